"""Opens the log of a run: which sinks it has, what they are told at the start, and the FLOPs from which MFU follows."""

from dataclasses import replace

import torch

from gptexp.config.branching import first_step
from gptexp.config.fitted import other_text
from gptexp.config.metrics import Metric, of_text
from gptexp.data.loader import Dataset, val_bytes_per_token
from gptexp.data.tokenizer import load_tokenizer
from gptexp.distributed.group import gather
from gptexp.loggers.alerts import Alerts
from gptexp.loggers.console import build_console
from gptexp.loggers.jsonl import JsonlSink
from gptexp.loggers.run_log import RunLog, Sink
from gptexp.loggers.wandb import build_wandb
from gptexp.machine.ceilings import gemm_rates
from gptexp.machine.effective import Effective, save_effective
from gptexp.model.flops import Utilisation, utilisation
from gptexp.process.errors import DataError
from gptexp.process.terminal import emit, say, warn
from gptexp.run.job import Decision, Job, Prepared
from gptexp.run.summary import start_event, start_lines
from gptexp.training.loop import Training


def measure_utilisation(job: Job, prepared: Prepared, effective: Effective) -> Utilisation:
    """Return the FLOPs and the peak rate from which MFU is computed. *Collective.*"""
    cfg, world_size = job.cfg, job.rank.world_size
    measured = None
    if cfg.log.mfu_peak == "measured":
        measured = world_size * _peak_flops_per_rank(job, prepared, effective)
    return utilisation(cfg.model, cfg.seq_len, effective.device_name, effective.dtype.value, world_size, measured)


def _peak_flops_per_rank(job: Job, prepared: Prepared, effective: Effective) -> float:
    """Return the FLOP/s of a rank's matrix products, measured once per run and saved. *Collective.*"""
    if effective.peak_flops_per_rank is not None:
        return effective.peak_flops_per_rank
    tokens = effective.micro_batch_size.value * job.cfg.seq_len
    dtype = getattr(torch, effective.dtype.value)
    # All ranks measure at once, as in a step: ranks on one CPU share its cores.
    rates = gather(gemm_rates(job.cfg.model, tokens, prepared.device, dtype)["model"])
    peak: float = sum(rates) / job.rank.world_size
    if job.rank.is_main:
        save_effective(job.directory, replace(effective, peak_flops_per_rank=peak))
    return peak


def open_log(job: Job, decision: Decision, training: Training, used: Utilisation) -> RunLog:
    """Open the log, without sinks on ranks other than 0."""
    cfg, directory, effective, state = job.cfg, job.directory, decision.effective, decision.state
    plan, schedule = training.plan, training.plan.schedule
    if not job.rank.is_main:
        return RunLog([], used, Alerts(schedule.warmup_ends, cfg.optim.grad_clip))
    about = training.checkpoints.about
    metadata = {**about, "effective": effective.to_dict(), "mfu": used.to_dict()}
    for_wandb = {**about["config"], **{key: value for key, value in metadata.items() if key != "config"}}
    for line in other_text(cfg, training.dataset.hash):
        warn(f"warning: {line}")
    if cfg.log.progress == "json":
        emit(start_event(directory, training, state, metadata))
    elif cfg.log.progress != "off":
        say(*start_lines(cfg, directory, effective, training, state))
    metrics = JsonlSink(directory, state, cfg.train.log_every, first_step(cfg.branch_from))
    sinks: list[Sink] = [metrics]
    if wandb := build_wandb(cfg.log, directory, for_wandb, cfg.sweep.name):
        sinks.append(wandb)
    if cfg.log.tensorboard:
        from gptexp.loggers.tensorboard import TensorBoardSink  # imports tensorboard, which may not be installed

        sinks.append(TensorBoardSink(cfg, directory, state))
    # The console is built last, so that no line is printed into its bar; it is first in the list, to print at once.
    if console := build_console(cfg.log.progress, plan.steps, plan.tokens, state):
        sinks.insert(0, console)
    alerts = Alerts(schedule.warmup_ends, cfg.optim.grad_clip, job.stop.deadline, metrics.alerts_before)
    texts = {of_text(Metric.VAL_LOSS, name): text for name, text in training.dataset.texts.items()}
    bytes_per_token = {
        name: length
        for name, text in {Metric.VAL_LOSS: training.dataset, **texts}.items()
        if (length := _val_bytes_per_token(cfg.data.tokenizer, text)) is not None
    }
    return RunLog(sinks, used, alerts, bytes_per_token, metrics.earlier_steps)


def _val_bytes_per_token(tokenizer: str, dataset: Dataset) -> float | None:
    """`val_bytes_per_token`; None without validation, or if a resumed run cannot download its tokenizer."""
    if not len(dataset.val_starts):
        return None
    try:
        return val_bytes_per_token(dataset, load_tokenizer(tokenizer, dataset.directory))
    except DataError as error:
        warn(f"bits per byte are not logged: {error}")
        return None
