"""Input that nobody meant: command lines, saved configs, shards and checkpoints, drawn by the thousand.

The oracle is the same for all: it is refused with one line and the right error, or it is right; nothing else happens,
nothing hangs, nothing is written, and no code that a file brings is run.
"""

import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import ForkServer

from gptexp import checkpoint, run_dir
from gptexp.checkpoint import Keep, TrainState
from gptexp.config import Config, DataConfig, ModelConfig, OptimConfig, fields_of, to_dict
from gptexp.data import shards as module
from gptexp.data.loader import open_dataset
from gptexp.data.shards import HEADER, MAGIC, MANIFEST, VERIFIED, ShardWriter, verify
from gptexp.distributed import Rank
from gptexp.effective import load_effective, resolve
from gptexp.errors import CheckpointError, ConfigError, DataError
from gptexp.model import GPT
from gptexp.optim import build_optimizer

# --- command lines ---------------------------------------------------------------------------------------------------
KEYS = [key for key, _, _ in fields_of(Config())]
TORCH = 97  # fork_server.py: the config was legal, and torch was about to be imported

VALUES = [
    *Path(__file__).with_name("fuzz_values.txt").read_text(encoding="utf-8").splitlines(),
    *("", " ", "\n", "x" * 300, "[" * 50),
]


def command_lines(seed: int, count: int) -> Iterator[list[str]]:
    draw = random.Random(seed)

    def key() -> str:
        name = draw.choice(KEYS)
        match draw.randrange(12):
            case 0:
                return name.replace(draw.choice(name), "", 1)  # a letter lost
            case 1:
                return f"{name}.{draw.choice(['x', '0', 'lr'])}"
            case 2:
                return draw.choice(["model", "optim", "nothing", "", ".", "a.b.c", "hydra"])
        return name

    for _ in range(count):
        line = []
        for _ in range(draw.randint(1, 3)):
            prefix = draw.choice([*[""] * 10, "+", "++", "~", "-"])
            value = draw.choice(VALUES)
            line.append(f"{prefix}{key()}{draw.choice([*['='] * 12, '', '==', ':'])}{value}")
        if draw.random() < 0.1:
            line.append(draw.choice(["-m", "--cfg", "--help", "--config-dir", "--nothing", "--resolve", "--run"]))
        yield line


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    home = tmp_path_factory.mktemp("home")
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    with ForkServer(env={**kept, "HOME": str(home), "GPTEXP_CACHE": str(home / "cache")}) as server:
        yield server


@pytest.mark.parametrize(("seed", "count"), [(0, 200), pytest.param(1, 2000, marks=pytest.mark.slow)])
def test_a_command_line_is_right_or_refused_in_lines(server: ForkServer, tmp_path: Path, seed: int, count: int) -> None:
    refused = legal = 0
    for line in command_lines(seed, count):
        answer = server.ask(["train", *line], tmp_path, timeout=10)
        code, err = answer["code"], answer["stderr"]
        assert code in (0, 2, TORCH), (line, answer)
        assert "Traceback" not in err, (line, err)
        if code == TORCH:  # legal: the run directory is there
            shutil.rmtree(tmp_path / "outputs", ignore_errors=True)
        assert list(tmp_path.iterdir()) == [], line
        assert answer["cpu_s"] < 2, line
        if code == 2:
            refused += 1
            lines = err.splitlines()
            assert lines, line
            assert all(text.startswith("gptexp: ") for text in lines), (line, err)
            assert all(len(text) < 1500 for text in lines), (line, err)
        legal += code == TORCH
    assert refused > count / 2
    assert legal > count / 200


# --- saved configs ---------------------------------------------------------------------------------------------------
TREES = [
    "!!python/object/apply:os.system ['touch SENTINEL']",
    "!!python/object/new:subprocess.Popen [['touch', 'SENTINEL']]",
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a]\ndata: {path: &c [*b, *b, *b, *b, *b, *b]}",
    "data: {path: " + "[" * 3000 + "]" * 3000 + "}",
    "model: {n_layer: !!int '1_0'}",
    "? {a: b}\n: c",
    "hydra: {callbacks: {x: {_target_: builtins.print}}}",
    "model: {_target_: os.system}",
    "- a\n- b",
    "model: 7",
    "model: [1, 2]",
    "model: null",
    "data: {path: {a: 1}}",
    "optim: {lr: .nan}",
    "optim: {lr: .inf}",
    "train: {seed: 99999999999999999999999999}",
    "log: {wandb: {tags: [1, [2]]}}",
    "\0",
    "\udcff\udcfe",
    "%YAML 9.9\n---\na: b",
    "model: {n_layer: 1, n_layer: 2}",
    "x" * 1_000_000,
]


