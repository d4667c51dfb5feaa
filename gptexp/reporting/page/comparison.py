"""A comparison of runs: what differs between them, whether their final losses differ by more than seeds cause, and how
that is shown on the terminal, as JSON and as a page.

Runs with equal configs but for the seed form a cell. A cell with several runs measures the noise (means.py).
"""

import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import stdev
from typing import Any

from gptexp.config.metrics import Metric
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import as_command, printable, say
from gptexp.process.words import counted, first_keys, listed
from gptexp.reporting.charts.line_charts import Lines, line_charts
from gptexp.reporting.charts.pictures import bundle
from gptexp.reporting.listings.differences import CONFIG, Difference, differences, recorded, what_differs
from gptexp.reporting.listings.records import Run, has_diverged, read_run, refuse_unlogged, tokenizers, toward
from gptexp.reporting.listings.table import BITS, LOSS, SPEED, STATUS, TOKENS, metric_columns
from gptexp.reporting.listings.terminal_table import print_in_blocks, texts_of
from gptexp.reporting.page.cells_table import BEST_LOSS
from gptexp.reporting.page.overview import Overview, as_started
from gptexp.reporting.page.own_file import MARKS
from gptexp.reporting.page.page import comparison_page
from gptexp.reporting.page.report import Report
from gptexp.reporting.page.write import show_findings
from gptexp.reporting.statistics.analysis import TEXT, analyse, data_warnings, usual_spread_of
from gptexp.reporting.statistics.likelihood import NOISE_DOF
from gptexp.reporting.statistics.means import Contrast, against_lowest
from gptexp.reporting.statistics.noise import POWER, t_quantile
from gptexp.reporting.words.finding import Finding, Verdict, seeds_in_words
from gptexp.reporting.words.proposals import SEEDS, Proposal
from gptexp.storage import inventory, run_dir

COMMAND = "gptexp compare"
RESULTS = (STATUS, LOSS, BEST_LOSS, BITS, TOKENS, SPEED)
SEED = "train.seed"
# Together with the length of a sequence, these keys decide which text is held out.
HELD_OUT = ("data.val_tokens", "data.val_ratio", "data.val_split", "data.max_tokens")


@dataclass(frozen=True)
class Cell:
    """Runs whose configs are equal but for the seed, with their final losses."""

    runs: list[Run]

    @property
    def mean(self) -> float:
        return math.fsum(run.loss or 0.0 for run in self.runs) / len(self.runs)

    @property
    def names(self) -> list[str]:
        return [run.name for run in self.runs]

    @property
    def sigma(self) -> float | None:
        """Standard deviation of its losses, in nats; None for a single run."""
        return stdev(run.loss or 0.0 for run in self.runs) if len(self.runs) > 1 else None


@dataclass(frozen=True)
class Pair:
    """The cell with the lowest mean loss, and another one."""

    lower: Cell
    higher: Cell
    contrast: Contrast | None  # None: no cell has two seeds, so the noise is unknown
    usual_spread: float  # nats: the standard deviation over seeds that such runs have had

    @property
    def difference(self) -> float:
        return self.higher.mean - self.lower.mean

    @property
    def clear_from(self) -> float:
        """The difference of two runs, in nats, that noise causes in 5% of cases, if no seeds measure the noise.

        The usual spread counts as much as `NOISE_DOF` degrees of freedom, as it does in the posterior of a sweep.
        """
        return math.sqrt(2) * t_quantile(NOISE_DOF) * self.usual_spread

    @property
    def is_tie(self) -> bool | None:
        return None if self.contrast is None else not self.contrast.is_significant


@dataclass(frozen=True)
class Comparison:
    """What a comparison says of its runs, which are named A, B, … in the order in which they were given."""

    runs: list[Run]
    labels: dict[str, str]  # name of a run -> its name and what tells it apart
    differences: list[Difference]
    why_incomparable: str  # why the losses cannot be compared, in sentences; empty if they can
    pairs: list[Pair]  # of the runs whose final loss counts; none if the losses cannot be compared
    report: Report  # what the page and the terminal show


