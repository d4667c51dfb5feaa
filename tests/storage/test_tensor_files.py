"""Files of tensors: what some ranks have written, any number of them read; another model and damage are refused."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gptexp.process.errors import CheckpointError, StorageError
from gptexp.storage import checkpoint, tensor_files
from gptexp.storage.checkpoint import Keep, Layout, Tensors, TrainState, begin_to_save
from gptexp.storage.tensor_files import MODEL, OPTIMIZER, Part, file_name

WHOLE = {"a": torch.arange(30.0).view(10, 3), "b": torch.arange(5.0), "c": torch.arange(42.0).view(21, 2)}


def rows(name: str, rank: int, ranks: int) -> slice:
    """As FSDP2 splits a tensor, by torch.chunk; of few rows, the last ranks have none."""
    chunks = WHOLE[name].chunk(ranks)
    first = sum(map(len, chunks[:rank]))
    return slice(first, first + (len(chunks[rank]) if rank < len(chunks) else 0))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("writers", [1, 2, 7])
def test_the_rows_of_some_ranks_are_read_by_any_number(tmp_path: Path, writers: int, ranks: int) -> None:
    for rank in range(writers):
        own = {name: whole[rows(name, rank, writers)].contiguous() for name, whole in WHOLE.items()}
        path = tmp_path / file_name(MODEL, rank, writers)
        size, digest = tensor_files.write(path, {**own, "d": torch.tensor(3.0, dtype=torch.float64)})
        assert (size, digest) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        assert all(torch.equal(load_file(path)[name], tensor) for name, tensor in own.items())
    for rank in range(ranks):
        wanted = {}
        for name, whole in WHOLE.items():
            own_rows = rows(name, rank, ranks)
            wanted[name] = Part(torch.full_like(whole[own_rows], -1.0), own_rows.start, len(whole))
        wanted["d"] = Part(torch.tensor(0.0))
        with patch.object(tensor_files, "rank_index", return_value=rank):
            tensor_files.read(tmp_path, MODEL, writers, True, wanted)
        for name, whole in WHOLE.items():
            assert torch.equal(wanted[name].tensor, whole[rows(name, rank, ranks)])
        assert wanted["d"].tensor == 3


def test_a_rank_opens_only_the_files_with_its_rows(tmp_path: Path) -> None:
    """Those of the others are not there."""
    own = WHOLE["a"][4:6].contiguous()
    tensor_files.write(tmp_path / file_name(MODEL, 2, 5), {"a": own})
    part = Part(torch.zeros(2, 3), 4, 10)
    tensor_files.read(tmp_path, MODEL, 5, True, {"a": part})
    assert torch.equal(part.tensor, own)


def test_tensors_that_are_shared_out_are_found_in_the_file_that_has_them(tmp_path: Path) -> None:
    for number, name in enumerate(WHOLE):
        tensor_files.write(tmp_path / file_name(OPTIMIZER, number, 3), {name: WHOLE[name]})
    found = {name: Part(torch.zeros_like(whole)) for name, whole in WHOLE.items()}
    tensor_files.read(tmp_path, OPTIMIZER, 3, False, found)
    assert all(torch.equal(found[name].tensor, whole) for name, whole in WHOLE.items())
    with pytest.raises(CheckpointError, match="e is missing"):
        tensor_files.read(tmp_path, OPTIMIZER, 3, False, {"e": Part(torch.zeros(1))})


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ({"a": (10, 3), "b": (5,)}, "it has c"),
        ({"a": (10, 3), "b": (5,), "c": (21, 2), "d": (1,)}, "d is missing"),
        ({"a": (10, 4), "b": (5,), "c": (21, 2)}, "a has the shape (10, 3), not (10, 4)"),
        ({"a": (10, 3), "b": (4,), "c": (21, 2)}, "b has the shape (5,), not (4,)"),
        ({"a": (10, 3), "b": (), "c": (21, 2)}, "b has the shape (5,), not ()"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path: Path, wanted: dict[str, tuple[int, ...]], line: str) -> None:
    tensor_files.write(tmp_path / "model.safetensors", WHOLE)
    parts = {name: Part(torch.zeros(shape)) for name, shape in wanted.items()}
    with pytest.raises(CheckpointError) as refusal:
        tensor_files.read(tmp_path, MODEL, 1, False, parts)
    assert str(refusal.value) == f"{tmp_path}/model.safetensors: does not fit the model ({line})"


def test_rows_of_another_model_are_refused(tmp_path: Path) -> None:
    for number, of_rank in enumerate(WHOLE["a"].chunk(2)):
        tensor_files.write(tmp_path / file_name(MODEL, number, 2), {"a": of_rank})
    for rows_of_whole in (9, 11):
        with pytest.raises(CheckpointError, match="does not fit the model"):
            tensor_files.read(tmp_path, MODEL, 2, True, {"a": Part(torch.zeros(9, 3), 0, rows_of_whole)})


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of gloo, beside a default group that, as with NCCL, sends nothing from the memory of the host."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def saved(directory: Path, group: dist.ProcessGroup, step: int = 1, keep: int = 0) -> Path:
    parts = {kind: {name: Part(tensor) for name, tensor in WHOLE.items()} for kind in (MODEL, OPTIMIZER)}
    layout = Layout({MODEL: 1, OPTIMIZER: 1}, False, [{"step": 3}])
    state = TrainState(step=step, tokens=10 * step)
    return begin_to_save(directory, Tensors(parts, layout), state, Keep(keep), {"a": 1}, group).result(60)


def test_a_group_of_ranks_publishes_one_checkpoint(tmp_path: Path, group: dist.ProcessGroup) -> None:
    directory = tmp_path / "c"
    (directory / ".tmp-step-00000003-16").mkdir(parents=True)  # in which a rank of a lost attempt may still write
    for step in (1, 2, 3):
        path = saved(directory, group, step, keep=2)
    assert sorted(path.name for path in directory.glob("step-*")) == ["step-00000002", "step-00000003"]
    assert checkpoint.load_state(path).tokens == 30
    assert checkpoint.layout_of(path).counts == [{"step": 3}]
    assert checkpoint.about_run(path) == {"a": 1}
    with pytest.raises(CheckpointError, match=r"it has 77 parameters, not 78"):
        checkpoint.refuse_other_size(path, 78)


@pytest.mark.parametrize("at", [(checkpoint, "fsync"), (tensor_files, "write"), (checkpoint, "_begin")])
def test_a_failed_write_is_one_line_and_leaves_earlier_ones(
    tmp_path: Path, group: dist.ProcessGroup, at: tuple[object, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "c", group)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*at, full)
    with pytest.raises(StorageError, match=r"step-00000002: cannot be saved \(No space left on device\); earlier"):
        saved(tmp_path / "c", group, 2)
    assert checkpoint.newest(tmp_path / "c")[0] == path
    assert [left.name for left in (tmp_path / "c").iterdir()] == [path.name]  # the disk has its space back
