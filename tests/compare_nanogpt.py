"""Compares the speed with nanoGPT's on this machine: `python tests/compare_nanogpt.py CHECKOUT WORKLOAD`.

CHECKOUT is a clone of github.com/karpathy/nanoGPT. WORKLOAD is a workload of `gptexp bench`, overrides, or both. A copy
of nanoGPT's train.py runs on the same tokens, shapes and precision settings as `gptexp train`. The programs run in
turns, each turn in a new process, so a machine that slows down slows all of them. The script prints the median and the
quartiles over all counted steps, and the ratio of the medians in each round.

  stock            unchanged: float32 on a CPU (its dtype is ignored there), compiled
  helped DTYPE     in the dtype requested, compiled; glibc's allocator keeps freed memory, as in gptexp

With `--dtype auto`, gptexp chooses its dtype, and helped nanoGPT is measured in each that the hardware has.
"""

import argparse
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.data.loader import build_dataset
from gptexp.machine.device import has_native_bfloat16
from gptexp.run.benchmark import WARM_UP, Workload, run_until, workloads
from gptexp.storage import run_dir

# glibc's environment variables for the options that gptexp sets with mallopt(3).
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": str(256 << 20),
}
CPU_CONTEXT = "nullcontext() if device_type == 'cpu' else"  # in nanoGPT's train.py
STEP = re.compile(r"^iter (\d+): loss ([\d.]+), time ([\d.]+)ms", re.MULTILINE)


def peer_ms(
    checkout: Path, config: Config, effective: dict[str, Any], steps: int, dtype: str, device: str, helped: bool
) -> list[float]:
    """Milliseconds of the counted steps of one nanoGPT process, for as many tokens as a step of ours has."""
    m, total, micro_batch_size = config.model, config.batch.total_batch_size, effective["micro_batch_size"]
    accumulation = max(1, round(total / (micro_batch_size * config.seq_len)))
    with tempfile.TemporaryDirectory(prefix="nanogpt-") as name:
        copy = Path(name)
        for file in ("train.py", "model.py", "configurator.py"):
            shutil.copy(checkout / file, copy)
        if helped and device == "cpu" and dtype != "float32":
            program = (copy / "train.py").read_text()
            assert program.count(CPU_CONTEXT) == 1, "another nanoGPT than this script knows"
            (copy / "train.py").write_text(program.replace(CPU_CONTEXT, ""))
        data = copy / "data" / "compare"
        data.mkdir(parents=True)
        dataset = build_dataset(config)
        tokens = dataset.train.read(0, min(len(dataset.train), 1_000_000))
        for split in ("train", "val"):
            tokens.tofile(data / f"{split}.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": effective["vocab_size"]}))
        options = {
            "dataset": "compare", "device": device, "dtype": dtype, "compile": True, "max_iters": WARM_UP + steps,
            "eval_interval": 10**9, "eval_iters": 1, "log_interval": 1, "out_dir": str(copy / "out"),
            "gradient_accumulation_steps": accumulation,
            "batch_size": micro_batch_size, "block_size": config.seq_len, "bias": True, "dropout": 0.0,
            "n_layer": m.n_layer, "n_head": m.n_head, "n_embd": m.n_embd, "learning_rate": 6e-4, "warmup_iters": 5,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-u", "train.py", *(f"--{key}={value}" for key, value in options.items())],
            cwd=copy, env={**os.environ, **(KEEP_FREED_MEMORY if helped else {})},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"nanoGPT failed: {done.stderr[-2000:]}")
        share = total / (accumulation * micro_batch_size * config.seq_len)
        return [share * float(ms) for _, _, ms in STEP.findall(done.stdout)][WARM_UP + 1 :]


def own_ms(overrides: list[str], steps: int, directory: Path) -> tuple[list[float], dict[str, Any]]:
    """Milliseconds of the counted steps of one gptexp process, and its effective.json."""
    cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", directory.parent / "compile-cache"))
    run = run_until(Workload("", tuple(overrides), steps), [], directory, cache, WARM_UP + steps)
    effective = run_dir.read_json(directory / run_dir.EFFECTIVE)
    return [event["perf/step_ms"] for event in run.steps[WARM_UP:][:steps]], effective


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a clone of github.com/karpathy/nanoGPT")
    parser.add_argument("workload", nargs="+", metavar="WORKLOAD|key=value", help="as for gptexp bench")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "auto"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="counted in each round")
    parser.add_argument("--peer-micro-batch", type=int, metavar="B", help="nanoGPT's; default: the same")
    parser.add_argument("--only", choices=("stock", "helped"), help="leave the other out")
    args = parser.parse_args()
    known = workloads(args.device)
    overrides = [text for what in args.workload for text in (known[what].overrides if what in known else (what,))]
    overrides += [f"train.dtype={args.dtype}", f"train.device={args.device}"]
    config = compose(overrides)
    dtypes = [args.dtype]
    if args.dtype == "auto":
        dtypes = ["float32", "bfloat16"] if has_native_bfloat16(torch.device(args.device)) else ["float32"]
    # Unchanged nanoGPT ignores dtype on a CPU and computes in float32.
    of_stock = ["float32"] if args.device == "cpu" else dtypes
    peers = {f"{kind} {dtype}": (dtype, kind == "helped")
             for kind, its_dtypes in (("stock", of_stock), ("helped", dtypes)) for dtype in its_dtypes
             if args.only in (None, kind)}  # fmt: skip
    measured: dict[str, list[list[float]]] = {name: [] for name in ("gptexp", *peers)}
    with tempfile.TemporaryDirectory(prefix="gptexp-") as out:
        for number in range(args.rounds):
            ours, effective = own_ms(overrides, args.steps, Path(out) / f"run{number}")
            measured["gptexp"].append(ours)
            if args.peer_micro_batch:
                effective["micro_batch_size"] = args.peer_micro_batch
            for peer, (dtype, helped) in peers.items():
                theirs = peer_ms(args.checkout, config, effective, args.steps, dtype, args.device, helped)
                measured[peer].append(theirs)
            print(json.dumps({name: round(statistics.median(rounds[-1]), 1) for name, rounds in measured.items()}))
    tokens = config.batch.total_batch_size
    for name, rounds in measured.items():
        low, middle, high = statistics.quantiles([ms for r in rounds for ms in r], n=4)
        print(f"{name:<16}{middle:>10.1f} ms ({low:.1f}-{high:.1f}) {1e3 * tokens / middle:>12,.0f} tokens/s")
    for peer in peers:
        ratios = [
            statistics.median(theirs) / statistics.median(ours)
            for ours, theirs in zip(measured["gptexp"], measured[peer], strict=True)
        ]
        print(f"{statistics.median(ratios):.2f}× {peer} (rounds: {', '.join(f'{r:.2f}' for r in ratios)})")


if __name__ == "__main__":
    main()
