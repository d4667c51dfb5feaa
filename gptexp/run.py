"""One rank, from a run directory to a finished run; the entry of the processes that gptexp starts itself.

`python -m gptexp.run RUN_DIR` (under torch's elastic agent) and `run` (in a process that is a rank already) train
from the frozen config; nothing here composes.
"""

import gc
import math
import os
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptexp.signals import EXIT_CODES, StopRequest, at_parents_death, ignore_stops
from gptexp.terminal import emit, say

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from gptexp.checkpoint import TrainState
    from gptexp.config import Config
    from gptexp.data.loader import Dataset
    from gptexp.distributed import Rank
    from gptexp.effective import Effective
    from gptexp.flops import Utilisation
    from gptexp.loggers import RunLog, Sink
    from gptexp.model import GPT
    from gptexp.trainer import Training

PARENT = "GPTEXP_PARENT"  # process id of the launcher, for the ranks it starts


def run(cfg: "Config", directory: Path, stop: StopRequest, rank: "Rank", store: "dist.Store | None" = None) -> int:
    """Train `cfg` in `directory` until done, stopped or diverged; the exit code. *Collective.*

    Continues from the newest checkpoint if there is one. Raises what a user can cause as `UserError`.
    """
    from gptexp import run_dir

    gc.unfreeze()  # under a launcher one process trains all cells of a sweep: what the last one left may go
    gc.disable()  # until `fit` has made a step: importing makes a million objects, and none of them is garbage
    try:
        with run_dir.held(directory, run_dir.RANK_LOCK) if rank.is_main else nullcontext():
            return _run(cfg, directory, stop, rank, store)
    finally:
        gc.enable()


def _run(cfg: "Config", directory: Path, stop: StopRequest, rank: "Rank", store: "dist.Store | None") -> int:
    from gptexp import checkpoint, run_dir, trial
    from gptexp.build import compile_in_turn, replace_unwritable_caches
    from gptexp.data.loader import build_dataset
    from gptexp.distributed import (
        agree,
        barrier,
        connect,
        destroy_process_group,
        gather,
        init_process_group,
        pick_device,
    )
    from gptexp.effective import Effective, apply, load_effective, resolve, step_context
    from gptexp.errors import EXIT_DIVERGED, EXIT_FAILED, CheckpointError, DivergedError
    from gptexp.faults import explained
    from gptexp.summary import Summary, end_line, end_lines
    from gptexp.trainer import fit

    for line in replace_unwritable_caches():
        if rank.local_rank == 0:
            print(f"gptexp: {line}", file=sys.stderr)
    checkpoints = directory / run_dir.CHECKPOINTS
    dataset = build_dataset(cfg)  # before the process group: one rank of a node may tokenise while the others wait
    device = pick_device(cfg.train.device, rank)
    patient = None
    if rank.world_size > 1:
        store = store or connect()
        patient = init_process_group(rank, store, device, cfg.world.backend, cfg.world.timeout_s)

    def decide() -> tuple[dict[str, Any], Path | None, "TrainState"]:
        _refuse_changed_data(directory, run_dir.read_json(directory / run_dir.SUMMARY).get("data_hash"), dataset)
        effective = resolve(cfg, device, rank, load_effective(directory))
        effective = trial.settle_micro_batch(cfg, effective, device, rank.world_size)
        run_dir.write_json(directory / run_dir.EFFECTIVE, effective.to_dict())
        run_dir.sweep(directory)
        checkpoint.sweep(checkpoints)
        found = checkpoint.load_latest(checkpoints)
        if found is None:
            old = checkpoint.newest(Path(cfg.init_from) / run_dir.CHECKPOINTS)[0] if cfg.init_from else None
            return effective.to_dict(), old, checkpoint.TrainState()
        path, state = found
        _refuse_changed_data(path, checkpoint.data_hash(path), dataset)
        if state.tokens != state.step * cfg.batch.total_batch_size:
            raise CheckpointError(
                f"{path}: says {state.tokens:,} tokens after {state.step:,} steps; no state of this run"
            )
        checkpoint.set_aside(checkpoints, state.step)
        return effective.to_dict(), path, state

    # Rank 0 decides and tells the others: nodes may differ, a run may not.
    chosen, path, state = agree(decide, rank, patient)
    effective = Effective(**chosen)
    _refuse_other_data(gather(dataset.hash))
    apply(effective, cfg.train.deterministic)

    # Around what may fail for a reason outside this process, and no more: a rank that has a reason says so at once.
    faults_explained = partial(explained, cfg, effective, directory, rank, store, state)
    with faults_explained():
        training = _build_training(cfg, directory, effective, dataset, rank, device, path, state)
    utilisation = _utilisation(cfg, directory, effective, rank, device)
    log, to_wandb = _open_log(cfg, directory, effective, training, state, utilisation, stop)
    barrier(patient)  # rank 0 may have waited for wandb, which is no reason to lose patience in a step
    summary = Summary(directory, training, state, utilisation)
    summary.write("running")
    status, reason, code = "failed", None, EXIT_FAILED
    gc.freeze()  # what is imported stays: neither a collection nor the interpreter's end need walk through it
    try:
        with faults_explained(), step_context(effective):
            if effective.compile:
                compile_in_turn(training, patient)
            reason = fit(training, state, stop, log, checkpoints)
        status, code = ("interrupted", EXIT_CODES[reason]) if reason else ("completed", 0)
        if reason is None and cfg.log.sample_tokens and rank.is_main:
            _sample(cfg, training.gpt, log, state.step)
    except DivergedError as error:
        status, code = "diverged", EXIT_DIVERGED
        if rank.is_main:
            print(f"gptexp: {error}", file=sys.stderr)
    finally:
        written = summary.write(status)
        if to_wandb and status in run_dir.DONE and cfg.sweep.name is None:  # a sweep has one report for all its cells
            from gptexp.report import files_of_report

            log.report(state.step, files_of_report(directory))
        log.close(written, code)
        if rank.is_main and cfg.log.progress != "json":
            say(
                *end_lines(written, directory, training)
                if cfg.log.progress != "off"
                else [end_line(written, directory)]
            )
    # Nobody leaves before rank 0 has written everything: a rank that ends makes launchers end the others.
    barrier(patient)
    destroy_process_group()
    return code


