"""`gptexp plan --models`: which of the models fit a GPU, at which number of ranks and with which sharding."""

import json
from collections.abc import Mapping, Sequence

from gptexp.config.schema import Config
from gptexp.model.gpus import Gpu
from gptexp.model.memory import StepShape, memory_estimate
from gptexp.model.shapes import count_parameters
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import terminal_width
from gptexp.reporting.listings.terminal_table import print_table

RANKS = (1, 8, 64, 512)
# The choices in the order in which they cost time: (name, world.sharding, train.activation_checkpointing).
CHOICES = (("none", "none", 0), ("optimizer", "optimizer", 0), ("full", "full", 0), ("full, recomputed", "full", 1))
NOTHING = "-"


def least_sharding(config: Config, ranks: int, memory_bytes: int) -> str | None:
    """The first of `CHOICES` with which one sequence for each rank fits, in compiled bfloat16; None if none does."""
    for name, sharding, every in CHOICES:
        if needed_bytes(config, ranks, sharding, every) <= memory_bytes:
            return name
    return None


def needed_bytes(config: Config, ranks: int, sharding: str, every: int) -> int:
    """Memory of a rank. `every=n`: every n-th block keeps only its input; 0: none."""
    loss = "chunked" if sharding == "full" else "plain"  # as `auto` chooses
    step = StepShape(1, config.seq_len, 1, ranks, "cuda", "bfloat16", True, loss, every, sharding=sharding)
    return memory_estimate(config.model, config.optim, step).peak


def print_fitting(models: Mapping[str, Config], gpu: Gpu, as_json: bool) -> None:
    """Print a table of `models`, by name, on `gpu`."""
    if gpu.memory_bytes is None:
        raise ConfigError(f"--models: the memory of the {gpu.name} is unknown; use device=h100 or another GPU")
    rows = []
    for name, config in sorted(models.items(), key=lambda item: count_parameters(item[1].model)):
        fits = {str(ranks): least_sharding(config, ranks, gpu.memory_bytes) for ranks in RANKS}
        rows.append({"model": name, "parameters": count_parameters(config.model), "world.sharding": fits})
    if as_json:
        print(json.dumps({"gpu": gpu.name, "memory_bytes": gpu.memory_bytes, "models": rows}, indent=1))
        return
    print(
        f"world.sharding with which a model fits the {gpu.name} ({gpu.memory_bytes / 1e9:.0f} GB), one sequence a rank:"
    )
    columns: list[tuple[str, Sequence[str]]] = [
        ("model", [str(row["model"]) for row in rows]),
        ("parameters", [f"{row['parameters']:,}" for row in rows]),
    ]
    for ranks in RANKS:
        texts = [str(row["world.sharding"][str(ranks)] or NOTHING) for row in rows]  # type: ignore[index]
        columns.append((f"{ranks} rank{'s' if ranks > 1 else ''}", texts))
    print_table(columns, ("model",), (), (), terminal_width())
