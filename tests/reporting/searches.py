"""Methods that look for the best learning rate of each batch size of an arm.

A method takes an arm (`surfaces.Surface`) and a random generator, and returns an answer for each batch size and its
runs. It is given the arm's prior, learning rates, usual spread and losses, never its truth.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from surfaces import GRID, Crossing, Run, Surface, fit_minimum

Losses = dict[float, float]  # log2 of the learning rate -> mean loss; infinite if a run diverged
OCTAVE = 1.1  # octaves; rates of tables are rounded
FACTOR = 3  # of successive halving


class Answer(NamedTuple):
    """What a method says of one batch size. `low` and `high`: its 95% interval, if it has one."""

    lr: float | None
    low: float | None = None
    high: float | None = None
    bracketed: bool = False
    status: str = ""


class Outcome(NamedTuple):
    answers: dict[int, Answer]
    runs: list[Run]
    cost: float | None = None  # in whole runs, if some were stopped early
    budget: float | None = None  # the most runs that the method was allowed


Method = Callable[[Surface, np.random.Generator], Outcome]


@dataclass
class Trials:
    """The runs of a method, at learning rates and with seeds that exist."""

    surface: Surface
    runs: list[Run] = field(default_factory=list)

    def losses(self, batch: int) -> Losses:
        by_rate: dict[float, list[float]] = {}
        for run in self.runs:
            if run.batch == batch:
                by_rate.setdefault(math.log2(run.lr), []).append(math.inf if run.loss is None else run.loss)
        return {x: float(np.mean(losses)) for x, losses in by_rate.items()}

    def run(self, batch: int, lr: float) -> Run | None:
        """Run the next seed at this learning rate, or at the nearest one that has a run left.

        It may be half an octave away, in a table with wider gaps half a gap. None: there is none.
        """
        seeds = {run.lr: run.seed + 1 for run in self.runs if run.batch == batch}  # the last run of a rate counts
        if (rates := self.surface.rates(batch)) is not None:
            x = np.log2(rates)
            reach = max(0.5, np.diff(x).max(initial=0) / 2) + 0.01  # rates of tables are rounded
            most = self.surface.seeds or math.inf
            left = [rate for rate in rates if seeds.get(rate, 0) < most and abs(math.log2(lr / rate)) <= reach]
            if not left:
                return None
            lr = min(left, key=lambda rate: abs(math.log2(lr / rate)))
        seed = seeds.get(lr, 0)
        found = Run(batch, lr, seed, self.surface.run(batch, lr, seed))
        self.runs.append(found)
        return found


def grid(surface: Surface, batch: int) -> list[float]:
    """log2 of the learning rates of a full grid: those of a table, or a factor sqrt(2) apart around the prior."""
    if (rates := surface.rates(batch)) is not None:
        return [math.log2(rate) for rate in rates]
    return [float(x) for x in math.log2(surface.prior(batch)) + GRID]


def start(surface: Surface, batch: int, off: float = 0.0) -> float:
    """log2 of the prior, moved by `off` octaves, within the grid."""
    x = grid(surface, batch)
    return min(max(math.log2(surface.prior(batch)) + off, min(x)), max(x))


def lowest(losses: Losses) -> Answer:
    """The learning rate of the lowest loss; bracketed if it is not at an end."""
    best = min(losses, key=lambda x: losses[x])
    if math.isinf(losses[best]):
        return Answer(None, status="diverged")
    bracketed = min(losses) < best < max(losses)
    return Answer(2**best, bracketed=bracketed, status="bracketed" if bracketed else "not bracketed")


def parabola(losses: Losses, usual_spread: float, reach: float = OCTAVE) -> Answer:
    """The minimum of a parabola through the losses within `reach` of the lowest; its error is from the usual spread."""
    answer = lowest(losses)
    fit = fit_minimum({x: loss for x, loss in losses.items() if loss < math.inf}, skew=0, reach=reach)
    if not answer.bracketed or fit is None:
        return answer
    half = 1.96 * fit.unit_sd * usual_spread / fit.height
    return Answer(2**fit.optimum, 2 ** (fit.optimum - half), 2 ** (fit.optimum + half), True, "bracketed")


def full_grid(trials: Trials, batch: int, _: np.random.Generator) -> Losses:
    for x in grid(trials.surface, batch):
        trials.run(batch, 2**x)
    return trials.losses(batch)


def octave_grid(trials: Trials, batch: int, rng: np.random.Generator) -> Losses:
    """Every other learning rate of the grid, from the first or from the second."""
    for x in grid(trials.surface, batch)[rng.integers(2) :: 2]:
        trials.run(batch, 2**x)
    return trials.losses(batch)


def random(trials: Trials, batch: int, rng: np.random.Generator, runs: int) -> Losses:
    x = grid(trials.surface, batch)
    for _ in range(runs):
        trials.run(batch, 2 ** rng.uniform(min(x), max(x)))
    return trials.losses(batch)


def golden(trials: Trials, batch: int, _: np.random.Generator) -> Losses:
    """Golden section of the grid's range, until it is one octave wide. A rate of a table is run once."""

    def loss(x: float) -> float:
        losses = trials.losses(batch)
        rates = trials.surface.rates(batch)
        nearest = x if rates is None else min((math.log2(rate) for rate in rates), key=lambda value: abs(value - x))
        if nearest not in losses:
            trials.run(batch, 2**nearest)
        return trials.losses(batch)[nearest]

    x = grid(trials.surface, batch)
    low, high, ratio = min(x), max(x), (math.sqrt(5) - 1) / 2
    while high - low > 1.01:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if loss(left) <= loss(right):
            high = right
        else:
            low = left
    return trials.losses(batch)


