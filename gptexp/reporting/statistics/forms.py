"""Forms of the curve of loss over learning rate. The true form is unknown, so the posterior averages over these.

Let u = log2(lr) - m, the distance to the best learning rate in octaves (factors of 2). A curve is c + a h(u). The slope
of h is h'(u) = u exp(g(u)), so every form has one minimum, at u = 0. A constant g gives a parabola; in general g says
how the curvature changes along the curve. h is scaled so that the mean of h(-1) and h(1) is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.floating]
Indices = npt.NDArray[np.intp]

REACH, STEPS = 12.0, 240  # on each side of the minimum: octaves over which h is tabulated, and steps
U = np.linspace(-REACH, REACH, 2 * STEPS + 1)
STEP = REACH / STEPS
FAR_FROM, FAR_TO = 1.0, 4.0  # octaves from the minimum between which `far` and `far_lean` change g
LARGEST_G = 8.0
SIDE_REACH = 1.5  # octaves, see `side`


@dataclass(frozen=True)
class Form:
    """A family of curves. `parameters`: name -> mean and standard deviation of its normal prior."""

    weight: float  # prior probability
    core: float  # octaves around the minimum within which the curve is rounded
    parameters: dict[str, tuple[float, float]]


# `skew`: LINEX, h = 2 (e^(ku) - 1 - ku) / k^2 (Varian 1975, in Studies in Bayesian Econometrics and Statistics): the
# loss falls slowly and rises like a wall. On real sweeps k is near 0.4 (the README's studies, Step Law's public table).
# `kink`: two curvatures, one on each side. `power`, `lean`: |u|^p; `power` changes p alike on both sides, `lean` in
# opposite directions. `wall`: the curvature rises by a factor of e^wall at `onset` octaves above the minimum, where
# training becomes unstable. `growth`: from `onset` on, the curvature grows with the distance.
# `far`, `far_lean`: a bend beyond one octave; `far` bends both sides alike, `far_lean` in opposite directions.
SKEW, KINK, POWER, LEAN = (0.4, 0.6), (0.2, 0.6), (0.0, 0.6), (0.0, 0.5)
WALL, ONSET, FAR = (1.0, 1.0), (0.7, 0.6), (0.0, 0.3)
FORMS = {
    "linex": Form(0.25, 0.0, {"skew": SKEW}),
    "two curvatures": Form(0.20, 0.05, {"kink": KINK}),
    "two bent curvatures": Form(0.10, 0.05, {"kink": KINK, "far": FAR, "far_lean": FAR}),
    "power": Form(0.05, 0.05, {"power": POWER}),
    "two powers": Form(0.15, 0.1, {"power": LEAN, "lean": LEAN, "wall": WALL, "onset": ONSET}),
    "wall": Form(0.05, 0.15, {"wall": WALL, "onset": ONSET}),
    "growing wall": Form(0.10, 0.15, {"growth": WALL, "onset": ONSET}),
    "bent": Form(0.05, 0.4, {"skew": SKEW, "power": POWER}),
    "free": Form(
        0.05, 0.15,
        {"skew": SKEW, "power": POWER, "lean": POWER, "kink": (0.0, 0.4), "far": FAR, "far_lean": FAR},
    ),
}  # fmt: skip


def table_of(form: Form, parameters: Sequence[Array]) -> Array:
    """h at each of `U`, shape (T, len(U)). `parameters`: T values of each parameter of the form."""
    side, log_power = np.sign(U), np.log((np.abs(U) + form.core + 1e-9) / (1 + form.core))
    far = np.clip(np.abs(U) - FAR_FROM, 0, FAR_TO - FAR_FROM)
    g = np.zeros((len(parameters[0]), len(U)))
    values_of = dict(zip(form.parameters, parameters, strict=True))
    for name, values in values_of.items():
        if name == "wall":
            g += values[:, None] * special.expit((U - values_of["onset"][:, None]) / form.core)
        elif name == "growth":
            beyond = form.core * np.logaddexp(0, (U - values_of["onset"][:, None]) / form.core)
            g += np.log1p(np.exp(values)[:, None] * beyond)
        elif name == "skew":
            ku = np.where(np.abs(values) < 1e-3, 1e-3, values)[:, None] * np.where(U == 0, 1e-6, U)
            g += np.log(np.expm1(ku) / ku)
        elif name == "kink":
            g += values[:, None] * np.tanh(U / form.core)
        elif name != "onset":
            basis = {"power": log_power, "lean": side * log_power, "far": far, "far_lean": side * far}[name]
            g += values[:, None] * basis
    slope = U * np.exp(np.clip(g, -LARGEST_G, LARGEST_G))
    h = np.zeros_like(slope)
    np.cumsum((slope[:, 1:] + slope[:, :-1]) * (STEP / 2), axis=1, out=h[:, 1:])
    h -= h[:, STEPS, None]
    octave = round(1 / STEP)
    scale = (h[:, STEPS - octave] + h[:, STEPS + octave]) / 2
    return np.asarray(np.maximum(h, 0) / scale[:, None])


def departure(table: Array) -> Array:
    """How far each curve is from a parabola: the standard deviation of g within an octave of the minimum, (T,)."""
    near = np.flatnonzero((np.abs(U) <= 1) & (U != 0))
    slope = (table[:, near + 1] - table[:, near - 1]) / U[near]
    return np.asarray(np.log(np.maximum(slope, 1e-6)).std(axis=1))


def side(u: Array) -> Array:
    """A function that is close to u near the minimum, and tends to +-`SIDE_REACH` far from it."""
    return np.asarray(SIDE_REACH * np.tanh(u / SIDE_REACH))


def read(table: Array, rows: Indices | slice, u: Array) -> Array:
    """h at `u`, by linear interpolation in the `rows` of a table of h."""
    position = np.clip((u + REACH) / STEP, 0, len(U) - 1.001)
    index = position.astype(np.intp)
    low = table[rows, index]
    return np.asarray(low + (table[rows, index + 1] - low) * (position - index))
