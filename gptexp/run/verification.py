"""`gptexp verify`: checks gptexp's guarantees on this machine, with real runs.

The checks train a small model on a generated text. Most compare its checkpoints with an independent reference: plain
torch, or an uninterrupted run. All files are temporary. The terminal shows each check as it runs, and the output of its
runs only if it fails.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gptexp.config.schema import Config, ModelConfig
from gptexp.data.loader import MicroBatch, build_dataset
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import MeanReduction
from gptexp.machine.resolve import resolve
from gptexp.model.gpt import GPT
from gptexp.optim.adamw import AdamWConfig
from gptexp.process.errors import EXIT_FAILED, ConfigError, UserError
from gptexp.process.signals import StopRequest, at_parents_death, ended_in_order
from gptexp.process.terminal import output_to
from gptexp.process.words import counted
from gptexp.run.build import build_gpt, wrap
from gptexp.run.job import Job
from gptexp.run.observe import observe
from gptexp.run.own_process import resume_command
from gptexp.run.rank import run
from gptexp.storage import run_dir
from gptexp.storage.checkpoint import load_weights, read_tensors
from gptexp.storage.tensor_files import MODEL, OPTIMIZER, file_name
from gptexp.training.optimizer import build_optimizer
from gptexp.training.step import TrainStep

SEQUENCES, SEQ_LEN = 8, 32  # sequences per step, tokens per sequence
STEPS, SAVE_EVERY, KILL_AFTER = 64, 7, 11  # steps
TIMEOUT_S = 120.0  # after which a collective that hangs is an error
TOLERANCE = 1e-5  # relative to the largest value: another order of additions rounds differently


@dataclass(frozen=True)
class Result:
    """A row of the table: the largest `difference` found, and the largest `allowed`."""

    promise: str
    how: str
    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.allowed


Check = Callable[["Bench"], list[Result]]


def verify(device: str, world_size: int | None) -> int:
    """Run all checks on `device` with `world_size` ranks, and print the results. Returns the exit code.

    `world_size=None` means 2 ranks on a CPU, else the largest power of two with one GPU per rank, at most 8.
    """
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count()
    if kind == "cuda" and not gpus:
        raise ConfigError("--device=cuda: no GPU is visible to this process; use --device=cpu")
    if world_size is None:
        world_size = 1 << (min(gpus, SEQUENCES).bit_length() - 1) if kind == "cuda" else 2
    if kind == "cuda" and world_size > gpus:
        raise ConfigError(f"--world-size={world_size}: only {counted(gpus, 'GPU')} here; use fewer, or --device=cpu")
    _say("", f"{world_size} × {kind}", "difference", "allowed", "seconds")
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="gptexp-verify-") as folder:
        bench = Bench(Path(folder), kind, world_size)
        hold = [_hold(what, check, bench) for what, check in (CHECKS if world_size > 1 else ALONE).items()]
    if world_size == 1:
        print("SKIP  another world size, and reductions in a step: they need several ranks, --world-size 2 or more")
    if kind == "cuda":
        print("All runs use train.deterministic=true, train.attention=math, and float32 without TF32.")
    return 0 if all(hold) else EXIT_FAILED


def _hold(what: str, check: Check, bench: "Bench") -> bool:
    """Run a check, and print its beginning and its results. Returns whether all of them hold."""
    _say("RUN", what)
    output, started = bench.folder / "output.txt", time.monotonic()
    try:
        with output_to(output):
            results = check(bench)
    except Exception:
        sys.stderr.write(output.read_text(errors="replace"))
        raise
    seconds = f"{time.monotonic() - started:.0f}"
    for r in results:
        found = f"{r.difference:.1e}" if r.difference else "none"
        allowed = f"{r.allowed:.0e} relative" if r.allowed else "none"
        _say("PASS" if r.holds else "FAIL", r.promise, found, allowed, seconds if r is results[0] else "")
        _say("", r.how)
    hold = all(result.holds for result in results)
    if not hold:
        sys.stderr.write(output.read_text(errors="replace"))
    return hold


def _say(verdict: str, what: str, found: str = "", allowed: str = "", seconds: str = "") -> None:
    """Print a row of the table at once. It is as wide as a narrow terminal."""
    print(f"{verdict:<6}{what:<41}{found:<11}{allowed:<15}{seconds:>7}".rstrip(), flush=True)


class Bench:
    """Configures, starts and finishes the runs of the checks, in `folder`."""

    def __init__(self, folder: Path, kind: str, world_size: int) -> None:
        self.folder, self.kind, self.world_size = folder, kind, world_size
        self.micro_batch_size = max(1, SEQUENCES // 2 // world_size)  # ranks with two sequences or more accumulate
        subjects, verbs = ("a cat", "the dog", "nobody", "my friend"), ("sees", "likes", "eats", "finds")
        text = [f"{subjects[i * i % 7 % 4]} {verbs[i // 3 % 4]} {subjects[i % 4]}, {i % 97}." for i in range(4000)]
        (folder / "text.txt").write_text("\n".join(text))

    def config(self, world_size: int, micro_batch_size: int, steps: int) -> Config:
        """Return a config with two layers and, on a GPU, kernels that are bitwise deterministic."""
        config = Config(model=ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=SEQ_LEN))
        config.batch.total_batch_size = SEQUENCES * SEQ_LEN
        config.batch.micro_batch_size = micro_batch_size
        config.world.size, config.world.threads_per_rank = world_size, 1
        config.world.timeout_s = TIMEOUT_S
        config.data.name, config.data.path = "text", str(self.folder / "text.txt")
        config.data.cache_dir, config.data.val_tokens = str(self.folder / "cache"), 11 * SEQ_LEN
        config.train.max_steps, config.train.eval_every, config.train.save_every = steps, 0, SAVE_EVERY
        config.train.device, config.train.dtype, config.train.compile = self.kind, "float32", "off"
        config.train.matmul_precision, config.train.attention = "highest", "math"
        config.train.deterministic = self.kind == "cuda"
        config.optim.lr = 1e-3
        config.log.progress, config.log.sample_tokens, config.log.wandb.mode = "off", 0, "disabled"
        return config

    def finish(self, name: str, config: Config) -> Path:
        """Start or resume a run and finish it; if it has one rank, in this process. Returns the newest checkpoint."""
        run_dir.save_config(self.folder / name, config)
        if config.world.size == 1:
            run(Job(config, self.folder / name, Rank(), StopRequest()))
        else:
            command, kill = resume_command(self.folder / name), partial(at_parents_death, signal.SIGKILL)
            if code := subprocess.run(command, preexec_fn=kill).returncode:
                raise UserError(f"a run of verify failed (exit code {code})")
        return run_dir.published(self.folder / name / run_dir.CHECKPOINTS)[0]


def _splits(bench: Bench) -> list[Result]:
    """Train one step with several splits of the batch. AdamW's first moment is then (1 - beta1) × gradient."""
    device = torch.device(bench.kind)
    gradient = loss = 0.0
    splits = [(1, size) for size in (1, 2, SEQUENCES)]
    if bench.world_size > 1:
        splits += [(bench.world_size, size) for size in (1, SEQUENCES // bench.world_size)]
    for world_size, micro_batch_size in splits:
        config = bench.config(world_size, micro_batch_size, steps=1)
        config.optim.grad_clip = 0.0
        name = f"split-{world_size}-{micro_batch_size}"
        path = bench.finish(name, config)
        dataset = build_dataset(config)
        torch.manual_seed(config.train.seed)
        model = GPT(run_dir.load_resolved(bench.folder / name).model).to(device)
        starts = dataset.order.train_starts(torch.arange(SEQUENCES).numpy(), dataset.seq_len)
        rows = torch.from_numpy(dataset.rows(dataset.train, starts).astype("int64")).to(device)
        model(rows[:, :-1], rows[:, 1:]).backward()
        moments = read_tensors(path / file_name(OPTIMIZER, 0, 1))
        for weight, parameter in model.named_parameters():
            assert parameter.grad is not None
            expected = (1 - AdamWConfig.beta1) * parameter.grad.cpu()
            gradient = max(gradient, _relative(moments[f"{weight}.exp_avg"], expected))
        load_weights(path, model)
        held_out = torch.from_numpy(dataset.rows(dataset.val, dataset.val_starts).astype("int64")).to(device)
        with torch.no_grad():
            alone = float(model.eval()(held_out[:, :-1], held_out[:, 1:]))
        logged = run_dir.read_json(bench.folder / name / run_dir.SUMMARY)["final_val_loss"]
        loss = max(loss, _relative(torch.tensor(logged).double(), torch.tensor(alone).double()))
    ways = ", ".join(f"{w}×{SEQUENCES // (w * b)}×{b}" for w, b in splits)
    how = f"ranks×micro-steps×sequences: {ways}; compared with plain torch"
    same = "the same splits; compared with plain torch, all windows at once"
    return [
        Result("gradients of a step, for several splits", how, gradient, TOLERANCE),
        Result("validation loss, for several splits", same, loss, TOLERANCE),
    ]


def _kill_and_resume(bench: Bench) -> list[Result]:
    """Compare an uninterrupted run with one that is resumed after all of its processes were killed."""
    config = bench.config(bench.world_size, bench.micro_batch_size, STEPS)
    config.model.dropout = 0.1
    whole = bench.finish("whole", config)
    step, difference = _killed(bench, "killed", config, config, whole)
    how = f"SIGKILL to all processes at step {step} of {STEPS}, then gptexp resume"
    return [Result("weights and moments of a resumed run", how, difference, 0.0)]


def _another_world_size(bench: Bench) -> list[Result]:
    """Compare a run on 1 rank with a run that is killed on several ranks and resumed on 1. Uses tree reduction."""
    config = bench.config(1, bench.micro_batch_size, STEPS)
    config.model.dropout, config.train.reduction = 0.1, "tree"
    whole = bench.finish("alone", config)
    several = replace(config, world=replace(config.world, size=bench.world_size))
    step, difference = _killed(bench, "moved", several, config, whole)
    ranks = f"{bench.world_size} ranks killed at step {step}, resumed on 1 rank; compared with 1 rank throughout"
    how = f"reduction=tree, {ranks}"
    return [Result("the same, resumed at another world size", how, difference, 0.0)]


def _killed(bench: Bench, name: str, first: Config, then: Config, whole: Path) -> tuple[int, float]:
    """Kill a run of `first` and resume it as `then`. Returns the step of the kill, and the difference to `whole`."""
    directory = bench.folder / name
    run_dir.save_config(directory, first)
    step = len(observe(resume_command(directory), directory, KILL_AFTER).steps)
    print(directory.with_name(f"{name}.log").read_text(), end="")
    if run_dir.status(directory) == "completed":
        raise UserError(f"a run of verify ended before it could be killed after step {step}; try again")
    killed_at = time.time()
    difference = _difference(whole, bench.finish(name, then))
    events = map(json.loads, (directory / run_dir.METRICS).read_text().splitlines())
    steps_since = sum(event["event"] == "step" and event["time"] > killed_at for event in events)
    restarted = steps_since >= STEPS  # all steps were logged again: it did not resume
    return step, math.inf if restarted else difference


def _reductions(bench: Bench) -> list[Result]:
    """Count the reductions of gradients in steps with 1, 2 and 8 micro-steps."""
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=_count_reductions, args=(rank, bench)) for rank in range(bench.world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    exit_codes = [process.exitcode for process in processes]
    if any(exit_codes):
        raise UserError(f"ranks of verify ended with exit codes {exit_codes}")
    counts = json.loads((bench.folder / "counts.json").read_text())
    how = "in steps of 1, 2 and 8 micro-steps: " + ", ".join(map(str, counts))
    if bench.kind == "cuda":
        how += "; no call in a step waits for the GPU"
    extra = max(counts) - min(counts) if counts[0] else math.inf
    return [Result("reductions of gradients in a step", how, extra, 0.0)]


def _count_reductions(number: int, bench: Bench) -> None:
    """Train real steps as one rank, with a hook that counts DDP's reductions."""
    rank, on_gpu = Rank(number, bench.world_size, number, bench.world_size), bench.kind == "cuda"
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = f"file://{bench.folder}/store"
    dist.init_process_group("nccl" if on_gpu else "gloo", store, rank=number, world_size=rank.world_size)
    config = bench.config(rank.world_size, 1, 1)
    effective = resolve(config, device, rank)
    model = build_gpt(config, effective, device)
    optimizer = build_optimizer(model, config.optim, effective.fused.value)
    ddp = wrap(model, effective, "mean", rank, device)
    assert isinstance(ddp, DistributedDataParallel)
    sent = 0

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal sent
        sent += 1
        return allreduce_hook(group, bucket)

    ddp.register_comm_hook(None, hook)
    x = torch.zeros((1, SEQ_LEN), dtype=torch.int64, device=device)
    batch = MicroBatch(x, x.clone(), 0, 0)
    step = TrainStep(ddp, optimizer, MeanReduction(ddp), 1.0, forward_context=nullcontext, dropout=False)
    counts: list[int] = []
    for micro_steps in (1, 1, 2, 8):  # in the first step DDP arranges its buckets
        sent = 0
        if counts and on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        step(iter([batch] * micro_steps), micro_steps, lr_factor=1.0)
        counts.append(sent)
    if on_gpu:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    dist.barrier()
    if number == 0:
        (bench.folder / "counts.json").write_text(json.dumps(counts[1:]))
    os._exit(0)  # a gloo thread may still hold the hook's future, and would abort the interpreter's exit


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value; infinite if a value is non-finite."""
    found = float((a - b).abs().max() / b.abs().max())
    return found if math.isfinite(found) else math.inf


def _difference(a: Path, b: Path) -> float:
    """Return the largest difference between weights and moments of two checkpoints; 0 only if all are equal."""
    worst = 0.0
    for file in (file_name(kind, 0, 1) for kind in (MODEL, OPTIMIZER)):
        others = read_tensors(b / file)
        for name, x in read_tensors(a / file).items():
            if not torch.equal(x, y := others[name]):
                worst = max(worst, float((x - y).abs().max()), sys.float_info.min)
    return worst


# What the terminal shows when a check begins -> the check. Those in `ALONE` need only one rank.
ALONE: dict[str, Check] = {
    "a step that is split in several ways": _splits,
    "a run that is killed and resumed": _kill_and_resume,
}
CHECKS: dict[str, Check] = {
    **ALONE,
    "the same, resumed at another world size": _another_world_size,
    "reductions of gradients in a step": _reductions,
}