def next_octaves(losses: Losses, first: float) -> list[float]:
    """Where a bracket by octaves may run next, the best place first; none: the lowest loss has one on both sides.

    Next to a run that diverged, it runs half an octave lower.
    """
    if not losses:
        return [first]
    best = min(losses, key=lambda x: losses[x])
    if math.isinf(losses[best]):
        return [min(losses) - 1]
    above = min((x for x in losses if x > best), default=None)
    wanted = [best + 1] if above is None else []
    if above is not None and math.isinf(losses[above]) and above - best > 0.75:
        wanted = [best + 0.5]
    return wanted + [best - 1] * (best == min(losses))


def bracket(trials: Trials, batch: int, rng: np.random.Generator, off: float = 0) -> Losses:
    """Octaves around the prior until the lowest loss has a higher one on both sides. `off`: begun so far from it."""
    first = start(trials.surface, batch, off * rng.choice([-1, 1]))
    while any(trials.run(batch, 2**wanted) for wanted in next_octaves(trials.losses(batch), first)):
        pass
    return trials.losses(batch)


Search = Callable[[Trials, int, np.random.Generator], Losses]


def each_size(search: Search, fitted: float | None = None) -> Method:
    """The method that searches at each batch size alone. `fitted`: answers by a parabola of that reach."""

    def method(surface: Surface, rng: np.random.Generator) -> Outcome:
        trials, answers = Trials(surface), {}
        for batch in surface.sizes:
            losses = search(trials, batch, rng)
            answers[batch] = parabola(losses, surface.usual_spread, fitted) if fitted else lowest(losses)
        return Outcome(answers, trials.runs)

    return method


def formula(surface: Surface, _: np.random.Generator) -> Outcome:
    return Outcome({batch: Answer(surface.prior(batch)) for batch in surface.sizes}, [])


def sampler(name: str, surface: Surface, rng: np.random.Generator, runs: Mapping[int, int]) -> Outcome:
    """Optuna's TPE or GP sampler, with so many runs of each batch size, the first at the prior.

    It is told the learning rates that were run. A run that diverged counts as the worst loss so far.
    """
    import optuna  # an optional package, and slow to import

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trials = Trials(surface)
    for batch in surface.sizes:
        x, first = grid(surface, batch), start(surface, batch)
        space = {"x": optuna.distributions.FloatDistribution(min(x), max(x))}
        kind = {"TPE": optuna.samplers.TPESampler, "GP": optuna.samplers.GPSampler}[name]
        study = optuna.create_study(sampler=kind(seed=int(rng.integers(2**31)), n_startup_trials=2))
        for i in range(3 * runs[batch]):  # what it asks for may have been run
            if sum(run.batch == batch for run in trials.runs) == runs[batch]:
                break
            asked = study.ask(space)
            run = trials.run(batch, 2 ** (asked.params["x"] if i else first))
            study.tell(asked, state=optuna.trial.TrialState.FAIL)  # the rate that was run takes its place
            if run is None:
                continue
            worst = max((loss for loss in trials.losses(batch).values() if loss < math.inf), default=10.0)
            at = {"x": min(max(math.log2(run.lr), min(x)), max(x))}  # rounding
            value = worst if run.loss is None else run.loss
            study.add_trial(optuna.trial.create_trial(params=at, distributions=space, value=value))
    return Outcome({batch: lowest(trials.losses(batch)) for batch in surface.sizes}, trials.runs)


