"""Checkpoints with one file for each rank: what is written is read, in any parts; a damaged one is refused."""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptexp.process.errors import CheckpointError, StorageError
from gptexp.storage import checkpoint, sharded
from gptexp.storage.checkpoint import Keep, TrainState, begin_to_save_parts

TENSORS = {
    "model.wte.weight": torch.arange(40.0).view(8, 5),
    "optimizer.wte.weight.exp_avg": torch.ones(8, 5),
    "optimizer.wte.weight.step": torch.tensor(3.0),
    "average.averaged_tokens": torch.tensor(7.0, dtype=torch.float64),
}


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of gloo, beside a default group that, as with NCCL, sends nothing from the memory of the host."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def saved(directory: Path, group: dist.ProcessGroup, step: int = 1, keep: int = 0) -> Path:
    directory.mkdir(exist_ok=True)
    state = TrainState(step=step, tokens=10 * step)
    return begin_to_save_parts(directory, TENSORS, [{"step": 3}], state, Keep(keep), {"a": 1}, group, 17).result(60)


def test_what_is_written_is_read_whole_and_in_parts(tmp_path: Path, group: dist.ProcessGroup) -> None:
    path = saved(tmp_path / "c", group)
    whole = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    sharded.read(path, whole)
    assert all(torch.equal(whole[name], tensor) for name, tensor in TENSORS.items())
    assert sharded.shapes(path) == {name: tensor.shape for name, tensor in TENSORS.items()}
    mesh = init_device_mesh("cpu", (1,))
    part = DTensor.from_local(torch.zeros(8, 5), mesh, [Shard(0)])
    sharded.read(path, {"model.wte.weight": part})
    assert torch.equal(part.to_local(), TENSORS["model.wte.weight"])
    assert json.loads((path / "state.json").read_text())["counts"] == [{"step": 3}]
    assert checkpoint.load_state(path).tokens == 10
    assert checkpoint.about_run(path) == {"a": 1}


def rows(ranks: int, whole: dict[str, torch.Tensor]) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    return {name: distribute_tensor(of, mesh, [Shard(0)], src_data_rank=None) for name, of in whole.items()}


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_the_rows_of_seven_ranks_are_read_by_any_number(tmp_path: Path, ranks: int) -> None:
    """Of few rows, the last ranks have none."""
    whole = {"a": torch.arange(30.0).view(10, 3), "b": torch.arange(5.0), "c": torch.arange(42.0).view(21, 2)}

    def as_rank(rank: int, of: int, act: Callable[[dict[str, DTensor]], None]) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=of)
        act(rows(of, whole))
        dist.destroy_process_group()

    def write(rank: int) -> Callable[[dict[str, DTensor]], None]:
        return lambda own: sharded.write(tmp_path, {**own, "d": torch.tensor(3.0)}, rank, 7).result(60)

    def read(own: dict[str, DTensor]) -> None:
        found = rows(ranks, {name: torch.zeros_like(tensor) for name, tensor in whole.items()})
        count = torch.tensor(0.0)
        sharded.read(tmp_path, {**found, "d": count})
        assert all(torch.equal(found[name].to_local(), own[name].to_local()) for name in own)
        assert count == 3

    for rank in range(7):
        as_rank(rank, 7, write(rank))
    for rank in range(ranks):
        as_rank(rank, ranks, read)


def test_a_checkpoint_without_the_files_of_a_rank_is_passed_over(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """Also if its hashes say nothing of them."""
    whole, lacking = saved(tmp_path / "c", group), saved(tmp_path / "c", group, 2)
    (lacking / "__0_0.json").unlink()
    rehash(lacking)
    found = checkpoint.load_latest(tmp_path / "c")
    assert found is not None
    assert found[0] == whole


def test_the_ranks_of_a_lost_attempt_write_elsewhere(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """They may still write a step that the new attempt saves too."""
    left = tmp_path / "c/.tmp-step-00000001-16"
    left.mkdir(parents=True)
    (left / "__1_0.distcp").touch()
    assert not (saved(tmp_path / "c", group) / "__1_0.distcp").exists()


def test_checkpoints_are_pruned_and_never_partly_there(tmp_path: Path, group: dist.ProcessGroup) -> None:
    directory = tmp_path / "c"
    for step in (1, 2, 3):
        saved(directory, group, step, keep=2)
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_failed_write_is_one_line_and_leaves_earlier_ones(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "c", group)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "fsync", full)
    with pytest.raises(StorageError, match=r"step-00000002: cannot be saved \(No space left on device\); earlier"):
        saved(tmp_path / "c", group, 2)
    assert checkpoint.newest(tmp_path / "c")[0] == path
    assert [left.name for left in (tmp_path / "c").iterdir()] == [path.name]  # the disk has its space back


def rehash(path: Path) -> None:
    files = {file.name: [file.stat().st_size, checkpoint._sha256(file)] for file in path.iterdir()}
    files.pop("manifest.json")
    (path / "manifest.json").write_text(json.dumps(files))


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("exploded",)


def described(path: Path, ranks: object = 1, **changes: object) -> None:
    content = json.loads((path / "parts.json").read_text())
    content["tensors"]["model.wte.weight"] |= changes
    (path / "parts.json").write_text(json.dumps({**content, "ranks": ranks}))


def placed(path: Path, at: object) -> None:
    content = json.loads((path / "__0_0.json").read_text())
    (path / "__0_0.json").write_text(json.dumps({**content, "model.wte.weight": at}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "parts.json").write_text("{"),
        lambda path: (path / "parts.json").write_text('{"ranks": 1, "tensors": {"model.wte.weight": 3}}'),
        lambda path: described(path, ranks=0),
        lambda path: described(path, ranks=2, split=True),  # half of it is missing
        lambda path: described(path, shape=[3, 3]),
        lambda path: described(path, shape=[2**63, 3]),
        lambda path: described(path, shape=[], split=True),
        lambda path: (path / "__0_0.json").unlink(),
        lambda path: (path / "__0_0.json").write_text("{}"),
        lambda path: placed(path, [10**9, 100]),
        lambda path: placed(path, [0, -1]),
        lambda path: placed(path, 3),
        lambda path: (path / "__0_0.distcp").write_bytes(b""),
        lambda path: (path / "__0_0.distcp").write_bytes(pickle.dumps(Bomb()) * 50),
    ],
)
def test_damage_is_refused_in_one_line_and_runs_no_code(
    tmp_path: Path, group: dist.ProcessGroup, damage: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / "c", group)
    damage(path)
    with pytest.raises(CheckpointError):
        checkpoint.load_state(path)  # the hash differs
    rehash(path)
    with pytest.raises(CheckpointError, match=str(path)) as error:
        list(checkpoint.read_weights(path, {"wte.weight": torch.Size((8, 5))}))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("shapes", "line"),
    [
        ({"wte.weight": (8, 6)}, "model.wte.weight has the shape (8, 5)"),
        ({"wpe.weight": (8, 5)}, "wpe.weight is missing"),
    ],
)
def test_another_model_is_refused(
    tmp_path: Path, group: dist.ProcessGroup, shapes: dict[str, tuple[int, int]], line: str
) -> None:
    path = saved(tmp_path / "c", group)
    with pytest.raises(CheckpointError) as error:
        list(checkpoint.read_weights(path, {name: torch.Size(shape) for name, shape in shapes.items()}))
    assert line in str(error.value)
    with pytest.raises(CheckpointError, match=r"it has 40 parameters, not 41"):
        checkpoint.refuse_other_size(path, 41)
