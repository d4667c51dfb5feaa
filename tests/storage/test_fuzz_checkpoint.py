"""Damaged and hostile checkpoints: each is skipped or refused with one line. No code in them is executed."""

import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz import Damage, flip

from gptexp.config.schema import AdamWConfig, ModelConfig
from gptexp.distributed.sharding import WholeParameters
from gptexp.model.gpt import GPT
from gptexp.process.errors import CheckpointError
from gptexp.storage import checkpoint
from gptexp.storage.checkpoint import Keep, TrainState
from gptexp.training.optim import build_optimizer
from gptexp.training.snapshot import load_checkpoint, take

SMALL = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64)


def saved(directory: Path, step: int) -> Path:
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = build_optimizer(model, AdamWConfig(), fused=True)
    model(torch.arange(8)[None], torch.arange(8)[None]).backward()
    optimizer.step()
    return checkpoint.save(
        directory, take(WholeParameters(model), optimizer), TrainState(step=step, tokens=10 * step), Keep()
    )


def _one(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    def damage(path: Path, draw: random.Random) -> None:
        file = path / draw.choice(["model.safetensors", "train.pt", "state.json"])
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
    "a file gone": lambda path, draw: (path / draw.choice(["model.safetensors", "train.pt", "state.json"])).unlink(),
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
    """A pickle that calls `function(*args)` when it is loaded."""

    def __init__(self, function: Any, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def _zip_bomb() -> bytes:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(300_000_000))
        archive.writestr("archive/version", "3")
    return body.getvalue()


def _lying_storage() -> bytes:
    """A file written by torch whose header claims a tensor of a trillion elements."""
    body = io.BytesIO()
    torch.save({"optimizer": torch.zeros(7)}, body)
    source, target = zipfile.ZipFile(io.BytesIO(body.getvalue())), io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                content = content.replace(b"K\x07", b"\x8a\x06" + (10**12).to_bytes(6, "little"))
            archive.writestr(name, content)
    return target.getvalue()


def hostile(sentinel: Path) -> dict[str, bytes]:
    """Hostile contents for train.pt, by name."""
    touch = f"touch {sentinel}"
    objects = {
        "system": Payload(os.system, touch),
        "eval": Payload(eval, f"open({str(sentinel)!r}, 'w')"),
        "exec": Payload(exec, f"open({str(sentinel)!r}, 'w')"),
        "getattr": Payload(getattr, Payload(__import__, "os"), "system"),
        "import": Payload(__import__, "antigravity"),
        "nested": {"optimizer": {"state": {0: [Payload(os.system, touch)]}, "param_groups": []}},
    }
    found = {f"pickle {name}": pickle.dumps(value) for name, value in objects.items()}
    for name, value in objects.items():
        body = io.BytesIO()
        torch.save(value, body)
        found[f"torch {name}"] = body.getvalue()
    for name, plain in {
        "no optimizer": {}, "a list": [], "a number": 7, "no groups": {"optimizer": {"state": {}}},
        "other groups": {"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}},
    }.items():  # fmt: skip
        body = io.BytesIO()
        torch.save(plain, body)
        found[name] = body.getvalue()
    return {**found, "zip bomb": _zip_bomb(), "lying storage": _lying_storage(), "empty": b"", "text": b"hello"}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    """The hashes are right, because the attacker wrote the manifest too."""
    sentinel = tmp_path / "sentinel"
    model = GPT(SMALL)
    optimizer = build_optimizer(model, AdamWConfig(), fused=True)
    path = saved(tmp_path / "c", 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, body in hostile(sentinel).items():
        (path / "train.pt").write_bytes(body)
        _rehash(path)
        assert checkpoint.newest(path.parent)[0] == path, name
        with pytest.raises(CheckpointError, match=r"train.pt: does not fit the optimizer") as refused:
            load_checkpoint(path, WholeParameters(model), optimizer, AdamWConfig())
        assert len(str(refused.value).splitlines()) == 1
        assert not sentinel.exists(), name
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 1_000_000


def test_optimizer_state_of_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    """AdamW's fused kernel would write beyond moments that are too short. The config's hyperparameters are kept."""
    model = GPT(SMALL)
    optimizer = build_optimizer(model, AdamWConfig(), fused=True)
    path = saved(tmp_path / "c", 1)
    whole = torch.load(path / "train.pt", weights_only=True)
    first = whole["optimizer"]["state"][0]
    for state in ({}, {**whole["optimizer"]["state"], 0: {**first, "exp_avg": torch.zeros(1)}},
                  {**whole["optimizer"]["state"], 0: {"step": first["step"]}}):  # fmt: skip
        torch.save({"optimizer": {**whole["optimizer"], "state": state}}, path / "train.pt")
        with pytest.raises(CheckpointError, match="does not fit the optimizer"):
            load_checkpoint(path, WholeParameters(model), optimizer, AdamWConfig())
    for group in whole["optimizer"]["param_groups"]:
        group.update(lr=99.0, weight_decay=99.0, betas=(0.0, 0.0))
    torch.save(whole, path / "train.pt")
    load_checkpoint(path, WholeParameters(model), optimizer, AdamWConfig())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]  # the config's, not the file's


@pytest.mark.parametrize(
    "change", [{"tokens": None}, {"step": "1"}, {"step": 2}, {"seconds": []}, {"new": 1}, {"val_loss": {}}]
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
    with pytest.raises(CheckpointError, match="does not list the files of a checkpoint"):
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

    names = ("model.safetensors", "train.pt", "state.json")
    files = {name: [len(body := (path / name).read_bytes()), hashlib.sha256(body).hexdigest()] for name in names}
    (path / "manifest.json").write_text(json.dumps(files))
