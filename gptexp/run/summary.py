"""The lines that rank 0 prints at the start and the end of a run, and `summary.json`."""

import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gptexp.config.blocks import in_words
from gptexp.config.metrics import Metric, of_text
from gptexp.config.noise_scale import why_unmeasured
from gptexp.config.parts import is_part
from gptexp.config.scaling import changes, scaled_optim
from gptexp.config.schema import Config, to_dict
from gptexp.data.loader import Dataset
from gptexp.data.prepare import tokens_hash
from gptexp.machine.ceilings import mask_ms
from gptexp.machine.effective import Effective
from gptexp.model.flops import Utilisation
from gptexp.model.parametrisation import describe
from gptexp.model.shapes import count_parameters
from gptexp.process.errors import CheckpointError, ConfigError, StorageError
from gptexp.process.terminal import as_command, warn
from gptexp.process.versions import git_commit, versions
from gptexp.process.words import counted, duration, titled
from gptexp.reporting.listings.records import read_run
from gptexp.storage import run_dir
from gptexp.storage.checkpoint import TrainState
from gptexp.training.loop import Training
from gptexp.training.optimizer import describe_groups, describe_optimizer


def start_lines(cfg: Config, directory: Path, effective: Effective, t: Training, state: TrainState) -> list[str]:
    """Return the lines that describe the run before it starts."""
    m, plan, shares = cfg.model, t.plan, t.dataset.train.shares
    epoch_tokens, scaled = t.dataset.order.n_train * plan.batch.seq_len, changes(cfg.optim, t.optim)
    sizes = f"{counted(m.n_layer, 'layer')}, {counted(m.n_head, 'head')}, width {m.n_embd}, "
    model = (
        f"{'' if is_part(m) else sizes}block {m.block_size}, "
        f"vocabulary {m.vocab_size:,}: {count_parameters(m):,} parameters"
    )
    world = f"{counted(plan.batch.world_size, 'rank')}, {effective.local_world_size} on this node"
    sent = f", sent as {cfg.world.comm}" if cfg.world.comm != "float32" else ""
    before = [
        ("run directory", str(directory)),
        ("model", model),
        ("block", in_words(m)),
        ("parametrisation", describe(m) if m.parametrisation != "standard" else ""),
        ("optimizer", describe_optimizer(t.optim)),
        ("scaling", ", ".join(scaled)),
        ("gradient noise", _gradient_noise(cfg)),
    ]
    after = [
        ("data", f"{cfg.data.name}: {epoch_tokens:,} training tokens per epoch, {_validation(cfg, t)}"),
        ("documents", _documents(cfg, effective, t) if cfg.data.document_mask else ""),
        ("mix", ", ".join(f"{tokens / sum(shares.values()):.1%} {source}" for source, tokens in shares.items())),
        *plan.lines(epoch_tokens),
        ("sharding", _sharding(cfg, effective, t) if cfg.world.sharding != "none" else ""),
        ("world", f"{world}; reduction of gradients: {cfg.train.reduction}{sent}"),
        ("noise scale", _noise_scale(cfg, t)),
        ("device", effective.device_name),
        *effective.described(),
    ]
    if state.step > plan.first_step:
        after.append(("resuming", f"after step {state.step:,}, {state.tokens:,} tokens"))
    elif cfg.init_from and not plan.first_step:
        after.append(("weights", f"those of {cfg.init_from}"))
    return [*titled(before), *describe_groups(t.gpt, t.optim), *titled(after)]


def _gradient_noise(cfg: Config) -> str:
    o, total = cfg.optim, cfg.batch.total_batch_size
    if o.gradient_noise:
        per = "steps" if o.gradient_noise_decay_tokens is None else f"tokens / {o.gradient_noise_decay_tokens:,}"
        decay = f", times (1 + {per})^{-o.gradient_noise_decay / 2:g}" if o.gradient_noise_decay else ""
        return f"{o.gradient_noise:g} of the norm of the clipped gradient{decay}"
    if o.gradient_noise_like_batch:
        return (
            f"as a batch of {o.gradient_noise_like_batch:,} tokens has more than one of {total:,}, by the noise scale "
            "of every step"
        )
    return ""


