"""`gptexp bench`: the rates that this machine reaches, and the share of them that a training step uses.

Every workload is a real `gptexp train` in a new process, measured from its metrics. It runs twice with its own compile
cache, which gives the time to the first step with a cold cache and with a warm one.
"""

import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gptexp.config.compose import compose
from gptexp.config.metrics import Metric
from gptexp.config.overrides import quoted
from gptexp.data.prepare import prepare
from gptexp.distributed.ranks import Rank
from gptexp.machine.ceilings import attention_ms, copy_bandwidth, gemm_rates
from gptexp.machine.device import pick_device
from gptexp.machine.effective import apply, load_effective
from gptexp.model.flops import flops_per_token
from gptexp.model.kernels import KERNELS
from gptexp.model.shapes import count_parameters
from gptexp.process.errors import EXIT_FAILED, ConfigError, UserError
from gptexp.process.versions import git_commit, versions
from gptexp.run.observe import Observed, medians, observe
from gptexp.run.workloads import CPU_WORKLOADS, GPU_WORKLOADS, Workload
from gptexp.storage import run_dir
from gptexp.training.phases import PHASES

WARM_UP = 3  # steps before the measured ones
WIDTH = 140  # of the tables, in characters


def workloads(device: str) -> dict[str, Workload]:
    return GPU_WORKLOADS if device == "cuda" else CPU_WORKLOADS


def run_workload(name: str, workload: Workload, extra: list[str], out: Path) -> dict[str, Any]:
    """Train `workload` with a cold cache for one step, then with a warm cache until enough steps are measured."""
    with TemporaryDirectory(prefix="gptexp-compiled-", ignore_cleanup_errors=True) as cache:
        cold = run_until(workload, extra, out / f"{name}-cold", cache, steps=1)
        warm = run_until(workload, extra, out / name, cache, steps=WARM_UP + workload.steps)
    return {**counted(warm.steps), **described(out / name), "cold_s": cold.start_s, "warm_s": warm.start_s}


def run_until(workload: Workload, extra: list[str], directory: Path, cache: str, steps: int) -> Observed:
    """Train `workload` in `directory` for `steps` steps, with `cache` as its compile cache."""
    command = [
        sys.executable, "-Pm", "gptexp.train", "log=disabled", "log.progress=off", "data.val_tokens=0",
        "train.eval_every_tokens=0", "train.save_every_tokens=0", f"train.max_steps={steps + 10**6}",
        "schedule=constant", f"hydra.run.dir={quoted(str(directory))}", *workload.overrides, *extra,
    ]  # fmt: skip
    return observe(command, directory, steps, {"TORCHINDUCTOR_CACHE_DIR": cache})


