"""The head of a page: what was run and how, how far it is, and its key figures."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from gptexp.config.blocks import in_words
from gptexp.config.metrics import Metric
from gptexp.config.parts import TARGET
from gptexp.config.paths import config_flags
from gptexp.config.schema import ModelConfig
from gptexp.config.spelling import as_typed
from gptexp.process.terminal import as_command, printable
from gptexp.process.words import counted, duration
from gptexp.reporting.listings.progress import Progress, by_status, not_started, time_left
from gptexp.reporting.listings.records import AXES, Run, scaled_keys, short_commit
from gptexp.reporting.statistics.analysis import Analysis, Arm
from gptexp.storage import reader, run_dir
from gptexp.storage.sweep_record import SweepRecord

MOST_LISTED = 5  # values
WEIGHTED = "in which one far from the others counts less"
SMALLEST_SHOWN = 5e-5  # nats


@dataclass(frozen=True)
class Tile:
    """A key figure."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Overview:
    """The head of a page. All texts are printable."""

    title: str
    facts: list[tuple[str, str]]  # label, value
    commands: list[str]  # that were issued, newest last
    tiles: list[Tile]
    share: float  # share of all training tokens that are done
    is_done: bool


def overview(
    directory: Path, analysis: Analysis, cells: Sequence[Progress], sweep: SweepRecord | None, goes_on: bool
) -> Overview:
    """The head of the page of the run or the sweep in `directory`. `goes_on`: see `is_going_on`."""
    run = analysis.runs[0]
    started = as_started(run.directory)
    choices = started.choices if started is not None else {}
    is_sweep = sweep is not None or len(analysis.runs) > 1
    varied = {key.partition(".")[0] for key in analysis.differing}
    same = [printable(choices[group]) for group in ("model", "data") if group in choices and group not in varied]
    what = " on ".join(same) or analysis.name
    planned = not_started(directory, analysis.runs, sweep)
    of_tokens = sum(cell.of_tokens for cell in cells)
    return Overview(
        title=f"{what}: {_axes(analysis, planned)}" if is_sweep else f"{what}, learning rate {run.lr:.3g}",
        facts=list(_facts(directory, analysis, planned)),
        commands=[as_command(given) for given in _commands(sweep, started)],
        tiles=_of_a_sweep(analysis, cells, goes_on) if is_sweep else _of_a_run(run, cells[0], goes_on),
        share=sum(cell.tokens for cell in cells) / of_tokens if of_tokens else 0.0,
        is_done=all(cell.status in run_dir.DONE for cell in cells),
    )


def _commands(sweep: SweepRecord | None, started: "Started | None") -> list[list[str]]:
    if sweep is not None:
        return sweep.commands
    return [started.arguments] if started is not None else []


@dataclass(frozen=True)
class Started:
    """How a run was started."""

    choices: dict[str, str]  # config group -> its option
    flags: list[str]  # --config-dir and --config-name, with their values
    of_hydra: list[str]  # overrides of Hydra's own keys
    overrides: list[str]

    @property
    def arguments(self) -> list[str]:
        return ["train", *self.flags, *self.of_hydra, *self.overrides]