def test_a_saved_config_is_data_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = yaml.safe_dump(to_dict(Config()), sort_keys=False)
    draw = random.Random(0)
    texts = list(TREES)
    for _ in range(300):
        lines = whole.splitlines()
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(lines))
            key = lines[at].partition(":")[0]
            new = [f"{key}: {draw.choice(VALUES)}", lines[at][2:], f"  {lines[at]}", "", lines[at] + ": x"]
            lines[at] = draw.choice(new)
        texts.append("\n".join(lines))
    taken, said = 0, []
    for text in texts:
        (tmp_path / run_dir.CONFIG).write_bytes(text.encode("utf-8", "surrogateescape"))
        started = time.perf_counter()
        try:
            config = run_dir.load_config(tmp_path)
            assert isinstance(config, Config)
            taken += 1
        except ConfigError as error:
            said.append(str(error))
        assert time.perf_counter() - started < 5, text[:200]
    assert 0 < taken < len(texts)
    assert all(len(line.splitlines()) == 1 and len(line) < 1000 for line in said)
    assert sorted(path.name for path in tmp_path.iterdir()) == [run_dir.CONFIG]  # and no sentinel


def test_saved_decisions_are_those_of_a_run_or_refused(tmp_path: Path) -> None:
    whole = resolve(Config(), torch.device("cpu"), Rank()).to_dict()
    run_dir.write_json(tmp_path / run_dir.EFFECTIVE, whole)
    assert load_effective(tmp_path) == whole
    values = [None, "x", -1, 1e400, [], {}, {"a": 1}, True]
    for key in [*whole, "new"]:
        wrong = [{**whole, key: value} for value in values if type(value) is not type(whole.get(key))]
        for saved in [*wrong, {k: v for k, v in whole.items() if k not in (key, "reasons")}]:
            (tmp_path / run_dir.EFFECTIVE).write_text(json.dumps(saved))
            with pytest.raises(ConfigError, match="no decisions of a run") as refused:
                load_effective(tmp_path)
            assert len(str(refused.value).splitlines()) == 1


# --- shards ----------------------------------------------------------------------------------------------------------
TOKENS, PER_SHARD, LARGEST = 2500, 1000, 50256
SKIP = HEADER.size
Damage = Callable[[Path, random.Random], object]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    ids = np.random.default_rng(0).integers(0, LARGEST, TOKENS).astype(np.uint16)
    with ShardWriter(tmp_path / "tokens", {"tokenizer": "gpt2"}, PER_SHARD) as writer:
        writer.append(ids)
    return tmp_path / "tokens"


def _manifest(change: Callable[[dict[str, Any], random.Random], object]) -> Damage:
    def damage(directory: Path, draw: random.Random) -> None:
        manifest = json.loads((directory / MANIFEST).read_text())
        change(manifest, draw)
        (directory / MANIFEST).write_text(json.dumps(manifest))

    return damage


