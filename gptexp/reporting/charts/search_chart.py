"""The chart of a search of `gptexp tune`: how the intervals narrowed."""

from gptexp.reporting.charts import vega_lite as vl
from gptexp.reporting.charts.vega_lite import Figure, Spec, caption, figure, tooltip
from gptexp.reporting.listings.search import SearchHistory
from gptexp.reporting.statistics.analysis import Arm


def narrowing_chart(arm: Arm, search: SearchHistory) -> Figure | None:
    """The width of the 95% interval over the runs of the search, with a line for each batch size of an arm."""
    name = search.arm_of({run.name for run in arm.runs})
    if name is None:
        return None
    batches = sorted(batch for of, batch in search.prior if of == name)
    cells = {decision.number: decision for decision in search.decisions}
    points: list[Spec] = []
    for batch in batches:
        for number, width in search.widths((name, batch)):
            known = {"number": number, "width": width, "size": f"{batch:,}"}
            points.append({**known, "run": cells[number].cell} if number in cells else known)
    if not points:
        return None
    without = [f"{batch:,}" for batch in batches if f"{batch:,}" not in {point["size"] for point in points}]
    numbers = sorted({point["number"] for point in points})
    axis = {"values": numbers, "labelOverlap": "greedy", "labelSeparation": 4}
    whole = {"scale": {"nice": False, "zero": False, "padding": 12}, "axis": axis}
    what = "loss at the best learning rate" if search.compares else "best learning rate"
    y = vl.log("width", f"width of the 95% interval, {search.unit}", form=".2~g")
    encoding = {
        "x": vl.quantitative("number", "runs of the search so far", **whole),
        "y": y,
        "color": vl.coloured("size", "tokens a step", [f"{batch:,}" for batch in batches], "batch"),
        "opacity": vl.faint_unless_isolated("size"),
    }
    width = 2 * search.within
    goal: list[Spec] = [] if search.compares else [{"width": width, "label": f"goal: {width:g}"}]
    plain: Spec = {"x": None, "color": None, "opacity": None}
    layers = [
        {**vl.layer("line", points, strokeWidth=2), "params": vl.isolated("size")},
        vl.layer("point", points, {"tooltip": tooltip("number", "size", "width")}, filled=True, size=60),
        vl.layer("rule", goal, {**plain, "y": y}, strokeDash=[6, 4], style="best"),
        vl.layer("text", goal, {**plain, "x": {"value": 0}, "y": y, "text": {"field": "label"}}, style="label", dy=-8),
    ]
    text = caption(
        f"The width of the 95% interval of the {what}, after each run at a batch size.",
        "Until two seeds of one learning rate have run, the noise is unknown and the interval is wide.",
        "" if search.compares else "The search is done with a batch size below the dashed line.",
        f"Not bracketed, and not shown: {', '.join(without)}." if without else "",
    )
    return figure("narrowing", "How the search narrowed", text, {"layer": layers, "encoding": encoding})
