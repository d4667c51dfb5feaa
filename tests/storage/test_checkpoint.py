"""Checkpoints: complete or absent, exact, and pruned as configured."""

import json
import os
import resource
import shutil
from collections.abc import Collection
from pathlib import Path

import checkpoints
import pytest
import torch

from gptexp.config.schema import ModelConfig
from gptexp.distributed.sharding import WholeParameters
from gptexp.model.gpt import GPT
from gptexp.optim import AdamWConfig
from gptexp.process.errors import CheckpointError, StorageError
from gptexp.storage import checkpoint, tensor_files
from gptexp.storage.checkpoint import Keep, TrainState
from gptexp.training.optimizer import build_optimizer
from gptexp.training.snapshot import load_checkpoint

TINY = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64)


def trained(steps: int = 2) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = build_optimizer(model, AdamWConfig(), fused=True)
    x = torch.arange(8)[None]
    for _ in range(steps):
        model(x, x + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(directory: Path, step: int, keep_last: int = 0, regular: bool = True) -> Path:
    return checkpoints.save(
        directory, *trained(), TrainState(step=step, tokens=10 * step, regular=regular), Keep(keep_last)
    )


def test_training_continues_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = TrainState(step=2, tokens=16, fingerprint=2**64 - 1, val_loss=3.5, best_val_loss=3.25, seconds=1.5)
    path = checkpoints.save(tmp_path / "c", model, optimizer, state)
    found, loaded = checkpoint.load_latest(tmp_path / "c") or pytest.fail("nothing found")
    assert (found, loaded) == (path, state)
    torch.manual_seed(9)
    other = GPT(TINY)
    other_optimizer = build_optimizer(other, AdamWConfig(), fused=True)
    load_checkpoint(path, WholeParameters(other), other_optimizer)
    assert other.lm_head.weight is other.wte.weight
    x = torch.arange(8)[None]
    for m, o in ((model, optimizer), (other, other_optimizer)):
        m(x, x).backward()
        o.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_newest_intact_checkpoint_is_loaded_and_each_damaged_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    weights = tmp_path / "step-00000003" / "model.safetensors"
    body = bytearray(weights.read_bytes())
    body[-5] ^= 1
    weights.write_bytes(body)
    (tmp_path / "old-step-00000009").mkdir()
    path, state = checkpoint.load_latest(tmp_path) or pytest.fail("nothing found")
    assert (path.name, state.step) == ("step-00000002", 2)
    out = capsys.readouterr().err
    assert "step-00000004: " in out
    assert "step-00000003: model.safetensors has changed since it was saved" in out


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_any_damage_to_any_file_is_detected(tmp_path: Path, name: str, damage: str) -> None:
    file = save(tmp_path, 1) / name
    body = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        middle = len(body) // 2
        flipped = body[:middle] + bytes([body[middle] ^ 255]) + body[middle + 1 :]
        file.write_bytes({"truncate": body[:-2], "flip": flipped}[damage])  # the last byte may be a line end
    with pytest.raises(CheckpointError, match="no intact checkpoint can be used"):
        checkpoint.load_latest(tmp_path)


def test_rejected_checkpoints_do_not_count_among_the_newest(tmp_path: Path) -> None:
    """Rejected checkpoints are not deleted. Their steps can be saved again."""
    for step in (200, 300, 400):
        save(tmp_path, step)
    for step in (300, 400):
        (tmp_path / f"step-{step:08d}" / "state.json").write_text("damaged")
    _, state = checkpoint.load_latest(tmp_path) or pytest.fail("nothing found")
    checkpoint.set_aside(tmp_path, state.step)
    for step in (250, 300):
        save(tmp_path, step, keep_last=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000250", "step-00000300"]
    assert (checkpoint.load_latest(tmp_path) or pytest.fail("none"))[1].step == 300
    assert len(list(tmp_path.glob("rejected-*"))) == 2


def test_pruning_keeps_the_newest_and_removes_leftovers(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        save(tmp_path, step)
    (tmp_path / ".tmp-step-00000031-1").mkdir()
    (tmp_path / ".del-step-00000000").mkdir()
    checkpoint.remove_leftovers(tmp_path)
    save(tmp_path, 100_000_000, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000030", "step-100000000"]
    assert (checkpoint.load_latest(tmp_path) or pytest.fail("none"))[1].step == 100_000_000


def keep(directory: Path, keep: Keep, losses: dict[int, float | None], irregular: Collection[int] = ()) -> list[int]:
    """Save a checkpoint after each step of ten tokens; the steps that are kept. A loss of None: no evaluation."""
    model, optimizer = trained(1)
    val_loss = None
    for step, loss in losses.items():
        val_loss = val_loss if loss is None else loss
        evaluated = 10 * step if loss is not None else 0
        state = TrainState(step, 10 * step, val_loss=val_loss, evaluated_tokens=evaluated)
        state.regular = step not in irregular
        checkpoints.save(directory, model, optimizer, state, keep)
    return sorted(int(p.name.removeprefix("step-")) for p in directory.glob("step-*"))


def test_the_best_checkpoint_and_those_at_multiples_of_tokens_are_kept_too(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 3.0, 3: None, 4: 4.0, 5: 2.9, 6: None, 7: 3.1, 8: None}
    assert keep(tmp_path / "last", Keep(2, best=False), losses) == [7, 8]
    assert keep(tmp_path / "best", Keep(2), losses) == [5, 7, 8]
    assert keep(tmp_path / "every", Keep(1, every_tokens=30, best=False), losses) == [3, 6, 8]
    assert keep(tmp_path / "between", Keep(1, every_tokens=25, best=False), losses) == [3, 5, 8]
    assert keep(tmp_path / "all", Keep(0), losses) == list(losses)


def test_a_damaged_checkpoint_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000003" / "optimizer.safetensors").write_bytes(b"")
    save(tmp_path, 4, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_copied_checkpoint_under_another_name_is_ignored(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    shutil.copytree(path, tmp_path / "step-000000005")
    shutil.copytree(path, tmp_path / "step-00000006")
    assert checkpoint.newest(tmp_path)[0] == path


def test_a_checkpoint_of_an_interruption_is_loaded_and_replaces_no_regular_one(tmp_path: Path) -> None:
    """Which checkpoints a run keeps and goes back to does not depend on whether it was interrupted."""
    for step in (1, 2):
        save(tmp_path, step, keep_last=2)
    save(tmp_path, 3, keep_last=2, regular=False)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["1", "2", "3"]
    for regular, step in ((False, 3), (True, 2)):
        found = checkpoint.load_latest(tmp_path, regular) or pytest.fail("nothing found")
        assert found[1].step == step
    save(tmp_path, 4, keep_last=2)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["2", "4"]


@pytest.mark.parametrize("rule", [Keep(1, 1000, best=False), Keep(1, best=True), Keep(2, 700, best=True)])
def test_checkpoints_of_the_sharpness_displace_none_that_a_rule_keeps(tmp_path: Path, rule: Keep) -> None:
    """Saves after 900, 1800, … tokens, and measurements of the sharpness after 1000, 2000, … with the lowest losses."""
    due: dict[int, float | None] = {step: 5 + abs(step - 180) / 1000 for step in range(90, 541, 90)}
    measured: dict[int, float | None] = {step: 1 + step / 1000 for step in range(100, 501, 100)}
    expected = keep(tmp_path / "due", rule, due)
    both = keep(tmp_path / "both", rule, dict(sorted({**due, **measured}.items())), irregular=measured)
    assert both == expected
    if rule.every_tokens == 1000:
        assert both == [180, 270, 360, 450, 540]


def test_files_are_synced_before_the_rename_and_the_rename_before_the_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the order of the calls: a test cannot cut the power, and a kill loses no written data."""
    calls: list[tuple[str, str]] = []
    plain_fsync, plain_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        calls.append(("fsync", path.name if path.is_dir() else f"{path.name} {path.stat().st_size}"))
        plain_fsync(handle)

    def rename(path: Path, target: Path) -> Path:
        calls.append(("rename", target.name))
        return plain_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    directory = tmp_path / "checkpoints"
    path = save(directory, 1)
    published = calls.index(("rename", path.name))
    files = {f"{file.name} {file.stat().st_size}" for file in path.iterdir()}
    before = {name for kind, name in calls[:published] if kind == "fsync"}
    [unfinished] = before - files - {tmp_path.name}  # which has a new folder
    assert unfinished.startswith(f".tmp-{path.name}-")
    assert files | {tmp_path.name, unfinished} == before
    assert calls[published + 1 :] == [("fsync", "checkpoints")]


def test_a_full_disk_is_detected_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    model, _ = trained(1)
    size = 3 * sum(4 * p.numel() for p in model.parameters())  # weights and two moments
    for free, fits in ((size, False), (1.2 * size, True)):
        usage = shutil.disk_usage(tmp_path)._replace(free=int(free))
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        if fits:
            save(tmp_path, 2)
        else:
            with pytest.raises(StorageError, match=r"step-00000002: cannot be saved \(.* are needed, .* are free"):
                save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_the_message_of_a_file_system_error_is_reported(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "step-00000001" / "model.safetensors").stat().st_size
    for limit in (size // 2, size + 1):  # in the weights; in the optimizer's state
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(StorageError, match=r"cannot be saved \(.*(File too large|EFBIG)"):
                save(tmp_path, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_contains_the_description_of_its_run(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    about = {"data_hash": "abc", "config": {"optim": {"lr": 1.0}}}
    path = checkpoints.save(tmp_path, model, optimizer, TrainState(step=1, tokens=10), about=about)
    assert json.loads((path / "state.json").read_text())["about"] == about
    assert checkpoint.newest(tmp_path)[1].tokens == 10


def test_loading_before_the_first_save_returns_none(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path / "nowhere") is None


def test_a_failed_save_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tensor_files, "write", full)
    with pytest.raises(StorageError, match=r"cannot be saved \(No space left on device\); earlier ones are unchanged"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert (checkpoint.load_latest(tmp_path) or pytest.fail("none"))[1].step == 1


def test_loading_keeps_the_fused_setting_of_the_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoints.save(tmp_path, model, optimizer, TrainState(step=1))
    other = build_optimizer(model, AdamWConfig(), fused=False)
    load_checkpoint(path, WholeParameters(model), other)
    assert [group["fused"] for group in other.param_groups] == [False, False]


def test_weights_have_the_names_of_gpt2_and_the_head_is_saved_once(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = save(tmp_path, 1)
    with safe_open(path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"wte.weight", "wpe.weight", "h.0.attn.c_attn.weight", "h.0.mlp.c_proj.bias", "ln_f.weight"} <= names
    assert "lm_head.weight" not in names
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.keys() == {"model.safetensors", "optimizer.safetensors", "state.json"}
