"""`gptexp plan`: tokens, memory, resolved `auto` values and time of a run, or of each cell of a sweep."""

import heapq
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptexp.command.prediction import (
    NOTHING,
    Asked,
    computing_here,
    computing_on,
    critical_of,
    has_ranks_here,
    lines,
    network_of,
    predict,
)
from gptexp.config.branching import run_and_step
from gptexp.config.fitted import fitted_warnings, other_text
from gptexp.config.run_plan import RunPlan, plan_run
from gptexp.config.scaling import lr_in_words, scaled_optim
from gptexp.config.schedule import asked_of_warmup, least_warmup_steps
from gptexp.config.schema import AUTO, Config, memory_key
from gptexp.config.vocabulary import ASSUMED_CHARACTERS, with_vocab_size
from gptexp.data.prepare import count_ids, has_own_validation, prepared_dir, tokens_hash
from gptexp.data.split import split
from gptexp.data.stream import TokenStream
from gptexp.distributed.ranks import AT_ONCE, Rank
from gptexp.machine.device import Device, pick_device
from gptexp.machine.effective import Effective, load_effective
from gptexp.machine.gpu_memory import excess, memory_by_sharding
from gptexp.machine.resolve import estimate, resolve
from gptexp.model.flops import count_parameters, flops_per_token
from gptexp.model.gpus import UNKNOWN_GPU, Gpu
from gptexp.process.errors import ConfigError, DataError, UserError, first_line
from gptexp.process.terminal import terminal_width, warn
from gptexp.process.words import counted, duration, rounded
from gptexp.reporting.listings.terminal_table import print_table
from gptexp.run.calibrate import pace, sample
from gptexp.sweep.cells import Draft, confounds, refuse_illegal
from gptexp.sweep.grid import Grid

MOST_EPOCHS = 4  # up to which repeated text is nearly as good as new text (Muennighoff et al. 2023, arXiv 2305.16264)
ASSUMED_MFU = 0.4  # Llama 3 trained at 38 to 43% (arXiv 2407.21783, table 4)
SCALED = "effective lr"
# Title -> the text about the plan of a cell, which is None if the cell is illegal.
CELL_COLUMNS: dict[str, Callable[[dict[str, Any] | None], str]] = {
    "steps": lambda p: f"{p['steps']:,}" if p else "illegal",
    "micro-steps": lambda p: f"{p['grad_accum_steps']} × {p['micro_batch_size']} × {p['seq_len']}" if p else "",
    SCALED: lambda p: f"{p['effective_lr']:.4g}" if p else "",
    "epochs": lambda p: "" if p is None else rounded(p["epochs"]) if p["epochs"] else "?",
    "GiB per rank": lambda p: f"{p['memory_bytes']['peak'] / 2**30:.2f}" if p else "",
    "time": lambda p: "" if p is None else duration(p["time"]["total_s"]) if "time" in p else "?",
}
LEAST_NEEDED = ("epochs", "micro-steps", "GiB per rank")  # columns that a narrow terminal leaves out first
ASSUMPTION = f"not measured, at an assumed MFU of {ASSUMED_MFU:.0%} (arXiv 2407.21783 reports 38 to 43%)"


def print_plan(cfg: Config, with_time: bool, as_json: bool, asked: Asked = NOTHING) -> None:
    """Print the plan of a run, on a GPU if one is asked for, else on this machine."""
    planned = plan(cfg, gpu=asked.gpu)
    if critical := critical_of(cfg, planned, asked.critical):
        planned["critical"] = critical
        if critical["other_keys"]:
            planned["warnings"].append(
                f"{critical['from']} has measured its {critical['what']} with other {', '.join(critical['other_keys'])}"
            )
    if with_time and has_ranks_here(planned):
        add_times([(cfg, planned)])
    if planned["world_size"] > 1:
        predict_on_gpu(cfg, planned, asked)
        if with_time:
            predict_here(cfg, planned, asked)
        elif asked.gpu is None:
            planned["unpredicted"] = "add --time to predict the waiting, or device=GPU for GPUs that are not here"
    print(json.dumps(planned, indent=1)) if as_json else show(planned)
    for line in planned["warnings"]:
        warn(f"warning: {line}")