def as_started(directory: Path) -> Started | None:
    """The start of a run from Hydra's own record; None if it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        hydra = reader.read_yaml(directory / run_dir.HYDRA / "hydra.yaml")["hydra"]
        choices = {str(group): str(option) for group, option in hydra["runtime"]["choices"].items()}
        of_hydra, overrides = ([str(text) for text in hydra["overrides"][part]] for part in ("hydra", "task"))
        return Started(choices, list(map(str, config_flags(hydra))), of_hydra, as_typed(overrides))
    return None


def link_to(name: str) -> str:
    """The address of the page of a run or a sweep, relative to the page above it. The name need not be UTF-8."""
    return f"{quote(os.fsencode(name))}/"


def _axes(analysis: Analysis, planned: Sequence[Run]) -> str:
    """The swept keys, for example 'learning rate × batch size'."""
    cells = [*(run for run in analysis.runs if run.config), *planned]
    swept = [name for field, name in AXES.values() if len({getattr(run, field) for run in cells}) > 1]
    return " × ".join([*swept, *map(printable, analysis.named)]) or counted(len(analysis.runs), "run")


def _facts(directory: Path, analysis: Analysis, planned: Sequence[Run]) -> Iterator[tuple[str, str]]:
    yield "Directory", printable(str(directory))
    readable = [run for run in analysis.runs if run.config]
    if not readable:
        return
    yield "Model", _each(map(_model, readable), "models")
    yield (
        "Data",
        _each((f"{r.config['data.name']}, tokenizer {r.config['data.tokenizer']}" for r in readable), "corpora"),
    )
    if analysis.objective != Metric.VAL_LOSS:
        yield "Loss", printable(analysis.objective)
    cells = [*readable, *planned]
    yield "Batch size", f"{_listed(sorted({run.batch for run in cells}), ',')} tokens a step"
    if ramps := [run.config for run in readable if run.config.get("batch.ramp_tokens")]:
        over = (f"from {c['batch.ramp_from_tokens']:,} over {c['batch.ramp_tokens']:,} tokens" for c in ramps)
        yield "Batch ramp", _each(over, "ramps")
    yield "Learning rate", _listed(sorted({run.lr for run in cells}), ".3g")
    yield from _as_scaled(analysis.arms)
    yield "Length", f"{_listed(sorted({run.of_tokens for run in readable}), ',')} tokens"
    if branches := [f"{run.branch}, after {run.first_tokens:,} tokens" for run in readable if run.branch]:
        yield "Branched from", _each(branches, "checkpoints")
    if devices := [run for run in readable if "device" in run.summary]:
        on = (f"{run.summary['device']}, {counted(run.summary.get('world_size', 1), 'rank')}" for run in devices)
        yield "Machine", _each(on, "machines")
    if started := [run.started for run in readable if run.started is not None]:
        yield "Started", min(started).strftime("%Y-%m-%d %H:%M")
    if wall := [run.summary["wall_s"] for run in readable if run.summary.get("wall_s")]:
        yield "Took", duration(sum(wall)) + (f", {len(wall)} runs in all" if len(wall) > 1 else "")
    if commits := [run.summary["git_commit"] for run in readable if "git_commit" in run.summary]:
        yield "Commit", _each(map(short_commit, commits), "commits")
    if tags := [tag for tag in readable[0].tags if all(tag in run.tags for run in readable)]:
        yield "Tags", ", ".join(tags)
    if (note := readable[0].note) and all(run.note == note for run in readable):
        yield "Note", note


def _as_scaled(arms: Sequence[Arm]) -> Iterator[tuple[str, str]]:
    """The optimizer's keys that are scaled with the batch size, at the smallest and the largest one of each arm."""
    runs = [run for arm in arms for run in arm.runs]
    for key in scaled_keys(runs):
        if key == "lr":
            yield "Learning rate as configured", _listed(sorted({run.config["optim.lr"] for run in runs}), ".3g")
            continue
        texts = []
        for arm in arms:
            if key not in scaled_keys(arm.runs):
                continue
            used = {run.batch: run.optim[key] for run in arm.runs}
            first, last = min(used), max(used)
            text = f"{used[first]:.6g} at {first:,} tokens a step"
            if last > first:
                text += f" to {used[last]:.6g} at {last:,}"
            texts.append(f"{text} ({arm.label})" if arm.label else text)
        yield f"{key} as scaled", printable("; ".join(texts))


def _model(run: Run) -> str:
    size = run.summary.get("parameters")
    model = ModelConfig(**{f.name: run.config.get(f"model.{f.name}", f.default) for f in fields(ModelConfig)})
    shape, block = f"{counted(model.n_layer, 'layer')}, width {model.n_embd:,}", in_words(model)
    if (target := run.config.get(f"model.{TARGET}")) is not None:
        shape, block = str(target), ""
    return ", ".join(filter(None, [shape, counted(size, "parameter") if size else "", block]))


