"""The dashboard: runs log every name on it, and a second push updates the same view."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, e2e_then_slow
from wandb_server import ENTITY, WandbServer

from gptexp.config.metrics import Metric

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

dashboard = pytest.importorskip(
    "gptexp.loggers.dashboard", reason="no wandb-workspaces; pip install 'gptexp[dashboard]'"
)


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        server.projects.add((ENTITY, "p"))
        yield server


@pytest.fixture
def push(gptexp: Gptexp, server: WandbServer, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`gptexp dashboard push` to a project of the server."""

    def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        project = () if "--project" in argv else ("--project", "p")
        command = ("dashboard", "push", "--entity", ENTITY, *project, *argv)
        return gptexp(*command, env={**server.environment(tmp_path), **env}, timeout=60)

    return run


def spec(name: str = "gptexp") -> dict[str, Any]:
    view: dict[str, Any] = json.loads(json.dumps(dashboard.definition(ENTITY, "p", name)._spec))
    return view


def names() -> set[str]:
    """The names that the definition reads: `config:…`, `summary:…`, `run:…`; names of the history have no prefix."""
    section = spec()["spec"]["section"]
    found = [section["settings"]["xAxis"]]
    for panel in [panel for part in section["panelBankConfig"]["sections"] for panel in part["panels"]]:
        shown = panel["config"]
        found += [shown[axis] for axis in ("xAxis", "yAxis", "zAxis") if axis in shown]
        found += [*shown.get("metrics", []), *(column["accessor"] for column in shown.get("columns", []))]
    [runs] = section["runSets"]
    keys = [key["key"] for key in runs["sort"]["keys"]]
    return {*found, *runs["runFeed"]["columnOrder"], *(f"{key['section']}:{key['name']}" for key in keys)}


def metrics() -> set[str]:
    """The metrics on the dashboard. A minimum in the summary counts as its metric."""
    logged = [name.removeprefix("summary:") for name in names() if not name.startswith(("config:", "run:"))]
    return {name.removesuffix(".min") for name in logged}


def config_keys() -> set[str]:
    """The config keys on the dashboard; wandb writes `optim.value.lr` for `optim.lr`."""
    return {name[7:].replace(".value.", ".", 1) for name in names() if name.startswith("config:")}


def optional_metrics() -> set[str]:
    """Those of the closed sections, which only runs with some option log."""
    sections = spec()["spec"]["section"]["panelBankConfig"]["sections"]
    closed = [section for section in sections if not section["isOpen"]]
    return {name for section in closed for panel in section["panels"] for name in panel["config"]["metrics"]}


def test_every_metric_on_the_dashboard_is_in_the_table_and_logged_by_a_run(finished_run: Path) -> None:
    assert {"val/loss", "flops", "tokens", "gns/tokens"} <= metrics() <= {*Metric}
    lines = (finished_run / "metrics.jsonl").read_text().splitlines()
    assert metrics() - optional_metrics() <= {name for line in lines for name in json.loads(line)}
    assert {"val/loss_ema", "sharpness/hessian", "optim/gradient_noise"} <= optional_metrics() <= metrics()


def test_the_dashboard_shows_the_learning_rate_as_scaled_and_the_batch_size() -> None:
    assert config_keys() == {"effective_optim.lr", "batch.total_batch_size"}


@pytest.mark.e2e
def test_a_run_sends_the_numbers_of_all_scatter_plots_and_columns(
    gptexp: Gptexp, tiny: list[str], server: WandbServer, tmp_path: Path
) -> None:
    env = server.environment(tmp_path)
    done = gptexp("train", *tiny, "log.wandb.mode=online", "hydra.run.dir=out", env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    [run] = server.runs.values()
    found = 0
    for name in names():
        section, _, path = name.rpartition(":")
        value: Any = {"config": run.config, "summary": run.summary}.get(section)
        if value is not None:
            for part in path.split("."):
                value = value[part]
            assert isinstance(value, float | int), name
            found += 1
    assert found > 3


def test_the_definition_is_the_same_each_time() -> None:
    assert spec() == spec()
    panels = [panel for part in spec()["spec"]["section"]["panelBankConfig"]["sections"] for panel in part["panels"]]
    assert len({panel["__id__"] for panel in panels}) == len(panels)


@pytest.mark.e2e
def test_a_second_push_updates_the_same_view(push: Gptexp, server: WandbServer) -> None:
    done = push()
    assert (done.returncode, done.stderr) == (0, "")
    [view] = server.views
    assert view.spec == spec()["spec"]
    assert done.stdout == f"{server.url}/{ENTITY}/p?nw={view.name.removeprefix('nw-').removesuffix('-v')}\n"
    view.spec["section"]["panelBankConfig"]["sections"].clear()  # a user may do this in the browser
    assert push(WANDB_MODE="offline").stdout == done.stdout
    assert (server.views, view.saves, view.spec) == ([view], 2, spec()["spec"])
    push("--name", "another")
    assert [view.display_name for view in server.views] == ["gptexp", "another"]
    assert not server.faults


def test_the_definition_is_printed_without_a_server_or_a_key(gptexp: Gptexp) -> None:
    done = gptexp("dashboard", "push", "--entity", ENTITY, "--project", "p", "--name", "another", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == spec("another")


@pytest.mark.parametrize("behaviour", e2e_then_slow(["hang", "refuse", "error", "dead"], 2))
def test_a_failing_server_gives_one_line(push: Gptexp, server: WandbServer, behaviour: str) -> None:
    if behaviour == "dead":
        server.die()
    else:
        server.behaviour = behaviour  # type: ignore[assignment]
    began = time.monotonic()
    done = push(WANDB_HTTP_TIMEOUT="2")
    assert time.monotonic() - began < 20
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("gptexp: dashboard: not pushed to somebody/p: ")
    assert server.url in done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("argv", "env", "code", "said"),
    [
        (["--project", "nowhere"], {}, 1, "Project `somebody/nowhere` not found"),
        (["--project", "a/b"], {}, 2, "--project=a/b: must be a name without"),
        (["--name", "🙂"], {}, 2, "--name=🙂: wandb accepts no symbols"),
        ([], {"WANDB_API_KEY": ""}, 2, "no API key for wandb; run wandb login, or set WANDB_API_KEY"),
    ],
)
def test_a_wrong_argument_gives_one_line(
    push: Gptexp, server: WandbServer, argv: list[str], env: dict[str, str], code: int, said: str
) -> None:
    done = push(*argv, **env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert said in done.stderr
    assert not server.views


def test_a_missing_package_gives_one_line() -> None:
    argv = ["dashboard", "push", "--entity", ENTITY]
    script = (
        f"import sys; sys.modules['wandb_workspaces'] = None; sys.argv[1:] = {argv}; import gptexp.cli as c; c.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "gptexp: config error: dashboard: not installed; pip install 'gptexp[dashboard]'\n"
