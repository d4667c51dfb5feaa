"""The main job in a container of a careful administrator.

Its user id has no name and no home, everything but one folder is read-only, and /dev/shm holds 64 kB.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.e2e

# In a mount namespace of its own, so that this machine keeps its mounts. The folder is in memory, and ends with it.
CONTAINER = """
set -e
folder=$1; shift
mount --make-rprivate /
mount -t tmpfs -o size=64k tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs "$folder"
for mounted in $(cut -d' ' -f2 /proc/mounts); do
    case $mounted in "$folder" | /proc* | /sys* | /dev*) ;; *) mount -o remount,bind,ro "$mounted" ;; esac
done
cd "$folder"
exec setpriv --reuid=54321 --regid=54321 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search \
    env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" sh -ec "$1"
"""


def in_container(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = ["unshare", "--mount", "sh", "-c", CONTAINER, "sh", str(folder), script]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def why_not(folder: Path) -> str:
    """Why this machine cannot run such a container; empty if it can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "needs root, unshare and setpriv"
    tried = in_container(folder, "true")
    return f"no mount namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        if reason := why_not(Path(name)):
            pytest.skip(reason)
        yield Path(name)


def test_a_run_trains_resumes_and_is_reported(tiny: list[str], folder: Path) -> None:
    gptexp = f"'{sys.executable}' -m gptexp"
    run = f"{gptexp} train {' '.join(tiny)} train.eval_every=2 hydra.run.dir=out world.size=2"
    done = in_container(
        folder,
        f"""
        if touch {folder.parent}/elsewhere 2>/dev/null; then echo "it may write elsewhere"; exit 9; fi
        if id -un 2>/dev/null; then echo "it has a name"; exit 9; fi
        {run} train.max_minutes=0.0001
        {run}
        {gptexp} report out >/dev/null
        {gptexp} sample out --num-samples 1 --max-new-tokens 2 >/dev/null
        {gptexp} evaluate out
        {gptexp} status out --json
        ls out
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert '"val/loss"' in done.stdout
    assert "report.html" in done.stdout
    [cell] = json.loads(done.stdout[done.stdout.index('{\n "cells"') : done.stdout.rindex("}") + 1])["cells"]
    assert (cell["status"], cell["tokens"], cell["problem"]) == ("completed", 512, None)
