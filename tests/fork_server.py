"""Runs `gptexp ARGV` at the price of a fork instead of an interpreter and its imports.

Hydra and gptexp are imported once, and torch too where the first argument is `torch`. Each request, a JSON object per
line on stdin with `argv`, `cwd`, `env` and `timeout`, is run by a forked child that becomes the command; the answer is
a JSON object per line on stdout. What one command line does to Hydra's singletons, to `sys` or to the environment dies
with its child.

Without `torch` a child that tries to import it is ended on the spot: that is the proof that torch had no part in an
answer, and the reason why a command line that turns out to be legal starts no training.
"""

import atexit
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

import gptexp.cli
import gptexp.compose  # and with it Hydra, so that no child pays for it
import gptexp.sweep.launchers
import gptexp.sweep.sweepers
import gptexp.train

TORCH = 97  # exit code of a child that went as far as importing torch


class TorchEndsIt(MetaPathFinder):
    """Stands first in `sys.meta_path`: no `try` around an import can hide that torch was asked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name.partition(".")[0] == "torch":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(TORCH)


def import_torch() -> None:
    """torch, what of gptexp needs it, and the compiler that an optimizer imports when it is made."""
    import torch

    import gptexp.launch
    import gptexp.trainer  # noqa: F401

    torch.optim.AdamW([torch.zeros(1)])


def become(argv: list[str], cwd: str, env: dict[str, str], timeout: float, stdout: int, stderr: int) -> int:
    """Turn this process into `gptexp ARGV`; the exit code that the interpreter would end with."""
    signal.setitimer(signal.ITIMER_REAL, timeout)  # SIGALRM ends whoever takes longer
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    # The server's stdin holds the next requests.
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, stdout), (2, stderr)):
        os.dup2(source, target)
    sys.argv = ["gptexp", *argv]
    try:
        gptexp.cli.main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def answer(argv: list[str], cwd: str, env: dict[str, str], timeout: float) -> dict[str, Any]:
    """Run one command line and say what came of it."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = become(argv, cwd, env, timeout, stdout.fileno(), stderr.fileno())
            finally:
                os._exit(code)  # taking the modules apart would copy each page that the server shares: a second
        _, status, usage = os.wait4(pid, 0)
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    code = os.waitstatus_to_exitcode(status)
    return {
        "code": code,
        "stdout": texts[0],
        "stderr": texts[1],
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "torch": code == TORCH,
    }


def main() -> None:
    assert "torch" not in sys.modules, "gptexp.cli, gptexp.compose, gptexp.sweep or gptexp.train imports torch"
    if sys.argv[1:] == ["torch"]:
        import_torch()
    else:
        sys.meta_path.insert(0, TorchEndsIt())
    gc.freeze()  # a collection in a child then leaves the shared pages alone
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