def counted(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the steps after the warm-up, and the quartiles of the step time."""
    steps = events[WARM_UP:]
    low, _, high = statistics.quantiles((event[Metric.STEP_MS] for event in steps), n=4)
    return {**medians(steps), "steps": len(steps), "step_ms_quartiles": [low, high]}


def described(directory: Path) -> dict[str, Any]:
    """Return the shape of a run, its resolved `auto` values, and its FLOPs per token."""
    config, effective = run_dir.load_resolved(directory), run_dir.read_json(directory / run_dir.EFFECTIVE)
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
    """Return `call(*args)`, computed in a new process, so that its GPU memory is free again for the workloads."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args).result()


def ceilings(directory: Path) -> dict[str, Any]:
    """Measure the device's rates at the shapes of a run's forward pass, with the run's own settings."""
    config = run_dir.load_resolved(directory)
    effective = load_effective(directory)
    assert effective is not None
    apply(effective)
    device, dtype = torch.device(effective.device), getattr(torch, effective.dtype.value)
    batch, t = effective.micro_batch_size.value, config.seq_len
    return {
        "gemm_flops_per_s": gemm_rates(config.model, batch * t, device, dtype),
        "attention_ms": attention_ms(config.model, batch, t, device, dtype),
    }


def measure(name: str, workload: Workload, extra: list[str], out: Path) -> dict[str, Any]:
    """Return one row of the result, or the `error` of a workload that cannot run, for example for lack of memory."""
    try:
        return _measured(name, workload, extra, out)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return {"meaning": workload.meaning, "error": str(error)}


def _measured(name: str, workload: Workload, extra: list[str], out: Path) -> dict[str, Any]:
    result = {"meaning": workload.meaning, **run_workload(name, workload, extra, out)}
    if result["world_size"] == 1:  # several ranks on one CPU share its rates
        result |= apart(ceilings, out / name)
        flops_per_s = result["flops_per_token_palm"] * result[Metric.TOKENS_PER_S]
        result["gemm_share"] = flops_per_s / result["gemm_flops_per_s"]["model"]
    return result


def show(results: dict[str, dict[str, Any]], bandwidth: float) -> None:
    """Print the tables: speed, milliseconds of a step by phase, and the rates of the machine."""

    def table(title: str, *columns: str) -> Table:
        empty = Table("workload", title=title, title_justify="left", box=None, pad_edge=False)
        for column in columns:
            empty.add_column(column, justify="right")
        return empty

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    speed = table("Speed", "tokens/s", "ms/step", "quartiles", "MFU palm", "causal", "of GEMM rate", "GiB",
                  "1st step cold", "warm")  # fmt: skip
    parts = table("Milliseconds of a step", *map(_phase, PHASES), "reduce*")
    layers = dict.fromkeys(layer for r in results.values() for layer in r.get("gemm_flops_per_s", {}))
    limits = table("Highest rates: GFLOP/s of matrix products, ms of one layer's attention", *layers, *KERNELS)
    for name, r in results.items():
        low, high = r["step_ms_quartiles"]
        speed.add_row(
            name, f"{r[Metric.TOKENS_PER_S]:,.0f}", f"{r[Metric.STEP_MS]:,.1f}", f"{low:,.1f}-{high:,.1f}",
            percent(r.get(Metric.MFU_PALM)), percent(r.get(Metric.MFU_CAUSAL)), percent(r.get("gemm_share")),
            f"{r[Metric.PEAK_MEM_GIB]:.2f}", f"{r['cold_s']:.1f} s", f"{r['warm_s']:.1f} s",
        )  # fmt: skip
        parts.add_row(name, *(f"{r[phase]:,.1f}" for phase in (*PHASES, Metric.REDUCE_MS)))
        if "gemm_flops_per_s" in r:
            measured = r["gemm_flops_per_s"]
            rates = (f"{measured[layer] / 1e9:,.0f}" if layer in measured else "-" for layer in layers)
            times = ("-" if (ms := r["attention_ms"][kernel]) is None else f"{ms:,.2f}" for kernel in KERNELS)
            limits.add_row(name, *rates, *times)
    console = Console(highlight=False, width=max(Console().width, WIDTH))  # a narrower table would cut numbers
    first = next(iter(results.values()))["effective"]
    console.print(f"{first['device_name']}; threads: {first['threads_per_rank']}; copy: {bandwidth / 1e9:,.1f} GB/s\n")
    for each in (speed, parts, limits):
        console.print(each)
        console.print()
    console.print("* included in backward")


def _phase(metric: Metric) -> str:
    """The name of a phase of the step, as in `perf/forward_ms`."""
    return metric.partition("/")[2].removesuffix("_ms")


def choose(names: list[str], device: str) -> tuple[torch.device, dict[str, Workload]]:
    """The device, and the workloads `names` of it (all if empty). Raises `ConfigError`."""
    picked = pick_device(device, Rank())
    known = workloads(picked.type)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{unknown[0]}: no such workload on {picked.type}; workloads: {', '.join(known)}")
    return picked, {name: known[name] for name in names or known}


def bench(chosen: dict[str, Workload], overrides: list[str], device: torch.device, out: Path, as_json: bool) -> int:
    """Measure the workloads with `overrides`, and print the tables. Returns the exit code."""
    for workload in chosen.values():  # tokenise before anything is timed
        prepare(compose([*workload.overrides, *overrides]).data)
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"versions": versions(), "git_commit": git_commit(), "workloads": {}}
    result["copy_bytes_per_s"] = apart(copy_bandwidth, device)
    for name, workload in chosen.items():
        print(f"{name}: {workload.meaning} …", file=sys.stderr, flush=True)
        result["workloads"][name] = measure(name, workload, overrides, out)
        run_dir.write_json(out / "bench.json", result)  # each time, so that an interrupted benchmark keeps its results
    measured = {name: row for name, row in result["workloads"].items() if "error" not in row}
    if as_json:
        print(json.dumps(result, indent=1))
    elif measured:
        show(measured, result["copy_bytes_per_s"])
        print(f"\n{out}/bench.json")
    return 0 if measured else EXIT_FAILED