def predict_on_gpu(cfg: Config, planned: dict[str, Any], asked: Asked) -> None:
    """Predict the steps of a plan for a GPU, if one is asked for."""
    if asked.gpu is not None and (computing := computing_on(cfg, planned)) is not None:
        predict(cfg, planned, asked, computing, partial(plan, gpu=asked.gpu))


def predict_here(cfg: Config, planned: dict[str, Any], asked: Asked) -> None:
    """Predict the steps of a plan from those of one rank on this machine, unless its network is unknown."""
    if isinstance(unknown := network_of(cfg, asked, planned["world_size"]), str):
        planned["unpredicted"] = unknown
        return
    try:
        predict(cfg, planned, asked, computing_here(cfg, planned), plan)
    except UserError as error:
        warn(f"warning: the steps of other ranks cannot be predicted: {first_line(error)}")


def print_sweep(grid: Grid, with_time: bool, as_json: bool, asked: Asked = NOTHING) -> None:
    """Print the plan of a sweep, as `print_plan`. Raises `ConfigError` for illegal cells, after printing."""
    if not grid.on_gpus:
        os.environ[AT_ONCE] = str(grid.at_once)  # cells that run at once share the cores
    cells = plan_sweep(grid.drafts, asked.gpu)
    for draft, cell in zip(grid.drafts, cells, strict=True):
        if draft.config is not None and cell["plan"] and cell["plan"]["world_size"] > 1:
            predict_on_gpu(draft.config, cell["plan"], asked)
    problems = [(draft.title, cell["problems"]) for draft, cell in zip(grid.drafts, cells, strict=True)]
    if with_time and not any(lines for _, lines in problems):
        add_times([(d.config, c["plan"]) for d, c in zip(grid.drafts, cells, strict=True) if d.config is not None])
    if as_json:
        print(json.dumps({"cells": cells, "of": grid.of, "at_once": grid.at_once}, indent=1))
    else:
        show_sweep(cells, grid.of, grid.at_once)
    lines = [line for cell in cells if cell["plan"] for line in cell["plan"]["warnings"]]
    lines += confounds([draft.config for draft in grid.drafts if draft.config is not None])
    for line in dict.fromkeys(lines):
        warn(f"warning: {line}")
    refuse_illegal(problems)


def plan(cfg: Config, earlier: Effective | None = None, gpu: Gpu | None = None) -> dict[str, Any]:
    """Return the arithmetic of a run and its resolved `auto` values. `epochs` is None until the corpus is tokenised.

    `earlier` are the values of an earlier cell of the sweep. On a `gpu`, which this machine need not have, it adds the
    figures that it takes for granted and the `time` that follows from them. Raises `ConfigError` for a device that is
    missing.
    """
    world_size = cfg.world.size or 1
    if gpu is not None and cfg.train.device not in ("auto", "cuda"):
        raise ConfigError(f"train.device={cfg.train.device}: the plan is for the GPU {gpu.name}; leave out one of them")
    device: Device = gpu or UNKNOWN_GPU
    if gpu is None and (cfg.train.device != "cuda" or torch.cuda.is_available()):
        device = pick_device(cfg.train.device, Rank())
    local = world_size
    if isinstance(device, torch.device) and device.type == "cuda":
        local = min(world_size, torch.cuda.device_count())
    n_vocab = count_ids(cfg.data)
    if cfg.branch_from is not None:
        earlier = load_effective(Path(run_and_step(cfg.branch_from)[0]))
    rank = Rank(0, world_size, 0, local)

    def resolved(of: Config) -> Effective:
        return resolve(of, device, rank, earlier, n_vocab or ASSUMED_CHARACTERS)

    effective = resolved(cfg)
    unknown = None if n_vocab or cfg.model.vocab_size != AUTO else cfg.data.tokenizer
    if unknown is not None:
        assumed = replace(effective.vocab_size, reason="an assumption, until the corpus is tokenised")
        effective = replace(effective, vocab_size=assumed)
    cfg = with_vocab_size(cfg, effective.vocab_size.value)
    memory, optim = estimate(cfg, effective, world_size), scaled_optim(cfg)
    p = plan_run(cfg, effective.micro_batch_size.value)
    palm, causal = flops_per_token(cfg.model, cfg.seq_len)
    corpus_tokens, about_text = _prepared_tokens(cfg)
    planned = {
        "parameters": count_parameters(cfg.model),
        "memory_bytes": {**asdict(memory), "peak": memory.peak},
        "memory_by_sharding": memory_by_sharding(cfg, effective, world_size, resolved) if world_size > 1 else {},
        "tokens": p.tokens,
        "steps": p.steps,
        "ramp_steps": p.step_sizes.ramp_steps,
        "ramp": p.ramp_in_words() if p.step_sizes.ramp_tokens else None,
        "first_step": p.first_step,
        "first_tokens": p.first_tokens,
        **asdict(p.batch),
        "corpus_tokens": corpus_tokens,
        "epochs": p.tokens / corpus_tokens if corpus_tokens else None,
        "flops_palm": palm * p.tokens,
        "flops_causal": causal * p.tokens,
        "lr": cfg.optim.lr,
        "effective_lr": optim.lr,
        "warmup_tokens": p.schedule.warmup_tokens,
        "warmup_steps": p.step_sizes.steps_to(p.schedule.warmup_tokens),
        "least_warmup_steps": least_warmup_steps(optim),
        "decay_tokens": p.schedule.decay_tokens,
        "eval_every_tokens": p.eval_every_tokens,
        "save_every_tokens": p.save_every_tokens,
        "sharpness_measurements": p.times(sharpness) if (sharpness := cfg.train.sharpness_every_tokens) else 0,
        "effective": effective.to_dict(),
    }
    warnings = [*about_text, *_warnings(planned, unknown), *fitted_warnings(cfg)]
    if gpu is not None:
        planned |= _assumed(gpu, planned, effective.dtype.value)
        if gpu.memory_bytes is not None and memory.peak > gpu.memory_bytes:
            warnings.append(excess(cfg, memory.peak, gpu, planned["memory_by_sharding"]))
    return {**planned, "warnings": warnings}


