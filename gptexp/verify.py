"""`gptexp verify`: what gptexp promises, proven on this machine with real runs in processes of their own.

Every check trains a small model on a text made here and compares tensors out of checkpoints with an independent
reference: plain torch, or a run that nothing disturbed. Needs no run directory and leaves nothing behind.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptexp import run_dir
from gptexp.config import Config, ModelConfig
from gptexp.errors import EXIT_FAILED, ConfigError, UserError
from gptexp.pool import resume_command
from gptexp.signals import StopRequest, at_parents_death, ended_in_order

if TYPE_CHECKING:
    import torch

SEQUENCES, SEQ_LEN = 8, 32  # of a step
STEPS, SAVE_EVERY, KILL_AFTER = 48, 7, 11
PATIENCE_S = 300.0
TOLERANCE = 1e-5  # relative to the largest value, where another order of additions rounds differently


@dataclass(frozen=True)
class Result:
    """One row: `difference` is the largest found, `allowed` the largest that passes."""

    promise: str
    how: str
    difference: float
    allowed: float
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return self.difference <= self.allowed


def main(argv: list[str] | None = None) -> int:
    """Prove the promises of gptexp on this machine: equal gradients, exact resumption, independent validation."""
    parser = argparse.ArgumentParser(prog="gptexp verify", description=main.__doc__)
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks (default: one per GPU, else 2)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(argv)

    import torch

    kind = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count()
    world_size = args.world_size if args.world_size is not None else gpus if kind == "cuda" else 2
    if world_size not in (1, 2, 4, 8):
        raise ConfigError(f"--world-size={world_size}: the checks cut {SEQUENCES} sequences evenly; use 1, 2, 4 or 8")
    if kind == "cuda" and world_size > gpus:
        raise ConfigError(f"--world-size={world_size}: there are {gpus} GPUs; use at most that many, or --device=cpu")
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="gptexp-verify-") as folder:
        bench = Bench(Path(folder), kind, world_size)
        results = list(_run_all(bench))
    _print(results, kind, world_size)
    return 0 if all(result.holds for result in results) else EXIT_FAILED


def _run_all(bench: "Bench") -> Iterator[Result]:
    checks: list[Callable[[Bench], list[Result]]] = [_factorisations, _kill_and_resume]
    if bench.world_size > 1:
        checks += [_another_world_size, _reductions]
    for check in checks:
        started = time.monotonic()
        results = check(bench)
        yield replace(results[0], seconds=time.monotonic() - started)
        yield from results[1:]


class Bench:
    """Where the runs lie, and how they are made."""

    def __init__(self, folder: Path, kind: str, world_size: int) -> None:
        self.folder, self.kind, self.world_size = folder, kind, world_size
        self.micro_batch_size = SEQUENCES // max(4, world_size)  # each rank accumulates, where it can
        subjects, verbs = ("a cat", "the dog", "nobody", "my friend"), ("sees", "likes", "eats", "finds")
        text = [f"{subjects[i * i % 7 % 4]} {verbs[i // 3 % 4]} {subjects[i % 4]}, {i % 97}." for i in range(4000)]
        (folder / "text.txt").write_text("\n".join(text))

    def config(self, world_size: int, micro_batch_size: int, steps: int) -> Config:
        """A model of two layers; kernels that give equal bits each time where a GPU has others too."""
        config = Config(model=ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=SEQ_LEN))
        config.batch.total_batch_size = SEQUENCES * SEQ_LEN
        config.batch.micro_batch_size = micro_batch_size
        config.world.size, config.world.threads_per_rank = world_size, 1
        config.data.name, config.data.path = "text", str(self.folder / "text.txt")
        config.data.cache_dir, config.data.val_tokens = str(self.folder / "cache"), 11 * SEQ_LEN
        config.train.max_steps, config.train.eval_every, config.train.save_every = steps, 0, SAVE_EVERY
        config.train.device, config.train.dtype, config.train.compile = self.kind, "float32", "off"
        config.train.matmul_precision, config.train.attention = "highest", "math"
        config.train.deterministic = self.kind == "cuda"
        config.optim.lr = 1e-3
        config.log.progress, config.log.sample_tokens, config.log.wandb.mode = "off", 0, "disabled"
        return config

    def start(self, name: str, config: Config) -> "subprocess.Popen[str]":
        """Begin a run, or go on with one, in processes as a user's command would."""
        directory = self.folder / name
        run_dir.save_config(directory, config)
        leave_too = partial(at_parents_death, signal.SIGKILL)
        return subprocess.Popen(
            resume_command(directory), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=leave_too
        )

    def finish(self, name: str, config: Config) -> Path:
        """Begin a run or go on with one, to its end; the newest checkpoint. One rank runs in this process."""
        from gptexp.distributed import Rank
        from gptexp.run import run

        if config.world.size == 1:
            run_dir.save_config(self.folder / name, config)
            with redirect_stdout(None):
                run(config, self.folder / name, StopRequest(), Rank())
        else:
            process = self.start(name, config)
            said, _ = process.communicate()
            if process.returncode:
                raise UserError(f"a run of verify failed (exit code {process.returncode}): {said.strip()[-2000:]}")
        return self.newest(name)

    def newest(self, name: str) -> Path:
        return max((self.folder / name / run_dir.CHECKPOINTS).glob("step-*"))


