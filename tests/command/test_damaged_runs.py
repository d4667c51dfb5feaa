"""Every verb that reads a run, before a run of which one file is damaged in every way.

The run is a cell of a sweep, and it was stopped, so that `resume` continues it. A verb works, works and names the file,
or refuses with one line that names it. `damaged_runs.txt` holds what each verb does. Most files, and half of the kinds
of damage, are in the tier `slow`.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TINY, ForkServer, clean, sabotaged

from gptexp.reporting.page.live import SHARE

EXPECTED = Path(__file__).with_name("damaged_runs.txt")
OF_SWEEPS = ("status", "report", "watch", "ls")
VERBS = (*OF_SWEEPS, "sample", "evaluate", "resume", "compare", "export", "sharpness")
CELL = "stopped"  # the run that is damaged; the sweep has another, which is completed
STEP = "checkpoints/step-00000001"
TEXTS = (
    *(f"{CELL}/{name}" for name in ("config.yaml", "effective.json", "summary.json", "metrics.jsonl")),
    *(f"{CELL}/{STEP}/{name}" for name in ("state.json", "manifest.json")),
    *(f"completed/{name}" for name in ("config.yaml", "summary.json", "metrics.jsonl")),
    "sweep.json",
)
WRITTEN = ("report.html", "report.json", "cells.csv", "pictures", "pictures/loss.png")
FILES = (
    *TEXTS,
    *(f"{CELL}/{STEP}/{name}" for name in ("model.safetensors", "optimizer.safetensors")),
    *(f"{CELL}/{name}" for name in (STEP, "checkpoints", ".lock", ".lock-rank0", ".lock-sweep", ".hydra/config.yaml")),
    CELL,
    ".",
    *WRITTEN,
)
IN_CI = (f"{CELL}/summary.json", f"{CELL}/{STEP}/manifest.json", "sweep.json")  # the others are in the tier `slow`


def in_all_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every leaf changed."""
    if isinstance(value, dict):
        return {key: in_all_values(inner, change) for key, inner in value.items()}
    if isinstance(value, list) and value:
        return [in_all_values(inner, change) for inner in value]
    return change(value)


def numbers(new: Any) -> Callable[[Any], Any]:
    return lambda old: new if isinstance(old, int | float) and not isinstance(old, bool) else old


def other_type(old: Any) -> Any:
    return 7 if isinstance(old, str) else {"a": [old]} if old is None else str(old) if isinstance(old, bool) else "x"