def _sharding(cfg: Config, effective: Effective, t: Training) -> str:
    if t.rank.world_size == 1:
        return f"{cfg.world.sharding}: one rank has everything"
    if cfg.world.sharding == "optimizer":
        return "optimizer: each rank has the optimizer's state of some of the parameters"
    times = t.plan.batch.grad_accum_steps
    often = "once a step"
    if effective.reduce_every == "micro_step" and times > 1:
        often = f"in every micro-step, which sends {times} times as much as once a step, to save memory"
    return (
        f"full: each rank has 1/{t.rank.world_size} of the parameters; gradients are reduced {often}; checkpoints have "
        "a file of each kind for each rank"
    )


def _documents(cfg: Config, effective: Effective, t: Training) -> str:
    """The mask of documents, and what it costs here."""
    shape = (t.plan.batch.micro_batch_size, t.plan.batch.seq_len, t.device, getattr(torch, effective.dtype.value))
    across, within = mask_ms(cfg.model, *shape, flex=effective.attention.value == "flex")
    return (
        f"attention stays within each; that of a layer takes {within:.2f} ms in place of {across:.2f}, measured now "
        "for a micro-batch, forward and backward"
    )


def _validation(cfg: Config, t: Training) -> str:
    found = len(t.dataset.val_starts) * t.plan.batch.seq_len
    asked = cfg.data.val_tokens if cfg.data.val_ratio is None else found
    is_short = found + t.plan.batch.seq_len <= asked
    texts = {name: len(text.val_starts) * text.seq_len for name, text in t.dataset.texts.items()}
    more = "".join(f", {tokens:,} of {name}" for name, tokens in texts.items())
    return f"{found:,} for validation{f', fewer than data.val_tokens={asked:,}' if is_short else ''}{more}"


def start_event(directory: Path, t: Training, state: TrainState, about: dict[str, Any]) -> str:
    """Return the description of the run as one line of JSON."""
    numbers = {"step": state.step - 1, "tokens": state.tokens, "steps": t.plan.steps, **asdict(t.plan.batch)}
    return json.dumps(run_dir.finite({"event": "start", "directory": str(directory), **numbers, **about}))


def _noise_scale(cfg: Config, t: Training) -> str:
    if t.noise_half_life_tokens is None:
        return f"not measured: {why_unmeasured(cfg, t.plan.batch.micro_batch_size, t.plan.batch.world_size)}"
    measured = t.plan.batch.micro_batch_size * t.plan.batch.world_size * min(2, t.plan.batch.grad_accum_steps)
    first = t.plan.step(0, 0).batch
    later = ", not in the first steps, which have one micro-batch" if first.sequences == first.micro_batch_size else ""
    return (
        f"measured on {measured} of the {t.plan.batch.sequences} sequences of a step, averaged with a half-life of "
        f"{t.noise_half_life_tokens:,.0f} tokens{later}"
    )


def hashes_of_texts(dataset: Dataset) -> dict[str, str]:
    """The hash of the tokens of each text of data.validation, by the name of its loss."""
    return {of_text(Metric.VAL_LOSS, name): tokens_hash(text.val) for name, text in dataset.texts.items()}