def compare(directories: Sequence[Path], objective: str | None = None) -> Comparison:
    """Compare the runs in `directories` by the validation loss `objective`. None: by `sweep.objective` if all have one.

    Raises `ConfigError` if one is damaged, or if none has logged that loss.
    """
    runs = list(_named(directories))
    if objective is not None:
        refuse_unlogged(runs, objective)
    common = {run.objective for run in runs}
    objective = objective or (common.pop() if len(common) == 1 else Metric.VAL_LOSS)
    runs = [toward(run, objective) for run in runs]
    differing = differences(runs)
    labels = {run.name: f"{run.name}: {text}" for run, text in zip(runs, what_differs(runs, differing), strict=True)}
    analysis = analyse("comparison", runs)
    why_incomparable = _why_incomparable(runs)
    cells = cells_of([run for run in runs if run.loss is not None and not has_diverged(run)])
    pairs = pairs_of(cells) if not why_incomparable else []
    known = {*data_warnings(runs)}
    verdict = Verdict(
        warnings=[
            *(Finding(printable(f"Warning: {line}.")) for line in analysis.warnings if line not in known),
            *_other_held_out_text(runs, differing),
        ],
        answers=list(_answers(runs, why_incomparable, cells, pairs)),
        findings=list(_without_loss(runs)),
        caveats=[],
        question="Which run is better",
    )
    further = list(_more_seeds(pairs[0].lower)) if pairs and pairs[0].contrast is None else []
    head = _head(runs, labels, differing)
    report = Report(Path(), analysis, [], None, False, head, [], verdict, further, line_charts(Lines(runs, labels)))
    return Comparison(runs, labels, differing, why_incomparable, pairs, report)


def _named(directories: Sequence[Path]) -> Iterator[Run]:
    """The runs, named A, B, …, Z, A1, …"""
    for number, directory in enumerate(directories):
        run = read_run(directory)
        if not run.config:
            raise ConfigError(str(run.problem))
        turn, letter = divmod(number, len(string.ascii_uppercase))
        yield replace(run, name=f"{string.ascii_uppercase[letter]}{turn or ''}")


def _head(runs: Sequence[Run], labels: Mapping[str, str], differing: Sequence[Difference]) -> Overview:
    keys = [difference.key for difference in differing if difference.kind == CONFIG]
    return Overview(
        title=f"{len(runs)} runs compared: {first_keys(keys) or 'equal configs'}",
        facts=[(labels[run.name], printable(str(run.directory))) for run in runs],
        commands=[as_command(["compare", *(str(run.directory) for run in runs)])],
        tiles=[],
        share=1.0,
        is_done=True,
    )


def _why_incomparable(runs: Sequence[Run]) -> str:
    if len(tokenizers(runs)) > 1:
        bits = [f"{run.bits_per_byte:.4f} for {run.name}" for run in runs if run.bits_per_byte is not None]
        known = f" Their bits per byte can be compared: {listed(bits)}." if len(bits) > 1 else ""
        return f"The losses are per token, and the tokenizers differ.{known}"
    hashes = {run.name: run.summary[TEXT] for run in runs if TEXT in run.summary}
    if len({*hashes.values()}) > 1:
        of_runs = listed([f"{text} for {name}" for name, text in hashes.items()])
        return f"They were trained on different text: the hash of its tokens is {of_runs}."
    return " ".join(f"{line}." for line in data_warnings(runs))


def cells_of(runs: Sequence[Run]) -> list[Cell]:
    """The cells of `runs`, the lowest mean loss first."""
    return sorted(map(Cell, _of_equal_config(runs)), key=lambda cell: cell.mean)


def pairs_of(cells: Sequence[Cell]) -> list[Pair]:
    """The first of `cells`, which has the lowest mean loss, with each of the others."""
    tested = against_lowest([[run.loss or 0.0 for run in cell.runs] for cell in cells])
    contrasts: Sequence[Contrast | None] = [None] * len(cells) if tested is None else tested
    return [
        Pair(cells[0], cell, contrast, usual_spread_of([*cells[0].runs, *cell.runs]))
        for cell, contrast in zip(cells[1:], contrasts[1:], strict=True)
    ]


