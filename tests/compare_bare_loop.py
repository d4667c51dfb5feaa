"""Compares the time of a step with that of a bare loop on a CPU: `python tests/compare_bare_loop.py world.size=2`.

The arguments are overrides of the config. The bare loop is the plainest one in PyTorch: the same model, dtype, threads,
tokens, accumulation, optimizer and clipping, its batches ready in memory; DDP over gloo for several ranks. The programs
run in turns, each turn in new processes. The script prints the median milliseconds of a step and their ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gptexp.config.metrics import Metric
from gptexp.config.run_plan import plan_run
from gptexp.data.loader import build_dataset, micro_batches
from gptexp.machine.cpu import flush_denormals
from gptexp.machine.effective import apply, forward_context, load_effective
from gptexp.process.terminal import run_verb
from gptexp.run.build import build_gpt
from gptexp.storage import run_dir
from gptexp.training.optimizer import build_optimizer

WARM_UP = 50  # steps before the counted ones


def bare_loop(directory: Path, steps: int) -> None:
    """Train `steps` steps as one rank, with the settings of the run in `directory`. Rank 0 prints the milliseconds."""
    cfg, effective = run_dir.load_resolved(directory), load_effective(directory)
    assert effective is not None
    flush_denormals()
    apply(effective)
    plan, autocast = plan_run(cfg, effective.micro_batch_size.value), forward_context(effective)
    gpt = build_gpt(cfg, effective, device := torch.device("cpu"))
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(gpt, gradient_as_bucket_view=True) if dist.get_world_size() > 1 else None
    optimizer = build_optimizer(gpt, cfg.optim, effective.fused.value)
    ready = islice(micro_batches(build_dataset(cfg), plan.steps_from(0, 0), dist.get_rank(), device), 64)
    batches, micro_steps = cycle([(batch.x, batch.y) for batch in ready]), plan.batch.grad_accum_steps
    times: list[float] = []
    for step in range(steps):
        began = time.perf_counter()
        for left in reversed(range(micro_steps)):
            x, y = next(batches)
            with ddp.no_sync() if ddp is not None and left else nullcontext():
                with autocast():
                    loss = (ddp or gpt)(x, y)
                (loss / micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), cfg.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=ddp is None)  # DDP's gradients are views of its buckets
        if step % 10 == 0:
            loss.item()
        times.append(1e3 * (time.perf_counter() - began))
    print(json.dumps(times) if dist.get_rank() == 0 else "", end="")


def turn(directory: Path, steps: int, overrides: list[str]) -> float:
    """Train a run in `directory`, then the bare loop. Prints the median milliseconds of a step, returns the ratio."""
    options = ["log=disabled", "log.progress=off", "log.sample_tokens=0", "schedule=constant", *overrides]
    options += ["train.eval_every_tokens=0", "train.save_every_tokens=0", f"hydra.run.dir={directory}"]
    command = [sys.executable, "-Pm", "gptexp.train", f"train.max_steps={steps}", *options]
    subprocess.run(command, check=True, capture_output=True)
    events = map(json.loads, (directory / run_dir.METRICS).open())
    ranks = f"--nproc-per-node={run_dir.load_resolved(directory).world.size or 1}"
    loop = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, __file__, str(directory), str(steps)]
    times = json.loads(subprocess.run(loop, check=True, capture_output=True).stdout)
    run = statistics.median([float(event[Metric.STEP_MS]) for event in events if event["event"] == "step"][WARM_UP:])
    bare = statistics.median(map(float, times[WARM_UP:]))
    print(f"gptexp {run:.2f} ms, bare {bare:.2f} ms: {run / bare:.3f}", flush=True)
    return run / bare


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300, help=f"of a turn; the first {WARM_UP} do not count")
    args = parser.parse_args(argv)
    with TemporaryDirectory(prefix="gptexp-") as out:
        ratios = [turn(Path(out) / f"run{n}", args.steps, args.overrides) for n in range(args.rounds)]
    print(f"{statistics.median(ratios):.3f}× the bare loop's time, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank of the bare loop
        bare_loop(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        run_verb(main)
