"""The search for the best learning rate of each batch size: the sweeper of `gptexp tune`.

Statistics (gptexp.reporting.statistics.tuning) say what to run next. This module turns it into cells, keeps to the
budget and logs each decision. All that it knows is in the sweep's directory: the runs there, whoever started them, and
tune.jsonl. So after a kill the same command goes on with the same choices.
"""

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

from gptexp.config.budget import FEWEST_RUNS, Budget, parse_budget, parse_range
from gptexp.config.schema import Config, every_key, field_problem, result_deciding
from gptexp.process.errors import ConfigError, InUseError
from gptexp.process.terminal import as_command, emit, say
from gptexp.process.words import duration, listed, shown
from gptexp.reporting.listings.records import (
    AXES,
    LR,
    Run,
    along,
    config_along,
    find_runs,
    lr_scaling,
    of_arm,
    read_run,
    toward,
)
from gptexp.reporting.listings.search import why_in_words
from gptexp.reporting.page.fitted import settings_given, write_optim
from gptexp.reporting.statistics.analysis import Arm
from gptexp.reporting.statistics.curves import SAME
from gptexp.reporting.statistics.tuning import (
    Goal,
    Step,
    Stop,
    Trial,
    decided_sizes,
    most_useful,
    next_law_steps,
    next_steps,
)
from gptexp.reporting.words.thresholds import NARROWEST_WITHIN
from gptexp.storage import run_dir
from gptexp.storage.search_log import SearchLog, read_events
from gptexp.sweep.cells import PLUGINS, Cell, Draft, confounds, draft_cells, settle
from gptexp.sweep.launchers import Places
from gptexp.sweep.search_prior import Prior, SearchedKey, prior_of, searched_value
from gptexp.sweep.space import Axis, Interval
from gptexp.sweep.sweepers import CellSweeper, one_space, whole_number

_, BATCH, SEED = AXES
DIGITS, MOST_DIGITS = 3, 12  # significant digits of a new learning rate, and of one that was given
USUAL_RUNS = 4  # of a batch size: three bracket most optima, one or two more narrow the interval
MOST_SEEDS = 1000
SEARCHABLE = ("model.", "optim.", "schedule.", "scaling.")  # other keys change what a loss means, or nothing
MARGIN = 1.15  # a run may take so much longer than expected
REPORT_S, REPORT_SHARE = 10.0, 0.05  # of a budget, kept for the report: seconds, or a smaller share


@dataclass
class SearchArm:
    """An arm of the search: runs that differ only in learning rate, batch size and seed."""

    overrides: tuple[str, ...]  # what tells it from the others
    cells: dict[int, Cell] = field(default_factory=dict)  # batch size -> a cell there, as composed
    spent: int = 0  # tokens of the runs that were chosen for it
    prior: Prior = field(init=False)
    low: float = 0.0  # the searched key lies between these two
    high: float = math.inf

    def holds(self, run: Run, key: str) -> bool:
        """Whether a run, read `along` the searched `key`, belongs to it."""
        cell = self.cells.get(run.batch)
        return cell is not None and of_arm(run.config) == of_arm(config_along(result_deciding(cell.config), key))


def usable(budget: Budget) -> float:
    """What runs may take of a budget; the report takes the rest of a time."""
    kept = min(REPORT_S, REPORT_SHARE * budget.amount)
    return budget.amount - (kept if budget.unit == "seconds" else 0)


def tokens_of(config: Config) -> int:
    """The tokens that a run trains; its last step is a whole one."""
    return config.batch.step_sizes.tokens_after(config.run_length[0])