def _of_equal_config(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Groups of runs that differ only in their seed.

    If two runs of equal config have the same seed, something else differs, such as the version of the code. Then only
    runs whose records (`recorded`) are equal form a group.
    """
    for group in _grouped(runs, lambda run: {**run.config, SEED: None, TEXT: run.summary.get(TEXT)}):
        for part in [group] if _has_every_seed_once(group) else _grouped(group, recorded):
            yield from [part] if _has_every_seed_once(part) else ([run] for run in part)


def _grouped(runs: Sequence[Run], key: Callable[[Run], dict[str, Any]]) -> list[list[Run]]:
    """The runs grouped by equal `key`, in the order of the first run of each group."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(key(run).items())), []).append(run)
    return list(groups.values())


def _has_every_seed_once(runs: Sequence[Run]) -> bool:
    return len({run.seed for run in runs}) == len(runs)


def _other_held_out_text(runs: Sequence[Run], differing: Sequence[Difference]) -> Iterator[Finding]:
    keys = [d.key for d in differing if d.key in HELD_OUT]
    if len({run.seq_len for run in runs}) > 1:
        keys.append("the length of a sequence")
    if keys:
        text = f"Warning: the runs may have been validated on different text, because of {listed(keys)}."
        yield Finding(text, "Then a part of the difference between their losses is one between these texts.")


def _answers(
    runs: Sequence[Run], why_incomparable: str, cells: Sequence[Cell], pairs: Sequence[Pair]
) -> Iterator[Finding]:
    names = listed([run.name for run in runs])
    if why_incomparable:
        yield Finding(f"The losses of {names} cannot be compared.", why_incomparable, ("not comparable",))
    elif not cells:
        yield Finding(f"Nothing can be said yet: none of {names} has a final loss that counts.")
    elif not pairs and len(cells[0].runs) < len(runs):
        yield Finding(f"Nothing can be said yet: only {listed(cells[0].names)} has a final loss that counts.")
    elif not pairs and cells[0].sigma is not None:
        yield Finding(
            f"{names} differ in their seed alone; their losses have a standard deviation of {cells[0].sigma:.4f} nats.",
            f"They measure the noise with {counted(len(runs) - 1, 'degree')} of freedom.",
            ("tied",),
        )
    yield from (_answer(pair, len(cells)) for pair in pairs)


def _answer(pair: Pair, cells: int) -> Finding:
    """Whether the losses of a pair differ by more than seeds cause. `cells`: the number of all cells compared."""
    lower, higher, contrast = listed(pair.lower.names), listed(pair.higher.names), pair.contrast
    if not pair.difference:
        return Finding(f"{lower} and {higher} have the same loss.", badges=("tied",))
    have = "has" if len(pair.lower.runs) == 1 else "have"
    text = f"{lower} {have} a lower loss than {higher}, by {pair.difference:.4f} nats"
    if contrast is None:
        is_clear = "is" if pair.difference >= pair.clear_from else "is not"
        why = (
            f"Runs of this size and length have had a standard deviation of {pair.usual_spread:.2g} nats over seeds. "
            f"If these have about the same, a difference is clear from {pair.clear_from:.2g} nats on; this one "
            f"{is_clear} clear. Two more seeds of one config measure the noise."
        )
        return Finding(f"{text}; noise unknown.", why, ("noise unknown",))
    chosen = f", corrected for choosing the lowest of {cells} configs" if cells > 2 else ""
    spreads = [
        f"{cell.names[0]} has no second seed, and is taken to vary as much as the others."
        if cell.sigma is None
        else f"The losses of {listed(cell.names)} have a standard deviation of {cell.sigma:.4f} nats over seeds."
        for cell in (pair.lower, pair.higher)
    ]
    why = (
        f"By Welch's test{chosen}, a difference is significant from {contrast.significant_from:.4f} nats on "
        f"(p = {contrast.p:.2g}). {' '.join(spreads)}"
    )
    if contrast.is_significant:
        return Finding(f"{text}, more than seeds cause.", why, ("significant",))
    if contrast.seeds_needed is not None:
        needed = seeds_in_words(contrast.seeds_needed)
        why += f" To show this difference takes {needed} of each config (power {POWER:g})."
    return Finding(f"{text}, which seeds alone can cause.", why, ("tied",))


def _without_loss(runs: Sequence[Run]) -> Iterator[Finding]:
    """What has become of the runs whose final loss does not count."""
    for run in runs:
        if has_diverged(run):
            yield Finding(f"{run.name} has diverged.")
        elif run.loss is None:
            yield Finding(f"{run.name} has no final loss: it is {run.status}, after {run.share:.0%} of its tokens.")


def _more_seeds(cell: Cell) -> Iterator[Proposal]:
    """The command that trains a cell's config with more seeds, if the run has a record of how it was started."""
    run = cell.runs[0]
    started = as_started(run.directory)
    if started is None or run.branch is not None:  # a branch has the seed of the run that it continues
        return
    kept = [text for text in started.overrides if text.lstrip("+").partition("=")[0] not in (SEED, "sweep")]
    highest = max(seed for other in cell.runs for seed in (other.seed, *_seeds_beside(other.directory)))
    seeds = ",".join(str(highest + i) for i in range(1, SEEDS + 1))
    command = as_command(["train", "-m", *started.flags, *kept, f"{SEED}={seeds}"])
    minutes = SEEDS * run.summary["wall_s"] / 60 if run.summary.get("wall_s") else None
    why = f"measures the noise of {run.name}, as no two of the compared runs differ in the seed alone"
    yield Proposal("", run.batch, command, why, "measures the noise", SEEDS, minutes)


def _seeds_beside(directory: Path) -> Iterator[int]:
    """The seeds of all runs of a sweep, if the run in `directory` is one of its cells."""
    sweep = directory.resolve().parent
    for path in inventory.cells(sweep) if inventory.is_sweep(sweep) else ():
        with suppress(ConfigError):  # a damaged run
            yield run_dir.load_config(path).train.seed


def write_page(path: Path, comparison: Comparison) -> None:
    html = comparison_page(comparison.report, comparison.differences, bundle())
    run_dir.write_atomically(path, f"{MARKS[COMMAND]}\n{html}")


def numbers(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON values."""
    names = [run.name for run in comparison.runs]
    columns = (*RESULTS, *metric_columns(comparison.runs, of_steps=True))
    return {
        "runs": [
            {
                "run": run.name,
                "label": comparison.labels[run.name],
                "directory": str(run.directory),
                **{column.key: column.value(run) for column in columns},
            }
            for run in comparison.runs
        ],
        "differences": [
            {"key": d.key, "kind": d.kind, "values": dict(zip(names, d.values, strict=True))}
            for d in comparison.differences
        ],
        "why_incomparable": comparison.why_incomparable,
        "pairs": [_pair(pair) for pair in comparison.pairs],
        "verdict": comparison.report.verdict.lines,
        "next": [asdict(proposal) for proposal in comparison.report.further],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    tie, contrast = pair.is_tie, pair.contrast
    return {
        "lower": _cell(pair.lower),
        "higher": _cell(pair.higher),
        "difference": pair.difference,
        "significant": None if tie is None else not tie,
        "p": contrast and contrast.p,
        "significant_from": contrast and contrast.significant_from,
        "seeds_needed": contrast and contrast.seeds_needed,
        "usual_spread": pair.usual_spread,
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {"runs": cell.names, "mean_loss": cell.mean, "sigma": cell.sigma}


def show(comparison: Comparison, width: int | None = None) -> None:
    """Print the comparison, on lines of `width` characters if given; tables then have as many columns as fit."""
    runs = comparison.runs
    say(*(f"{comparison.labels[run.name]}  {run.directory}" for run in runs))
    for kind, group in groupby(comparison.differences, key=lambda d: d.kind):
        rows = list(group)
        columns = [(run.name, [d.texts[number] for d in rows]) for number, run in enumerate(runs)]
        say(f"\n{kind.capitalize()}:")
        print_in_blocks(("", [d.key for d in rows]), columns, [run.name for run in runs], width)
    if not comparison.differences:
        say("\nNothing differs: configs, data, machines and versions are equal.")
    say()
    print_in_blocks(
        ("run", [run.name for run in runs]), texts_of((*RESULTS, *metric_columns(runs)), runs), [STATUS.title], width
    )
    say()
    show_findings(comparison.report, width)