VALUES: dict[str, Callable[[Any], Any]] = {
    "NaN": numbers(float("nan")),
    "-Infinity": numbers(float("-inf")),
    "huge": numbers(10**400),
    "big": numbers(10**15),
    "64 bits": numbers(10**19),
    "negative": numbers(-1),
    "fractions": numbers(0.5),
    "null": lambda _: None,
    "nested": lambda _: json.loads("[" * 100 + "]" * 100),
    "wrong types": other_type,
}


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change all values in a file of JSON, JSON lines or YAML."""
    text = path.read_text()
    if path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(in_all_values(yaml.safe_load(text), change), sort_keys=False))
    elif path.suffix == ".jsonl":
        keep = ("event", "text", "kind")
        events = [json.loads(line) for line in text.splitlines()]
        new = [{k: v if k in keep else in_all_values(v, change) for k, v in event.items()} for event in events]
        path.write_text("".join(json.dumps(event) + "\n" for event in new))
    else:
        path.write_text(json.dumps(in_all_values(json.loads(text), change)))


def rehashed(change: Callable[[Any], Any]) -> Callable[[Path, Path], object]:
    """Change the numbers in the state of a checkpoint, but not its config, and also the hash, as a stranger can."""

    def damage(path: Path, _: Path) -> None:
        about = {"about": json.loads(path.read_text())["about"]}
        rewrite(path, change)
        path.write_text(json.dumps({**json.loads(path.read_text()), **about}))
        manifest = path.with_name("manifest.json")
        text = path.read_bytes()
        hashes = {**json.loads(manifest.read_text()), path.name: [len(text), hashlib.sha256(text).hexdigest()]}
        manifest.write_text(json.dumps(hashes))

    return damage


def link(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, target / path.name)
        shutil.rmtree(path)
    else:
        (target / path.name).write_bytes(path.read_bytes() if path.exists() else b"")
        path.unlink(missing_ok=True)
    path.symlink_to(target / path.name)


def replaced(make: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    def damage(path: Path, _: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return damage


def halved(path: Path, _: Path) -> None:
    content = path.read_bytes()
    end = len(content) // 2
    if path.suffix == ".yaml":  # within a key, whatever the length of the paths before it
        end = content.rindex(b"\n", 0, end) + len("\n  k")
    path.write_bytes(content[:end])


ANYTHING: dict[str, Callable[[Path, Path], object]] = {
    "a link": link,
    "a broken link": replaced(lambda path: path.symlink_to("/nowhere/at/all")),
    "a directory": replaced(lambda path: path.mkdir()),
    "a pipe": replaced(os.mkfifo),
    "unreadable": lambda path, _: path.chmod(0),
    "missing": replaced(lambda path: None),
    "empty": replaced(lambda path: path.write_bytes(b"")),
    "noise": replaced(lambda path: path.write_bytes(bytes(range(256)) * 8)),
}
TEXT_ONLY: dict[str, Callable[[Path, Path], object]] = {
    **{name: (lambda path, _, change=change: rewrite(path, change)) for name, change in VALUES.items()},
    "deep": replaced(lambda path: path.write_text("[" * 100_000)),
    "deep line": lambda path, _: path.write_text(path.read_text() + '{"event": "step", "x": ' + "[" * 100_000 + "\n"),
    "a list": replaced(lambda path: path.write_text("[1, 2]\n")),
    "halved": halved,
}


NAMES: dict[str, Callable[[Path, Path], object]] = {
    "no UTF-8": lambda path, _: path.rename(os.fsdecode(os.fsencode(path.parent) + b"/stopped\xff")),
    "escapes": lambda path, _: path.rename(path.with_name("stopped\x1b[31m\n")),
}


def damages(file: str) -> dict[str, Callable[[Path, Path], object]]:
    """The kinds of damage that apply to a file, and what each does to a path, with a folder for targets of links."""
    kinds = {**ANYTHING, **(TEXT_ONLY if file in TEXTS else {}), **(NAMES if file == CELL else {})}
    if file in WRITTEN or Path(file).name.startswith(".lock"):  # written anew, or empty
        return {name: kinds[name] for name in ("a link", "a broken link", "a directory", "a pipe", "noise")}
    if file == f"{CELL}/{STEP}/state.json":
        kinds = {**kinds, **{f"hashed {name}": rehashed(change) for name, change in VALUES.items()}}
    if file.startswith(f"{CELL}/{STEP}/"):  # one hash detects each change of the content
        hashed = [name for name in kinds if name.startswith("hashed ")]
        return {name: kinds[name] for name in kinds if name in (*ANYTHING, *hashed, "NaN", "deep", "wrong types")}
    return kinds


# Each of these is like another kind, or is less likely.
SLOW = (
    "a broken link", "a pipe", "empty", "noise", "-Infinity", "64 bits", "huge", "negative", "fractions", "null",
    "deep", "a list",
)  # fmt: skip


def table() -> dict[tuple[str, str], list[str]]:
    """The outcomes in `damaged_runs.txt`, in the order of the verbs, by file and kind of damage."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in EXPECTED.read_text().splitlines()[3:]:
        if not line.startswith(" "):
            file, verbs = line, VERBS if line.startswith((CELL, ".")) else OF_SWEEPS
            continue
        *outcomes, kinds = line.split(maxsplit=len(verbs))
        others = [kind for kind in damages(file) if (file, kind) not in found]
        for kind in others if kinds in ("every kind", "the others") else kinds.split(", "):
            assert kind in others, f"{file}: {kind} stands twice, or does not apply"
            found[file, kind] = outcomes
    return found


