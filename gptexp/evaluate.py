"""Validation loss: the mean over every target token of a fixed set of windows, in nats.

Losses are summed over windows and ranks before the one division, so the result depends neither on how the windows
are batched nor on how many ranks share them.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gptexp import run_dir
from gptexp.batch import count_val_windows
from gptexp.distributed import Rank
from gptexp.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

    from gptexp.data.loader import Dataset
    from gptexp.effective import ForwardContext
    from gptexp.model import GPT


def evaluate(
    model: "GPT",
    dataset: "Dataset",
    batch_size: int,
    rank: Rank,
    device: "torch.device",
    forward_context: "ForwardContext",
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
    with torch.no_grad(), forward_context():
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


def main(argv: list[str] | None = None) -> None:
    """`gptexp evaluate RUN_DIR`: validation loss and perplexity of its newest checkpoint, as JSON."""
    parser = argparse.ArgumentParser(prog="gptexp evaluate", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--data", metavar="PATH", help="evaluate on this file or glob instead of the run's own text")
    parser.add_argument("--val-tokens", type=int, metavar="N", help="how many tokens (default: as the run)")
    args = parser.parse_args(argv)

    from gptexp.data.corpora import absolute
    from gptexp.data.loader import build_dataset
    from gptexp.effective import apply, forward_context, step_context
    from gptexp.load import load_checkpointed
    from gptexp.loss import perplexity

    loaded = load_checkpointed(args.run_dir)
    config = loaded.config
    if args.data is not None:
        path = [absolute(args.data)]
        config = replace(config, data=replace(config.data, name="text", path=path, val_path=path, max_tokens=None))
    held_out = config.data.val_tokens if config.data.val_path is None else None  # the rest was trained on
    if args.data is None and held_out == 0:
        raise ConfigError(f"{args.run_dir}: data.val_tokens=0: the run has held nothing out; give --data FILE")
    if args.val_tokens is not None and args.data is None and held_out is not None and args.val_tokens > held_out:
        raise ConfigError(f"--val-tokens={args.val_tokens}: the run has held out {held_out}; use fewer, or --data FILE")
    if args.val_tokens is not None:
        config = replace(config, data=replace(config.data, val_tokens=args.val_tokens))
    if count_val_windows(config.data.val_tokens, config.seq_len) < 1:
        raise ConfigError(
            f"--val-tokens={config.data.val_tokens}: rounds to no window of {config.seq_len} tokens; use more"
        )
    apply(loaded.effective)
    dataset = build_dataset(config)
    trained_on = run_dir.read_json(args.run_dir / run_dir.SUMMARY).get("data_hash", dataset.hash)
    if args.data is None and dataset.hash != trained_on:
        raise DataError(
            f"{args.run_dir}: trained on other tokens ({trained_on}) than data={config.data.name} holds now "
            f"({dataset.hash}); what is held out now may have been trained on: give --data FILE"
        )
    context = forward_context(loaded.effective)
    with step_context(loaded.effective):
        loss = evaluate(loaded.model, dataset, loaded.effective.micro_batch_size, Rank(), loaded.device, context)
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
