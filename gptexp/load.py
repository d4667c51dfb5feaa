"""A finished (or interrupted) run back in memory, from its directory alone."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gptexp import checkpoint, run_dir
from gptexp.config import AUTO, Config
from gptexp.data.tokenizer import load_tokenizer
from gptexp.distributed import Rank, pick_device
from gptexp.effective import Effective, load_effective, resolve
from gptexp.errors import ConfigError
from gptexp.loss import plain_cross_entropy
from gptexp.model import GPT

if TYPE_CHECKING:
    import tiktoken


@dataclass
class LoadedRun:
    model: GPT  # in eval mode, on `device`
    config: Config
    effective: Effective
    step: int
    device: torch.device


def load_checkpointed(directory: Path | str) -> LoadedRun:
    """The newest whole checkpoint of a run directory; raises `ConfigError` or `CheckpointError`."""
    directory = Path(directory)
    config = run_dir.load_config(directory)
    path, state = checkpoint.newest(directory / run_dir.CHECKPOINTS)
    device = _device(config.train.device)
    model = GPT(config.model, plain_cross_entropy)
    checkpoint.load_weights(path, model)
    decided = load_effective(directory)
    effective = resolve(_portable(config, decided.get("device"), device), device, Rank(), decided)
    return LoadedRun(model.to(device).eval(), config, effective, state.step, device)


def _device(trained_on: str) -> torch.device:
    """The kind of device that a run trained on, or what this machine has in its place."""
    try:
        return pick_device(trained_on, Rank())
    except ConfigError:
        return pick_device("auto", Rank())


def _portable(config: Config, trained_on: str | None, device: torch.device) -> Config:
    """`config` without the kernels it asks for, where those were of another kind of device."""
    if device.type == trained_on:
        return config
    return replace(config, train=replace(config.train, attention=AUTO), optim=replace(config.optim, fused=AUTO))


def load_run(directory: Path | str) -> "tuple[GPT, tiktoken.Encoding, Config]":
    """The model in eval mode, its tokenizer and the run's config, for a notebook."""
    run = load_checkpointed(directory)
    return run.model, load_tokenizer(run.config.data.tokenizer), run.config
