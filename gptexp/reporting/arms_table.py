"""The arms of a sweep side by side, as a table: at each batch size the best learning rate of each, and its loss."""

from collections.abc import Sequence

from gptexp.process.terminal import printable
from gptexp.reporting.analysis import Arm
from gptexp.reporting.terminal_table import Columns

ARM = "arm"  # title of the column of names


def arms_table(arms: Sequence[Arm]) -> Columns:
    """Columns with a text for each batch size and arm whose optimum has an interval; none unless two arms compare."""
    rows: list[tuple[str, ...]] = []
    for batch in sorted({batch for arm in arms for batch in arm.curves.optima}):
        optima = {printable(arm.label): arm.curves.optima[batch] for arm in arms if batch in arm.curves.optima}
        if len(optima) < 2:
            continue
        best = min(optima.values(), key=lambda optimum: optimum.loss)
        for label, optimum in optima.items():
            gap, half_width = optimum.above(best)
            above = "lowest" if optimum is best else f"{gap:.4f} ± {half_width:.4f}"
            interval = f"{optimum.low:.3g} to {optimum.high:.3g}"
            rows.append((f"{batch:,}", label, f"{optimum.lr:.3g}", interval, f"{optimum.loss:.4f}", above))
    titles = ("tokens a step", ARM, "learning rate", "95% interval", "loss", "above the lowest")
    return list(zip(titles, zip(*rows, strict=True), strict=True)) if rows else []
