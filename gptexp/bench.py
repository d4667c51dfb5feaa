"""`gptexp bench`: what this machine can do, and how much of it a training step gets.

Every workload is a real run: `gptexp train` in a process of its own, read back from its metrics. It runs twice with a
compile cache of its own, so that the time to the first step is known cold and warm.
"""

import argparse
import json
import multiprocessing
import shutil
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gptexp import run_dir
from gptexp.calibrate import Observed, medians, observe
from gptexp.errors import EXIT_FAILED, ConfigError, UserError
from gptexp.flops import count_parameters, flops_per_token
from gptexp.versions import git_commit, versions

WARM_UP = 3  # steps left out of the medians
WIDTH = 140  # of the tables

SMALL = (
    "model.n_layer=4", "model.n_head=4", "model.n_embd=128", "model.block_size=256",
    "batch.micro_batch_size=8", "batch.total_batch_size=2048", "optim.lr=6e-4",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A named run: what it is, the overrides that make it, and how many steps are counted."""

    meaning: str
    overrides: tuple[str, ...]
    steps: int


def _gpt2(model: str, micro_batch: int) -> tuple[str, ...]:
    tokens = micro_batch * 1024
    return f"model={model}", f"batch.micro_batch_size={micro_batch}", f"batch.total_batch_size={tokens}"


CPU_WORKLOADS = {
    "nano": Workload("the model a newcomer trains", ("train.compile=off",), 20),
    "nano_ddp2": Workload("the same on two ranks", ("train.compile=off", "world=ddp2", "batch.micro_batch_size=4"), 20),
    "small": Workload("4 layers, 128 wide, GPT-2's vocabulary", (*SMALL, "train.compile=off"), 30),
    "small_compiled": Workload("the same, compiled", (*SMALL, "train.compile=on"), 30),
    "gpt2": Workload("GPT-2 124M at T=1024", (*_gpt2("gpt2", 4), "train.compile=off"), 5),
    "gpt2_compiled": Workload("the same, compiled", (*_gpt2("gpt2", 4), "train.compile=on"), 5),
}
GPU_WORKLOADS = {
    "nano": Workload("the model a newcomer trains", (), 50),
    "small": Workload("4 layers, 128 wide, GPT-2's vocabulary", SMALL, 50),
    **{
        f"gpt2_b{b}": Workload(f"GPT-2 124M at T=1024, micro-batch {b}", _gpt2("gpt2", b), 30)
        for b in (16, 32, 64, 128)
    },
    "gpt2_xl": Workload("GPT-2 1.5B at T=1024, micro-batch 12", _gpt2("gpt2_xl", 12), 10),
}


def workloads(device: str) -> dict[str, Workload]:
    return GPU_WORKLOADS if device == "cuda" else CPU_WORKLOADS


def run_workload(name: str, workload: Workload, extra: list[str], out: Path) -> dict[str, Any]:
    """Train `workload` cold until its first step, then warm until enough steps are counted."""
    cache = out / "compile-cache" / name
    cold = run_until(workload, extra, out / f"{name}-cold", cache, steps=1)
    warm = run_until(workload, extra, out / name, cache, steps=WARM_UP + workload.steps)
    shutil.rmtree(cache, ignore_errors=True)
    return {**counted(warm.steps), **described(out / name), "cold_s": cold.start_s, "warm_s": warm.start_s}


def run_until(workload: Workload, extra: list[str], directory: Path, cache: Path, steps: int) -> Observed:
    """Train `workload` in `directory`, as long as `steps` steps take, with a compile cache of its own."""
    command = [
        sys.executable, "-m", "gptexp.train", "log=disabled", "log.progress=off", "data.val_tokens=0",
        "train.eval_every_tokens=0", "train.save_every_tokens=0", f"train.max_steps={steps + 10**6}",
        "schedule=constant", f"hydra.run.dir='{directory}'", *workload.overrides, *extra,
    ]  # fmt: skip
    return observe(command, directory, steps, {"TORCHINDUCTOR_CACHE_DIR": str(cache)})


def counted(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps after the warm-up, and the quartiles of their length."""
    steps = events[WARM_UP:]
    low, _, high = statistics.quantiles((event["perf/step_ms"] for event in steps), n=4)
    return {**medians(steps), "steps": len(steps), "step_ms_quartiles": [low, high]}


def described(directory: Path) -> dict[str, Any]:
    """What a run was, what every `auto` came to, and its arithmetic: the same for every step."""
    config, effective = run_dir.load_config(directory), run_dir.read_json(directory / run_dir.EFFECTIVE)
    palm, causal = flops_per_token(config.model, config.seq_len)
    return {
        "effective": effective,
        "world_size": config.world.size,
        "micro_batch_size": effective["micro_batch_size"],
        "seq_len": config.seq_len,
        "total_batch_size": config.batch.total_batch_size,
        "parameters": count_parameters(config.model),
        "flops_per_token_palm": palm,
        "flops_per_token_causal": causal,
    }


def apart(call: Callable[..., Any], *args: Any) -> Any:
    """`call(*args)` in a process of its own: what a GPU's allocator keeps there no workload goes without."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args).result()


def ceilings(directory: Path) -> dict[str, Any]:
    """What the device does at best at the shapes of a run's forward pass, with the run's own settings."""
    import torch

    from gptexp.ceilings import attention_ms, gemm_rates
    from gptexp.effective import Effective, apply

    config = run_dir.load_config(directory)
    effective = Effective(**run_dir.read_json(directory / run_dir.EFFECTIVE))
    apply(effective)
    device, dtype = torch.device(effective.device), getattr(torch, effective.dtype)
    batch, t = effective.micro_batch_size, config.seq_len
    return {
        "gemm_flops_per_s": gemm_rates(config.model, batch * t, device, dtype),
        "attention_ms": attention_ms(config.model, batch, t, device, dtype),
    }


def measure(name: str, workload: Workload, extra: list[str], out: Path) -> dict[str, Any]:
    """One row of the result, or the `error` that kept the workload from running: it may need more than there is."""
    try:
        return _measured(name, workload, extra, out)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return {"meaning": workload.meaning, "error": str(error)}


def _measured(name: str, workload: Workload, extra: list[str], out: Path) -> dict[str, Any]:
    result = {"meaning": workload.meaning, **run_workload(name, workload, extra, out)}
    if result["world_size"] == 1:  # ranks that share a CPU share its ceilings
        result |= apart(ceilings, out / name)
        done_per_s = result["flops_per_token_palm"] * result["perf/tokens_per_s"]
        result["gemm_share"] = done_per_s / result["gemm_flops_per_s"]["model"]
    return result


def show(results: dict[str, dict[str, Any]], bandwidth: float) -> None:
    """The tables: what the machine can do, what a step gets of it, and where its time goes."""
    from rich.console import Console
    from rich.table import Table

    from gptexp.attention import KERNELS
    from gptexp.ceilings import LAYERS
    from gptexp.phases import PHASES

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", box=None, pad_edge=False)
        made.add_column("workload")
        for column in columns:
            made.add_column(column, justify="right")
        return made

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    speed = table(
        "Speed",
        "tokens/s",
        "ms/step",
        "quartiles",
        "MFU palm",
        "causal",
        "of GEMM rate",
        "GiB",
        "1st step cold",
        "warm",
    )
    parts = table("Milliseconds of a step", *PHASES, "reduce*")
    limits = table("At best: GFLOP/s of matrix products, ms of one layer's attention", *LAYERS, *KERNELS)
    for name, r in results.items():
        low, high = r["step_ms_quartiles"]
        speed.add_row(
            name, f"{r['perf/tokens_per_s']:,.0f}", f"{r['perf/step_ms']:,.1f}", f"{low:,.1f}-{high:,.1f}",
            percent(r.get("perf/mfu_palm")), percent(r.get("perf/mfu_causal")), percent(r.get("gemm_share")),
            f"{r['perf/peak_mem_gib']:.2f}", f"{r['cold_s']:.1f} s", f"{r['warm_s']:.1f} s",
        )  # fmt: skip
        parts.add_row(name, *(f"{r[f'perf/{phase}_ms']:,.1f}" for phase in (*PHASES, "reduce")))
        if "gemm_flops_per_s" in r:
            attention = (r["attention_ms"][kernel] for kernel in KERNELS)
            limits.add_row(
                name,
                *(f"{r['gemm_flops_per_s'][layer] / 1e9:,.0f}" for layer in LAYERS),
                *("-" if ms is None else f"{ms:,.2f}" for ms in attention),
            )
    console = Console(highlight=False, width=max(Console().width, WIDTH))  # narrower would cut the figures
    first = next(iter(results.values()))["effective"]
    console.print(f"{first['device_name']}, {first['threads_per_rank']} threads; copies {bandwidth / 1e9:,.1f} GB/s\n")
    for made in (speed, parts, limits):
        console.print(made)
        console.print()
    console.print("* part of backward")


def main(argv: list[str] | None = None) -> int:
    """`gptexp bench [WORKLOAD …] [key=value …]`: this machine's speed, and where a step's time goes."""
    parser = argparse.ArgumentParser(prog="gptexp bench", description=main.__doc__)
    parser.add_argument("what", nargs="*", metavar="WORKLOAD|key=value", help="default: all; overrides go to each")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: outputs/bench/<date and time>")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    args = parser.parse_intermixed_args(argv)
    overrides = [text for text in args.what if "=" in text]
    names = [text for text in args.what if "=" not in text]

    from gptexp.compose import compose
    from gptexp.data.prepare import prepare
    from gptexp.distributed import Rank, pick_device

    device = pick_device(args.device, Rank())
    known = workloads(device.type)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{unknown[0]}: no such workload on {device.type}; there are {', '.join(known)}")
    chosen = {name: known[name] for name in names or known}
    overrides.insert(0, f"train.device={device.type}")
    for workload in chosen.values():  # wrong overrides are told now, and no clock runs while text is tokenised
        prepare(compose([*workload.overrides, *overrides]).data)
    out: Path = (args.out or Path("outputs/bench") / datetime.now().strftime("%Y-%m-%d-%H-%M-%S")).absolute()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: not empty; name a new directory")
    out.mkdir(parents=True, exist_ok=True)

    from gptexp.ceilings import copy_bandwidth

    result: dict[str, Any] = {"versions": versions(), "git_commit": git_commit(), "workloads": {}}
    result["copy_bytes_per_s"] = apart(copy_bandwidth, device)
    for name, workload in chosen.items():
        print(f"{name}: {workload.meaning} …", file=sys.stderr, flush=True)
        result["workloads"][name] = measure(name, workload, overrides, out)
        run_dir.write_json(out / "bench.json", result)  # after each: what is measured is kept
    measured = {name: row for name, row in result["workloads"].items() if "error" not in row}
    if args.json:
        print(json.dumps(result, indent=1))
    elif measured:
        show(measured, result["copy_bytes_per_s"])
        print(f"\n{out}/bench.json")
    return 0 if measured else EXIT_FAILED


if __name__ == "__main__":
    from gptexp.cli import run_verb

    run_verb(main)
