"""The stand-in for the wandb server, tested with the real wandb client: a wrong stand-in would hide faults."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import e2e_then_slow
from wandb_server import ENTITY, WandbServer

# A run that logs the given numbers, and uses every other feature of wandb that gptexp uses.
RUN = """
import sys, wandb
numbers, settings = [float(number) for number in sys.argv[1:]], wandb.Settings(console="off", x_disable_stats=True)
run = wandb.init(project="p", id="abc", resume="allow", name="a name", group="g", job_type="train", tags=["t"],
                 config={"optim": {"lr": 0.5}}, settings=settings)
run.define_metric("val/loss", summary="min")
for number in numbers:
    run.log({"val/loss": number, "train/loss": float("nan")})
run.alert("title", "text")
run.log({"table": wandb.Table(columns=["a"], data=[[1]])})
artifact = wandb.Artifact("weights", "model")
with artifact.new_file("model.bin", "wb") as file:
    file.write(b"bits")
logged = run.log_artifact(artifact, aliases=["best"])
if not run.settings._offline:
    print(logged.wait(30).state)
run.finish(exit_code=3)
"""

TRIAL = """
import sys, wandb
run = wandb.init(project="other", id="own", resume="allow", settings=wandb.Settings(console="off"))
run.log({"lr": float(dict(word.split("=") for word in sys.argv[1:])["optim.lr"])})
"""

SWEEP = f"""
method: grid
project: p
parameters: {{optim.lr: {{values: [0.1, 0.2]}}, batch.total_batch_size: {{value: 128}}}}
command: [{sys.executable}, trial.py, "${{args_no_hyphens}}"]
"""


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        yield server


def python(server: WandbServer, directory: Path, *argv: str, mode: str = "online") -> str:
    env = {**os.environ, **server.environment(directory), "WANDB_DIR": str(directory), "WANDB_MODE": mode}
    done = subprocess.run([sys.executable, *argv], cwd=directory, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(server: WandbServer) -> list[tuple[int, float]]:
    """wandb's own step and the loss of every row that has one."""
    return [(row["_step"], row["val/loss"]) for row in server.runs["abc"].history if "val/loss" in row]


@pytest.mark.e2e
def test_a_second_run_with_the_same_id_continues_the_first(server: WandbServer, tmp_path: Path) -> None:
    assert python(server, tmp_path, "-c", RUN, "3", "2").split() == ["COMMITTED"]
    run = server.runs["abc"]
    assert (run.entity, run.project, run.display_name, run.group) == (ENTITY, "p", "a name", "g")
    assert (run.job_type, run.tags, run.config["optim"]) == ("train", ["t"], {"value": {"lr": 0.5}})
    assert losses(server) == [(0, 3), (1, 2)]
    assert all(math.isnan(row["train/loss"]) for row in run.history[:2])
    assert run.summary["val/loss"] == {"min": 2}
    assert run.exit_code == 3
    assert [alert["title"] for alert in run.alerts] == ["title"]
    assert {"config.yaml", "wandb-summary.json"} <= run.files.keys()
    table, weights = sorted(run.artifacts, key=lambda artifact: artifact.type != "run_table")
    assert [table.state, weights.state] == ["COMMITTED"] * 2
    assert table.files.keys() == {"table.table.json"}
    assert (weights.name, weights.type, {*weights.aliases}) == ("weights", "model", {"latest", "best"})
    assert weights.files == {"model.bin": b"bits"}

    python(server, tmp_path, "-c", RUN, "1")
    assert losses(server) == [(0, 3), (1, 2), (3, 1)]  # step 2 has the table
    assert not server.faults


@pytest.mark.e2e
def test_offline_runs_are_synced_in_the_order_they_were_made(server: WandbServer, tmp_path: Path) -> None:
    python(server, tmp_path, "-c", RUN, "3", "2", mode="offline")
    time.sleep(1.1)  # wandb names their directories, and orders them, by the second
    python(server, tmp_path, "-c", RUN, "1", mode="offline")
    assert not server.requests
    made = sorted(map(str, (tmp_path / "wandb").glob("offline-run-*")))
    python(server, tmp_path, "-m", "wandb", "sync", *reversed(made))
    assert losses(server) == [(0, 3), (1, 2), (3, 1)]
    assert server.runs["abc"].exit_code == 3
    assert [artifact.state for artifact in server.runs["abc"].artifacts] == ["COMMITTED"] * 4
    assert not server.faults


@pytest.mark.e2e
def test_an_agent_runs_every_trial_of_a_grid_once(server: WandbServer, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    (tmp_path / "trial.py").write_text(TRIAL)
    python(server, tmp_path, "-m", "wandb", "sweep", "sweep.yaml")
    [sweep] = server.sweeps.values()
    swift = "import wandb.wandb_agent as w, wandb.cli.cli as c; w.Agent.POLL_INTERVAL = 0.2; c.cli()"
    python(server, tmp_path, "-c", swift, "agent", f"{ENTITY}/p/{sweep.id}")
    assert server.runs.keys() == set(sweep.runs)
    rows = [[row["lr"] for row in run.history] for run in server.runs.values()]
    assert rows == [[0.1], [0.2]]
    assert {(run.project, run.sweep, run.exit_code) for run in server.runs.values()} == {("p", sweep.id, 0)}
    assert not server.faults


@pytest.mark.parametrize(
    ("behaviour", "said"), e2e_then_slow([("refuse", "permission denied"), ("error", "500"), ("hang", "")])
)
def test_a_failing_server_starts_no_run(
    server: WandbServer, tmp_path: Path, behaviour: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.behaviour = behaviour  # type: ignore[assignment]
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    script = "import wandb\ntry: wandb.init(id='abc')\nexcept wandb.errors.CommError as error: print(error)"
    assert said in python(server, tmp_path, "-c", script)
    assert server.requests
    assert not server.runs


@pytest.mark.e2e
def test_an_unknown_request_is_recorded_as_a_fault(server: WandbServer, tmp_path: Path) -> None:
    python(server, tmp_path, "-c", "import wandb\ntry: wandb.Api().run('e/p/r')\nexcept Exception: pass")
    assert "no such operation here" in server.faults[0]