def _factorisations(bench: Bench) -> list[Result]:
    """One step by every way to cut it; AdamW's first moment after it is (1 - beta1) times its gradient."""
    import torch

    from gptexp.checkpoint import load_weights
    from gptexp.data.loader import build_dataset
    from gptexp.model import GPT
    from gptexp.optim import build_optimizer

    device = torch.device(bench.kind)
    gradient = loss = 0.0
    cuts = [(1, size) for size in (1, 2, SEQUENCES)]
    if bench.world_size > 1:
        cuts += [(bench.world_size, size) for size in (1, SEQUENCES // bench.world_size)]
    for world_size, micro_batch_size in cuts:
        config = bench.config(world_size, micro_batch_size, steps=1)
        config.optim.grad_clip = 0.0
        name = f"cut-{world_size}-{micro_batch_size}"
        path = bench.finish(name, config)
        dataset = build_dataset(config)
        torch.manual_seed(config.train.seed)
        model = GPT(config.model).to(device)
        windows = dataset.order.train_windows(torch.arange(SEQUENCES).numpy())
        rows = torch.from_numpy(dataset.rows(dataset.train, windows).astype("int64")).to(device)
        model(rows[:, :-1], rows[:, 1:]).backward()
        moments = _optimizer_state(path)
        parameters = [p for group in build_optimizer(model, config.optim, False).param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            expected = (1 - config.optim.beta1) * parameter.grad.cpu()
            gradient = max(gradient, _relative(moments[number]["exp_avg"], expected))
        load_weights(path, model)
        held_out = torch.from_numpy(dataset.rows(dataset.val, dataset.val_windows).astype("int64")).to(device)
        with torch.no_grad():
            alone = float(model.eval()(held_out[:, :-1], held_out[:, 1:]))
        logged = run_dir.read_json(bench.folder / name / run_dir.SUMMARY)["final_val_loss"]
        loss = max(loss, abs(alone - logged) / alone)
    ways = ", ".join(f"{w}×{SEQUENCES // (w * b)}×{b}" for w, b in cuts)
    how = f"ranks×micro-steps×sequences: {ways}; against plain torch"
    return [
        Result("gradients of a step, however it is cut", how, gradient, TOLERANCE),
        Result(
            "validation loss, however it is cut", "the same; against plain torch, all windows at once", loss, TOLERANCE
        ),
    ]


def _kill_and_resume(bench: Bench) -> list[Result]:
    """A run that nothing disturbed, and one whose processes were all killed and that was resumed."""
    config = bench.config(bench.world_size, bench.micro_batch_size, STEPS)
    config.model.dropout = 0.1
    whole = bench.finish("whole", config)
    step, difference = _killed(bench, "killed", config, config, whole)
    how = f"SIGKILL to all processes at step {step} of {STEPS}, then gptexp resume"
    return [Result("weights and moments of a killed run", how, difference, 0.0)]


def _another_world_size(bench: Bench) -> list[Result]:
    """Gradients that add up in a tree: one rank throughout, and one that took over from several."""
    config = bench.config(1, bench.micro_batch_size, STEPS)
    config.model.dropout, config.train.reduction = 0.1, "tree"
    whole = bench.finish("alone", config)
    several = replace(config, world=replace(config.world, size=bench.world_size))
    step, difference = _killed(bench, "moved", several, config, whole)
    how = f"reduction=tree, {bench.world_size} ranks killed at step {step}, resumed on 1; against 1 throughout"
    return [Result("… at another world size", how, difference, 0.0)]


def _killed(bench: Bench, name: str, first: Config, then: Config, whole: Path) -> tuple[int, float]:
    """At which step a run of `first` was killed, and how far it is from `whole` once it has gone on as `then`."""
    step = _kill(bench, name, first)
    killed_at = time.time()
    difference = _difference(whole, bench.finish(name, then))
    events = map(json.loads, (bench.folder / name / run_dir.METRICS).read_text().splitlines())
    made_since = sum(event["event"] == "step" and event["time"] > killed_at for event in events)
    return step, difference if made_since < STEPS else math.inf  # it did not go on, it began anew


def _kill(bench: Bench, name: str, config: Config) -> int:
    """Begin a run, and end all of its processes between two checkpoints; how many steps it had logged."""
    import psutil

    process = bench.start(name, config)
    metrics = bench.folder / name / run_dir.METRICS
    deadline = time.monotonic() + PATIENCE_S
    try:
        while not metrics.exists() or (steps := metrics.read_text().count('"event": "step"')) < KILL_AFTER:
            if process.poll() is not None:
                assert process.stdout is not None
                raise UserError(f"a run of verify ended early: {process.stdout.read().strip()[-2000:]}")
            if time.monotonic() > deadline:
                raise UserError(f"a run of verify made no {KILL_AFTER} steps in {PATIENCE_S:g} s")
            time.sleep(0.005)
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()
    if run_dir.status(bench.folder / name) == "completed":
        raise UserError(f"a run of verify was over before it could be killed after step {steps}; try again")
    return steps


def _reductions(bench: Bench) -> list[Result]:
    """How often the ranks exchange gradients in a step of eight micro-steps, beyond a step of one."""
    import torch

    processes = [
        torch.multiprocessing.get_context("spawn").Process(target=_count_reductions, args=(rank, bench))
        for rank in range(bench.world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise UserError(f"ranks of verify ended with exit codes {[process.exitcode for process in processes]}")
    counts = json.loads((bench.folder / "counts.json").read_text())
    how = "in steps of 1, 2 and 8 micro-steps: " + ", ".join(map(str, counts))
    if bench.kind == "cuda":
        how += "; no call of a step waits for its GPU"
    extra = max(counts) - min(counts) if counts[0] else math.inf
    return [Result("reductions of gradients in a step", how, extra, 0.0)]


def _count_reductions(number: int, bench: Bench) -> None:
    """One rank: real steps, with a hook that counts what DDP sends."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from gptexp.build import build_gpt, wrap
    from gptexp.data.loader import MicroBatch
    from gptexp.distributed import MeanReduction, Rank
    from gptexp.effective import resolve
    from gptexp.optim import build_optimizer
    from gptexp.trainer import train_step

    rank = Rank(number, bench.world_size, number, bench.world_size)
    device = torch.device(bench.kind, number) if bench.kind == "cuda" else torch.device("cpu")
    if bench.kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if bench.kind == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{bench.folder}/store", rank=number, world_size=rank.world_size
    )
    config = bench.config(rank.world_size, 1, 1)
    effective = resolve(config, device, rank)
    model = build_gpt(config, effective, device)
    optimizer = build_optimizer(model, config.optim, effective.fused)
    ddp = wrap(model, effective, "mean", rank, device)
    assert isinstance(ddp, DistributedDataParallel)
    sent = 0

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal sent
        sent += 1
        return allreduce_hook(group, bucket)

    ddp.register_comm_hook(None, hook)
    x = torch.zeros((1, SEQ_LEN), dtype=torch.int64, device=device)
    batch, counts = MicroBatch(x, x.clone(), 0, 0), list[int]()
    mean = MeanReduction(ddp)
    for micro_steps in (1, 1, 2, 8):  # the first to let DDP arrange its buckets
        sent = 0
        if counts and bench.kind == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        batches = iter([batch] * micro_steps)
        train_step(ddp, optimizer, mean, batches, micro_steps, 1e-3, 1.0, nullcontext, dropout=False)
        counts.append(sent)
    if bench.kind == "cuda":
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    dist.barrier()
    if number == 0:
        (bench.folder / "counts.json").write_text(json.dumps(counts[1:]))
    os._exit(0)  # a thread of gloo's may still hold the hook's future, which an interpreter that ends would abort on


def _relative(a: "torch.Tensor", b: "torch.Tensor") -> float:
    """The largest difference over the largest value; infinite where either holds what is no number."""
    found = float((a - b).abs().max() / b.abs().max())
    return found if math.isfinite(found) else math.inf


def _difference(a: Path, b: Path) -> float:
    """The largest between weights and moments of two checkpoints; 0 only where every bit is equal."""
    import torch
    from safetensors.torch import load_file

    worst = 0.0
    ours, theirs = (
        [
            *load_file(path / "model.safetensors").values(),
            *(v for s in _optimizer_state(path).values() for v in s.values()),
        ]
        for path in (a, b)
    )
    for x, y in zip(ours, theirs, strict=True):
        if not torch.equal(x, y):
            worst = max(worst, float((x - y).abs().max()), sys.float_info.min)
    return worst


def _optimizer_state(path: Path) -> dict[int, dict[str, "torch.Tensor"]]:
    """Per parameter, in the order of the optimizer's groups."""
    import torch

    saved: dict[str, Any] = torch.load(path / "train.pt", map_location="cpu", weights_only=True)
    return dict(saved["optimizer"]["state"])


def _print(results: list[Result], kind: str, world_size: int) -> None:
    print(f"{'':<6}{f'{world_size} × {kind}':<42}{'largest difference':<20}{'allowed':<18}seconds")
    for r in results:
        verdict = "PASS" if r.holds else "FAIL"
        found = f"{r.difference:.1e}" if r.difference else "none"
        allowed = f"{r.allowed:.0e} relative" if r.allowed else "none"
        print(f"{verdict:<6}{r.promise:<42}{found:<20}{allowed:<18}{f'{r.seconds:.0f}' if r.seconds else ''}")
        print(f"{'':<6}{r.how}")
    if world_size == 1:
        print("SKIP  another world size, and reductions in a step: they need several ranks, --world-size 2 or more")
    if kind == "cuda":
        print("All with train.deterministic=true, float32 without TF32, and attention written out.")
