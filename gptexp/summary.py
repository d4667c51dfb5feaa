"""What a run says of itself: the block at its start, `summary.json`, the line at its end. Rank 0 speaks."""

import sys
import time
from pathlib import Path
from typing import Any

from gptexp import run_dir
from gptexp.checkpoint import TrainState
from gptexp.config import Config, to_dict
from gptexp.effective import Effective
from gptexp.errors import StorageError
from gptexp.flops import count_parameters
from gptexp.optim import describe_groups
from gptexp.trainer import Training
from gptexp.versions import git_commit, versions


def start_lines(cfg: Config, directory: Path, effective: Effective, t: Training, state: TrainState) -> list[str]:
    """What is about to happen, a line a subject."""
    m, plan, s = cfg.model, t.plan, t.schedule
    total = plan.total_batch_size
    per_epoch = t.dataset.order.n_train * plan.seq_len

    def every(tokens: int) -> str:
        return f"every {tokens:,} tokens ({tokens / total:g} steps)" if tokens else "at the end"

    lines = [
        f"run directory   {directory}",
        f"model           {m.n_layer} layers, {m.n_head} heads, width {m.n_embd}, block {m.block_size}, "
        f"vocabulary {m.vocab_size:,}: {count_parameters(m):,} parameters",
        *describe_groups(t.gpt),
        f"data            {cfg.data.name}: {per_epoch:,} training tokens an epoch, "
        f"{len(t.dataset.val_windows) * plan.seq_len:,} for validation",
        f"batch           {total:,} tokens a step = {plan.micro_batch_size} sequences × {plan.seq_len} tokens × "
        f"{plan.world_size} ranks × {plan.grad_accum_steps} micro-steps",
        f"length          {t.steps:,} steps, {t.steps * total:,} tokens, {t.steps * total / per_epoch:.2f} epochs",
        f"schedule        {s.name}, warm-up over {s.warmup_tokens:,} tokens ({s.warmup_tokens / total:g} steps), "
        f"horizon {s.decay_tokens:,} ({s.decay_tokens / total:g} steps)",
        f"validation      {every(t.eval_every_tokens)}",
        f"checkpoint      {every(t.save_every_tokens)}",
        f"device          {effective.device_name}",
    ]
    lines += [f"{name:<16}{what}" for name, what in effective.described()]
    if state.step:
        lines.append(f"resuming        after step {state.step - 1}, {state.tokens:,} tokens")
    elif cfg.init_from:
        lines.append(f"weights         the newest of {cfg.init_from}")
    return lines


def about(cfg: Config, effective: Effective, data_hash: str, world_size: int) -> dict[str, Any]:
    """What a run is, beyond its counters; every checkpoint carries it too."""
    return {
        "parameters": count_parameters(cfg.model),
        "world_size": world_size,
        "device": effective.device_name,
        "seed": cfg.train.seed,
        "data_hash": data_hash,
        "versions": versions(),
        "git_commit": git_commit(),
        "config": to_dict(cfg),
    }


class Summary:
    """summary.json of a run, rewritten as its status changes; on other ranks than 0 it only carries the status."""

    def __init__(self, directory: Path, training: Training, state: TrainState) -> None:
        self._directory, self._state, self._is_main = directory, state, training.rank.is_main
        self._started = time.monotonic()
        self._fixed = {key: value for key, value in training.about.items() if key != "config"}  # that has its own file
        if self._is_main:
            before = run_dir.read_json(directory / run_dir.SUMMARY).get("wall_s")
            self._wall_before = before if isinstance(before, int | float) else 0.0

    def write(self, status: str) -> dict[str, Any]:
        """Write the file with `status` (rank 0); what was written, on every rank its status.

        A disk that takes no more is a line: whatever led here is the story.
        """
        if not self._is_main:
            return {"status": status}
        state = self._state
        summary = {
            "status": status,
            "final_val_loss": state.val_loss,
            "best_val_loss": state.best_val_loss,
            "tokens": state.tokens,
            "steps": state.step,
            "wall_s": round(self._wall_before + time.monotonic() - self._started, 3),
            "train_s": round(state.seconds, 3),
            "fingerprint": f"{state.fingerprint:016x}",
            "skipped_updates": state.skipped_updates,
            "steps_passed_over": state.steps_passed_over,
            **self._fixed,
        }
        try:
            run_dir.write_json(self._directory / run_dir.SUMMARY, summary)
        except StorageError as error:
            print(f"gptexp: {error}", file=sys.stderr)
        return summary


def end_line(summary: dict[str, Any], directory: Path) -> str:
    """The last line on the terminal."""
    val = f"val loss {summary['final_val_loss']:.4f}, " if summary["final_val_loss"] is not None else ""
    return (
        f"{summary['status']} after {summary['steps']:,} steps, {summary['tokens']:,} tokens, "
        f"{summary['train_s']:.1f} s of training; {val}all of it in {directory}"
    )
