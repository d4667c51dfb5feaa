"""The answer of a sweep: for each arm and batch size the best learning rate, how sure it is, and what to run next."""

from collections.abc import Sequence
from dataclasses import dataclass

from gptexp.process.terminal import printable
from gptexp.process.words import counted
from gptexp.reporting.listings.progress import is_unfinished
from gptexp.reporting.listings.records import LR
from gptexp.reporting.listings.search import SearchHistory, stopped_in_words
from gptexp.reporting.listings.terminal_table import Columns
from gptexp.reporting.statistics.analysis import Analysis, Arm
from gptexp.reporting.statistics.curves import Curve
from gptexp.reporting.statistics.prior import law_intervals
from gptexp.reporting.statistics.tuning import found_optima
from gptexp.reporting.words.proposals import Proposal
from gptexp.storage.sweep_record import SweepRecord

TEXTS = ("arm", "status", "stopped", "surer with")  # titles of the columns of text
NOTHING = "narrow enough"
WANTED = {  # why a search made no further run -> what would make the answer surer
    "flat": "nothing: runs at it lose less than a tenth of a seed's spread",
    "exhausted": "nothing that can be run",
    "law": "gptexp tune without --law",
    "decided": "gptexp tune without --compare",
    "failed": "its command again",
    "interrupted": "its command again",
}


@dataclass(frozen=True)
class Answer:
    """What is known at one batch size of an arm. Learning rates and losses are None if no optimum is bracketed.

    Intervals are 95% intervals. For `tie_low` and `tie_high` see `curves.Optimum`.
    """

    arm: str  # label; empty if there is only one
    total_batch_size: int  # tokens
    status: str  # in a word or two
    wanted: str  # what would make it surer, and its cost
    lr: float | None = None
    low: float | None = None
    high: float | None = None
    loss: float | None = None
    loss_low: float | None = None
    loss_high: float | None = None
    tie_low: float | None = None
    tie_high: float | None = None
    why: str = ""
    lowest_lr: float | None = None  # the learning rate with the lowest mean loss at this batch size
    stopped: str = ""  # why `gptexp tune` made no further run: a key of `search.STOPPED`, or interrupted

    @property
    def badges(self) -> tuple[str, ...]:
        return tuple(self.status.split(", "))


def answers_of(
    analysis: Analysis,
    sweep: SweepRecord | None,
    further: Sequence[Proposal],
    within: float,
    search: SearchHistory | None = None,
) -> list[Answer]:
    """A row for each batch size and arm, by rising batch size; none if neither batch size nor learning rate was swept.

    `within`: an interval is narrow enough with at most so many octaves on each side.
    """
    planned = list(sweep.cells.values()) if sweep is not None else []
    sizes = {cell.total_batch_size for cell in planned}
    are_swept = len(sizes) > 1 or len({cell.values.get("optim.lr") for cell in planned}) > 1
    rows: list[Answer] = []
    for arm in analysis.arms:
        label = printable(arm.label)
        for batch, curve in arm.curves.by_batch.items() if arm.is_grid or are_swept else ():
            stopped = "" if search is None else search.stop_of({run.name for run in arm.runs}, batch)
            # A search takes the noise from other batch sizes, if seeds have measured it there.
            noise_is_known = curve.noise_is_known or (stopped == "narrow" and arm.curves.noise_is_known)
            status, wanted = _status(curve, within, noise_is_known), _proposed(arm, batch, further)
            if not wanted and not noise_is_known:
                wanted = "a second seed"
            elif not wanted and curve.optimum is not None and curve.optimum.is_within(within):
                wanted = NOTHING
            if sweep is not None and is_unfinished(sweep, analysis.runs, batch):
                status, wanted = f"{status}, so far", "its other cells"
            optimum = vars(curve.optimum) if curve.optimum is not None else {}
            if search is not None and not search.stopped and wanted != NOTHING:
                wanted = "its next runs"
            if stopped == "budget" and not wanted:
                wanted = "gptexp tune … with a larger --budget"
            wanted = WANTED.get(stopped, wanted)
            if stopped == "exhausted" and any(lr > curve.best for lr in arm.diverged.get(batch, ())):
                wanted += ": training diverges above"
            row = Answer(label, batch, status, wanted, **optimum, why=curve.why, lowest_lr=curve.best, stopped=stopped)
            rows.append(row)
        rows += _by_law(arm, label, search) if search is not None else []
        for batch in arm.all_diverged if len(arm.runs) > 1 else ():
            stopped = "" if search is None else search.stop_of({run.name for run in arm.runs}, batch)
            wanted = WANTED.get(stopped, _proposed(arm, batch, further))
            rows.append(Answer(label, batch, "diverged", wanted, stopped=stopped))
    if rows:
        begun = {batch for arm in analysis.arms for batch in (*arm.losses, *arm.diverged)}
        begun |= {row.total_batch_size for row in rows}
        searched = {batch for _, batch in search.prior} if search is not None else set()
        for batch in sorted((sizes | searched) - begun):
            reasons = {why for (_, of), why in search.stopped.items() if of == batch} if search is not None else set()
            stopped = reasons.pop() if len(reasons) == 1 else ""
            wanted = WANTED.get(stopped, "its first runs")
            rows.append(Answer("", batch, "too few, so far", wanted, stopped=stopped))
    return sorted(rows, key=lambda row: row.total_batch_size)


