"""What rank 0 decides, or refuses, holds for all ranks."""

import pytest

from gptexp.distributed.group import agree
from gptexp.distributed.ranks import Rank
from gptexp.process.errors import ConfigError


def test_a_single_rank_gets_what_its_function_returns() -> None:
    assert agree(lambda: 3, Rank(), None) == 3


def test_an_error_of_rank_0_is_raised() -> None:
    def refuse() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        agree(refuse, Rank(), None)
