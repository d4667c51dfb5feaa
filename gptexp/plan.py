"""`gptexp plan [overrides]`: what a run, or with -m each cell of a sweep, would be on this machine."""

import argparse
import heapq
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gptexp import flops
from gptexp.batch import BatchPlan, count_val_windows, count_windows, interval_tokens, plan_batch, run_length
from gptexp.errors import ConfigError, UserError, first_line
from gptexp.schedule import resolve_schedule

if TYPE_CHECKING:
    from gptexp.config import Config
    from gptexp.effective import Effective
    from gptexp.memory import Memory
    from gptexp.sweep.cells import Draft


def plan(cfg: "Config", earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """The arithmetic of a run, and what every `auto` would come to; `epochs` is None until its corpus is tokenised.

    `earlier`: what another cell of the sweep would decide. Raises `ConfigError` for what this machine hasn't.
    """
    t, world_size, total = cfg.seq_len, cfg.world.size or 1, cfg.batch.total_batch_size
    effective, memory = _on_this_machine(cfg, world_size, earlier)
    batch = plan_batch(total, effective.micro_batch_size, t, world_size)
    steps, run_tokens = run_length(cfg.train.max_tokens, cfg.train.max_steps, total)
    schedule = resolve_schedule(cfg, run_tokens)
    palm, causal = flops.flops_per_token(cfg.model, t)
    corpus_tokens = _prepared_tokens(cfg)
    return {
        "parameters": flops.count_parameters(cfg.model),
        "memory_bytes": {**asdict(memory), "peak": memory.peak},
        "tokens": steps * total,
        "steps": steps,
        "total_batch_size": total,
        "micro_batch_size": batch.micro_batch_size,
        "seq_len": t,
        "world_size": world_size,
        "grad_accum_steps": batch.grad_accum_steps,
        "corpus_tokens": corpus_tokens,
        "epochs": steps * total / corpus_tokens if corpus_tokens else None,
        "flops_palm": palm * steps * total,
        "flops_causal": causal * steps * total,
        "lr": cfg.optim.lr,
        "warmup_tokens": schedule.warmup_tokens,
        "decay_tokens": schedule.decay_tokens,
        "eval_every_tokens": interval_tokens(
            cfg.train.eval_every, cfg.train.eval_every_tokens, run_tokens, total
        ),
        "save_every_tokens": interval_tokens(
            cfg.train.save_every, cfg.train.save_every_tokens, run_tokens, total
        ),
        "effective": effective.to_dict(),
    }  # fmt: skip


def plan_sweep(drafts: "Sequence[Draft]") -> list[dict[str, Any]]:
    """For each cell its swept `values`, and its `plan` or the `problems` that make it illegal."""
    cells: list[dict[str, Any]] = []
    earlier = None
    for draft in drafts:
        cell: dict[str, Any] = {"values": draft.values, "problems": draft.problems, "plan": None}
        if draft.config is not None:
            try:
                cell["plan"] = plan(draft.config, earlier)
                earlier = earlier or cell["plan"]["effective"]
            except ConfigError as error:
                cell["problems"] = error.problems
        cells.append(cell)
    return cells


def add_times(runs: "Sequence[tuple[Config, dict[str, Any]]]") -> None:
    """Give every plan its `time`, from a few real steps of one run for all that differ in nothing but their length."""
    from gptexp.calibrate import pace, sample
    from gptexp.config import memory_key

    alike: dict[str, list[tuple[Config, dict[str, Any], BatchPlan]]] = {}
    for cfg, planned in runs:
        batch = plan_batch(
            cfg.batch.total_batch_size, planned["micro_batch_size"], planned["seq_len"], planned["world_size"]
        )
        one = replace(cfg.batch, total_batch_size=1, micro_batch_size=planned["micro_batch_size"])
        alike.setdefault(memory_key(replace(cfg, batch=one)), []).append((cfg, planned, batch))
    for members in alike.values():
        cfg, planned, batch = max(members, key=lambda member: member[2].grad_accum_steps)
        try:
            seen = sample(cfg, batch, planned["effective"])
        except UserError as error:
            print(f"gptexp: warning: no time, {first_line(error)}", file=sys.stderr)
            continue
        for cfg, planned, batch in members:
            planned["time"] = asdict(pace(seen, cfg, batch))


def _on_this_machine(cfg: "Config", world_size: int, earlier: dict[str, Any] | None) -> "tuple[Effective, Memory]":
    """What a run here would decide. A GPU that is not here is planned for all the same."""
    import torch

    from gptexp.distributed import Rank, pick_device
    from gptexp.effective import estimate, resolve

    wanted = cfg.train.device
    device = torch.device("cuda") if wanted == "cuda" else pick_device(wanted, Rank())
    local = min(world_size, torch.cuda.device_count() or world_size) if device.type == "cuda" else world_size
    effective = resolve(cfg, device, Rank(0, world_size, 0, local), earlier)
    return effective, estimate(cfg, effective, world_size)


def _prepared_tokens(cfg: "Config") -> int | None:
    """Training tokens of an epoch, if the corpus is in the cache."""
    from gptexp.data.corpora import SHAKESPEARE_FILE
    from gptexp.data.prepare import downloads_dir, find_corpus, tokens_dir
    from gptexp.data.shards import MANIFEST

    if cfg.data.name == "shakespeare" and not (downloads_dir(cfg.data) / SHAKESPEARE_FILE).exists():
        return None
    manifest = tokens_dir(find_corpus(cfg.data), cfg.data) / MANIFEST
    if not manifest.exists():
        return None
    tokens: int = json.loads(manifest.read_text())["tokens"]
    windows = count_windows(min(tokens, cfg.data.max_tokens or tokens), cfg.seq_len)
    held_out = 0 if cfg.data.val_path else count_val_windows(cfg.data.val_tokens, cfg.seq_len)
    return max(0, windows - held_out) * cfg.seq_len


def show(p: dict[str, Any]) -> None:
    """Print a plan, a line a subject."""
    from gptexp.effective import Effective

    epochs = f"{p['epochs']:.2f} of {p['corpus_tokens']:,} tokens" if p["epochs"] else "unknown; see `gptexp prepare`"
    for name, value in (
        ("parameters", f"{p['parameters']:,}"),
        ("memory", _memory_line(p["memory_bytes"])),
        ("tokens", f"{p['tokens']:,} in {p['steps']:,} steps of {p['total_batch_size']:,}"),
        (
            "batch",
            f"{p['micro_batch_size']} sequences × {p['seq_len']} tokens × {p['world_size']} ranks × "
            f"{p['grad_accum_steps']} micro-steps",
        ),
        ("epochs", epochs),
        ("FLOPs", f"{p['flops_palm']:.4g} (PaLM's count), {p['flops_causal']:.4g} (causal)"),
        (
            "learning rate",
            f"{p['lr']:g}, warm-up over {p['warmup_tokens']:,} tokens, decay until {p['decay_tokens']:,}",
        ),
        ("validation", f"every {p['eval_every_tokens']:,} tokens" if p["eval_every_tokens"] else "at the end"),
        ("checkpoint", f"every {p['save_every_tokens']:,} tokens" if p["save_every_tokens"] else "at the end"),
        ("device", p["effective"]["device_name"]),
        *Effective(**p["effective"]).described(),
        ("time", _time_line(p["time"]) if "time" in p else "see --time"),
    ):
        print(f"{name:<15}{value}")


def _memory_line(memory: dict[str, int]) -> str:
    gib = {part: size / 2**30 for part, size in memory.items()}
    state = gib["weights"] + gib["optimizer"] + gib["gradients"]
    return (
        f"about {gib['peak']:.2f} GiB on each rank: {state:.2f} weights, optimizer state and gradients, "
        f"{gib['activations']:.2f} activations, {gib['loss']:.2f} loss"
        + (f", {gib['fragmentation']:.2f} fragmentation" if gib["fragmentation"] else "")
    )


def _time_line(time_s: dict[str, float]) -> str:
    return (
        f"about {timedelta(seconds=round(time_s['total_s']))} ({time_s['step_s']:.3g} s a step, "
        f"{time_s['validation_s']:.3g} s a validation, {time_s['start_s']:.1f} s to start)"
    )


def show_sweep(cells: Sequence[dict[str, Any]], of: int, at_once: int) -> None:
    """Print the grid, a line a cell, and what it comes to in all: of `of` cells, `at_once` of them side by side."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    keys = list(cells[0]["values"])
    timed = any(cell["plan"] and "time" in cell["plan"] for cell in cells)
    said = [*(key.rpartition(".")[2] for key in keys), "steps", "micro-steps", "epochs", "GiB a rank"]
    for column in [*said, "time"] if timed else said:
        table.add_column(column, justify="right")
    for cell in cells:
        p, values = cell["plan"], [cell["values"][key] for key in keys]
        if p is None:
            table.add_row(*map(Text, values), "illegal")
            continue
        row = [
            f"{p['steps']:,}",
            f"{p['grad_accum_steps']} × {p['micro_batch_size']} × {p['seq_len']}",
            f"{p['epochs']:.2f}" if p["epochs"] else "?",
            f"{p['memory_bytes']['peak'] / 2**30:.2f}",
        ]
        if timed:
            row.append(str(timedelta(seconds=round(p["time"]["total_s"]))) if "time" in p else "?")
        table.add_row(*map(Text, [*values, *row]))
    Console().print(table)
    legal = [cell["plan"] for cell in cells if cell["plan"]]
    if not legal:
        return
    share = of / len(cells)  # Optuna's cells are not known yet, only what they are chosen from
    tokens = round(sum(p["tokens"] for p in legal) * share)
    side_by_side = f", {at_once} at once" if at_once > 1 else ""
    chosen = "; chosen by Optuna, from values as in these rows" if of != len(cells) else ""
    print(f"{of} cells, {tokens:,} tokens in all{side_by_side}{chosen}")
    first = legal[0]
    print(f"{'device':<15}{first['effective']['device_name']}")
    if timed:
        seconds = share * makespan([p["time"]["total_s"] for p in legal if "time" in p], at_once)
        more = "" if all("time" in p for p in legal) else ", and those marked ?"
        print(f"{'time':<15}about {timedelta(seconds=round(seconds))}{more}")
    else:
        print(f"{'time':<15}see --time")


def makespan(seconds: Sequence[float], at_once: int) -> float:
    """When the last is done if each begins as soon as one of `at_once` places is free, in this order."""
    ends = [0.0] * at_once
    for duration in seconds:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


def main(argv: list[str] | None = None) -> None:
    """Say what a run, or a sweep, would be: length, batch, memory, every `auto`, with --time how long."""
    parser = argparse.ArgumentParser(prog="gptexp plan", description=main.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for gptexp train")
    parser.add_argument("-m", "--multirun", action="store_true", help="plan every cell of a sweep")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--time", action="store_true", help="train a few steps to say how long it would take")
    parser.add_argument("--config-dir", metavar="DIR", help="your own YAML files")
    args = parser.parse_intermixed_args(argv)

    from gptexp.compose import compose, compose_sweep, is_multirun

    if not (args.multirun or is_multirun(args.overrides)):
        cfg = compose(args.overrides, args.config_dir)
        planned = plan(cfg)
        if args.time:
            add_times([(cfg, planned)])
        print(json.dumps(planned, indent=1)) if args.json else show(planned)
        return

    from gptexp.distributed import AT_ONCE
    from gptexp.sweep.cells import confounds, refuse_illegal

    grid = compose_sweep(args.overrides, args.config_dir)
    if not grid.on_gpus:
        os.environ[AT_ONCE] = str(grid.at_once)  # cells that run side by side share the cores
    cells = plan_sweep(grid.drafts)
    illegal = [(draft.title, cell["problems"]) for draft, cell in zip(grid.drafts, cells, strict=True)]
    if args.time and not any(problems for _, problems in illegal):
        add_times([(d.config, c["plan"]) for d, c in zip(grid.drafts, cells, strict=True) if d.config is not None])
    if args.json:
        print(json.dumps({"cells": cells, "of": grid.of, "at_once": grid.at_once}, indent=1))
    else:
        show_sweep(cells, grid.of, grid.at_once)
    for line in confounds([draft.config for draft in grid.drafts if draft.config is not None]):
        print(f"gptexp: warning: {line}", file=sys.stderr)
    refuse_illegal(illegal)


if __name__ == "__main__":
    from gptexp.cli import run_verb

    run_verb(main)
