"""The device of a rank."""

import pytest
import torch

from gptexp.distributed.ranks import Rank
from gptexp.machine.device import pick_device
from gptexp.process.errors import ConfigError


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_gpu")
def test_a_task_of_srun_uses_the_only_gpu_that_it_sees() -> None:
    assert pick_device("cuda", Rank(1, 2, 1, 2, by_srun=True)) == torch.device("cuda", 0)


@pytest.mark.usefixtures("one_gpu")
def test_a_second_rank_of_a_node_with_one_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="local rank 1 has no GPU, because this node has 1 GPU;"):
        pick_device("cuda", Rank(1, 2, 1, 2, by_srun=False))