def _build_training(
    cfg: "Config",
    directory: Path,
    effective: "Effective",
    dataset: "Dataset",
    rank: "Rank",
    device: "torch.device",
    path: Path | None,
    state: "TrainState",
) -> "Training":
    """Model and optimizer with what the checkpoint `path` holds, and all that goes with them. *Collective.*"""
    from gptexp import checkpoint, run_dir
    from gptexp.batch import interval_tokens, plan_batch, run_length
    from gptexp.build import build_gpt, wrap
    from gptexp.distributed import build_reduction
    from gptexp.effective import forward_context
    from gptexp.errors import ConfigError
    from gptexp.noise_scale import noise_half_life, why_unmeasured
    from gptexp.optim import build_optimizer
    from gptexp.profiling import StepProfiler
    from gptexp.schedule import resolve_schedule
    from gptexp.summary import about
    from gptexp.trainer import Training

    gpt = build_gpt(cfg, effective, device)
    optimizer = build_optimizer(gpt, cfg.optim, effective.fused)
    if path is not None:
        checkpoint.load_weights(path, gpt)
        if state.step:  # of this run; what `init_from` names gives its weights only
            checkpoint.load_optimizer(path, optimizer)
    model = wrap(gpt, effective, cfg.train.reduction, rank, device)
    train, total_batch_size = cfg.train, cfg.batch.total_batch_size
    steps, run_tokens = run_length(train.max_tokens, train.max_steps, total_batch_size)
    unmeasured = why_unmeasured(cfg, effective.micro_batch_size, rank.world_size)
    if unmeasured and cfg.log.noise_scale == "on":
        raise ConfigError(f"log.noise_scale=on: {unmeasured}")
    return Training(
        model=model,
        gpt=gpt,
        optimizer=optimizer,
        reduction=build_reduction(train.reduction, model, rank),
        dataset=dataset,
        plan=plan_batch(total_batch_size, effective.micro_batch_size, cfg.seq_len, rank.world_size),
        schedule=resolve_schedule(cfg, run_tokens),
        forward_context=forward_context(effective),
        rank=rank,
        device=device,
        steps=steps,
        peak_lr=cfg.optim.lr,
        grad_clip=cfg.optim.grad_clip,
        nonfinite=train.nonfinite,
        divergence_nats=train.divergence_nats,
        timeout_s=cfg.world.timeout_s if rank.world_size > 1 else math.inf,
        eval_every_tokens=interval_tokens(train.eval_every, train.eval_every_tokens, run_tokens, total_batch_size),
        save_every_tokens=interval_tokens(train.save_every, train.save_every_tokens, run_tokens, total_batch_size),
        log_every=train.log_every,
        noise_half_life_tokens=None if unmeasured else noise_half_life(cfg, run_tokens),
        profiler=StepProfiler(directory / run_dir.PROFILE, rank, device, state.step, steps) if train.profile else None,
        keep=checkpoint.Keep(
            train.keep_last,
            train.keep_every_tokens if train.keep_every is None else train.keep_every * total_batch_size,
            train.keep_best,
        ),
        about=about(cfg, effective, dataset.hash, rank.world_size) if rank.is_main else {},
    )


def _refuse_changed_data(path: Path, before: str | None, dataset: "Dataset") -> None:
    """Raise `DataError` for a run directory or a checkpoint that began with other tokens."""
    from gptexp.errors import DataError

    if before not in (None, dataset.hash):
        raise DataError(
            f"{path}: began with other data (tokens {before}, now {dataset.hash}); give it the text it had, "
            "or start a new run"
        )


def _refuse_other_data(hashes: list[str]) -> None:
    """Raise `DataError` on all ranks alike unless their tokens have equal hashes."""
    from gptexp.errors import DataError

    for rank, other in enumerate(hashes):
        if other != hashes[0]:
            raise DataError(
                f"rank {rank}: has other data than rank 0 (tokens {other}, not {hashes[0]}); "
                "give every node the same text, and data=stdlib the same Python"
            )