def _by_law(arm: Arm, label: str, search: SearchHistory) -> list[Answer]:
    """The answers at the batch sizes at which a search for the law (`gptexp tune --law`) made no run."""
    names = {run.name for run in arm.runs}
    prior = search.prior_of(names)
    known = {batch: found for batch, found in found_optima(arm.curves).items() if batch in prior}
    if not known:
        return []
    why = f"the law through {counted(len(known), 'batch size')} expects it there"
    return [
        Answer(label, batch, "by the law", "runs there", *expected, why=why, stopped="law")
        for batch, expected in law_intervals(prior, known, search.spread).items()
        if search.stop_of(names, batch) == "law" and batch not in arm.losses
    ]


def _status(curve: Curve, within: float, noise_is_known: bool) -> str:
    side = curve.side if curve.status == "not bracketed" else None
    is_wide = curve.optimum is not None and not curve.optimum.is_within(within)
    badges = [side or curve.status, *(["wide"] if is_wide else [])]
    return ", ".join(badges if noise_is_known else [*badges, "noise unknown"])


def _proposed(arm: Arm, batch: int, further: Sequence[Proposal]) -> str:
    """The proposals at a batch size, in a few words."""
    return "; ".join(f"{p.cost}: {p.brings}" for p in further if (p.arm, p.batch) == (arm.label, batch))


def _best_lr(row: Answer) -> str:
    """The best learning rate. Without an optimum: the one with the lowest mean loss, and on which side to go on."""
    if row.lr is not None:
        return f"{row.lr:.3g}"
    if row.lowest_lr is None:
        return ""
    side = {"higher": " or more", "lower": " or less"}.get(row.badges[0])
    return f"{row.lowest_lr:.3g}{side}" if side else f"lowest: {row.lowest_lr:.3g}"


def table_of_answers(rows: Sequence[Answer], key: str = LR) -> Columns:
    """Columns of texts; those without any text are left out. `key`: the one whose best value the rows have."""

    def interval(low: float | None, high: float | None, form: str) -> str:
        return "" if low is None or high is None else f"{low:{form}} to {high:{form}}"

    columns = [
        ("tokens a step", [f"{row.total_batch_size:,}" for row in rows]),
        ("arm", [row.arm for row in rows]),
        (f"best {key.rpartition('.')[2]}", [_best_lr(row) for row in rows]),
        ("95% interval", [interval(row.low, row.high, ".3g") for row in rows]),
        ("loss there", ["" if row.loss is None else f"{row.loss:.4f}" for row in rows]),
        ("its interval", [interval(row.loss_low, row.loss_high, ".4f") for row in rows]),
        ("within a seed's spread", [interval(row.tie_low, row.tie_high, ".3g") for row in rows]),
        ("status", [row.status for row in rows]),
        ("stopped", [stopped_in_words(row.stopped, row.tie_low, row.tie_high) for row in rows]),
        ("surer with", [row.wanted for row in rows]),
    ]
    return [column for column in columns if any(column[1])]
