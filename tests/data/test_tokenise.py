"""Tokenisation by several processes, killed and resumed: real processes and real kills."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path

import pytest
from texts import ids_of

from gptexp.data.documents import Part, Span
from gptexp.data.shards import MANIFEST
from gptexp.data.tokenise import Encoder, tokenise

Start = Callable[..., subprocess.Popen[str]]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 MB of jsonl with words of many lengths: eight parts, a few seconds of work for each worker."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 9))) for _ in range(5000)]
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with path.open("w") as file:
        for _ in range(30_000):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=670))}) + "\n")
    return path


def command(rows: Path, cache: Path, workers: int) -> list[str]:
    return ["prepare", "data=text", f"data.path={rows}", f"data.cache_dir={cache}", f"data.workers={workers}"]


def manifest(cache: Path) -> dict[str, object]:
    [found] = cache.glob(f"*/{MANIFEST}")
    return json.loads(found.read_text())  # type: ignore[no-any-return]


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def complete_parts(cache: Path) -> dict[str, int]:
    """The files of the parts that are complete, with their times."""
    return {path.name: path.stat().st_mtime_ns for path in cache.glob("*.tmp/parts/part-*.ids")}


def test_the_result_depends_neither_on_the_number_of_workers_nor_on_kills(
    start: Start, tmp_path: Path, rows: Path
) -> None:
    """Five kills of the first process. Its workers end too, and complete parts are not tokenised again.

    The first parts are joined before the last one is tokenised.
    """
    for workers in (1, 3):
        process = start(*command(rows, tmp_path / f"{workers}", workers))
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert manifest(tmp_path / "1") == manifest(tmp_path / "3")

    cache = tmp_path / "killed"
    for kills in range(1, 6):
        before = complete_parts(cache)
        process = start(*command(rows, cache, 2))
        while len(complete_parts(cache)) < kills:
            assert process.poll() is None
            time.sleep(0.01)
        joined = list(cache.glob("*.tmp/tokens-*.bin"))
        workers_before = children(process.pid)
        process.kill()
        process.wait(30)
        deadline = time.monotonic() + 10
        while any(map(is_running, workers_before)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_running, workers_before))
        assert before.items() <= complete_parts(cache).items()
    assert joined
    process = start(*command(rows, cache, 2))
    assert process.wait(200) == 0
    assert manifest(cache) == manifest(tmp_path / "1")
    assert not list(cache.glob("*.tmp"))


def test_a_lost_worker_is_one_line_and_the_next_start_goes_on(start: Start, tmp_path: Path, rows: Path) -> None:
    cache = tmp_path / "cache"
    process = start(*command(rows, cache, 2))
    while not complete_parts(cache):
        time.sleep(0.01)
    [worker, *_] = [pid for pid in children(process.pid) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=200)
    assert (process.returncode, len(err.splitlines())) == (3, 1), err
    assert "a process that tokenises has ended, perhaps for lack of memory" in err
    assert complete_parts(cache)
    assert start(*command(rows, cache, 2)).wait(200) == 0


@pytest.mark.parametrize("workers", [2, 3])
def test_a_part_that_is_not_needed_is_not_waited_for(tmp_path: Path, workers: int) -> None:
    """The parts after the first two never end: pipes into which nobody writes. None is begun that is not at hand."""
    paths = [tmp_path / f"{number}.jsonl" for number in range(6)]
    for path in paths[:2]:
        path.write_text('{"text": "a few words"}\n' * 10)
    for path in paths[2:]:
        os.mkfifo(path)
    parts: list[Part] = [[Span(path, "jsonl")] for path in paths]
    words = [*ids_of("a few words"), 50256] * 20
    found = list[int]()
    for ids, _ in tokenise(parts, Encoder("gpt2", tmp_path, "text", 70), tmp_path, workers, lambda *_: None):
        found += ids.tolist()
    assert found == words[:-1]
    assert not active_children()
    assert len(list(tmp_path.glob("part-*.ids"))) == 2
    assert len(list(tmp_path.glob(".part-*"))) <= workers - 1