class TuneSweeper(CellSweeper):
    """Chooses full-length runs one by one until the best learning rate of each batch size is known well enough."""

    __module__ = PLUGINS
    is_search = True

    def __init__(self, params: Any, **options: Any) -> None:
        """`options`: those of conf/hydra/sweeper/tune.yaml."""
        super().__init__(params)
        self.key, self.within = options["key"], options["within"]
        self.seeds = whole_number("hydra.sweeper.seeds", options["seeds"], 1, MOST_SEEDS)
        self.yes, self.prints_json, budget = options["yes"], options["json"], options["budget"]
        self.law, self.compares = options["law"], options["compare"]
        for name in ("law", "compare", "yes", "json"):
            if not isinstance(options[name], bool):
                raise ConfigError(f"hydra.sweeper.{name}={shown(options[name])}: must be true or false", "wrong-type")
        self.earlier = None if options["from"] is None else str(options["from"])
        self.range = None if options["range"] is None else parse_range(options["range"])
        self.budget: Budget | None = None if budget is None else parse_budget(budget)
        self.arms: list[SearchArm] = []
        self.chosen: dict[str, dict[str, Any]] = {}  # name of a cell -> the event of its choice, by any command
        self.estimates: dict[tuple[tuple[str, ...], int], float] = {}  # arm, batch size -> predicted seconds of a run
        self.decided: dict[Path, tuple[SearchArm, Trial]] = {}  # cells that were chosen and have not ended
        self.failures: set[tuple[tuple[str, ...], int]] = set()  # arms and batch sizes with a run that failed
        self.runs: list[Run] = []  # as of the newest choice
        self.known: dict[Path, Run] = {}  # those that are done
        self.steps: dict[tuple[tuple[str, ...], int], Step | Stop | None] = {}  # arm, batch size -> the newest verdict
        self.optima: list[dict[str, Any]] = []  # the best value of each arm and batch size, with its interval
        self.has_news = True  # whether anything has ended since the last choice
        self.is_over = False
        self.begun_at = time.monotonic()

    # --- which cells ---
    def combinations(self, spaces: Sequence[Sequence[Axis]]) -> list[list[str]]:
        """Return an example for each arm and batch size."""
        self.space = one_space(spaces)
        is_number = isinstance(self.within, float | int) and not isinstance(self.within, bool)
        if not is_number or not NARROWEST_WITHIN <= self.within <= 4:
            rule = f"must be a number of octaves from {NARROWEST_WITHIN:g} to 4"
            raise ConfigError(f"hydra.sweeper.within={shown(self.within)}: {rule}", "out-of-range")
        for axis in self.space:
            if axis.swept and axis.key == SEED:
                rule = "a search adds seeds itself, up to hydra.sweeper.seeds of one learning rate; give one seed"
                raise ConfigError(f"{SEED}: {rule}", "seeds-in-search")
            if isinstance(axis.among, Interval):
                rule = "give --range LOW..HIGH" if axis.key == self.key else "each value is an arm; list them: a,b,c"
                raise ConfigError(f"{axis.key}: {rule}", "interval-in-search")
        if self.compares and len(self._arms()) < 2:
            raise ConfigError("compare: needs two arms or more, such as optim=adamw,muon", "compare-one-arm")
        if self.law and self.compares:
            rule = "law and compare spend the runs in two ways; leave one of them out"
            raise ConfigError(f"law=true compare=true: {rule}", "law-and-compare")
        if self.law and not any(axis.swept and axis.key == BATCH for axis in self.space):
            raise ConfigError(f"law: needs two batch sizes or more, such as {BATCH}=4k,16k,64k", "law-of-one-size")
        self._check_key()
        others = [axis for axis in self.space if not (axis.key == self.key and axis.swept)]
        texts = [[axis.override(value) for value in axis.among] for axis in others if isinstance(axis.among, list)]
        return [list(overrides) for overrides in itertools.product(*texts)]

    def _check_key(self) -> None:
        """Raise `ConfigError` unless the searched key can have a best value, and it is known where to begin."""
        field = next((f for key, f, _, _ in every_key() if key == self.key), None)
        is_of_training = str(self.key).startswith(SEARCHABLE)
        if field is None or not is_of_training or float not in (field.type, *get_args(field.type)):
            rule = f"a search is for a key of {listed(SEARCHABLE)} with a number that need not be whole"
            raise ConfigError(f"key={shown(self.key)}: {rule}, such as optim.weight_decay", "not-searchable")
        if self._rates and (len(self._rates) < FEWEST_RUNS or min(self._rates) <= 0):
            rule = f"give {FEWEST_RUNS} values above 0 or more, a range (--range LOW..HIGH), or one value to begin at"
            raise ConfigError(f"{self.key}={','.join(map(repr, self._rates))}: {rule}", "too-few-values")
        if self._rates and self.range is not None:
            rule = f"{self.key} has a list of values too; give one of them"
            raise ConfigError(f"range={self.range[0]:g}..{self.range[1]:g}: {rule}", "range-and-list")
        given = (*(self.range or ()), *self._rates)
        if problems := [problem for value in given if (problem := field_problem(self.key, field, value))]:
            raise ConfigError(problems)
        if self.key != LR and self.range is None and all(axis.key != self.key for axis in self.space):
            rule = f"where does the search begin? Give a value, {self.key}=…, or --range LOW..HIGH"
            raise ConfigError(f"key={self.key}: {rule}", "prior-missing")
        if self.earlier is not None and self.key != LR:
            rule = f"an earlier law is one of {LR}; leave it out"
            raise ConfigError(f"from={self.earlier}: {rule}", "prior-of-other-key")

    def _arms(self) -> list[str]:
        """The swept overrides that tell arms apart."""
        swept = [axis for axis in self.space if axis.swept and axis.key not in (self.key, BATCH)]
        return [axis.override(value) for axis in swept if isinstance(axis.among, list) for value in axis.among]

    def prior_of(self, configs: Mapping[int, Config]) -> Prior:
        """Where the search of an arm begins. `configs`: batch size in tokens -> config of a run there."""
        is_given = any(axis.key == self.key and not axis.swept for axis in self.space)
        searched = SearchedKey(self.key, is_given, self.range, self.config.batch.total_batch_size)
        return prior_of(configs, searched, self.earlier)

    def arm_of(self, values: Mapping[str, str]) -> tuple[str, ...]:
        """What tells the arm of a cell with these swept values from the others."""
        return tuple(f"{key}={value}" for key, value in values.items() if key not in (self.key, BATCH))

    def count(self, combinations: Sequence[Sequence[str]]) -> int:
        return USUAL_RUNS * len(combinations)

    def check(self, cells: Sequence[Cell]) -> None:
        self.check_search([cell.config for cell in cells])
        super().check(cells)

    def check_search(self, configs: Sequence[Config]) -> None:
        """Raise `ConfigError` unless runs like those of `configs` can be compared, and with those of earlier commands.

        Also if it is not known where to begin.
        """
        if lines := confounds(configs):
            raise ConfigError(lines)
        if not all(config.data.validates for config in configs):
            rule = "a search needs a validation loss; set data.val_tokens above 0"
            raise ConfigError(f"data.val_tokens=0: {rule}", "validation-missing")
        keys = {event["key"] for event in read_events(self.directory) if event["event"] == "start"}
        if others := sorted(keys - {self.key}):
            rule = f"{self.directory} has the search for {others[0]}; give another sweep.name"
            raise ConfigError(f"key={self.key}: {rule}", "another-key")
        deciding = {key for config in configs for key in result_deciding(config)}
        for axis in self.space:
            if axis.swept and "." in axis.key and axis.key not in deciding:
                rule = "changes no result, so its values are no arms; give one"
                raise ConfigError(f"{axis.key}={','.join(map(str, axis.among))}: {rule}", "no-arm")  # type: ignore[arg-type]
        for config in configs:
            self.prior_of({config.batch.total_batch_size: config})

    def queue(self, cells: list[Cell], spaces: Sequence[Sequence[Axis]]) -> None:
        """Read what is known. The `cells` are examples, and only those that the search chooses are run."""
        for cell in cells:
            overrides = self.arm_of(cell.values)
            arm = next((arm for arm in self.arms if arm.overrides == overrides), None)
            if arm is None:
                self.arms.append(arm := SearchArm(overrides))
            arm.cells[cell.config.batch.total_batch_size] = cell
        for arm in self.arms:
            arm.prior = self.prior_of({batch: cell.config for batch, cell in arm.cells.items()})
            arm.low, arm.high = self.range or (arm.low, arm.high)
        self.total = USUAL_RUNS * len(cells)
        self.runs, self.log = self._read_runs(), SearchLog(self.directory)
        self.seconds_before = self.log.seconds()
        self._recall()
        self.total = len(self.waiting) + self.to_choose()
        self._begin()

    def _begin(self) -> None:
        """Log and print where the search begins."""
        places = [(arm, batch, lr) for arm in self.arms for batch, lr in sorted(arm.prior.values.items())]
        prior = [{"arm": list(arm.overrides), "batch": batch, "lr": lr} for arm, batch, lr in places]
        budget = None if self.budget is None else asdict(self.budget)
        self.log.add(
            "start", key=self.key, within=self.within, budget=budget, law=self.law, compare=self.compares, prior=prior,
            spread=self.arms[0].prior.spread, spent=round(self.seconds_before, 1),
        )  # fmt: skip
        for arm in self.arms:
            say(f"--- begins{' of ' if arm.overrides else ''}{' '.join(arm.overrides)} with {arm.prior.in_words}")

    def _recall(self) -> None:
        """Take over the choices in the log that are not known here: of earlier commands, and of others that run now."""
        by_arm = {arm.overrides: arm for arm in self.arms}
        new = {event["cell"]: event for event in self.log.read() if event["event"] == "choose"}
        for name in [name for name in new if name not in self.chosen]:
            event = self.chosen[name] = new[name]
            arm = by_arm.get(tuple(map(str, event["arm"])))
            if arm is None or event["batch"] not in arm.cells:
                continue
            [cell] = settle([self._draft(arm, event["batch"], event["typed"], event["seed"])], self.directory)
            if cell.name != name:  # it was another run, such as one of another length
                continue
            arm.spent += event["tokens"]
            self.cells.append(cell)
            if not self.skips(cell):
                self.decided[cell.directory] = arm, Trial(event["batch"], event["lr"], event["repeat"])
                if self._may_end(cell, arm):
                    self.waiting.append(cell)

    def choose(self) -> Cell | None:
        if not self.has_news:
            return None
        lock = None
        while lock is None:
            with suppress(InUseError):  # another command chooses now
                lock = run_dir.acquire(self.directory, run_dir.CHOICE_LOCK)
        with lock:
            self._recall()
            return self.waiting.pop(0) if self.waiting else self._choose()

    def _choose(self) -> Cell | None:
        """Decide on the next run, and log the decision. None if no run helps now."""
        while (choice := self._choice()) is not None:
            arm, step = choice
            trial = step.trial
            draft, typed = self._new_draft(arm, trial)
            if draft.config is not None:
                break
            self._end_range(arm, trial, draft)
        else:
            self.has_news = False
            self.log.add("wait", optima=self.optima)
            return None
        [cell] = settle([draft], self.directory)
        seed, lr = cell.config.train.seed, searched_value(cell.config, self.key)
        self.decided[cell.directory] = arm, replace(trial, lr=lr)
        self.cells.append(cell)
        tokens, seconds = tokens_of(cell.config), self._seconds(arm, trial.batch)
        arm.spent += tokens
        event = {
            "cell": cell.name, "arm": list(arm.overrides), "batch": trial.batch, "lr": lr, "typed": typed,
            "seed": seed, "repeat": trial.repeat, "why": step.why, "width": step.now, "expected_width": step.then,
            "known_runs": len(self.known), "tokens": tokens, "seconds": seconds, "optima": self.optima,
        }  # fmt: skip
        self.log.add("choose", **event)
        self.chosen[cell.name] = event
        self.record()
        self.total = self.begun + 1 + self.to_choose()
        return cell

    def title(self, cell: Cell) -> str:
        choice = self.chosen[cell.name]
        seed = f", seed {choice['seed']}" if choice["repeat"] else ""
        return " ".join([f"{choice['lr']:.3g} at {choice['batch']:,}", *map(str, choice["arm"])]) + seed

    def announcement(self, cell: Cell) -> str:
        """What is run, and why, for example "0.011 at 4,096: interval 0.9 -> about 0.5 octaves, about 48 s"."""
        choice, unit = self.chosen[cell.name], "nats" if self.compares else "octaves"
        now, then, seconds = (choice.get(name) for name in ("width", "expected_width", "seconds"))
        is_narrowing = now is not None and then is not None and then < now
        width = f"interval {now:.2g} -> about {then:.2g} {unit}" if is_narrowing else ""
        took = "" if seconds is None else f"about {duration(seconds)}"
        reasons = filter(None, (why_in_words(choice["why"], choice["repeat"]), width, took))
        return f"{self.title(cell)}: {', '.join(reasons)}"

    def to_choose(self) -> int:
        """The number of further runs that are expected."""
        if self.is_over:
            return 0
        runs = [(tuple(event["arm"]), event["batch"]) for event in self.chosen.values()]
        costs: list[float] = []
        for arm in self.arms:
            for place in [(arm.overrides, batch) for batch in arm.cells]:
                if not isinstance(self.steps.get(place), str):
                    costs += [self._cost(arm, place[1])] * max(1, USUAL_RUNS - runs.count(place))
        left = self._left()
        if self.budget is not None and self.budget.unit == "seconds":  # those that run have not spent theirs yet
            left = self.at_once * left - sum(self._cost(arm, trial.batch) for arm, trial in self.decided.values())
        return sum(cost <= left for cost in itertools.accumulate(sorted(costs)))

    def find_places(self, configs: Sequence[Config]) -> Places:
        return super().find_places([*configs] * USUAL_RUNS)

    def to_run(self) -> list[Config]:
        return [cell.config for arm in self.arms for cell in arm.cells.values()] * USUAL_RUNS

    def learn(self, cell: Cell) -> None:
        arm, trial = self.decided.pop(cell.directory)
        status = run_dir.read_summary(cell.directory).get("status")
        if status not in run_dir.DONE:
            self.failures.add((arm.overrides, trial.batch))
        self.log.add("end", cell=cell.name, status=status)
        self.has_news, self.optima = True, []

    def sweep(self, arguments: list[str]) -> int:
        """Search, and with `json` print the answers."""
        code = super().sweep(arguments)
        laws = [] if self.report is None or self.key != LR else [arm for arm in self.report.analysis.arms if arm.law]
        if len(laws) > 1:
            say(f"--- no file of optim=fitted: {len(laws)} arms have laws of their own; search one alone for its file")
        if self.report is not None and len(laws) == 1:
            file = self.directory / "optim" / "fitted.yaml"
            write_optim(file, self.report.analysis)
            command = ["train", "--config-dir", str(self.directory), *settings_given(self.report.sweep), "optim=fitted"]
            say(f"--- {file} is the law; use it with", f"  {as_command(command)}")
        if self.prints_json:
            answers = [] if self.report is None else [asdict(answer) for answer in self.report.answers]
            tokens = sum(event["tokens"] for event in self.chosen.values())
            cost = {"runs": len(self.chosen), "seconds": round(self.log.seconds(), 1), "tokens": tokens}
            result = {"key": self.key, "answers": answers, **cost}
            emit(json.dumps(run_dir.finite(result)))
        return code

    def run(self, signals: list[int]) -> None:
        try:
            super().run(signals)
        finally:
            self.log.add("stop", stopped=self._stopped(bool(signals)), optima=self.optima)
            self.is_over = not signals
            self.record()

    # --- what to run next ---
    def _choice(self) -> tuple[SearchArm, Step] | None:
        """The next run of the arm that has spent least; None if no further run helps now, or is within the budget."""
        self.runs, found = self._read_runs(), []
        known = [
            (arm, Arm({}, set(), [run for run in self.runs if arm.holds(run, self.key)]).curves) for arm in self.arms
        ]
        decided = decided_sizes([curves for _, curves in known]) if self.compares else None
        for arm, curves in known:
            running = [trial for of, trial in self.decided.values() if of is arm]
            closed = [
                batch
                for batch in arm.cells
                if (arm.overrides, batch) in self.failures or self._cost(arm, batch) > self._left()
            ]
            rates = dict.fromkeys(arm.cells, self._rates)
            goal = Goal(self.within, self.seeds, rates, closed, arm.low, arm.high, decided)
            choose = next_law_steps if self.law else next_steps
            steps = choose(curves, running, goal, arm.prior.values, arm.prior.spread)
            self.steps |= {(arm.overrides, batch): step for batch, step in steps.items()}
            # Tokens, not seconds: measured times differ between two commands, and choices must not.
            costs = {batch: float(tokens_of(cell.config)) for batch, cell in arm.cells.items()}
            tried = {*curves.losses, *curves.diverged, *(trial.batch for trial in running)}
            if (step := most_useful(steps, costs, tried)) is not None:
                found.append((arm, step))
        is_bracketing = any(step.now is None for _, step in found)
        self.optima = [
            {"arm": list(arm.overrides), "batch": batch, "lr": optimum.lr, "low": optimum.low, "high": optimum.high}
            for arm, curves in known
            for batch, optimum in ({} if is_bracketing else curves.optima).items()  # fits take time
        ]

        def order(choice: tuple[SearchArm, Step]) -> tuple[float, ...]:
            arm, step = choice
            if step.now is None or not self.compares:
                return step.now is not None and self.compares, arm.spent
            # What counts is the variance of the difference, which is the sum of those of the arms.
            return True, (step.then or 0.0) ** 2 - step.now**2

        return min(found, key=order, default=None)

    @property
    def _rates(self) -> tuple[float, ...]:
        """The only learning rates that may be run, if a list was given."""
        among = next((axis.among for axis in self.space if axis.key == self.key and axis.swept), [])
        return tuple(map(float, among)) if isinstance(among, list) else ()

    def _read_runs(self) -> list[Run]:
        """The runs in the sweep's directory, whoever started them. Each is read again until it is done."""
        if not self.directory.is_dir() or not run_dir.subdirectories(self.directory):
            return []

        def read(directory: Path) -> Run:
            if directory not in self.known:
                run = along(read_run(directory), self.key)
                if run.status not in run_dir.DONE:
                    return run
                self.known[directory] = run
            return self.known[directory]

        return [toward(run, self.config.sweep.objective) for run in find_runs(self.directory, read)]

    def _end_range(self, arm: SearchArm, trial: Trial, draft: Draft) -> None:
        """End the range of an arm at the last value before a trial that the rules of the key accept.

        It depends on nothing that was run, so it is the same after a kill.
        """
        accepted, refused, seed = arm.prior.values[trial.batch], trial.lr, arm.cells[trial.batch].config.train.seed
        if self._rates or accepted == refused:
            raise ConfigError(draft.problems)
        factor = 2.0 if refused > accepted else 0.5

        def is_legal(value: float) -> bool:
            return self._draft(arm, trial.batch, f"{value:.{DIGITS}g}", seed).config is not None

        while abs(math.log(refused / accepted)) > math.log(2) and is_legal(accepted * factor):
            accepted *= factor
        refused = accepted * factor
        while abs(math.log(refused / accepted)) > math.log(SAME):
            middle = math.sqrt(accepted * refused)
            accepted, refused = (middle, refused) if is_legal(middle) else (accepted, middle)
        arm.low, arm.high = (arm.low, accepted) if factor > 1 else (accepted, arm.high)

    def _new_draft(self, arm: SearchArm, trial: Trial) -> tuple[Draft, str]:
        """The draft of a trial's cell, and its learning rate as typed: an earlier one again, or rounded."""
        config = arm.cells[trial.batch].config
        runs = [run for run in self.runs if arm.holds(run, self.key)]
        same = [run for run in runs if (run.batch, run.lr) == (trial.batch, trial.lr)]
        scale = lr_scaling(result_deciding(config), trial.batch) if self.key == LR else 1.0
        given = (*self._rates, *(self.range or ()), searched_value(config, self.key))
        digits = MOST_DIGITS if any(math.isclose(trial.lr, value) for value in given) else DIGITS
        typed = repr(same[0].config[LR]) if same else f"{trial.lr / scale:.{digits}g}"
        places = {path: (of.overrides, other.batch, other.lr) for path, (of, other) in self.decided.items()}
        place = arm.overrides, trial.batch, trial.lr
        running = [cell for cell in self.cells if places.get(cell.directory) == place]
        used = {run.seed for run in same} | {cell.config.train.seed for cell in running}
        seed = next(seed for seed in itertools.count(config.train.seed) if seed not in used)
        return self._draft(arm, trial.batch, typed, seed), typed

    def _draft(self, arm: SearchArm, batch: int, typed: str, seed: int) -> Draft:
        """The draft of the cell with this value of the searched key."""
        fixed = [axis.override(axis.among[0]) for axis in self.space if not axis.swept and isinstance(axis.among, list)]
        kept = [text for text in fixed if text.partition("=")[0] not in (BATCH, SEED, self.key)]
        own = [f"{BATCH}={batch}", f"{self.key}={typed}", f"{SEED}={seed}"]
        [draft] = draft_cells(self.compositions, [[*kept, *arm.overrides, *own]], self.total, len(self.cells))
        usual = arm.cells[batch].config.train.seed
        return replace(draft, values={**draft.values, self.key: typed, **({SEED: str(seed)} if seed != usual else {})})

    # --- what it costs ---
    def _seconds(self, arm: SearchArm, batch: int) -> float | None:
        """How long a run at a batch size takes: as runs there took, or as predicted from runs at other batch sizes."""
        runs = [run for run in self.known.values() if run.status == "completed" and arm.holds(run, self.key)]
        ended = [(run.batch, float(run.summary["wall_s"])) for run in runs]
        if here := [seconds for size, seconds in ended if size == batch]:
            return median(here)
        predicted = {size: self.estimates.get((arm.overrides, size)) for size in arm.cells}
        # Runs take longer than predicted if several share the machine.
        ratios = [seconds / expected for size, seconds in ended if (expected := predicted[size])]
        if expected := predicted[batch]:
            return expected * median(ratios or [1.0])
        return median(seconds for _, seconds in ended) if ended else None

    def _cost(self, arm: SearchArm, batch: int) -> float:
        """What one more run costs, in the unit of the budget."""
        if self.budget is not None and self.budget.unit == "seconds":
            if (seconds := self._seconds(arm, batch)) is None:  # the first run shows it
                return math.inf if any(of is arm for of, _ in self.decided.values()) else 0.0
            return MARGIN * seconds
        in_tokens = self.budget is not None and self.budget.unit == "tokens"
        return tokens_of(arm.cells[batch].config) if in_tokens else 1

    def _may_end(self, cell: Cell, arm: SearchArm) -> bool:
        """Whether a run that was chosen earlier would end in time, from its newest checkpoint on."""
        if self.budget is None or self.budget.unit != "seconds":
            return True
        left = 1 - int(run_dir.read_summary(cell.directory).get("tokens") or 0) / tokens_of(cell.config)
        return left * MARGIN * (self._seconds(arm, cell.config.batch.total_batch_size) or 0.0) <= self._left()

    def _left(self) -> float:
        """What is left of the budget, in its unit."""
        if self.budget is None:
            return math.inf
        spent: dict[str, float] = {
            "runs": len(self.chosen),
            "tokens": sum(event["tokens"] for event in self.chosen.values()),
            "seconds": self.seconds_before + time.monotonic() - self.begun_at,
        }
        return usable(self.budget) - spent[self.budget.unit]

    def _stopped(self, is_interrupted: bool) -> list[dict[str, Any]]:
        """Why each arm and batch size had no further run."""
        reasons = []
        for arm in self.arms:
            for batch in sorted(arm.cells):
                step = self.steps.get((arm.overrides, batch))
                has_failed = (arm.overrides, batch) in self.failures
                unknown = "interrupted" if is_interrupted else "failed" if has_failed else "budget"
                why = step if isinstance(step, str) else unknown
                reasons.append({"arm": list(arm.overrides), "batch": batch, "why": why})
        return reasons
