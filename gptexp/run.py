"""One rank, from a run directory to a finished run; the entry of the processes that gptexp starts itself.

`python -m gptexp.run RUN_DIR` (under torch's elastic agent) and `run` (in a process that is a rank already) train
from the frozen config; nothing here composes.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptexp.signals import EXIT_CODES, StopRequest

if TYPE_CHECKING:
    import torch.distributed as dist

    from gptexp.checkpoint import TrainState
    from gptexp.config import Config
    from gptexp.data.loader import Dataset
    from gptexp.distributed import Rank
    from gptexp.effective import Effective
    from gptexp.loggers import Sink
    from gptexp.model import GPT


def run(cfg: "Config", directory: Path, stop: StopRequest, rank: "Rank", store: "dist.Store | None" = None) -> int:
    """Train `cfg` in `directory` until done or stopped; the exit code. *Collective.*

    Continues from the newest checkpoint if there is one. Raises what a user can cause as `UserError`.
    """
    import torch

    from gptexp import checkpoint, run_dir
    from gptexp.batch import interval_tokens, plan_batch, run_length
    from gptexp.distributed import connect, destroy_process_group, init_process_group, pick_device
    from gptexp.effective import apply, make_autocast
    from gptexp.errors import DivergedError
    from gptexp.loss import chunked_cross_entropy, plain_cross_entropy
    from gptexp.model import GPT
    from gptexp.optim import build_optimizer
    from gptexp.schedule import resolve_schedule
    from gptexp.trainer import Training, fit

    lock = run_dir.lock(directory) if rank.is_main else None
    dataset = open_data(cfg)  # before the process group: the first may tokenise for minutes while the others wait
    device = pick_device(cfg.train.device, rank)
    if rank.world_size > 1:
        init_process_group(rank, store or connect(), device, cfg.world.backend, cfg.world.timeout_s)
    effective = _effective(cfg, directory, device, rank)
    apply(effective, cfg.train.deterministic)

    torch.manual_seed(cfg.train.seed)
    gpt = GPT(cfg.model, chunked_cross_entropy if effective.loss == "chunked" else plain_cross_entropy).to(device)
    optimizer = build_optimizer(gpt, cfg.optim, effective.fused)
    state = checkpoint.TrainState()
    if found := checkpoint.load_latest(directory / run_dir.CHECKPOINTS):
        path, state = found
        checkpoint.load_weights(path, gpt)
        checkpoint.load_optimizer(path, optimizer)

    total_batch_size = cfg.batch.total_batch_size
    plan = plan_batch(total_batch_size, effective.micro_batch_size, effective.seq_len, rank.world_size)
    steps, run_tokens = run_length(cfg.train.max_tokens, cfg.train.max_steps, total_batch_size)
    train = cfg.train
    training = Training(
        model=_wrap(gpt, effective, rank),
        gpt=gpt,
        optimizer=optimizer,
        dataset=dataset,
        plan=plan,
        schedule=resolve_schedule(cfg, run_tokens),
        autocast=make_autocast(effective, device),
        rank=rank,
        device=device,
        steps=steps,
        peak_lr=cfg.optim.lr,
        grad_clip=cfg.optim.grad_clip,
        eval_every_tokens=interval_tokens(train.eval_every, train.eval_every_tokens, run_tokens, total_batch_size),
        save_every_tokens=interval_tokens(train.save_every, train.save_every_tokens, run_tokens, total_batch_size),
        log_every=train.log_every,
        keep_last=train.keep_last,
    )
    log = _open_log(cfg, directory, effective, training, state)
    status = "failed"
    try:
        _write_summary(cfg, directory, effective, rank, state, "running")
        reason = fit(training, state, stop, log, directory / run_dir.CHECKPOINTS)
        status = "interrupted" if reason else "completed"
        if reason is None and cfg.log.sample_tokens and rank.is_main:
            _print_sample(cfg, gpt, state, log)
    except DivergedError:
        status = "diverged"
        raise
    finally:
        summary = _write_summary(cfg, directory, effective, rank, state, status)
        log.close(summary)
        if rank.is_main:
            _print_end(summary, directory)
    destroy_process_group()
    if lock:
        lock.release()
    return EXIT_CODES[reason] if reason else 0


def open_data(cfg: "Config") -> "Dataset":
    """Prepare (once a node) and open the tokens that `cfg` trains on."""
    from gptexp.data.loader import open_dataset
    from gptexp.data.prepare import prepare

    seq_len = cfg.batch.seq_len or cfg.model.block_size
    return open_dataset(cfg.data, *prepare(cfg.data), seq_len, cfg.train.seed, cfg.model.vocab_size)


def _effective(cfg: "Config", directory: Path, device: Any, rank: "Rank") -> "Effective":
    """The run's own earlier decisions where it goes on on the same kind of device, else new ones.

    Rank 0 decides and tells the others: nodes may differ, a run may not.
    """
    import torch.distributed as dist

    from gptexp import run_dir
    from gptexp.effective import Effective, resolve

    decided: list[Any] = [None]
    if rank.is_main:
        saved = run_dir.read_json(directory / run_dir.EFFECTIVE)
        effective = Effective(**saved) if saved.get("device") == device.type else resolve(cfg, device, rank)
        run_dir.write_json(directory / run_dir.EFFECTIVE, effective.to_dict())
        decided = [effective.to_dict()]
    if rank.world_size > 1:
        dist.broadcast_object_list(decided, src=0, device=device)
    return Effective(**decided[0])


def _wrap(gpt: "GPT", effective: "Effective", rank: "Rank") -> Any:
    """Compile and wrap in DDP as decided; at world size 1 DDP would only cost."""
    from torch.nn.parallel import DistributedDataParallel

    if effective.compile:
        gpt.compile()
    if rank.world_size == 1:
        return gpt
    device_ids = [rank.local_rank] if effective.device == "cuda" else None
    return DistributedDataParallel(gpt, device_ids=device_ids, gradient_as_bucket_view=True)


def _open_log(cfg: "Config", directory: Path, effective: "Effective", training: Any, state: "TrainState") -> Any:
    from gptexp.flops import flops_per_token, peak_flops
    from gptexp.loggers import JsonlSink, RunLog
    from gptexp.loggers.console import build_console
    from gptexp.loggers.wandb import build_wandb

    total_batch_size, rank = training.plan.total_batch_size, training.rank
    if not rank.is_main:
        return RunLog([], total_batch_size)
    _print_start(cfg, directory, effective, training, state)
    sinks: list[Sink] = [JsonlSink(directory, state.tokens)]
    if console := build_console(cfg.log.progress, training.steps, state.step):
        sinks.append(console)
    name = f"{directory.name.split('-')[-1]}-lr{cfg.optim.lr:g}-b{total_batch_size}"
    from gptexp.config import to_dict

    config = {**to_dict(cfg), "effective": effective.to_dict()}
    if wandb := build_wandb(cfg.log.wandb, directory, config, cfg.sweep.name, name):
        sinks.append(wandb)
    peak = peak_flops(effective.device_name, effective.dtype)
    return RunLog(
        sinks,
        total_batch_size,
        flops_per_token(cfg.model, effective.seq_len),
        peak * rank.world_size if peak else None,
    )


def _print_start(cfg: "Config", directory: Path, effective: "Effective", training: Any, state: "TrainState") -> None:
    from gptexp.flops import count_parameters
    from gptexp.optim import describe_groups

    if cfg.log.progress == "off":
        return
    m, plan, order, rank = cfg.model, training.plan, training.dataset.order, training.rank
    per_epoch = order.n_train * plan.seq_len
    chosen = [f"{key} {getattr(effective, key)} ({why})" for key, why in effective.reasons.items()]
    lines = [
        f"run directory   {directory}",
        f"model           {m.n_layer} layers, {m.n_head} heads, width {m.n_embd}, block {m.block_size}, "
        f"vocabulary {m.vocab_size:,}: {count_parameters(m):,} parameters",
        *describe_groups(training.gpt),
        f"data            {cfg.data.name}: {per_epoch:,} training tokens an epoch, "
        f"{len(training.dataset.val_windows) * plan.seq_len:,} for validation",
        f"batch           {plan.total_batch_size:,} tokens a step = {plan.micro_batch_size} sequences × {plan.seq_len} "
        f"tokens × {rank.world_size} ranks × {plan.grad_accum_steps} micro-steps",
        f"length          {training.steps:,} steps, {training.steps * plan.total_batch_size:,} tokens, "
        f"{training.steps * plan.total_batch_size / per_epoch:.2f} epochs",
        f"device          {effective.device_name}",
        f"chosen          {'; '.join(chosen)}",
    ]
    if state.step:
        lines.append(f"resuming        after step {state.step - 1}, {state.tokens:,} tokens")
    print(*lines, sep="\n", flush=True)


def _print_sample(cfg: "Config", gpt: "GPT", state: "TrainState", log: Any) -> None:
    from gptexp.data.tokenizer import load_tokenizer
    from gptexp.sample import complete

    [text] = complete(gpt, load_tokenizer(cfg.data.tokenizer), "", 1, cfg.log.sample_tokens, seed=cfg.train.seed)
    log.sample(state.step, f"sample: {text!r}")


def _print_end(summary: dict[str, Any], directory: Path) -> None:
    val = f"val loss {summary['final_val_loss']:.4f}, " if summary["final_val_loss"] is not None else ""
    print(
        f"{summary['status']} after {summary['steps']:,} steps, {summary['tokens']:,} tokens, "
        f"{summary['train_seconds']:.1f} s of training; {val}all of it in {directory}",
        flush=True,
    )


def _write_summary(
    cfg: "Config", directory: Path, effective: "Effective", rank: "Rank", state: "TrainState", status: str
) -> dict[str, Any]:
    """summary.json, on rank 0; the dictionary on every rank."""
    from gptexp import run_dir
    from gptexp.flops import count_parameters
    from gptexp.versions import git_commit, versions

    summary = {
        "status": status,
        "final_val_loss": state.val_loss,
        "best_val_loss": state.best_val_loss,
        "tokens": state.tokens,
        "steps": state.step,
        "train_seconds": round(state.seconds, 3),
        "parameters": count_parameters(cfg.model),
        "world_size": rank.world_size,
        "device": effective.device_name,
        "seed": cfg.train.seed,
        "fingerprint": f"{state.fingerprint:016x}",
        "versions": versions(),
        "git_commit": git_commit(),
    }
    if rank.is_main:
        run_dir.write_json(directory / run_dir.SUMMARY, summary)
    return summary


def _die_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent goes, however it goes; leave at once if it is gone already."""
    parent = os.getppid()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent or parent == 1:
        sys.exit(128 + signal.SIGTERM)


def main() -> None:
    """Entry of a rank that gptexp's launcher started."""
    stop = StopRequest()
    stop.install(ignore_sigint=True)  # before torch is imported: Ctrl-C belongs to the parent from the first moment
    _die_with_parent()
    from torch.distributed.elastic.multiprocessing.errors import record

    from gptexp import run_dir
    from gptexp.distributed import launcher_rank
    from gptexp.errors import UserError

    def body() -> int:
        directory = Path(sys.argv[1])
        cfg = run_dir.load_config(directory)
        stop.limit(cfg.train.max_minutes)
        rank = launcher_rank()
        assert rank is not None
        return run(cfg, directory, stop, rank)

    try:
        code = record(body)()
    except UserError as error:
        sys.exit(error.exit_code)  # the parent prints the message, which `record` has written for it
    # All ranks are past their last collective: a signal that still arrives has nothing left to stop.
    for name in ("SIGUSR1", "SIGTERM"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
