"""What `auto` comes to: asked for wins, an earlier decision holds, else this machine decides."""

import pytest
import torch

from gptexp.config import Config
from gptexp.distributed import Rank
from gptexp.effective import Effective, has_native_bfloat16, resolve
from gptexp.errors import ConfigError

CPU = torch.device("cpu")


def test_auto_on_a_cpu() -> None:
    effective = resolve(Config(), CPU, Rank())
    assert effective.dtype == ("bfloat16" if has_native_bfloat16(CPU) else "float32")
    assert (effective.compile, effective.loss, effective.fused) == (False, "chunked", True)
    assert effective.matmul_precision == "highest"
    assert all(effective.reasons.values())


def test_what_is_asked_for_is_never_changed() -> None:
    cfg = Config()
    cfg.train.dtype, cfg.train.compile, cfg.train.loss, cfg.optim.fused = "bfloat16", "on", "plain", "off"
    cfg.world.threads_per_rank = 3
    effective = resolve(cfg, CPU, Rank(), resolve(Config(), CPU, Rank()).to_dict())
    assert (effective.dtype, effective.compile, effective.loss) == ("bfloat16", True, "plain")
    assert (effective.fused, effective.threads_per_rank) == (False, 3)
    assert set(effective.reasons.values()) == {"asked for"}


def test_an_earlier_decision_holds_on_the_same_device_and_node_layout() -> None:
    earlier = resolve(Config(), CPU, Rank()).to_dict()
    earlier.update(loss="plain", threads_per_rank=17)
    assert resolve(Config(), CPU, Rank(), earlier).loss == "plain"
    assert resolve(Config(), CPU, Rank(), earlier).threads_per_rank == 17
    # Two ranks on the node instead of one: their threads are shared out anew, all else stays.
    two = resolve(Config(), CPU, Rank(0, 2, 0, 2), earlier)
    assert (two.loss, two.threads_per_rank != 17) == ("plain", True)
    assert resolve(Config(), CPU, Rank(), {**earlier, "device": "cuda"}).loss == "chunked"


def test_what_another_cell_was_asked_for_decides_nothing() -> None:
    asked = Config()
    asked.train.dtype, asked.world.threads_per_rank = "bfloat16", 3
    earlier = resolve(asked, CPU, Rank()).to_dict()
    assert resolve(Config(), CPU, Rank(), earlier) == resolve(Config(), CPU, Rank())


def test_it_survives_json() -> None:
    effective = resolve(Config(), CPU, Rank())
    assert Effective(**effective.to_dict()) == effective


def test_a_missing_device_is_one_line() -> None:
    from gptexp.distributed import pick_device

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    with pytest.raises(ConfigError, match=r"train.device=cuda: no cuda device is visible"):
        pick_device("cuda", Rank())