def _assumed(gpu: Gpu, planned: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the published figures of a GPU, and the time of a run at the assumed MFU if its dtype has a peak."""
    peak = gpu.peak_flops if dtype == "bfloat16" else None
    figures = {"memory_bytes": gpu.memory_bytes, "peak_flops_per_s": peak, "mfu": ASSUMED_MFU}
    if peak is None:
        return {"assumed": figures}
    whole_s = planned["flops_palm"] / (peak * planned["world_size"] * ASSUMED_MFU)
    step_s = whole_s * planned["total_batch_size"] / planned["tokens"]
    total_s = whole_s * (1 - planned["first_tokens"] / planned["tokens"])
    return {"assumed": figures, "time": {"step_s": step_s, "total_s": total_s}}


def _warnings(planned: dict[str, Any], unknown: str | None) -> Iterator[str]:
    """Yield the warnings of a plan. `unknown` is the tokenizer whose vocabulary follows from an unread corpus."""
    if unknown is not None:
        yield (
            f"data.tokenizer={unknown}: the number of ids is unknown until the corpus is tokenised; the plan is for "
            f"{ASSUMED_CHARACTERS}; run gptexp prepare with the same arguments"
        )
    if planned["epochs"] and planned["epochs"] > MOST_EPOCHS:
        yield (
            f"{rounded(planned['epochs'])} epochs: text that is read more than {MOST_EPOCHS} times is worth clearly "
            "less than new text (arXiv 2305.16264); give more text, or train for fewer tokens"
        )


def plan_sweep(drafts: Sequence[Draft], gpu: Gpu | None = None) -> list[dict[str, Any]]:
    """Return the swept `values` of each cell, and its `plan`, or the `problems` that make it illegal."""
    cells: list[dict[str, Any]] = []
    earlier = None
    for draft in drafts:
        cell: dict[str, Any] = {"values": draft.values, "problems": draft.problems, "plan": None}
        if draft.config is not None:
            try:
                cell["plan"] = plan(draft.config, earlier, gpu)
                earlier = earlier or Effective.from_dict(cell["plan"]["effective"])
            except ConfigError as error:
                cell["problems"] = error.problems
        cells.append(cell)
    return cells


def add_times(runs: Sequence[tuple[Config, dict[str, Any]]]) -> None:
    """Add `time` to every plan. Times a few steps of one run for all runs that differ only in batch size or length."""
    alike: dict[str, list[tuple[Config, dict[str, Any], RunPlan]]] = {}
    for cfg, planned in runs:
        size = planned["micro_batch_size"]
        one = replace(cfg, batch=cfg.batch.of_one_size(1, size))
        alike.setdefault(memory_key(one), []).append((cfg, planned, plan_run(cfg, size)))
    for members in alike.values():
        cfg, planned, run = max(members, key=lambda member: member[2].batch.grad_accum_steps)
        try:
            seen = sample(cfg, run, Effective.from_dict(planned["effective"]))
        except UserError as error:
            warn(f"warning: the time cannot be estimated: {first_line(error)}")
            continue
        for cfg, planned, run in members:
            planned["time"] = asdict(pace(seen, cfg, run))


def _prepared_tokens(cfg: Config) -> tuple[int | None, list[str]]:
    """Return the training tokens of an epoch, None if the corpus is not in the cache, and warnings about the text."""
    directory = prepared_dir(cfg.data)
    if directory is None:
        return None, []
    stream = TokenStream(directory, cfg.data.max_tokens)
    try:
        own = has_own_validation(cfg.data)
        data = replace(cfg.data, val_tokens=0, val_ratio=None) if own else cfg.data
        tokens = split(data, len(stream), cfg.seq_len, cfg.train.seed).order.n_train * cfg.seq_len
        return tokens, [] if own else other_text(cfg, tokens_hash(stream))
    except DataError as error:
        return 0, [str(error)]


def show(p: dict[str, Any]) -> None:
    """Print the plan of a run."""
    described = Effective.from_dict(p["effective"]).described()
    if "assumed" in p:  # the cores beside that GPU are unknown
        described = [(name, what) for name, what in described if name != "threads"]
    epochs = "unknown; run gptexp prepare"
    if p["corpus_tokens"] is not None:
        epochs = (
            f"{rounded(p['epochs'])} of {p['corpus_tokens']:,} tokens" if p["epochs"] else "the corpus is too short"
        )
    most = "up to " if p["ramp"] else ""
    branched = f", the first {counted(p['first_step'], 'step')} by the run of branch_from" if p["first_step"] else ""
    for name, value in (
        ("parameters", f"{p['parameters']:,}"),
        ("memory", _memory_line(p["memory_bytes"])),
        *([("by sharding", _sharding_line(p))] if p["memory_by_sharding"] else []),
        ("tokens", f"{p['tokens']:,} in {counted(p['steps'], 'step')} of {most}{p['total_batch_size']:,}{branched}"),
        *([("batch ramp", p["ramp"])] if p["ramp"] else []),
        (
            "batch",
            f"{counted(p['micro_batch_size'], 'sequence')} × {counted(p['seq_len'], 'token')} × "
            f"{counted(p['world_size'], 'rank')} × {counted(p['grad_accum_steps'], 'micro-step')}",
        ),
        ("epochs", epochs),
        ("FLOPs", f"{p['flops_palm']:.4g} (PaLM's count), {p['flops_causal']:.4g} (causal)"),
        (
            "learning rate",
            f"{lr_in_words(p['lr'], p['effective_lr'])}, warm-up over {counted(p['warmup_tokens'], 'token')} "
            f"({_warmup_steps(p)}), decay until {counted(p['decay_tokens'], 'token')}",
        ),
        ("validation", _every(p["eval_every_tokens"])),
        ("checkpoint", _every(p["save_every_tokens"])),
        ("device", _device_line(p)),
        *described,
        ("time", _time_line(p)),
        *lines(p),
    ):
        print(f"{name:<15}{value}")


def _warmup_steps(p: dict[str, Any]) -> str:
    return counted(p["warmup_steps"], "step") + asked_of_warmup(p["warmup_steps"], p["least_warmup_steps"])


def _every(tokens: int) -> str:
    return f"every {counted(tokens, 'token')}" if tokens else "at the end"


def _memory_line(memory: dict[str, int]) -> str:
    gib = {part: size / 2**30 for part, size in memory.items()}
    state = gib["weights"] + gib["average"] + gib["optimizer"] + gib["gradients"]
    parts = "weights, their average, optimizer state" if gib["average"] else "weights, optimizer state"
    return (
        f"about {gib['peak']:.2f} GiB on each rank: {state:.2f} {parts} and gradients, "
        + (f"{gib['gathered']:.2f} whole parameters, " if gib["gathered"] else "")
        + f"{gib['activations']:.2f} activations, {gib['loss']:.2f} loss"
        + (f", {gib['fragmentation']:.2f} fragmentation" if gib["fragmentation"] else "")
    )


def _sharding_line(p: dict[str, Any]) -> str:
    each = [f"{name} {size / 2**30:.2f} GiB" for name, size in p["memory_by_sharding"].items()]
    return f"{', '.join(each)} on each rank (world.sharding)"


def _device_line(p: dict[str, Any]) -> str:
    name = str(p["effective"]["device_name"])
    if "assumed" not in p:
        return name
    return f"{name} with {p['assumed']['memory_bytes'] / 1e9:.0f} GB, from its data sheet; nothing is measured"


def _time_line(p: dict[str, Any]) -> str:
    if "time" not in p:
        return "unknown: the published peak is that of bfloat16" if "assumed" in p else "unknown; add --time"
    time_s = p["time"]
    of = f" of {p['total_batch_size']:,} tokens" if p["ramp"] else ""
    total, step = f"about {duration(time_s['total_s'])}", f"{time_s['step_s']:.3g} s per step{of}"
    if "assumed" in p:
        peak = f"{p['assumed']['peak_flops_per_s'] / 1e12:,.0f} TFLOP/s"
        after = " after compilation" if p["effective"]["compile"] else ""
        return f"{total}{after} ({step}): {ASSUMPTION}; the peak is {peak} on each rank{_uncounted([p])}"
    if "start_s" not in time_s:
        return f"{total} ({step}), as predicted; without start and validation"
    parts = f"{step}, {time_s['validation_s']:.3g} s per validation, {time_s['start_s']:.1f} s to start"
    return f"{total} ({parts}){_uncounted([p])}"


def _uncounted(plans: Sequence[dict[str, Any]], scale: float = 1) -> str:
    """What the time of `plans` lacks: measurements of the sharpness, whose time is not known."""
    measurements = round(scale * sum(p["sharpness_measurements"] for p in plans))
    return f"; {counted(measurements, 'measurement')} of the sharpness not counted" if measurements else ""


def show_sweep(cells: Sequence[dict[str, Any]], total: int, at_once: int) -> None:
    """Print a line for each cell, and the totals of the sweep: `total` cells will run, `at_once` of them at a time."""
    timed = any(cell["plan"] and "time" in cell["plan"] for cell in cells)
    keys = dict.fromkeys(key for cell in cells for key in cell["values"])
    values = [(key.rpartition(".")[2], [cell["values"].get(key, "") for cell in cells]) for key in keys]
    longest, _ = max(values, key=lambda column: max(map(len, column[1])), default=("", []))
    described = [(title, [texts(cell["plan"]) for cell in cells]) for title, texts in CELL_COLUMNS.items()]
    legal = [cell["plan"] for cell in cells if cell["plan"]]
    scaled = any(p["effective_lr"] != p["lr"] for p in legal)
    needed = {"time": timed, SCALED: scaled}
    columns = [*values, *(column for column in described if needed.get(column[0], True))]
    print_table(columns, (longest,), (), LEAST_NEEDED, terminal_width())
    if not legal:
        return
    scale = total / len(cells)  # Optuna's cells are not chosen yet; these rows are examples
    tokens = round(sum(p["tokens"] - p["first_tokens"] for p in legal) * scale)
    side_by_side = f", {at_once} at once" if at_once > 1 else ""
    chosen = "; Optuna chooses their values, for example as in these rows" if total != len(cells) else ""
    print(f"{counted(total, 'cell')}, {tokens:,} tokens in all{side_by_side}{chosen}")
    print(f"{'device':<15}{_device_line(legal[0])}")
    if timed:
        seconds = scale * makespan([p["time"]["total_s"] for p in legal if "time" in p], at_once)
        more = "" if all("time" in p for p in legal) else ", plus the cells marked ?"
        assumption = f": {ASSUMPTION}" if "assumed" in legal[0] else ""
        print(f"{'time':<15}about {duration(seconds)}{more}{assumption}{_uncounted(legal, scale)}")
    else:
        print(f"{'time':<15}{_time_line(legal[0])}")


def makespan(seconds: Sequence[float], at_once: int) -> float:
    """Return the time at which the last job ends if `at_once` jobs run at a time, in the given order."""
    ends = [0.0] * at_once
    for needed in seconds:
        heapq.heapreplace(ends, ends[0] + needed)
    return max(ends)
