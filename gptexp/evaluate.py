"""Validation loss: the mean over every target token of a fixed set of windows, in nats.

Losses are summed over windows and ranks before the one division, so the result depends neither on how the windows
are batched nor on how many ranks share them.
"""

import argparse
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gptexp.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from gptexp.data.loader import Dataset
    from gptexp.distributed import Rank
    from gptexp.model import GPT


def evaluate(
    model: "GPT",
    dataset: "Dataset",
    batch_size: int,
    rank: "Rank",
    device: "torch.device",
    autocast: Callable[[], AbstractContextManager[object]],
) -> float:
    """Mean validation loss in nats per token. *Collective.*

    Every forward pass has the same shape (the last batch is padded with ignored targets), so a compiled model is
    compiled once.
    """
    import torch

    from gptexp.data.loader import val_batches
    from gptexp.distributed import all_reduce_sum
    from gptexp.loss import IGNORED

    was_training = model.training
    model.eval()
    # MPS has no float64, and one rank only.
    total = torch.zeros(2, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
    with torch.no_grad(), autocast():
        for x, y in val_batches(dataset, batch_size, rank.rank, rank.world_size, device):
            tokens = y.numel()
            if missing := batch_size - len(x):
                x = torch.cat([x, x.new_zeros(missing, dataset.seq_len)])
                y = torch.cat([y, y.new_full((missing, dataset.seq_len), IGNORED)])
            total[0] += model(x, y) * tokens
            total[1] += tokens
    model.train(was_training)
    loss, tokens = all_reduce_sum(total).tolist()
    return float(loss / tokens)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that does not fit a float."""
    return math.exp(loss) if loss < 700 else math.inf


def main(argv: list[str] | None = None) -> None:
    """`gptexp evaluate RUN_DIR`: validation loss and perplexity of its newest checkpoint, as JSON."""
    parser = argparse.ArgumentParser(prog="gptexp evaluate", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--data", metavar="PATH", help="evaluate on this file or glob instead of the run's own text")
    parser.add_argument("--val-tokens", type=int, metavar="N", help="how many tokens (default: as the run)")
    args = parser.parse_args(argv)

    from gptexp.effective import apply, make_autocast
    from gptexp.load import load_checkpointed
    from gptexp.run import open_data

    loaded = load_checkpointed(args.run_dir)
    data = loaded.config.data
    if args.data is not None:
        data = replace(data, val_path=[str(Path(args.data).absolute())])
    if args.val_tokens is not None:
        data = replace(data, val_tokens=args.val_tokens)
    if data.val_tokens < loaded.effective.seq_len / 2:
        raise ConfigError(
            f"--val-tokens={data.val_tokens}: fewer than one window of {loaded.effective.seq_len} tokens; use more"
        )
    apply(loaded.effective)
    dataset = open_data(replace(loaded.config, data=data))
    loss = evaluate(
        loaded.model,
        dataset,
        loaded.effective.micro_batch_size,
        loaded.rank,
        loaded.device,
        make_autocast(loaded.effective, loaded.device),
    )
    print(
        json.dumps(
            {
                "step": loaded.step,
                "tokens": len(dataset.val_windows) * dataset.seq_len,
                "val/loss": loss,
                "val/ppl": perplexity(loss),
            }
        )
    )


if __name__ == "__main__":
    from gptexp.cli import run_verb

    run_verb(main)
