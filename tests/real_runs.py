"""Helpers of tests of real runs: a run in this process, one shared finished run, and readers of run directories."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checkpoints import moments
from conftest import _FOREIGN, TINY, ForkServer, events
from safetensors.torch import load_file

from gptexp.config.compose import compose
from gptexp.distributed.ranks import Rank
from gptexp.process.signals import StopRequest
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.storage import branch, run_dir


def train_here(overrides: list[str], directory: Path, stop: StopRequest | None = None) -> int:
    """Train on one rank in this process; the exit code."""
    return run(Job(compose(overrides, find_parent=branch.find), directory, Rank(), stop or StopRequest()))


def branch_and_whole(own: list[str], root: Path) -> tuple[Path, Path]:
    """Train eight steps with a cooldown, once from a branch at step 4 of another run, once without interruption.

    Returns their directories. `own` are the overrides that both have.
    """
    wsd, begin = ["schedule=wsd", "schedule.cooldown_ratio=0.5"], ["schedule.warmup_tokens=0", "train.max_steps=8"]
    parent = ["schedule=constant", "train.save_every=4", "train.keep_last=0"]
    runs = {
        "parent": [*own, *begin, *parent],
        "branch": [f"branch_from={root / 'parent'}@4", *wsd],
        "whole": [*own, *begin, *wsd],
    }
    for name, overrides in runs.items():
        run_dir.save_config(root / name, compose(overrides, find_parent=branch.find))
        assert train_here(overrides, root / name) == 0
    return root / "branch", root / "whole"


def environment(cache: Path) -> dict[str, str]:
    """An environment for fixtures of wider scope: no variable of a launcher or of wandb, and this token cache."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {**own, "GPTEXP_CACHE": str(cache), "WANDB_SILENT": "true", "OMP_WAIT_POLICY": "PASSIVE"}


class Finished(NamedTuple):
    """A completed run of 40 steps on one rank. It is shared: copy the directory before changing it."""

    directory: Path
    stdout: str


_finished: list[Finished] = []  # at most one for each process


def finished_run(factory: pytest.TempPathFactory, corpus: Path, server: ForkServer) -> Finished:
    """The finished run of this process. The folder `tokens` next to its directory is the token cache that it used."""
    if not _finished:
        _finished.append(_train_one(factory, corpus, server))
    return _finished[0]


def _train_one(factory: pytest.TempPathFactory, corpus: Path, server: ForkServer) -> Finished:
    root = factory.mktemp("finished")
    own = ["optim.lr=1e-2", "train.max_steps=40", "log.progress=auto", "log.sample_tokens=48", "hydra.run.dir=out"]
    argv = ["train", *TINY, f"data.path={corpus}", *own]
    done = server.ask(argv, root, environment(root / "tokens"), timeout=240)
    assert done["code"] == 0, done["stderr"]
    return Finished(root / "out", done["stdout"])


def newest(directory: Path) -> Path:
    """The newest checkpoint of a run directory."""
    return sorted((directory / "checkpoints").glob("step-*"))[-1]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The weights in the newest checkpoint of a run directory."""
    return load_file(newest(directory) / "model.safetensors")


def equal(a: Path, b: Path) -> bool:
    """Whether the newest checkpoints of two run directories hold the same weights and moments, to the last bit."""
    of_a, of_b = ({**weights(directory), **moments(newest(directory))} for directory in (a, b))
    assert of_a.keys() == of_b.keys()
    return all(torch.equal(value, of_b[name]) for name, value in of_a.items())


def begun(directory: Path, steps: int = 4) -> Callable[[], bool]:
    """A condition for `wait_for`: the run in `directory` has logged at least `steps` steps."""
    return lambda: (directory / "metrics.jsonl").exists() and len(events(directory, "step")) >= steps
