"""`agree` gives all ranks the value or the error of rank 0; here on a single rank."""

import pytest

from gptexp.distributed.group import agree
from gptexp.distributed.ranks import Rank
from gptexp.process.errors import ConfigError


def test_agree_returns_the_value_of_the_function_on_a_single_rank() -> None:
    assert agree(lambda: 3, Rank(), None) == 3


def test_an_error_of_rank_0_is_raised() -> None:
    def refuse() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        agree(refuse, Rank(), None)
