"""Checkpoints: a directory per saved step, complete or not there.

    checkpoints/step-00000050/model.safetensors   weights under GPT-2's names; lm_head is wte
                              train.pt            optimizer state; loads with weights_only=True
                              state.json          counters
                              manifest.json       sizes and hashes of the others, written last

Only numbers that cannot be derived are saved: data order, learning rate and dropout follow from the config and the
count of samples seen.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gptexp.errors import CheckpointError

NAME = re.compile(r"step-(\d{8,})")
MANIFEST = "manifest.json"


@dataclass
class TrainState:
    """The counters of a run."""

    step: int = 0  # optimizer updates done
    tokens: int = 0  # training tokens consumed
    fingerprint: int = 0  # of the windows consumed, over all ranks, modulo 2^64
    val_loss: float | None = None  # newest, in nats per token
    best_val_loss: float | None = None
    evaluated_tokens: int = 0  # `tokens` at the newest evaluation
    seconds: float = 0.0  # of training, over all attempts


def save(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, keep_last: int
) -> Path:
    """Publish the checkpoint of `state.step` in `directory` by one rename; then remove all but the newest."""
    directory.mkdir(exist_ok=True)
    target = directory / f"step-{state.step:08d}"
    if target.exists():
        return target
    unfinished = directory / f".tmp-{target.name}-{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, unfinished / "model.safetensors")
    with (unfinished / "train.pt").open("wb") as file:
        torch.save({"optimizer": optimizer.state_dict()}, file)
    (unfinished / "state.json").write_text(json.dumps(asdict(state), indent=1) + "\n")
    files = {path.name: [path.stat().st_size, _sha256(path)] for path in sorted(unfinished.iterdir())}
    (unfinished / MANIFEST).write_text(json.dumps(files, indent=1) + "\n")
    for path in [*unfinished.iterdir(), unfinished]:
        _fsync(path)
    unfinished.rename(target)
    _fsync(directory)
    _prune(directory, keep_last)
    return target


def load_latest(directory: Path) -> tuple[Path, TrainState] | None:
    """The newest checkpoint that is whole, and its state; None if none was ever saved.

    Prints a line for each newer one that it passes over; raises `CheckpointError` if none of several is whole.
    """
    rejected = []
    for path in sorted(_published(directory), key=_step, reverse=True):
        problem = _problem(path)
        if problem is None:
            return path, TrainState(**json.loads((path / "state.json").read_text()))
        rejected.append(f"{path}: {problem}")
        print(f"gptexp: checkpoint passed over: {rejected[-1]}", file=sys.stderr)
    if rejected:
        raise CheckpointError(f"{directory}: no checkpoint is whole; " + "; ".join(rejected))
    return None


def set_aside(directory: Path, newer_than: int) -> None:
    """Rename the checkpoints of steps after `newer_than`: they were passed over, and training goes on before them.

    Left in place they would count among the newest when old ones are removed. Nothing is deleted.
    """
    for path in _published(directory):
        if _step(path) > newer_than:
            path.rename(path.with_name(f"rejected-{os.getpid()}-{path.name}"))


def load_weights(path: Path, model: nn.Module) -> None:
    """Put the weights of checkpoint `path` into `model`."""
    weights = load_file(path / "model.safetensors")
    model.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]})


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Put the optimizer state of checkpoint `path` into `optimizer`."""
    saved: dict[str, Any] = torch.load(path / "train.pt", map_location="cpu", weights_only=True)
    fused = [group["fused"] for group in optimizer.param_groups]
    optimizer.load_state_dict(saved["optimizer"])
    for group, own in zip(optimizer.param_groups, fused, strict=True):
        group["fused"] = own  # this device's kernel, not that of the device it was saved on


def _published(directory: Path) -> list[Path]:
    return [p for p in directory.glob("step-*") if NAME.fullmatch(p.name)] if directory.is_dir() else []


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _problem(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((path / MANIFEST).read_text())
        if not isinstance(files, dict) or not files.keys() >= {"model.safetensors", "train.pt", "state.json"}:
            return f"{MANIFEST} does not name all files"
        for name, (size, digest) in files.items():
            file = path / name
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size:,} bytes, not {size:,}"
            if _sha256(file) != digest:
                return f"{name} is not what was saved (sha256 differs)"
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return None


def _prune(directory: Path, keep_last: int) -> None:
    """Keep the newest `keep_last` (all for 0); what a killed process left unfinished goes too."""
    newest_first = sorted(_published(directory), key=_step, reverse=True)
    doomed = newest_first[keep_last:] if keep_last else []
    for path in doomed:
        # Renamed first, so that a half-deleted checkpoint never looks like a damaged one.
        hidden = path.with_name(f".del-{path.name}")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    for leftover in [*directory.glob(".tmp-*"), *directory.glob(".del-*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
