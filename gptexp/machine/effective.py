"""The values of every `auto` that affects training, as effective.json saves them, and their effect on this process.

A resumed run and every cell of a sweep reuse them. So neither the length of a cell, nor the number of cells that run at
once, nor other processes on the machine change the bits of the result.
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

import torch

from gptexp.config.schema import fits_type
from gptexp.machine.cpu import keep_freed_memory
from gptexp.model.kernels import attention_kernel
from gptexp.process.errors import ConfigError
from gptexp.process.words import shown
from gptexp.storage import run_dir

ForwardContext = Callable[[], AbstractContextManager[object]]
Source = Literal["asked", "decided", "saved"]
T = TypeVar("T")

# Names for the terminal, where the first column is 16 characters wide.
SHORT_NAMES = {
    "vocab_size": "vocabulary",
    "matmul_precision": "float32 matmul",
    "micro_batch_size": "micro-batch",
    "threads_per_rank": "threads",
}

ASKED = "asked for"  # the reason of a value from the config


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The value of a key, with its origin."""

    value: T
    source: Source  # asked: from the config; decided: on this machine, now; saved: by an earlier start or another cell
    reason: str  # text for people


@dataclass(frozen=True)
class Effective:
    """The choices of one run."""

    device: str  # cuda, mps or cpu
    device_name: str
    n_vocab: int  # number of ids of the tokenizer for which vocab_size was chosen
    vocab_size: Choice[int]  # rows of wte
    dtype: Choice[str]  # float32, or bfloat16 by autocast
    matmul_precision: Choice[str]  # of products in float32, torch's names; "high" is TF32
    compile: Choice[bool]
    attention: Choice[str]  # kernel
    loss: Choice[str]  # plain, chunked or fused
    fused: Choice[bool]  # AdamW's kernel
    threads_per_rank: Choice[int]
    micro_batch_size: Choice[int]  # sequences per rank and forward pass (B)
    memory_key: str  # identifies the settings for which the micro-batch size was chosen
    local_world_size: int  # ranks per node, which share its cores
    peak_flops_per_rank: float | None = None  # FLOP/s of matrix products, if measured for log.mfu_peak
    reduce_every: str | None = None  # for world.sharding=full: step or micro_step
    runs_at_once: int = 1  # runs that shared the cores of a node when the first of these choices were made

    @property
    def choices(self) -> dict[str, Choice[Any]]:
        """The choices by key, in the order in which they were made."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Choice)}

    def to_dict(self) -> dict[str, Any]:
        """The content of effective.json: plain values, with `reasons` and `sources` by key."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            **{key: choice.value for key, choice in self.choices.items()},
            "reasons": {key: choice.reason for key, choice in self.choices.items()},
            "sources": {key: choice.source for key, choice in self.choices.items()},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Effective":
        """The inverse of `to_dict`. Raises `ValueError`, `KeyError` or `TypeError` for wrong keys or types."""
        reasons, sources = values["reasons"], values["sources"]
        known = {f.name: f.type for f in fields(cls)}
        values = {"runs_at_once": 1, **values}  # files of earlier commits lack it
        if unknown := sorted(values.keys() - known.keys() - {"reasons", "sources"}):
            raise ValueError(f"unknown key '{unknown[0]}'; another version of gptexp may have saved it")
        rebuilt: dict[str, Any] = {}
        for key, kind in known.items():
            value, is_choice = values[key], getattr(kind, "__origin__", None) is Choice
            if key == "reduce_every" and value not in (None, "step", "micro_step"):
                raise ValueError(f"{key}={shown(value)}: must be step or micro_step")
            if not fits_type(value, get_args(kind)[0] if is_choice else kind):
                raise ValueError(f"{key}={shown(value)}: wrong type")
            if key == "runs_at_once" and value < 1:
                raise ValueError(f"{key}={shown(value)}: must be above 0")
            if is_choice:
                if sources[key] not in get_args(Source):
                    raise ValueError(
                        f"sources.{key}={shown(sources[key])}: must be one of {', '.join(get_args(Source))}"
                    )
                value = Choice(value, sources[key], str(reasons[key]))
            rebuilt[key] = value
        return cls(**rebuilt)

    def described(self) -> list[tuple[str, str]]:
        """(short name, value with reason) of each choice, for the terminal."""
        lines = []
        for key, choice in self.choices.items():
            value = {True: "on", False: "off"}[choice.value] if isinstance(choice.value, bool) else choice.value
            lines.append((SHORT_NAMES.get(key, key), f"{value}: {choice.reason}"))
        return lines


def load_effective(directory: Path) -> Effective | None:
    """Load the choices of a run directory; None if the file is missing. Raises `ConfigError` for a damaged file."""
    path = directory / run_dir.EFFECTIVE
    values = run_dir.read_json(path)
    if not values:
        return None
    try:
        effective = Effective.from_dict(values)
        peak = effective.peak_flops_per_rank
        if peak is not None and not 0 < peak < math.inf:
            raise ValueError(f"peak_flops_per_rank={peak}: must be finite and above 0")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not the saved choices of a run ({error}); remove it, or start a new run") from None
    return effective


def save_effective(directory: Path, effective: Effective) -> None:
    run_dir.write_json(directory / run_dir.EFFECTIVE, effective.to_dict())


def apply(effective: Effective, deterministic: bool = False) -> None:
    """Configure torch and the allocator. Call it before the first large tensor is allocated."""
    torch.set_num_threads(effective.threads_per_rank.value)
    torch.set_float32_matmul_precision(effective.matmul_precision.value)
    if effective.device == "cpu":
        keep_freed_memory()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports the compiler, which takes 1 s
        torch.use_deterministic_algorithms(deterministic)


def forward_context(effective: Effective) -> ForwardContext:
    """Factory of the context of each forward pass: autocast for bfloat16, else an empty context."""
    if effective.dtype.value == "float32":
        return nullcontext
    return partial(torch.autocast, effective.device, dtype=torch.bfloat16)


def step_context(effective: Effective) -> AbstractContextManager[object]:
    """Context of whole steps, which selects the attention kernel. It is entered once."""
    return attention_kernel(effective.attention.value, effective.attention.source == "asked", effective.device)