def _each(texts: Iterable[str], plural: str) -> str:
    """The text that all runs share, or all different texts with their number."""
    different = list(dict.fromkeys(texts))
    return different[0] if len(different) == 1 else f"{len(different)} {plural}: {'; '.join(different)}"


def _listed(values: Sequence[float], form: str) -> str:
    if len(values) > MOST_LISTED:
        return f"{values[0]:{form}} to {values[-1]:{form}} ({len(values)} values)"
    return ", ".join(format(value, form) for value in values)


def _of_a_run(run: Run, cell: Progress, goes_on: bool) -> list[Tile]:
    tiles = []
    losses = [(point.loss, point.step) for point in run.val if point.loss is not None]
    if losses:
        lowest, step = min(losses)
        note = "the lowest of the run" if losses[-1][0] == lowest else f"lowest {lowest:.4f}, after step {step:,}"
        tiles.append(Tile("Validation loss", f"{losses[-1][0]:.4f}", note))
        if run.bits_per_byte is not None:
            tiles.append(Tile("Bits per byte", f"{run.bits_per_byte:.4f}", "of the validation text"))
        if run.val_ema and (averaged := run.val_ema[-1].loss) is not None:
            tiles.append(Tile("Averaged weights", f"{averaged:.4f}", "their validation loss"))
    elif run.train and run.train[-1].loss is not None:
        tiles.append(Tile("Training loss", f"{run.train[-1].loss:.4f}", "the last logged step"))
    if cell.of_tokens:
        tiles.append(Tile("Tokens", f"{cell.tokens:,}", f"of {cell.of_tokens:,}"))
    if run.tokens_per_s:
        tiles.append(Tile("Tokens per second", f"{run.tokens_per_s:,.0f}", f"MFU {run.mfu:.1%}" if run.mfu else ""))
    left, condition = time_left([cell], goes_on)
    tiles.append(Tile("Progress", f"{cell.share:.0%}", f"{left} left {condition}".strip() if left else run.status))
    return tiles


def _of_a_sweep(analysis: Analysis, cells: Sequence[Progress], goes_on: bool) -> list[Tile]:
    tiles = []
    if analysis.best_arm is not None:
        tiles += _best(analysis.best_arm)
    done = sum(cell.status in run_dir.DONE for cell in cells)
    tiles.append(Tile("Runs done", f"{done} of {len(cells)}", ", ".join(by_status(cells))))
    left, condition = time_left(cells, goes_on)
    tiles.append(Tile("Time left", left or "none", condition))
    return tiles


def _best(arm: Arm) -> list[Tile]:
    assert arm.best is not None
    batch, lr = arm.best
    loss = arm.means[arm.best]
    seeds = len(arm.losses[batch][lr])
    basis = f"mean of {counted(seeds, 'seed')}" if seeds > 1 else "one run"
    basis += f", {WEIGHTED}" if abs(loss - fmean(arm.losses[batch][lr])) > SMALLEST_SHOWN else ""
    lrs = arm.losses[batch]
    edge = f"the {'highest' if lr == max(lrs) else 'lowest'} that ended" if lr in (min(lrs), max(lrs)) else ""
    where = ", ".join(filter(None, (f"{batch:,} tokens a step", arm.label, edge if len(lrs) > 1 else "")))
    tiles = [Tile("Best tested cell", f"lr {lr:.3g}", f"at {printable(where)}; loss {loss:.4f}, {basis}")]
    if len(arm.means) > 1:
        following = min(arm.means.keys() - {arm.best}, key=lambda cell: (arm.means[cell], cell))
        significance = "not significant" if following in arm.ties else "significant"
        significance = significance if arm.curves.noise_is_known else "noise unknown"
        batch, lr = following
        gap = f"{arm.means[following] - loss:.4f} nats"
        tiles.append(Tile("Gap to the next cell", gap, f"lr {lr:.3g} at {batch:,}: {significance}"))
    return tiles
