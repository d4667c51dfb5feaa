"""Runs `gptexp ARGV` in a forked process, which is faster than a new interpreter that imports everything again.

Hydra and gptexp are imported once, and torch too if the first argument is `torch`. Each line on stdin is a request: a
JSON object with `argv`, `cwd`, `env` and `timeout`. A forked child runs it. Each line on stdout is an answer, a JSON
object. A command's changes to Hydra's singletons, to `sys` or to the environment are lost with its child.

Without the argument `torch`, a child exits as soon as it imports torch. So a test can check that a command imports no
torch, and a valid command line starts no training.
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

# The verbs import these modules when they run. Importing them here saves each child that time.
import gptexp.command.lead
import gptexp.plan
import gptexp.sweep.grid
import gptexp.train

TORCH = 97  # exit code of a child that imported torch


class TorchEndsIt(MetaPathFinder):
    """Exits the process at an import of torch. It is first in `sys.meta_path`, so no `try` can hide the import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name.partition(".")[0] == "torch":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(TORCH)


def import_torch() -> None:
    """Import torch, the parts of gptexp that need it, and the compiler, which an optimizer imports when it is made."""
    import torch

    import gptexp.command.planning
    import gptexp.reporting.page.write
    import gptexp.run.launch
    import gptexp.run.load
    import gptexp.run.rank  # noqa: F401

    torch.optim.AdamW([torch.zeros(1)])


def become(argv: list[str], cwd: str, env: dict[str, str], timeout: float, stdout: int, stderr: int) -> int:
    """Run `gptexp ARGV` in this process; the exit code that the interpreter would end with."""
    signal.setitimer(signal.ITIMER_REAL, timeout)  # SIGALRM ends a command that takes longer
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))  # as a new interpreter has them
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
    """Run one command line in a child; its exit code, output and CPU seconds."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = become(argv, cwd, env, timeout, stdout.fileno(), stderr.fileno())
            finally:
                # Finalising the interpreter would copy each page shared with the server, which takes a second.
                os._exit(code)
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
    assert "torch" not in sys.modules, "gptexp.cli, command.lead, plan, sweep.grid or train imports torch"
    if sys.argv[1:] == ["torch"]:
        import_torch()
    else:
        sys.meta_path.insert(0, TorchEndsIt())
    gc.freeze()  # a collection in a child then does not touch the shared pages
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
