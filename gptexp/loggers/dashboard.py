"""`gptexp dashboard push`: a saved view of a wandb project, defined in code. Reads no run.

Everybody who can see the project finds a saved view in its list of views. Its internal name is derived from the name
that wandb displays, so a second push, from any machine, replaces the same view and discards changes made in the
browser. wandb-workspaces calls its interface a preview, and has no public way to set the internal name.
"""

import hashlib
import json
import threading
from typing import Any

import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces.workspaces import Workspace

from gptexp.config.metrics import SHARPNESS, Metric
from gptexp.process.errors import ConfigError, UserError, first_line

# With `define_metric("val/loss", summary="min")` wandb's summary of a run contains {"val/loss": {"min": …}} and no
# number under "val/loss" itself. Panels with one value per run (scatter, parallel coordinates, the list of runs) read
# the summary, where a dot separates nested keys. Line plots read the history, where the name is "val/loss".
BEST_LOSS = f"{Metric.VAL_LOSS}.min"
LR, BATCH = "effective_optim.lr", "batch.total_batch_size"  # lr as scaled with the batch size, in every run's config
OF_FEW_RUNS = ("Averaged weights", "Sharpness", "Gradient noise added")  # sections that most runs log nothing for
MAX_RUNS = 100  # in a panel; wandb's default of 10 is fewer than a sweep has
LEAVE_S = 10.0  # longest wait for wandb's service to end


def definition(entity: str, project: str, name: str) -> Workspace:
    """Build the view. Equal arguments give equal views, ids included. Raises `ValueError` for a name wandb refuses."""

    def curves(*metrics: str, x: str = "tokens", log_x: bool = False, log_y: bool = False) -> list[Any]:
        return [wr.LinePlot(title=f"{y} by {x}", x=x, y=[y], log_x=log_x, log_y=log_y) for y in metrics]

    losses = Metric.TRAIN_LOSS, Metric.VAL_LOSS
    axis = wr.ParallelCoordinatesPlotColumn
    lr, batch, best_loss = wr.Config(LR), wr.Config(BATCH), wr.SummaryMetric(BEST_LOSS)
    panels = {
        "Loss": curves(*losses) + curves(*losses, x="flops", log_x=True),
        "Optimiser": curves(Metric.LR, Metric.BATCH_TOKENS, Metric.GRAD_NORM, Metric.CLIP_FRACTION),
        "Speed": curves(Metric.TOKENS_PER_S, Metric.MFU_PALM, Metric.MFU_CAUSAL, Metric.STEP_MS, Metric.DATA_MS),
        "Noise scale": [
            *curves(Metric.GNS_TOKENS, log_y=True),
            *curves(Metric.GNS_COS),
            *curves(Metric.GNS_GRAD_SQ, Metric.GNS_NOISE_TRACE, log_y=True),
        ],
        "Sweep": [
            wr.ParallelCoordinatesPlot(
                title=f"{BEST_LOSS} by {LR} and {BATCH}",
                columns=[axis(metric=lr, log=True), axis(metric=batch, log=True), axis(metric=best_loss)],
            ),
            # A scatter plot cannot be grouped: its third axis sets the colour of the points.
            wr.ScatterPlot(title=f"{BEST_LOSS} by {LR}", x=lr, y=best_loss, z=batch, log_x=True, log_z=True),
            # The page of each sweep and search: loss by learning rate with its band, and how the intervals narrowed.
            wr.MediaBrowser(title="Reports", media_keys=["report"], num_columns=1),
        ],
        "Averaged weights": curves(Metric.VAL_LOSS_EMA),
        "Sharpness": curves(*(metric for metric in SHARPNESS if metric != Metric.SHARPNESS_THRESHOLD), log_y=True),
        "Gradient noise added": curves(Metric.GRADIENT_NOISE),
    }
    for section, plots in panels.items():
        for plot in plots:
            plot._id = _digest(section, plot.title)  # otherwise random
    # Runs stay ungrouped: wandb draws a group as one mean line, and the cells of a sweep must stay separate.
    workspace = ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            ws.Section(name=section, panels=plots, is_open=section not in OF_FEW_RUNS)
            for section, plots in panels.items()
        ],
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=MAX_RUNS),
        runset_settings=ws.RunsetSettings(
            order=[ws.Ordering(ws.Summary(BEST_LOSS))],
            pinned_columns=[f"summary:{BEST_LOSS}", *map(_column, (LR, BATCH)), "summary:tokens", "run:state"],
        ),
    )
    workspace._internal_name = f"nw-{_digest('gptexp', name)}-v"  # `nw-…-v` is wandb's form
    return workspace


def _column(key: str) -> str:
    """The name of a key of the config in the list of runs: wandb keeps each of our groups as one value."""
    group, _, rest = key.partition(".")
    return f"config:{group}.value.{rest}"


def _digest(*parts: str) -> str:
    """Eleven letters and digits, as wandb's own ids have."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:11]


def as_json(entity: str, project: str, name: str) -> str:
    """Return the definition as JSON. Needs no network and no API key."""
    return json.dumps(_build(entity, project, name)._spec, indent=1)


def push(entity: str, project: str, name: str) -> str:
    """Save the view, replacing one of the same name. Returns its address."""
    workspace = _build(entity, project, name)
    wandb.setup(wandb.Settings(silent=True, mode="online"))  # WANDB_MODE applies only to runs
    try:
        if not wandb.login(prompt=False):
            raise ConfigError("dashboard: no API key for wandb; run wandb login, or set WANDB_API_KEY")
        try:
            workspace._internal_id = Workspace.from_url(workspace.url)._internal_id
        except ValueError as error:
            if "not found in project" not in str(error):
                raise
        workspace.save()
        return str(workspace.url)
    except ConfigError:
        raise
    except Exception as error:  # wandb documents no types; a missing project is a ValueError
        raise UserError(f"dashboard: not pushed to {entity}/{project}: {first_line(error)}") from None
    finally:
        _leave()


def _build(entity: str, project: str, name: str) -> Workspace:
    try:
        return definition(entity, project, name)
    except ValueError:
        raise ConfigError(f"--name={name}: wandb accepts no symbols in a view's name; use letters, digits") from None


def _leave() -> None:
    """Ask wandb to end its service process, and wait at most `LEAVE_S`.

    With wandb's own exit hook a failed push may never end. After a request without an answer, wandb 0.31 sometimes
    loses the order to end; then it and its service wait for each other.
    """
    ending = threading.Thread(target=wandb.teardown, daemon=True)
    ending.start()
    ending.join(LEAVE_S)
