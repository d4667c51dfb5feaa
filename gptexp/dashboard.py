"""`gptexp dashboard push`: a saved view of a wandb project, kept as code. Knows which panels there are, reads no run.

A saved view is one that everybody who can see the project finds in its list of views. Its internal name follows from
the name it is shown under, so that whoever pushes again, from wherever, changes the same view; what was changed in the
browser since is lost. wandb-workspaces calls its interface a preview, and has no public way to set that name.
"""

import argparse
import hashlib
import json
import os
import threading
from typing import TYPE_CHECKING, Any

from gptexp.config import WandbConfig
from gptexp.errors import ConfigError, UserError, first_line

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

# With `define_metric("val/loss", summary="min")` wandb's summary of a run holds {"val/loss": {"min": …}} and no number
# under "val/loss" itself. What shows one value per run (scatter, parallel coordinates, the list of runs) reads the
# summary, in which a dot leads to what is nested; line plots read the history, where it is "val/loss".
BEST_LOSS = "val/loss.min"
LR, BATCH = "optim.lr", "batch.total_batch_size"
MAX_RUNS = 100  # in a panel; wandb draws 10 unless told, fewer than a sweep has
TIMEOUT_S = 10  # for an answer of the server, and of wandb's service


def definition(entity: str, project: str, name: str) -> "Workspace":
    """The view; the same arguments give the same, down to the ids. Raises `ValueError` for a name wandb refuses."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def curves(*metrics: str, x: str = "tokens", log_x: bool = False, log_y: bool = False) -> list[Any]:
        return [wr.LinePlot(title=f"{y} by {x}", x=x, y=[y], log_x=log_x, log_y=log_y) for y in metrics]

    def axis(metric: Any, log: bool = False) -> Any:
        return wr.ParallelCoordinatesPlotColumn(metric=metric, log=log)

    lr, batch, best_loss = wr.Config(LR), wr.Config(BATCH), wr.SummaryMetric(BEST_LOSS)
    panels = {
        "Loss": curves("train/loss", "val/loss") + curves("train/loss", "val/loss", x="flops", log_x=True),
        "Optimiser": curves("optim/lr", "optim/grad_norm", "optim/clip_fraction"),
        "Speed": curves("perf/tokens_per_s", "perf/mfu_palm", "perf/mfu_causal", "perf/step_ms", "perf/data_ms"),
        "Noise scale": [
            *curves("gns/tokens", log_y=True),
            *curves("gns/cos"),
            *curves("gns/grad_sq", "gns/noise_trace", log_y=True),
        ],
        "Sweep": [
            wr.ParallelCoordinatesPlot(
                title=f"{BEST_LOSS} by {LR} and {BATCH}",
                columns=[axis(lr, log=True), axis(batch, log=True), axis(best_loss)],
            ),
            # A scatter plot cannot be grouped: its third axis is what colours the points.
            wr.ScatterPlot(title=f"{BEST_LOSS} by {LR}", x=lr, y=best_loss, z=batch, log_x=True, log_z=True),
        ],
    }
    for section, plots in panels.items():
        for plot in plots:
            plot._id = _digest(section, plot.title)  # else a new one each time
    # Runs stay ungrouped: a group is drawn as one line, its mean, and a sweep's cells are there to be told apart.
    workspace = ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[ws.Section(name=section, panels=plots, is_open=True) for section, plots in panels.items()],
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=MAX_RUNS),
        runset_settings=ws.RunsetSettings(
            order=[ws.Ordering(ws.Summary(BEST_LOSS))],
            pinned_columns=[f"summary:{BEST_LOSS}", *map(_column, (LR, BATCH)), "summary:tokens", "run:state"],
        ),
    )
    workspace._internal_name = f"nw-{_digest('gptexp', name)}-v"  # `nw-…-v` is wandb's form
    return workspace


def _column(key: str) -> str:
    """What the list of runs calls a key of the config: wandb keeps each group of ours as one value."""
    group, _, rest = key.partition(".")
    return f"config:{group}.value.{rest}"


def _digest(*parts: str) -> str:
    """Eleven letters and digits, as wandb's own ids have."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:11]


def push(workspace: "Workspace") -> str:
    """Save the view, in place of the one that was pushed under its name before; its address."""
    import wandb
    from wandb_workspaces.workspaces import Workspace

    wandb.setup(wandb.Settings(silent=True, mode="online"))  # whatever WANDB_MODE says of runs
    if not wandb.login(prompt=False):
        raise ConfigError("dashboard: no API key for wandb; run wandb login, or set WANDB_API_KEY")
    try:
        workspace._internal_id = Workspace.from_url(workspace.url)._internal_id
    except ValueError as error:
        if "not found in project" not in str(error):
            raise
    workspace.save()
    return str(workspace.url)


def _leave() -> None:
    """Have wandb end its service process, and wait no longer than `TIMEOUT_S`.

    Left to wandb's exit hook, a push that failed may never end: after a request without an answer 0.31 at times loses
    the order to end, and then it waits for the service and the service for it.
    """
    import wandb

    ending = threading.Thread(target=wandb.teardown, daemon=True)
    ending.start()
    ending.join(TIMEOUT_S)


def main(argv: list[str] | None = None) -> None:
    """Build the project's dashboard on wandb: a saved view, made once and changed by each later push."""
    parser = argparse.ArgumentParser(prog="gptexp dashboard", description=main.__doc__)
    parser.add_argument("action", choices=("push",))
    parser.add_argument("--entity", required=True, help="the user or team that owns the project")
    parser.add_argument("--project", default=WandbConfig().project, help="default: %(default)s, as log.wandb.project")
    parser.add_argument("--name", default="gptexp", help="the view's name; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the definition; needs no network and no key")
    args = parser.parse_args(argv)
    for flag, given in (("entity", args.entity), ("project", args.project)):
        if not given or {*given} & {*"/\\#?%:"}:
            raise ConfigError(f"--{flag}={given}: must be a name without / \\ # ? % and :")
    os.environ.setdefault("WANDB_HTTP_TIMEOUT", str(TIMEOUT_S))  # read when wandb is imported
    try:
        workspace = definition(args.entity, args.project, args.name)
    except ModuleNotFoundError:
        raise ConfigError("dashboard: not installed; pip install 'gptexp[dashboard]'") from None
    except ValueError:
        raise ConfigError(f"--name={args.name}: wandb takes no symbols in a view's name; use letters, digits") from None
    if args.json:
        print(json.dumps(workspace._spec, indent=1))
        return
    try:
        print(push(workspace))
    except ConfigError:
        raise
    except Exception as error:  # wandb raises what it will: ValueError for a project that is not there
        raise UserError(f"dashboard: not pushed to {args.entity}/{args.project}: {first_line(error)}") from None
    finally:
        _leave()


if __name__ == "__main__":
    from gptexp.cli import run_verb

    run_verb(main)
