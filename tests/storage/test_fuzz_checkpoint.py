"""Damaged and hostile checkpoints: each is skipped or refused with one line. No code in them is executed."""

import io
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import moments, save
from fuzz import Damage, flip
from safetensors.torch import save_file

from gptexp.config.schema import ModelConfig
from gptexp.distributed.sharding import WholeParameters
from gptexp.model.gpt import GPT
from gptexp.optim import AdamWConfig
from gptexp.process.errors import CheckpointError
from gptexp.storage import checkpoint
from gptexp.storage.checkpoint import TrainState
from gptexp.training.optimizer import build_optimizer
from gptexp.training.snapshot import load_checkpoint

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
SMALL = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64)


def saved(directory: Path, step: int) -> Path:
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = build_optimizer(model, AdamWConfig(), fused=True)
    model(torch.arange(8)[None], torch.arange(8)[None]).backward()
    optimizer.step()
    return save(directory, model, optimizer, TrainState(step=step, tokens=10 * step))


def _one(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    def damage(path: Path, draw: random.Random) -> None:
        file = path / draw.choice(FILES)
        file.write_bytes(change(file.read_bytes(), draw))

    return damage


def _zeros(body: bytes, draw: random.Random) -> bytes:
    nonzero = [i for i in range(0, len(body), 64) if any(body[i : i + 64])]
    at = draw.choice(nonzero)
    return body[:at] + bytes(min(4096, len(body) - at)) + body[at + 4096 :]


CORRUPTIONS: dict[str, Damage] = {
    "truncate": _one(lambda body, draw: body[: draw.randrange(len(body))]),
    "flip": _one(flip),
    "zeros": _one(_zeros),
    "empty": _one(lambda body, draw: b""),
    "append": _one(lambda body, draw: body + b"\0"),
    "no manifest": lambda path, draw: (path / "manifest.json").unlink(),
    "bad manifest": lambda path, draw: (path / "manifest.json").write_text(
        draw.choice(["", "{", "[]", "null", "{}", "[" * 100_000, '{"model.safetensors": 1}', "\0"])
    ),
    "a file gone": lambda path, draw: (path / draw.choice(FILES)).unlink(),
    "a pipe": lambda path, draw: ((path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_damaged_checkpoint_is_skipped_with_one_line(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        saved(tmp_path / "whole", step)
    for seed in range(25):
        directory = tmp_path / f"{seed}"
        shutil.copytree(tmp_path / "whole", directory)
        CORRUPTIONS[kind](directory / "step-00000002", random.Random(seed))
        path, state = checkpoint.newest(directory)
        assert (path.name, state.step) == ("step-00000001", 1)
        [line] = capsys.readouterr().err.splitlines()
        assert f"{directory}/step-00000002: " in line


class Payload:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    """The hashes are right, because the attacker wrote the manifest too."""
    sentinel, by_torch = tmp_path / "sentinel", io.BytesIO()
    torch.save(Payload(f"touch {sentinel}"), by_torch)
    model = GPT(SMALL)
    optimizer = build_optimizer(model, AdamWConfig(), fused=True)
    path = saved(tmp_path / "c", 1)
    for name in ("optimizer.safetensors", "model.safetensors"):
        whole = (path / name).read_bytes()
        for body in (pickle.dumps(Payload(f"touch {sentinel}")), by_torch.getvalue(), b"", b"hello"):
            (path / name).write_bytes(body)
            _rehash(path)
            assert checkpoint.newest(path.parent)[0] == path
            with pytest.raises(CheckpointError, match=f"{name}: does not fit the model") as refused:
                load_checkpoint(path, WholeParameters(model), optimizer)
            assert len(str(refused.value).splitlines()) == 1
            assert not sentinel.exists()
        (path / name).write_bytes(whole)


def test_optimizer_state_of_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    """AdamW's fused kernel would write beyond moments that are too short."""
    model = GPT(SMALL)
    optimizer = build_optimizer(model, AdamWConfig(), fused=True)
    path = saved(tmp_path / "c", 1)
    whole = moments(path)
    lacking = {name: tensor for name, tensor in whole.items() if name != "wte.weight.exp_avg"}
    for state in ({}, lacking, {**lacking, "wte.weight.exp_avg": torch.zeros(1)}):
        save_file(state, path / "optimizer.safetensors")
        with pytest.raises(CheckpointError, match="does not fit the model"):
            load_checkpoint(path, WholeParameters(model), optimizer)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"step": "1"},
        {"step": 2},
        {"seconds": []},
        {"new": 1},
        {"val_loss": {}},
        {"tensors": 3},
        *(
            {"tensors": {"files": files, "split": False, "counts": []}}
            for files in (
                3,
                {},
                {"model": 1},
                {"model": 1, "optimizer": 0},
                {"model": 1, "optimizer": 2},
                {"model": 1, "optimizer": 1, "x": 1},
                {"model": 10**12, "optimizer": 1},
            )
        ),
    ],
)
def test_a_checkpoint_with_invalid_counters_is_skipped(tmp_path: Path, change: dict[str, Any]) -> None:
    path = saved(tmp_path / "c", 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, **change}))
    _rehash(path)
    with pytest.raises(CheckpointError, match="no intact checkpoint can be used"):
        checkpoint.newest(path.parent)


def test_a_manifest_that_names_other_files_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "/dev/zero": [0, ""]}))
    with pytest.raises(CheckpointError, match=r"does not list the files that state\.json describes"):
        checkpoint.newest(path.parent)


def test_weights_with_a_wrong_header_are_refused(tmp_path: Path) -> None:
    model = GPT(SMALL)
    path = saved(tmp_path / "c", 1)
    good = (path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + length])

    def with_header(change: Callable[[dict[str, Any]], object]) -> bytes:
        changed = json.loads(json.dumps(header))
        change(changed)
        text = json.dumps(changed).encode()
        return struct.pack("<Q", len(text)) + text + good[8 + length :]

    first = next(name for name in header if name != "__metadata__")
    for body in (
        struct.pack("<Q", 2**62) + good[8:],
        with_header(lambda h: h[first].update(data_offsets=[0, 2**40])),
        with_header(lambda h: h[first].update(shape=[2**31, 2**31])),
        with_header(lambda h: [h[name].update(data_offsets=[0, 4]) for name in h if name != "__metadata__"]),
        with_header(lambda h: h.pop("wte.weight")),
        with_header(lambda h: h.update(extra=h[first])),
        b"",
        good[:-4],
    ):
        (path / "model.safetensors").write_bytes(body)
        _rehash(path)
        with pytest.raises(CheckpointError, match=r"model.safetensors: does not fit the model"):
            checkpoint.load_weights(path, model)


def _rehash(path: Path) -> None:
    import hashlib

    files = {name: [len(body := (path / name).read_bytes()), hashlib.sha256(body).hexdigest()] for name in FILES}
    (path / "manifest.json").write_text(json.dumps(files))