def _bytes(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    return _file(lambda path, draw: path.write_bytes(change(path.read_bytes(), draw)))


def _file(change: Callable[[Path, random.Random], object]) -> Damage:
    return lambda directory, draw: change(draw.choice(sorted(directory.glob("*.bin"))), draw)


def _flip(body: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(body))
    return body[:at] + bytes([body[at] ^ 1 << draw.randrange(8)]) + body[at + 1 :]


def _put_id(directory: Path, draw: random.Random, rehash: bool) -> None:
    """An id that no vocabulary has, with the hash of what it was or, a lie well told, of what it is now."""
    import hashlib

    paths = sorted(directory.glob("*.bin"))
    number = draw.randrange(len(paths))
    body = bytearray(paths[number].read_bytes())
    count = (len(body) - HEADER.size) // 2
    struct.pack_into("<H", body, HEADER.size + 2 * draw.choice([0, count - 1, draw.randrange(count)]), 65535)
    paths[number].write_bytes(body)
    if rehash:
        manifest = json.loads((directory / MANIFEST).read_text())
        manifest["shards"][number]["sha256"] = hashlib.sha256(body).hexdigest()
        (directory / MANIFEST).write_text(json.dumps(manifest))


def _swap(directory: Path, draw: random.Random) -> None:
    a, b = sorted(directory.glob("*.bin"))[:2]  # of equal length
    body = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(body)


def _replace_by(make: Callable[[Path], object]) -> Damage:
    def change(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path)

    return _file(change)


DAMAGES: dict[str, Damage] = {
    "cut short": _bytes(lambda body, draw: body[: draw.randrange(len(body))]),
    "an odd byte": _bytes(lambda body, draw: body + b"\0"),
    "longer": _bytes(lambda body, draw: body + bytes(2 * draw.randint(1, 99))),
    "empty": _file(lambda path, draw: path.write_bytes(b"")),
    "a bit": _bytes(_flip),
    "a block of zeros": _bytes(lambda body, draw: body[:99] + bytes(400) + body[499:]),
    "big endian": _bytes(lambda body, draw: body[:SKIP] + np.frombuffer(body[SKIP:], "<u2").byteswap().tobytes()),
    "32 bits": _bytes(lambda body, draw: HEADER.pack(MAGIC, 1, 4, (len(body) - SKIP) // 4) + body[SKIP:]),
    "another version": _bytes(lambda body, draw: HEADER.pack(MAGIC, 2, 2, (len(body) - SKIP) // 2) + body[SKIP:]),
    "foreign": _bytes(lambda body, draw: struct.pack("<256i", 20240520, 1, 1000, *[0] * 253) + body[SKIP:]),
    "text": _bytes(lambda body, draw: bytearray(b"to be or not to be " * 200)),
    "an id too large": lambda directory, draw: _put_id(directory, draw, rehash=False),
    "an id too large, hashed": lambda directory, draw: _put_id(directory, draw, rehash=True),
    "swapped": _swap,
    "gone": _replace_by(lambda path: None),
    "a folder": _replace_by(lambda path: path.mkdir()),
    "a pipe": _replace_by(lambda path: os.mkfifo(path)),
    "a link to nowhere": _replace_by(lambda path: path.symlink_to("nowhere")),
    "a device": _replace_by(lambda path: path.symlink_to("/dev/zero")),
    "fewer tokens": _manifest(lambda m, draw: m["shards"][0].update(tokens=draw.randrange(PER_SHARD))),
    "more tokens": _manifest(lambda m, draw: m["shards"][0].update(tokens=PER_SHARD + draw.randint(1, 10**9))),
    "negative tokens": _manifest(lambda m, draw: m["shards"][0].update(tokens=-draw.randint(1, 10**30))),
    "no number": _manifest(lambda m, draw: m["shards"][0].update(tokens=draw.choice(["x", None, [], math.inf]))),
    "another hash": _manifest(lambda m, draw: m["shards"][1].update(sha256=draw.choice(["", "0" * 64, None]))),
    "a smaller largest id": _manifest(lambda m, draw: m.update(max_id=draw.randrange(-5, 40000))),
    "another folder": _manifest(lambda m, draw: m["shards"][0].update(file=draw.choice(["../x", "/etc/passwd", ".."]))),
    "twice": _manifest(lambda m, draw: m["shards"].append(m["shards"][0])),
    "no shards": _manifest(lambda m, draw: m.pop(draw.choice(["shards", "max_id"]))),
    "no object": _manifest(lambda m, draw: m.update(shards=draw.choice([None, 7, "x", [1], [[]], [{}]]))),
    "no JSON": lambda directory, draw: (directory / MANIFEST).write_text(  # type: ignore[return-value]
        draw.choice(["", "{", "[" * 100_000, "null", "\0", '{"shards": 1e999}'])
    ),
}


def _open(directory: Path) -> None:
    """As a run does before its first step."""
    verify(directory)
    open_dataset(DataConfig(val_tokens=0), directory, None, 16, 1337, LARGEST + 1)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_with_file_and_place(shards: Path, damage: str) -> None:
    """Twenty times each, from a seed; before any step, in one line that names a file of the data set."""
    verify(shards)
    for seed in range(20):
        directory = shards.with_name(f"{seed}")
        shutil.copytree(shards, directory)
        DAMAGES[damage](directory, random.Random(seed))
        with pytest.raises(DataError) as refused:
            _open(directory)
        text = str(refused.value)
        assert len(text.splitlines()) == 1
        assert f"{directory}/" in text
        if damage.startswith("an id too large, hashed"):
            assert ": byte " in text


def test_what_was_read_whole_is_not_read_again_until_it_changes(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify(shards)
    read: list[Path] = []
    plain = module._check_content
    monkeypatch.setattr(
        module, "_check_content", lambda shard, largest: (read.append(shard.path), plain(shard, largest))
    )
    verify(shards)
    assert read == []
    os.utime(shards / "tokens-00001.bin", ns=(1, 1))
    verify(shards)
    assert len(read) == 3
    for path in (shards / "tokens-00001.bin", shards / VERIFIED):  # other bytes of the same size and time
        body, before = bytearray(path.read_bytes()), path.stat()
        if path.suffix == ".bin":
            body[-1] ^= 1
        path.write_bytes(body)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="sha256 differs"):
        verify(shards)


def test_a_cache_that_cannot_be_written_is_read_once_a_process(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    plain = module._check_content

    def counted(shard: module.Shard, largest: int) -> None:
        read.append(shard.path)
        plain(shard, largest)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(module, "_check_content", counted)
    monkeypatch.setattr(Path, "write_text", refuse)
    verify(shards)
    verify(shards)
    assert len(read) == 3
    assert not (shards / VERIFIED).exists()
    monkeypatch.setattr(module, "_found_right", {})
    verify(shards)
    assert len(read) == 6


# --- checkpoints -----------------------------------------------------------------------------------------------------
SMALL = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64)


def saved(directory: Path, step: int) -> Path:
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = build_optimizer(model, OptimConfig(), fused=True)
    model(torch.arange(8)[None], torch.arange(8)[None]).backward()
    optimizer.step()
    return checkpoint.save(directory, model, optimizer, TrainState(step=step, tokens=10 * step), Keep())


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
    "flip": _one(_flip),
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
def test_a_corrupt_checkpoint_is_passed_over(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    """What a pickle can be made to call."""

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
    """A file that torch wrote, whose tensor claims a trillion elements."""
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
    """Contents for train.pt."""
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
def test_what_a_checkpoint_brings_is_not_run(tmp_path: Path) -> None:
    """The hashes are right: whoever made these wrote the manifest too."""
    sentinel = tmp_path / "sentinel"
    model = GPT(SMALL)
    optimizer = build_optimizer(model, OptimConfig(), fused=True)
    path = saved(tmp_path / "c", 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, body in hostile(sentinel).items():
        (path / "train.pt").write_bytes(body)
        _rehash(path)
        assert checkpoint.newest(path.parent)[0] == path, name
        with pytest.raises(CheckpointError, match=r"train.pt: not this optimizer's state") as refused:
            checkpoint.load_optimizer(path, optimizer)
        assert len(str(refused.value).splitlines()) == 1
        assert not sentinel.exists(), name
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 1_000_000


def test_moments_of_other_shapes_reach_no_kernel(tmp_path: Path) -> None:
    """AdamW's fused kernel writes where the moments should be, however short they are."""
    model = GPT(SMALL)
    optimizer = build_optimizer(model, OptimConfig(), fused=True)
    path = saved(tmp_path / "c", 1)
    whole = torch.load(path / "train.pt", weights_only=True)
    first = whole["optimizer"]["state"][0]
    for state in ({}, {**whole["optimizer"]["state"], 0: {**first, "exp_avg": torch.zeros(1)}},
                  {**whole["optimizer"]["state"], 0: {"step": first["step"]}}):  # fmt: skip
        torch.save({"optimizer": {**whole["optimizer"], "state": state}}, path / "train.pt")
        with pytest.raises(CheckpointError, match="not this optimizer's state"):
            checkpoint.load_optimizer(path, optimizer)
    for group in whole["optimizer"]["param_groups"]:
        group.update(lr=99.0, weight_decay=99.0, betas=(0.0, 0.0))
    torch.save(whole, path / "train.pt")
    checkpoint.load_optimizer(path, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]  # the config's, not the file's


@pytest.mark.parametrize(
    "change", [{"tokens": None}, {"step": "1"}, {"step": 2}, {"seconds": []}, {"new": 1}, {"val_loss": {}}]
)
def test_counters_that_are_none_are_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    path = saved(tmp_path / "c", 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, **change}))
    _rehash(path)
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        checkpoint.newest(path.parent)


def test_a_manifest_names_its_own_files_only(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "/dev/zero": [0, ""]}))
    with pytest.raises(CheckpointError, match="does not name these files"):
        checkpoint.newest(path.parent)


def test_weights_that_lie_about_themselves_are_refused(tmp_path: Path) -> None:
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
        with pytest.raises(CheckpointError, match=r"model.safetensors: not this model's weights"):
            checkpoint.load_weights(path, model)


def _rehash(path: Path) -> None:
    import hashlib

    names = ("model.safetensors", "train.pt", "state.json")
    files = {name: [len(body := (path / name).read_bytes()), hashlib.sha256(body).hexdigest()] for name in names}
    (path / "manifest.json").write_text(json.dumps(files))
