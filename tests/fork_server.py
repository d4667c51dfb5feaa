"""Answers "what does `gptexp train ARGV` do in an empty directory?" at the price of a fork instead of an interpreter.

Hydra and gptexp are imported once. Each request, a JSON object per line on stdin with `argv` and `cwd`, is run by a
forked child that calls `gptexp.train.main()`; the answer is a JSON object per line on stdout. What one command line
does to Hydra's singletons, to `sys` or to the environment dies with its child.

torch is never imported, and a child that tries is ended on the spot: that is the proof that torch had no part in an
answer, and the reason why a command line that turns out to be legal starts no training.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import gptexp.compose  # and with it Hydra, so that no child pays for it
import gptexp.sweep
import gptexp.train

TORCH = 97  # exit code of a child that went as far as importing torch
PATIENCE_S = 60  # a child that takes longer is killed by SIGALRM


class TorchEndsIt(MetaPathFinder):
    """Stands first in `sys.meta_path`: no `try` around an import can hide that torch was asked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name.partition(".")[0] == "torch":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(TORCH)


def child(argv: list[str], cwd: str, stdout: int, stderr: int) -> int:
    """Become `gptexp train ARGV`; the exit code that the interpreter would have ended with."""
    signal.alarm(PATIENCE_S)
    os.chdir(cwd)
    # The server's stdin holds the next requests.
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, stdout), (2, stderr)):
        os.dup2(source, target)
    sys.meta_path.insert(0, TorchEndsIt())
    sys.argv = ["gptexp train", *argv]
    try:
        gptexp.train.main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def answer(argv: list[str], cwd: str) -> dict[str, Any]:
    """Run one command line and say what came of it."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        start = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            code = TORCH
            try:
                code = child(argv, cwd, stdout.fileno(), stderr.fileno())
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status, usage = os.wait4(pid, 0)
        wall_s = time.perf_counter() - start
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    code = os.waitstatus_to_exitcode(status)
    return {
        "code": code,
        "stdout": texts[0],
        "stderr": texts[1],
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "torch": code == TORCH,
        "files": sorted(str(path.relative_to(cwd)) for path in Path(cwd).rglob("*")),
    }


def main() -> None:
    assert "torch" not in sys.modules, "gptexp.compose, gptexp.sweep or gptexp.train imports torch"
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
