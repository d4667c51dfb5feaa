"""What a run says of itself: the block at its start, `summary.json`, the block at its end. Rank 0 speaks."""

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gptexp import run_dir
from gptexp.checkpoint import TrainState
from gptexp.config import Config, to_dict
from gptexp.effective import Effective
from gptexp.errors import StorageError
from gptexp.flops import Utilisation, count_parameters
from gptexp.noise_scale import why_unmeasured
from gptexp.optim import describe_groups
from gptexp.trainer import Training
from gptexp.versions import git_commit, versions

HALF_LIVES = 4  # of its average that a noise scale is worth a line


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
        f"world           {plan.world_size} rank{'s' if plan.world_size > 1 else ''}, {effective.local_world_size} on "
        f"this node; gradients by {cfg.train.reduction}",
        f"noise scale     {_noise_scale(cfg, t)}",
        f"device          {effective.device_name}",
    ]
    lines += [f"{name:<16}{what}" for name, what in effective.described()]
    if state.step:
        lines.append(f"resuming        after step {state.step - 1}, {state.tokens:,} tokens")
    elif cfg.init_from:
        lines.append(f"weights         the newest of {cfg.init_from}")
    return lines


def start_event(directory: Path, t: Training, state: TrainState, about: dict[str, Any]) -> str:
    """The same as a line of JSON."""
    numbers = {"step": state.step - 1, "tokens": state.tokens, "steps": t.steps, **asdict(t.plan)}
    return json.dumps(run_dir.finite({"event": "start", "directory": str(directory), **numbers, **about}))


def _noise_scale(cfg: Config, t: Training) -> str:
    if t.noise_half_life_tokens is None:
        return f"not measured: {why_unmeasured(cfg, t.plan.micro_batch_size, t.plan.world_size)}"
    measured = t.plan.micro_batch_size * t.plan.world_size * min(2, t.plan.grad_accum_steps)
    return (
        f"from {measured} of {t.plan.sequences} sequences of a step, averaged with a half-life of "
        f"{t.noise_half_life_tokens:,.0f} tokens"
    )


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

    def __init__(self, directory: Path, training: Training, state: TrainState, utilisation: Utilisation) -> None:
        self._directory, self._state, self._is_main = directory, state, training.rank.is_main
        self._seq_len, self._utilisation = training.plan.seq_len, utilisation
        self._is_measured = training.noise_half_life_tokens is not None
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
        rate = state.tokens / state.seconds if state.seconds else None
        palm, causal = self._utilisation.mfu(rate) if rate else (None, None)
        summary = {
            "status": status,
            "final_val_loss": state.val_loss,
            "best_val_loss": state.best_val_loss,
            "tokens": state.tokens,
            "steps": state.step,
            "wall_s": round(self._wall_before + time.monotonic() - self._started, 3),
            "train_s": round(state.seconds, 3),
            "tokens_per_s": rate,
            "mfu_palm": palm,
            "mfu_causal": causal,
            "noise_scale_tokens": state.noise_scale.sequences * self._seq_len if self._is_measured else None,
            "fingerprint": f"{state.fingerprint:016x}",
            "skipped_updates": state.skipped_updates,
            "steps_passed_over": state.steps_passed_over,
            **self._fixed,
            "mfu": self._utilisation.to_dict(),
        }
        try:
            run_dir.write_json(self._directory / run_dir.SUMMARY, summary)
        except StorageError as error:
            print(f"gptexp: {error}", file=sys.stderr)
        return summary


def end_line(summary: dict[str, Any], directory: Path) -> str:
    """All of it in one line."""
    val = f"val loss {summary['final_val_loss']:.4f}, " if summary["final_val_loss"] is not None else ""
    return (
        f"{summary['status']} after {summary['steps']:,} steps, {summary['tokens']:,} tokens, "
        f"{summary['train_s']:.1f} s of training; {val}all of it in {directory}"
    )


def end_lines(summary: dict[str, Any], directory: Path, t: Training) -> list[str]:
    """What came of the run, and what can be done with it."""
    lines = [end_line(summary, directory)]
    if summary["best_val_loss"] is not None:
        lines.append(f"lowest val loss {summary['best_val_loss']:.4f}")
    if summary["tokens_per_s"]:
        palm, causal = summary["mfu_palm"], summary["mfu_causal"]
        mfu = f"MFU {palm:.1%}, {causal:.1%} with causal attention; " if palm is not None else "no MFU; "
        source = f"peak {summary['mfu']['peak_source']}"
        lines.append(f"speed           {summary['tokens_per_s']:,.0f} tokens/s; {mfu}{source}")
    scale, half_life = summary["noise_scale_tokens"], t.noise_half_life_tokens
    settled = half_life is not None and summary["tokens"] > HALF_LIVES * half_life
    if settled and scale is not None and math.isfinite(scale):
        about = f"an average with a half-life of {half_life:,.0f}; gptexp report gives an interval"
        lines.append(f"noise scale     {scale:,.0f} tokens, {about}")
    if summary["status"] in ("interrupted", "failed"):
        return [*lines, f"go on           gptexp resume {directory}"]
    return [*lines, *(f"{verb:<16}gptexp {verb} {directory}" for verb in ("report", "sample", "watch"))]
