"""Which tokens are held out: by number or share, spread or as the tail, and never trained on."""

import numpy as np
import pytest

from gptexp.config.compose import compose
from gptexp.config.schema import DataConfig
from gptexp.data.order import Order
from gptexp.data.split import Split, split
from gptexp.process.errors import DataError


def targets(starts: np.ndarray, t: int) -> set[int]:
    return {int(start) + 1 + i for start in starts for i in range(t)}


def trained(parts: Split, t: int, epochs: int = 1) -> set[int]:
    return targets(parts.order.train_starts(np.arange(epochs * parts.order.n_train), t), t)


def test_the_defaults_hold_out_what_they_always_did() -> None:
    parts = split(DataConfig(val_tokens=112), 5000, 16, 3)
    before = Order((5000 - 1) // 16, 7, seed=3, shuffled=True)
    assert parts.order == before
    assert np.array_equal(parts.val_starts, before.val_windows() * 16)


def test_a_tail_is_nanogpts_last_tenth_of_tiny_shakespeare() -> None:
    """Its prepare.py cuts the ids at int(n * 0.9): 1,003,854 and 111,540 of them."""
    parts = split(DataConfig(val_ratio=0.1, val_split="tail", order="sequential"), 1_115_394, 64, 1337)
    assert parts.val_starts[0] == int(1_115_394 * 0.9) == 1_003_854
    assert len(parts.val_starts) == (111_540 - 1) // 64
    assert parts.order.n_train == (1_003_854 - 1) // 64
    starts = parts.order.train_starts(np.arange(parts.order.n_train), 64)
    assert starts[-1] + 64 < 1_003_854  # the last target
    assert np.array_equal(np.diff(parts.val_starts), np.full(len(parts.val_starts) - 1, 64))


@pytest.mark.parametrize("n", [100, 999, 1_115_394, 10**9 + 7])
@pytest.mark.parametrize("ratio", [0.0005, 0.05, 0.1, 0.3, 0.5])
def test_the_cut_is_the_whole_number_below(n: int, ratio: float) -> None:
    cut = int((1 - ratio) * n)
    if n - cut < 2:
        return
    assert split(DataConfig(val_ratio=ratio, val_split="tail"), n, 1, 0, most_val_windows=1).val_starts.tolist() == [
        cut
    ]


AMOUNTS = ({"val_tokens": 33}, {"val_ratio": 0.07}, {"val_ratio": 0.4})


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("where", ["spread", "tail"])
@pytest.mark.parametrize("offset", ["fixed", "per_epoch"])
@pytest.mark.parametrize("tokens", [400, 401, 407])
def test_no_target_of_training_is_one_of_validation(
    amount: dict[str, float], where: str, offset: str, tokens: int
) -> None:
    """By brute force, over all offsets. Every target is below the end of the text."""
    t = 8
    parts = split(DataConfig(**amount, val_split=where, offset=offset), tokens, t, 3)  # type: ignore[arg-type]
    held_out = targets(parts.val_starts, t)
    assert len(held_out) == len(parts.val_starts) * t
    if "val_tokens" in amount:
        assert len(parts.val_starts) == 4
    elif where == "tail":
        assert len(parts.val_starts) == (tokens - int((1 - amount["val_ratio"]) * tokens) - 1) // t
    else:
        assert len(parts.val_starts) == round(amount["val_ratio"] * tokens / t)
    read = trained(parts, t, epochs=t)
    assert not held_out & read
    assert max(held_out | read) < tokens
    if where == "tail":
        assert max(read) < min(held_out) - 1  # nor is the first held-out token, which is only an input
        assert "val_tokens" not in amount or max(held_out) == tokens - 1


@pytest.mark.parametrize("where", ["spread", "tail"])
def test_fewer_windows_are_some_of_those_held_out_and_change_no_training_window(where: str) -> None:
    data = DataConfig(val_ratio=0.2, val_split=where)
    whole, few = split(data, 5000, 16, 3), split(data, 5000, 16, 3, most_val_windows=5)
    assert few.order == whole.order
    assert len(few.val_starts) == 5
    assert {*few.val_starts.tolist()} <= {*whole.val_starts.tolist()}
    assert where == "spread" or np.array_equal(few.val_starts, whole.val_starts[:5])


@pytest.mark.parametrize("where", ["spread", "tail"])
def test_a_part_without_a_window_is_an_error(where: str) -> None:
    with pytest.raises(DataError, match=r"data.val_ratio=0.001: of 1,000 tokens this holds out no window of seq_len"):
        split(DataConfig(val_ratio=0.001, val_split=where), 1000, 16, 0)
    with pytest.raises(DataError, match=r"data.val_ratio=0.999: for .*has only 62, so none is left for training"):
        split(DataConfig(val_ratio=0.999, val_split=where), 1000, 16, 0)
    with pytest.raises(DataError, match=r"data.val_tokens=1,000: for .*has only 62, so none is left for training"):
        split(DataConfig(val_tokens=1000, val_split=where), 1000, 16, 0)
    assert not len(split(DataConfig(val_tokens=0, val_split=where), 1000, 16, 0).val_starts)


def test_the_command_lines_number_wins_over_a_files_share(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("conf")
    (folder / "experiment").mkdir()
    (folder / "experiment/mine.yaml").write_text("# @package _global_\ndata: {val_ratio: 0.1, val_split: tail}\n")
    assert compose(["experiment=mine"], str(folder)).data.val_ratio == 0.1
    assert compose(["experiment=mine", "data.val_tokens=512"], str(folder)).data.val_ratio is None
    both = compose(["data.val_tokens=512", "data.val_ratio=0.2"]).data
    assert (both.val_ratio, both.val_tokens) == (0.2, 512)
