"""`python -m gptexp.run RUN_DIR`: one rank, started by gptexp's own launcher. Installs signals before torch loads."""

import os
import sys
from pathlib import Path

from gptexp.process.imports import permanent
from gptexp.process.signals import PARENT, StopRequest, die_with_parent


def main() -> None:
    """Train as the rank that the environment names."""
    stop = StopRequest()
    stop.install(ignore_sigint=True)  # the parent handles Ctrl-C, also before torch is imported
    die_with_parent(int(os.environ[PARENT]))
    with permanent():
        from gptexp.run.rank import run_launched  # imports torch

    run_launched(Path(sys.argv[1]), stop)


if __name__ == "__main__":
    main()