def _halve(surface: Crossing, batch: int, rates: Sequence[float], rungs: Sequence[float]) -> tuple[list[Run], float]:
    """The runs that reach the last rung, and the cost of all in whole runs; a third goes on from each rung."""
    left, cost, before = list(rates), 0.0, 0.0
    for rung in rungs:
        cost += len(left) * (rung - before)
        losses = {lr: surface.loss_at(batch, lr, 0, rung) for lr in left}
        ranked = sorted(left, key=lambda lr: math.inf if losses[lr] is None else losses[lr])
        if rung < 1:
            left = ranked[: max(1, len(left) // FACTOR)]
        before = rung
    return [Run(batch, lr, 0, surface.run(batch, lr, 0)) for lr in left], cost


def halving(surface: Surface, rng: np.random.Generator, brackets: Sequence[int] = (2,)) -> Outcome:
    """Successive halving of nine log-uniform rates from a ninth of the run on; Hyperband: `brackets` 2, 1 and 0."""
    assert isinstance(surface, Crossing)
    runs: list[Run] = []
    cost = 0.0
    for batch in surface.sizes:
        x = grid(surface, batch)
        for rounds in brackets:
            rates = [float(2**value) for value in rng.uniform(min(x), max(x), max(3, FACTOR**rounds))]
            found, paid = _halve(surface, batch, rates, [FACTOR ** (i - rounds) for i in range(rounds + 1)])
            runs, cost = runs + found, cost + paid
    trials = Trials(surface, runs)
    return Outcome({batch: lowest(trials.losses(batch)) for batch in surface.sizes}, runs, cost)


def law(surface: Surface, rng: np.random.Generator, degree: int) -> Outcome:
    """All batch sizes from three, bracketed by octaves: a polynomial in log2 of the batch size through the optima."""
    trials = Trials(surface)
    optima = {}
    for batch in (surface.sizes[0], surface.sizes[len(surface.sizes) // 2], surface.sizes[-1]):
        answer = parabola(bracket(trials, batch, rng), surface.usual_spread)
        if answer.lr is not None:
            optima[math.log2(batch)] = math.log2(answer.lr)
    if len(optima) <= degree:
        return Outcome({batch: Answer(None) for batch in surface.sizes}, trials.runs)
    line = np.polynomial.Polynomial.fit(list(optima), list(optima.values()), degree)
    return Outcome({batch: Answer(float(2 ** line(math.log2(batch)))) for batch in surface.sizes}, trials.runs)


METHODS: dict[str, Method] = {
    "full grid, lowest": each_size(full_grid),
    "full grid, parabola": each_size(full_grid, 1.6),
    "octave grid, lowest": each_size(octave_grid),
    "octave grid, parabola": each_size(octave_grid, OCTAVE),
    "4 random, lowest": each_size(partial(random, runs=4)),
    "8 random, lowest": each_size(partial(random, runs=8)),
    "golden section": each_size(golden),
    "bracket, parabola": each_size(bracket, OCTAVE),
    "bracket begun 1.5 octaves off, parabola": each_size(partial(bracket, off=1.5), OCTAVE),
    "formula alone": formula,
}
# With as many runs of each batch size as `tune` took.
SAMPLERS: dict[str, Callable[..., Outcome]] = {
    "Optuna TPE": partial(sampler, "TPE"),
    "Optuna GP": partial(sampler, "GP"),
}
# On learning curves only.
EARLY_STOPPING: dict[str, Method] = {
    "successive halving": halving,
    "Hyperband": partial(halving, brackets=(2, 1, 0)),
}
# All batch sizes from runs at three.
LAWS: dict[str, Method] = {
    "curved law through three": partial(law, degree=2),
    "straight law through three": partial(law, degree=1),
}