def about(
    cfg: Config, effective: Effective, dataset: Dataset, world_size: int, branched_from: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the description of a run that summary.json and every checkpoint contain."""
    return {
        "parameters": count_parameters(cfg.model),
        "effective_optim": asdict(scaled_optim(cfg)),
        "world_size": world_size,
        "device": effective.device_name,
        "seed": cfg.train.seed,
        "data_hash": dataset.hash,
        **({"validation_hashes": text_hashes} if (text_hashes := hashes_of_texts(dataset)) else {}),
        **({"mix_tokens": dataset.train.shares} if dataset.train.shares else {}),
        **({"branched_from": branched_from} if branched_from else {}),
        "versions": versions(),
        "git_commit": git_commit(),
        "config": to_dict(cfg),
    }


class Summary:
    """Writes summary.json, on rank 0, when the status of the run changes."""

    def __init__(self, directory: Path, training: Training, state: TrainState, utilisation: Utilisation) -> None:
        self._directory, self._training, self._state, self._utilisation = directory, training, state, utilisation
        self._started = time.monotonic()
        if training.rank.is_main:
            self._earlier_wall_s = run_dir.read_summary(directory).get("wall_s", 0.0)

    def write(self, status: str) -> dict[str, Any]:
        """Write the file. Returns its content; on ranks other than 0 only the status.

        Only prints an error of the disk, so that it does not hide the error that ended the run.
        """
        t, state = self._training, self._state
        if not t.rank.is_main:
            return {"status": status}
        scale = state.noise_scale.sequences * t.plan.batch.seq_len if t.noise_half_life_tokens is not None else None
        rate = (state.tokens - t.plan.first_tokens) / state.seconds if state.seconds else None
        palm, causal = self._utilisation.mfu(rate) if rate else (None, None)
        summary = {
            "status": status,
            "final_val_loss": state.val_loss,
            "final_val_loss_ema": state.val_loss_ema,
            "best_val_loss": state.best_val_loss,
            "tokens": state.tokens,
            "steps": state.step,
            "wall_s": round(self._earlier_wall_s + time.monotonic() - self._started, 3),
            "train_s": round(state.seconds, 3),
            "tokens_per_s": rate,
            "mfu_palm": palm,
            "mfu_causal": causal,
            "noise_scale_tokens": scale,
            "fingerprint": f"{state.fingerprint:016x}",
            "skipped_updates": state.skipped_updates,
            "steps_passed_over": state.steps_passed_over,
            **{key: value for key, value in t.checkpoints.about.items() if key != "config"},  # config.yaml has it
            "mfu": self._utilisation.to_dict(),
        }
        try:
            run_dir.write_summary(self._directory, summary)
        except StorageError as error:
            warn(str(error))
        return summary


def end_line(summary: dict[str, Any], directory: Path) -> str:
    """Return the outcome of the run in one line."""
    val = f"val loss {summary['final_val_loss']:.4f}, " if summary["final_val_loss"] is not None else ""
    return (
        f"{summary['status']} after {counted(summary['steps'], 'step')}, {counted(summary['tokens'], 'token')}, "
        f"{duration(summary['train_s'])} of training; {val}saved in {directory}"
    )


def end_lines(summary: dict[str, Any], directory: Path, t: Training) -> list[str]:
    """Return the outcome of the run, and the commands to use next."""
    lines = []
    if summary["final_val_loss_ema"] is not None:
        lines.append(("average", f"val loss {summary['final_val_loss_ema']:.4f} with the averaged weights"))
    if summary["tokens_per_s"]:
        palm, causal = summary["mfu_palm"], summary["mfu_causal"]
        mfu = f"MFU {palm:.1%}, {causal:.1%} with causal attention" if palm is not None else "no MFU"
        lines.append(("speed", f"{summary['tokens_per_s']:,.0f} tokens/s; {mfu}; peak {summary['mfu']['peak_source']}"))
    if t.noise_half_life_tokens is not None and summary["status"] in run_dir.DONE:
        from gptexp.reporting.statistics.noise_scale import in_words  # imports scipy, which only the end needs

        lines.append(("noise scale", in_words(read_run(directory))))
    stopped = summary["status"] in ("interrupted", "failed")
    lines += [
        (verb, as_command([verb, str(directory)]))
        for verb in (["resume"] if stopped else ["report", "sample", "watch"])
    ]
    if (best := summary["best_val_loss"]) is not None:
        lines.insert(0, ("lowest val loss", f"{best:.4f}{_best_checkpoint(summary, directory)}"))
    return [end_line(summary, directory), *titled(lines)]


def _best_checkpoint(summary: dict[str, Any], directory: Path) -> str:
    """How to load the best checkpoint, if it is not the last."""
    with suppress(CheckpointError, ConfigError):  # none was evaluated, or kept
        if (step := run_dir.choose_step(directory, run_dir.BEST, run_dir.BEST)) != summary["steps"]:
            how = as_command(["sample", f"{directory}@{run_dir.BEST}"])
            return f"; the best checkpoint is that of step {step}: {how}"
    return ""
