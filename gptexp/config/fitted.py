"""`optim=fitted`: whether a run is like the runs to which its learning-rate law was fitted.

`gptexp report --write-optim` writes a file with the law and, in the section `fitted`, the facts of the fit. A run with
another model or optimizer is refused. Other differences cause a warning, because the law may still hold.
"""

import math
from collections.abc import Iterator

from gptexp.config.schema import Config, fields_of
from gptexp.process.errors import Problem
from gptexp.process.words import first_keys, shown

LENGTH_FACTOR = 1.5  # without a warning, a run may be longer or shorter than those of the fit by this factor
OPTIMIZER = "optim.name"
SO = "so another learning rate may be best"


def fitted_problems(cfg: Config, _: int) -> Iterator[Problem]:
    """A line if the model differs from the fit's, and one if the optimizer does; none with `fitted.anyway`."""
    for what, line in _differing(cfg).items():
        if what in ("model", OPTIMIZER) and not cfg.fitted.anyway:
            fix = "give optim.lr, or fitted.anyway=true to use the law all the same"
            yield Problem("law-of-other-runs", f"{line}; {fix}")


def fitted_warnings(cfg: Config) -> Iterator[str]:
    """A line for each way in which a legal run differs from the runs of the fit."""
    fit, batch, (_, tokens) = cfg.fitted, cfg.batch.total_batch_size, cfg.run_length
    if far := _outside(batch, fit.min_batch_tokens, fit.max_batch_tokens, "batch size"):
        yield f"batch.total_batch_size={batch:,} is {far}; the learning rate is extrapolated"
    if far := _outside(tokens, fit.min_tokens, fit.max_tokens, "number of tokens", LENGTH_FACTOR):
        yield f"a run of {tokens:,} tokens is {far}, {SO}"
    yield from _differing(cfg).values()


def other_text(cfg: Config, data_hash: str) -> list[str]:
    """A line if the hash of the run's tokens differs from the fit's, unless a key of `data` already shows this."""
    was = cfg.fitted.data_hash
    if was in (None, data_hash) or "data" in _differing(cfg):
        return []
    return [f"the text (hash {data_hash}) is not that of the fitted law of optim (hash {was}), {SO}"]


def _differing(cfg: Config) -> dict[str, str]:
    """Section, or `optim.name` -> a line about its values that differ from the fit's."""
    was, differences = cfg.fitted.settings or {}, dict[str, list[str]]()
    for key, _, now in fields_of(cfg):
        if was.get(key, now) != now:
            section = key if key == OPTIMIZER else key.partition(".")[0]
            differences.setdefault(section, []).append(f"{key}={shown(now)} (the fit: {shown(was[key])})")
    unlike = f"unlike the runs of the fitted law of optim, {SO}"
    return {what: f"{first_keys(texts)}: {unlike}" for what, texts in differences.items()}


def _outside(value: int, least: int | None, most: int | None, what: str, factor: float = 1.0) -> str | None:
    """How many octaves `value` lies outside the fit's range, in words; None if inside, or if by at most `factor`."""
    least, most = least or value, most or value
    octaves, where = max(
        (math.log2(least / value), f"below the smallest {what} of the fit, {least:,}"),
        (math.log2(value / most), f"above the largest {what} of the fit, {most:,}"),
    )
    if octaves <= math.log2(factor):
        return None
    number = f"{octaves:.1f}" if octaves >= 0.05 else f"{octaves:.1g}"
    return f"{number} octave{'' if number == '1.0' else 's'} {where}"