def _utilisation(
    cfg: "Config", directory: Path, effective: "Effective", rank: "Rank", device: "torch.device"
) -> "Utilisation":
    """What MFU will be a share of. *Collective.*"""
    from gptexp.flops import utilisation

    measured = None
    if cfg.log.mfu_peak == "measured":
        measured = rank.world_size * _peak_flops_per_rank(cfg, directory, effective, rank, device)
    return utilisation(cfg.model, cfg.seq_len, effective.device_name, effective.dtype, rank.world_size, measured)


def _peak_flops_per_rank(
    cfg: "Config", directory: Path, effective: "Effective", rank: "Rank", device: "torch.device"
) -> float:
    """What a rank's matrix products reach, measured once for all attempts of a run. *Collective.*"""
    from dataclasses import replace

    import torch

    from gptexp import run_dir
    from gptexp.ceilings import gemm_rates
    from gptexp.distributed import gather

    if effective.peak_flops_per_rank is not None:
        return effective.peak_flops_per_rank
    tokens = effective.micro_batch_size * cfg.seq_len
    # All ranks at once, as in a step: those on one CPU share what it has.
    rates = gather(gemm_rates(cfg.model, tokens, device, getattr(torch, effective.dtype))["model"])
    peak: float = sum(rates) / rank.world_size
    if rank.is_main:
        run_dir.write_json(directory / run_dir.EFFECTIVE, replace(effective, peak_flops_per_rank=peak).to_dict())
    return peak


def _open_log(
    cfg: "Config",
    directory: Path,
    effective: "Effective",
    training: "Training",
    state: "TrainState",
    utilisation: "Utilisation",
    stop: StopRequest,
) -> "tuple[RunLog, bool]":
    """Where the numbers go, and whether wandb is among it."""
    from gptexp.alerts import Alerts
    from gptexp.loggers import JsonlSink, RunLog
    from gptexp.loggers.console import build_console
    from gptexp.loggers.wandb import build_wandb
    from gptexp.summary import start_event, start_lines

    total_batch_size = training.plan.total_batch_size
    if not training.rank.is_main:
        return RunLog([], total_batch_size), False
    about = {**training.about, "effective": effective.to_dict(), "mfu": utilisation.to_dict()}
    if cfg.log.progress == "json":
        emit(start_event(directory, training, state, about))
    elif cfg.log.progress != "off":
        say(*start_lines(cfg, directory, effective, training, state))
    metrics = JsonlSink(directory, state)
    sinks: list[Sink] = [metrics]
    wandb = build_wandb(cfg.log.wandb, directory, {**about.pop("config"), **about}, cfg.sweep.name)
    if wandb is not None:
        sinks.append(wandb)
    if console := build_console(cfg.log.progress, training.steps, state):
        sinks.insert(0, console)  # made last, so that nothing prints into the bar; told first
    alerts = Alerts(training.schedule.warmup_tokens, training.grad_clip, stop.deadline, metrics.alerts_before)
    return RunLog(sinks, total_batch_size, utilisation, alerts), wandb is not None


def _sample(cfg: "Config", gpt: "GPT", log: "RunLog", step: int) -> None:
    """Log what the model writes; whatever goes wrong with that, the run is done and saved."""
    from gptexp.data.tokenizer import load_tokenizer
    from gptexp.sample import complete

    try:
        [text] = complete(gpt, load_tokenizer(cfg.data.tokenizer), "", 1, cfg.log.sample_tokens, seed=cfg.train.seed)
        log.sample(step, text)
    except Exception as error:
        print(f"gptexp: no sample: {type(error).__name__}: {error}", file=sys.stderr)


def _die_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent goes, however it goes; leave at once if it is gone already."""
    at_parents_death(signal.SIGTERM)
    if os.getppid() != int(os.environ[PARENT]):
        sys.exit(128 + signal.SIGTERM)


def main() -> None:
    """Entry of a rank that gptexp's launcher started."""
    stop = StopRequest()
    stop.install(ignore_sigint=True)  # before torch is imported: Ctrl-C belongs to the parent from the first moment
    _die_with_parent()
    gc.disable()  # as in `run`: torch is imported here
    from torch.distributed.elastic.multiprocessing.errors import record

    from gptexp import run_dir
    from gptexp.distributed import launcher_rank, leaving
    from gptexp.errors import UserError

    def body() -> int:
        directory = Path(sys.argv[1])
        cfg = run_dir.load_config(directory)
        stop.limit(cfg.train.max_minutes)
        rank = launcher_rank()
        assert rank is not None
        return run(cfg, directory, stop, rank)

    with leaving(report=False):  # the parent prints what `record` writes for it
        try:
            code = record(body)()
        except UserError as error:
            sys.exit(error.exit_code)
        ignore_stops()  # all ranks are past their last collective
        sys.exit(code)


if __name__ == "__main__":
    main()