class Place:
    """A sweep of two cells, and the processes that read it, which cannot read files of mode 0 even as root."""

    def __init__(self, root: Path, corpus: Path, cache: Path) -> None:
        self.root, self.sweep, self.outside = root, root / "sweep", root / "outside"
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        # The drawing of PNGs takes 3 s in each process.
        without_pictures = sabotaged(root / "sabotage", "gptexp.reporting.charts.pictures", "m.png = lambda spec: b''")
        self.env = clean(without_pictures, cache)
        self.server = ForkServer("torch", env=self.env, prefix=prefix)
        self._train(corpus)
        shutil.copytree(self.whole, self.sweep)
        self.outside.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        watch = [*prefix, sys.executable, "-m", "gptexp", "watch", str(self.sweep), f"--port={self.port}"]
        self.watching = subprocess.Popen(watch, cwd=root, env=self.env, stdout=subprocess.PIPE, text=True)
        assert self.watching.stdout is not None
        assert "watching" in self.watching.stdout.readline()
        self.asked_again = 0.0  # s of the monotonic clock: no page is asked for before

    def _train(self, corpus: Path) -> None:
        small = [
            *(o for o in TINY if "n_embd" not in o),
            "model.n_embd=2",
            "data.tokenizer=bytes",
            f"data.path={corpus}",
            "train.save_every=2",
        ]
        for name, lr, minutes in ((CELL, "1e-2", "0.0001"), ("completed", "2e-2", "null")):
            argv = ["train", *small, f"optim.lr={lr}", f"train.max_minutes={minutes}", f"hydra.run.dir=whole/{name}"]
            done = self.server.ask(argv, self.root, self.env, timeout=240)
            assert done["code"] == 0, done["stderr"]
        self.whole = self.root / "whole"
        entry = {"values": {"optim.lr": "1e-2"}, "total_batch_size": 128, "tokens": 512}
        cells = dict.fromkeys((CELL, "completed", "not started"), entry)
        sweep = {"name": "sweep", "overrides": [*small, "sweep.name=sweep"], "to_choose": 1, "cells": cells}
        (self.whole / "sweep.json").write_text(json.dumps(sweep))
        (self.whole / CELL / ".lock-sweep").touch()
        config = self.whole / CELL / "config.yaml"
        config.write_text(config.read_text().replace("max_minutes: 0.0001", "max_minutes: null"))

    def close(self) -> None:
        self.watching.kill()
        self.watching.wait()
        self.server.__exit__()

    def damage(self, file: str, kind: str) -> dict[Path, bytes]:
        """Damage one file of a whole sweep; the files that links now point to, with their content."""
        for folder in (self.sweep, self.outside):
            folder.unlink(missing_ok=True) if folder.is_symlink() or not folder.is_dir() else shutil.rmtree(folder)
        shutil.copytree(self.whole, self.sweep)
        self.outside.mkdir()
        path = self.sweep if file == "." else self.sweep / file
        path.parent.mkdir(exist_ok=True)
        damages(file)[kind](path, self.outside)
        return self.targets()

    def targets(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.outside.rglob("*") if path.is_file()}

    def outcome(self, verb: str, file: str) -> str:
        """What a verb does: "works", "names" if it also names the file, or the code that it exits with.

        The names of the run and the sweep are in all output, so there "names" would say nothing.
        """
        about = "checkpoints" if file.endswith(STEP) else "sweep" if file == "." else Path(file).name
        if verb == "watch":
            return self.page(file, about)
        cell = next(self.sweep.glob("stopped*"), self.sweep / CELL)
        directory = self.sweep if verb in OF_SWEEPS else cell
        exported = self.root / "exported"
        shutil.rmtree(exported, ignore_errors=True)
        more = {
            "export": [str(exported)],
            "sample": ["--num-samples=1", "--max-new-tokens=2"],
            "compare": [str(self.sweep / "completed"), "--json"],
            "sharpness": ["--sequences=2"],
        }
        done = self.server.ask([verb, str(directory), *more.get(verb, [])], self.root, self.env, timeout=60)
        code, said = done["code"], done["stdout"] + done["stderr"]
        assert code in (0, 1, 2, 3, 4), (code, said)
        assert "Traceback" not in said, said
        assert "\x1b" not in said, said
        assert not re.search(r"(?<!=)\bnan\b", done["stdout"]), said
        assert max(map(len, said.splitlines()), default=0) < 1000, said
        if code:
            assert about in done["stderr"], said
            assert not [*self.root.glob("*exported*")]
            return str(code)
        return "names" if about in said and file not in (CELL, ".") else "works"

    def page(self, file: str, about: str) -> str:
        """The same for the page of the `gptexp watch` that runs all the time.

        After it has built a page, it shows that for a share of the time which this took, whatever changes meanwhile.
        """
        time.sleep(max(0.0, self.asked_again - time.monotonic()))
        started = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=60) as answer:
            said = answer.read().decode().partition("<main>")[2].partition("</main>")[0]
        self.asked_again = time.monotonic() + SHARE * (time.monotonic() - started)
        assert "Error" not in said, said
        names = about in said and file not in (CELL, ".")
        return "names" if names else "works" if "<table" in said else "refuses"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("damaged"), corpus, cache)
    yield place
    place.close()


@pytest.mark.parametrize(
    ("file", "is_slow"),
    [
        pytest.param(file, is_slow, marks=pytest.mark.e2e if file in IN_CI and not is_slow else pytest.mark.slow)
        for file in FILES
        for is_slow in (False, True)
    ],
)
def test_each_verb_works_or_names_the_damaged_file(place: Place, file: str, is_slow: bool) -> None:
    for kind in (kind for kind in damages(file) if (kind in SLOW) == is_slow):
        found = []
        for verb in VERBS if file.startswith((CELL, ".")) else OF_SWEEPS:
            targets = place.damage(file, kind)
            found.append(place.outcome(verb, file))
            if file not in (CELL, "."):  # a run, or a sweep, may be given by a link
                assert place.targets() == targets, f"{verb} wrote through {kind} to {file}"
        assert found == table()[file, kind], f"{file}: {kind}"


def test_the_table_lists_every_kind_of_damage_to_every_file() -> None:
    """Otherwise a row that no test compares would stay."""
    assert {*table()} == {(file, kind) for file in FILES for kind in damages(file)}
