"""wandb: the sink with a wandb that fails or hangs, and runs that log to a stand-in for the server."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY, ForkServer, events, summary, wait_for
from real_runs import begun
from wandb_server import ENTITY, WandbServer, minimal_environment
from wandb_server import Run as WandbRun

from gptexp.config.metrics import Metric
from gptexp.config.schema import LogConfig, WandbConfig, fields_of, from_dict, to_dict
from gptexp.loggers.wandb import WandbSink, _mode, build_wandb
from gptexp.storage import run_dir

Start = Callable[..., subprocess.Popen[str]]
Sabotage = Callable[[str, str], dict[str, str]]

SOON = "m.INIT_TIMEOUT_S, m.FINISH_TIMEOUT_S, m.HTTP_TIMEOUT_S = 3.0, 3.0, 2.0"


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        yield server


@pytest.fixture
def logged(tiny: list[str]) -> list[str]:
    """Overrides of a run that prints lines and logs to wandb."""
    return [*(text for text in tiny if text != "log=disabled"), "log.progress=lines", "log.sample_tokens=8"]


@pytest.fixture
def online(server: WandbServer, sabotage: Sabotage, tmp_path: Path) -> dict[str, str]:
    """The environment of a user with an account on the server."""
    env = {**sabotage("gptexp.loggers.wandb", SOON), **server.environment(tmp_path)}
    del env["WANDB_SILENT"]  # the tests count the lines of wandb itself as well
    return env


def ended(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def of_wandb(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "wandb" in line]


def steps_logged(server: WandbServer, run: str) -> list[tuple[int, float]]:
    return [(row["step"], row["train/loss"]) for row in server.runs[run].history if "train/loss" in row]


def run_id(directory: Path) -> str:
    return str(json.loads((directory / "wandb.json").read_text())["id"])


def sync(server: WandbServer, directory: Path, line: str) -> None:
    """Upload to `server` by the command at the end of a printed `line`."""
    folder = Path(sys.executable).parent  # of the program wandb
    env = {**os.environ, **server.environment(directory), "PATH": f"{folder}:{os.environ['PATH']}"}
    command = line.partition("to upload: ")[2]
    done = subprocess.run(command, shell=True, env=env, cwd=directory, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


# --- the sink ---------------------------------------------------------------------------------------------------------
class _Failing:
    """A wandb run whose service process has died."""

    def define_metric(self, *_: object, **__: object) -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        raise ConnectionResetError("gone")

    def finish(self, **_: object) -> None:
        raise AssertionError("called after it failed")


def test_a_dead_wandb_is_reported_once_and_not_called_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WandbSink, "_init", lambda self: _Failing())
    sink = build_wandb(LogConfig(wandb=WandbConfig(mode="offline")), tmp_path, {}, None)
    assert sink is not None
    for _ in range(3):
        sink.write({"event": "step", "tokens": 1})
    sink.close({"status": "completed"}, 0)
    assert capsys.readouterr().err.count("wandb: failed (ConnectionResetError: gone)") == 1


def test_a_run_gives_up_on_a_stuck_wandb_without_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Stuck(_Failing):
        def log(self, values: dict[str, Any]) -> None:
            release.wait(60)

    monkeypatch.setattr(WandbSink, "_init", lambda self: Stuck())
    monkeypatch.setattr("gptexp.loggers.wandb.MOST_WAITING", 5)
    sink = build_wandb(LogConfig(wandb=WandbConfig(mode="offline")), tmp_path, {}, None)
    assert sink is not None
    for _ in range(20):
        sink.write({"event": "step", "tokens": 1})
    sink.close({"status": "completed"}, 0)
    release.set()
    assert capsys.readouterr().err.count("wandb: is too slow; continuing without wandb") == 1


def test_training_continues_without_a_wandb_that_hangs_at_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(WandbSink, "_init", lambda self: release.wait(60))
    monkeypatch.setattr("gptexp.loggers.wandb.INIT_TIMEOUT_S", 60)
    monkeypatch.setattr("gptexp.loggers.wandb.FINISH_TIMEOUT_S", 0.0)
    monkeypatch.setattr("gptexp.loggers.wandb.SPARE_S", 0.2)
    late = threading.Timer(30, release.set)
    late.start()
    sink = build_wandb(LogConfig(wandb=WandbConfig(mode="offline")), tmp_path, {}, None)
    assert not release.is_set(), "it has waited for `_init`"
    late.cancel()
    assert sink is not None
    sink.write({"event": "step", "tokens": 1})
    sink.close({"status": "completed"}, 0)
    release.set()
    assert capsys.readouterr().err.count("wandb: does not respond; continuing without wandb") == 1


@pytest.mark.parametrize(
    ("value", "mode", "said"),
    [
        ("", "auto", ""),
        ("dryrun", "offline", ""),
        ("offline", "offline", ""),
        ("garbage", "auto", "WANDB_MODE=garbage:"),
    ],
)
def test_the_mode_follows_the_environment(
    value: str, mode: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", value)
    assert _mode() == mode
    assert os.environ.get("WANDB_MODE") == (mode if mode != "auto" else None)
    err = capsys.readouterr().err
    assert said in err
    assert bool(said) == bool(err)


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink determines its id and starts no wandb run."""
    monkeypatch.setattr(WandbSink, "_init", lambda self: self._id())
    monkeypatch.setattr(WandbSink, "_work", lambda self: self._is_set_up.set())


@pytest.mark.usefixtures("no_thread")
def test_a_damaged_id_file_gives_a_new_id_which_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wandb.json").write_text("garbage")
    sink = build_wandb(LogConfig(wandb=WandbConfig(mode="offline")), tmp_path, {}, None)
    assert sink is not None
    made = sink._id()
    assert "starting a new wandb run" in capsys.readouterr().err
    assert sink._id() == made == json.loads((tmp_path / "wandb.json").read_text())["id"]


@pytest.mark.usefixtures("no_thread")
def test_only_a_new_run_outside_of_a_sweep_takes_the_id_of_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "of-agent")
    for name, sweep, known, expected in (
        ("new", None, None, True),
        ("resumed", None, "own", False),  # a run keeps the id that it has
        ("cell", "sweep", None, False),  # each cell of a sweep has its own wandb run
    ):
        directory = tmp_path / name
        directory.mkdir()
        if known is not None:
            (directory / "wandb.json").write_text(json.dumps({"id": known}))
        sink = build_wandb(LogConfig(wandb=WandbConfig(mode="offline")), directory, {}, sweep)
        assert sink is not None
        assert (sink._id() == "of-agent") == expected
        assert known is None or sink._id() == known


@pytest.mark.e2e
def test_disabled_never_imports_wandb(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; "
        "from gptexp.loggers.wandb import build_wandb; from gptexp.config.schema import LogConfig, WandbConfig; "
        "assert build_wandb(LogConfig(wandb=WandbConfig(mode='disabled')), pathlib.Path('.'), {}, None) is None; "
        "assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.e2e
def test_a_resumed_offline_run_keeps_its_id_and_wandb_reads_its_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """wandb's own reader reads the offline file."""
    ids = set()
    for attempt in range(2):
        sink = build_wandb(
            LogConfig(wandb=WandbConfig(mode="auto", name="a-name")), tmp_path, {"optim": {"lr": 0.5}}, "grid"
        )
        assert sink is not None
        for step in range(3):
            sink.write({"event": "step", "step": step, "tokens": 100 * (step + 3 * attempt), "train/loss": 5.0 - step})
        sink.write({"event": "checkpoint", "step": 2, "tokens": 300, "path": "x"})
        sink.close({"status": "completed"}, 0)
        ids.add(json.loads((tmp_path / "wandb.json").read_text())["id"])
    assert "wandb sync" in capfd.readouterr().err
    assert len(ids) == 1
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) >= 1
    assert all(ids.copy().pop() in f.name for f in files)
    read = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(files[0])],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert read.returncode == 0, read.stderr
    text = read.stdout
    assert "train/loss" in text
    assert "a-name" in text
    assert "grid" in text


@pytest.mark.e2e
def test_wandb_writes_its_files_into_its_own_directory_if_one_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "all"))
    (tmp_path / "run").mkdir()
    sink = build_wandb(LogConfig(wandb=WandbConfig(mode="offline")), tmp_path / "run", {}, None)
    assert sink is not None
    sink.close({"status": "completed"}, 0)
    [written] = (tmp_path / "all/wandb").glob("offline-run-*")
    assert f"{tmp_path}/all/wandb/offline-run-*" in capfd.readouterr().err
    assert written.name.endswith(run_id(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["wandb.json"]


@pytest.mark.slow
def test_online_without_a_server_falls_back_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    sink = build_wandb(LogConfig(wandb=WandbConfig(mode="auto")), tmp_path, {}, None)
    assert sink is not None
    sink.write({"event": "step", "tokens": 1, "train/loss": 1.0})
    sink.close({"status": "completed"}, 0)
    assert "logging offline instead" in capfd.readouterr().err
    assert list((tmp_path / "wandb").glob("offline-run-*"))


# --- runs -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Online:
    """A finished run of two ranks, and its wandb run as the server has it."""

    out: Path
    stderr: str
    run: WandbRun
    faults: list[str]


@pytest.fixture(scope="module")
def finished(torch_server: ForkServer, corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Online:
    """A run that logs everything that gptexp can log to wandb."""
    folder = tmp_path_factory.mktemp("online")
    with WandbServer() as server:
        own = [
            "model=mini", *TINY[1:5], "world.size=2", "log.progress=lines", "log.sample_tokens=8",
            "log.wandb.tags=[a,b]", "log.wandb.artifacts=true", "hydra.run.dir=out", "--tag", "b", "--tag", "c d",
            "train.sharpness_every_tokens=1000000", "log.wandb.init={job_type: ablation}", "user.team=red",
        ]  # fmt: skip
        kept = (text for text in TINY if text != "log=disabled")
        env = {**minimal_environment(cache), **server.environment(folder)}
        env |= {"WANDB_ENTITY": "a-team", "WANDB_NOTES": "why, and how", "WANDB_TAGS": "not,these"}
        done = torch_server.ask(["train", *kept, f"data.path={corpus}", *own], folder, env, 240)
        assert done["code"] == 0, done["stderr"]
        [run] = server.runs.values()
        return Online(folder / "out", done["stderr"], run, server.faults)


@pytest.mark.e2e
def test_a_run_sets_name_and_tags_of_its_wandb_run_and_prints_no_warning(finished: Online) -> None:
    assert of_wandb(finished.stderr) == []
    run = finished.run
    assert (run.id, run.project, run.tags) == (run_id(finished.out), "gptexp", ["b", "c d", "a"])
    assert run.job_type == "ablation"  # by log.wandb.init
    assert (run.entity, run.notes) == ("a-team", "why, and how")
    assert run.display_name == "mini-lr6e-4-b128"
    assert run.group is None
    assert run.exit_code == 0
    assert not finished.faults


@pytest.mark.e2e
def test_the_config_of_a_run_is_on_the_server(finished: Online) -> None:
    out = finished.out
    config = {key: of["value"] for key, of in finished.run.config.items() if key != "_wandb"}
    saved = to_dict(run_dir.load_resolved(out))
    saved["data"] = {key: value for key, value in saved["data"].items() if value != {}}  # which wandb leaves out
    assert {key: config[key] for key in saved} == saved
    assert saved["user"] == {"team": "red"}
    assert config["effective"] == json.loads((out / "effective.json").read_text())
    assert config["mfu"] == summary(out)["mfu"]
    assert config["data_hash"] == summary(out)["data_hash"]


@pytest.mark.e2e
def test_every_number_of_metrics_jsonl_is_on_the_server_under_its_name(finished: Online) -> None:
    rows = [{k: v for k, v in row.items() if not k.startswith("_")} for row in finished.run.history]
    expected = [
        {k: v for k, v in event.items() if k not in ("event", "time") and v is not None}
        for event in map(json.loads, (finished.out / "metrics.jsonl").read_text().splitlines())
        if event["event"] in ("step", "eval", "sharpness")
    ]
    assert [row for row in rows if not {"samples", "report"} & row.keys()] == expected
    definitions = finished.run.config["_wandb"]["value"]["m"]
    assert any(d.get("2") == "*" or "tokens" in str(d) for d in definitions)


@pytest.mark.e2e
def test_the_summary_on_the_server_has_the_lowest_losses_and_the_status(finished: Online) -> None:
    run, out = finished.run, finished.out
    assert run.summary["val/loss"] == {"min": summary(out)["best_val_loss"]}
    assert run.summary["train/loss"]["min"] == min(event["train/loss"] for event in events(out, "step"))
    assert run.summary["status"] == "completed"
    assert run.summary["final_val_loss"] == summary(out)["final_val_loss"]


@pytest.mark.e2e
def test_samples_report_and_weights_are_uploaded(finished: Online) -> None:
    out = finished.out
    kinds = {artifact.type: artifact for artifact in finished.run.artifacts}
    assert kinds.keys() == {"run_table", "report", "model"}
    assert all(artifact.state == "COMMITTED" for artifact in finished.run.artifacts)
    table = json.loads(kinds["run_table"].files["samples.table.json"])
    assert table["columns"] == ["step", "tokens", "text"]
    assert table["data"] == [[3, 512, events(out, "sample")[0]["text"]]]
    assert {"report.html", "report.json", "cells.csv"} <= kinds["report"].files.keys()
    assert kinds["report"].files["report.html"] == (out / "report.html").read_bytes()
    assert [row["report"]["_type"] for row in finished.run.history if "report" in row] == ["html-file"]
    weights = "checkpoints/step-00000004/model.safetensors"
    assert kinds["model"].files["step-00000004/model.safetensors"] == (out / weights).read_bytes()


LOOK = """
import atexit, importlib, time
importlib.import_module("gptexp.loggers.wandb").FINISH_TIMEOUT_S = 3.0
plain = {name: getattr(m.RunLog, name) for name in ("step", "evaluation", "checkpoint", "sync")}
spent, began = [0.0, 0], []
def timed(name):
    def call(*args, **kwargs):
        now = time.perf_counter()
        began.append(now)
        plain[name](*args, **kwargs)
        spent[0] += time.perf_counter() - now
    return call
for name in plain:
    setattr(m.RunLog, name, timed(name))
atexit.register(lambda: began and open("share.txt", "a").write(f"{spent[0] / (began[-1] - began[0])}\\n"))
"""


STEPS = 150
LONGER = [f"train.max_steps={STEPS}", "train.eval_every=0", "train.save_every=0", "log.progress=off"]


@pytest.fixture(scope="module")
def plain_weights(
    torch_server: ForkServer, corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> bytes:
    """The weights after the same run without wandb."""
    folder = tmp_path_factory.mktemp("plain")
    done = torch_server.ask(
        ["train", *TINY, f"data.path={corpus}", *LONGER, "hydra.run.dir=out"], folder, minimal_environment(cache), 120
    )
    assert done["code"] == 0, done["stderr"]
    return (folder / f"out/checkpoints/step-{STEPS:08d}/model.safetensors").read_bytes()


E2E, SLOW = pytest.mark.e2e, pytest.mark.slow
NOT_ALL = "not everything was uploaded within 3 s; to upload: for run in "


@pytest.mark.parametrize(
    ("when", "behaviour", "said"),
    [
        pytest.param("always", "ok", None, marks=SLOW),
        pytest.param("always", "refuse", "logging offline instead", marks=SLOW),
        pytest.param("always", "error", "logging offline instead", marks=SLOW),
        pytest.param("always", "hang", "logging offline instead", marks=SLOW),
        pytest.param("always", "gone", "logging offline instead", marks=SLOW),
        pytest.param("midway", "refuse", "files were not uploaded (AuthenticationError: ", marks=SLOW),
        pytest.param("midway", "error", NOT_ALL, marks=SLOW),
        pytest.param("midway", "hang", NOT_ALL, marks=SLOW),
        pytest.param("midway", "gone", NOT_ALL, marks=E2E),
    ],
)
def test_a_failing_server_changes_no_run_and_one_line_says_how_to_upload(
    server: WandbServer,
    start: Start,
    logged: list[str],
    online: dict[str, str],
    tmp_path: Path,
    plain_weights: bytes,
    when: str,
    behaviour: str,
    said: str | None,
) -> None:
    steps, run = STEPS, [*logged, *LONGER]

    def misbehave() -> None:
        if behaviour == "gone":
            server.die()
        else:
            server.behaviour = behaviour  # type: ignore[assignment]

    if when == "always":
        misbehave()
    training = start("train", *run, "hydra.run.dir=out", env=online)
    out = tmp_path / "out"
    if when == "midway":
        metrics = out / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20, training)
        misbehave()
    code, _, err = ended(training)
    assert code == 0, err
    assert "Traceback" not in err
    lines = of_wandb(err)
    if said is None:
        assert lines == []
        assert len(steps_logged(server, run_id(out))) == steps
        return
    assert said in lines[0]
    assert len(lines) == (2 if when == "always" else 1)  # the first names the failure, the last the command to upload
    assert "wandb sync" in lines[-1]
    # Metrics and weights are those of a run without wandb.
    assert [event["step"] for event in events(out, "step")] == list(range(steps))
    assert (out / f"checkpoints/step-{steps:08d}/model.safetensors").read_bytes() == plain_weights
    # The command in the line uploads everything to a server that answers.
    with WandbServer() as healthy:
        sync(healthy, tmp_path, lines[-1])
        assert steps_logged(healthy, run_id(out)) == [(e["step"], e["train/loss"]) for e in events(out, "step")]
        assert not healthy.faults


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["ok", "hang"])
def test_logging_takes_less_than_one_percent_of_the_time_of_the_loop(
    server: WandbServer,
    start: Start,
    logged: list[str],
    sabotage: Sabotage,
    tmp_path: Path,
    behaviour: str,
) -> None:
    """The steps take half a second. The server answers at first, and then behaves as given."""
    env = {**sabotage("gptexp.loggers.run_log", LOOK), **server.environment(tmp_path)}
    larger = ["model.n_embd=64", "model.block_size=128", "batch.total_batch_size=2048", "data.val_tokens=256"]
    training = start(
        "train", *logged, *larger, "train.max_steps=20", "train.eval_every=10", "train.save_every=10",
        "log.wandb.mode=online", "hydra.run.dir=out", env=env,
    )  # fmt: skip
    metrics = tmp_path / "out/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, training)
    server.behaviour = behaviour  # type: ignore[assignment]
    code, _, err = ended(training)
    assert code == 0, err
    share = float((tmp_path / "share.txt").read_text())
    print(f"logging with a server that is {behaviour}: {share:.2%} of the loop")
    assert share < 0.01


@pytest.mark.parametrize("when", [pytest.param("always", marks=SLOW), pytest.param("midway", marks=SLOW)])
def test_the_other_ranks_wait_while_rank_0_waits_for_wandb(
    server: WandbServer, start: Start, logged: list[str], online: dict[str, str], tmp_path: Path, when: str
) -> None:
    """Rank 0 waits longer than the timeout of a collective."""
    if when == "always":
        server.behaviour = "hang"
    training = start(
        "train", *logged, *LONGER, "world.size=2", "world.timeout_s=2", "hydra.run.dir=out", env=online
    )  # fmt: skip
    metrics = tmp_path / "out/metrics.jsonl"
    if when == "midway":
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20, training)
        server.behaviour = "hang"
    code, _, err = ended(training)
    assert code == 0, err
    assert summary(tmp_path / "out")["status"] == "completed"
    assert "wandb sync" in of_wandb(err)[-1]


@pytest.mark.slow
def test_the_first_step_waits_for_wandb_ten_seconds_at_most(
    server: WandbServer, start: Start, logged: list[str], tmp_path: Path
) -> None:
    """With unchanged timeouts. Measures the time from the opening of metrics.jsonl to its first line."""
    server.behaviour = "hang"
    env = {**os.environ, **server.environment(tmp_path)}
    training = start("train", *logged, "train.max_steps=2", "hydra.run.dir=out", env=env)
    metrics = tmp_path / "out/metrics.jsonl"
    wait_for(metrics.exists, training)
    began = time.monotonic()
    wait_for(lambda: metrics.stat().st_size, training)
    assert time.monotonic() - began < 10 + 3  # 3 s for the first step itself
    assert ended(training)[0] == 0


@pytest.mark.slow
def test_a_stopped_run_does_not_wait_for_an_upload(
    server: WandbServer, start: Start, logged: list[str], online: dict[str, str], tmp_path: Path
) -> None:
    endless = ["train.max_steps=100000", "train.eval_every=0", "train.save_every=5", "log.wandb.artifacts=true"]
    training = start("train", *logged, *endless, "hydra.run.dir=out", env=online)
    metrics = tmp_path / "out/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20, training)
    server.behaviour = "hang"
    os.kill(training.pid, signal.SIGTERM)
    code, _, err = ended(training, seconds=30)  # SLURM sends SIGKILL after 30 s
    assert code == 143, err
    assert "wandb sync" in of_wandb(err)[-1]


@pytest.mark.e2e
def test_wandb_sync_uploads_an_offline_run_completely(
    server: WandbServer, start: Start, logged: list[str], tmp_path: Path
) -> None:
    code, _, err = ended(start("train", *logged, "log.wandb.mode=offline", "hydra.run.dir=out"))
    assert code == 0
    [line] = of_wandb(err)
    assert "logged offline" in line
    assert not server.requests
    sync(server, tmp_path, line)
    out = tmp_path / "out"
    assert steps_logged(server, run_id(out)) == [(e["step"], e["train/loss"]) for e in events(out, "step")]
    run = server.runs[run_id(out)]
    assert run.exit_code == 0
    assert {artifact.type for artifact in run.artifacts} == {"run_table"}
    assert not (out / "report.html").exists(), "a report that nobody sees takes seconds"
    assert not server.faults


@pytest.mark.e2e
def test_all_attempts_of_a_killed_offline_run_are_uploaded(
    server: WandbServer, start: Start, logged: list[str], tmp_path: Path
) -> None:
    """The file of the killed attempt ends in the middle of a record. The folder's name needs quotes in a shell."""
    out = tmp_path / "it's an offline run"
    training = start(
        "train", *logged, "train.max_steps=300", "train.save_every=20", "train.eval_every=0", "log.wandb.mode=offline",
        f'hydra.run.dir="{out}"',
    )  # fmt: skip
    wait_for(begun(out, 60), training)  # wandb has written the rows of the checkpoint of step 40
    training.kill()
    training.wait()
    [file] = out.glob("wandb/offline-run-*/*.wandb")
    file.write_bytes(file.read_bytes()[:-7])
    code, _, err = ended(start("resume", str(out)))
    assert code == 0, err
    sync(server, tmp_path, of_wandb(err)[-1])
    seen = steps_logged(server, run_id(out))
    assert {step for step, _ in seen} == set(range(300))
    first = resumed_at(seen)
    assert first > 0
    assert [step for step, _ in seen] == [*range(len(seen) - (300 - first)), *range(first, 300)]
    assert not server.faults


@pytest.mark.e2e
def test_a_killed_run_continues_its_wandb_run(
    server: WandbServer, start: Start, logged: list[str], online: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    training = start(
        "train", *logged, "train.max_steps=200", "train.save_every=20", "train.eval_every=0", "log.progress=off",
        "hydra.run.dir=out", env=online,
    )  # fmt: skip
    wait_for(lambda: len(list((out / "checkpoints").glob("step-*"))) >= 2, training)
    training.kill()
    training.wait()
    code, _, err = ended(start("resume", "out", env=online))
    assert (code, of_wandb(err)) == (0, [])
    [run] = server.runs.values()
    assert run.id == run_id(out)
    seen = steps_logged(server, run.id)
    assert seen[-1][0] == 199
    # All steps of the second attempt follow the steps of the first that the server received.
    again = [step for step, _ in seen].index(199) - (199 - resumed_at(seen))
    assert [step for step, _ in seen[again:]] == list(range(resumed_at(seen), 200))
    assert run.exit_code == 0
    assert [event["step"] for event in events(out, "step")] == list(range(200))
    assert not server.faults


def resumed_at(seen: list[tuple[int, float]]) -> int:
    """The first step of the last attempt."""
    at = len(seen) - 1
    while at and seen[at - 1][0] == seen[at][0] - 1:
        at -= 1
    return seen[at][0]


@pytest.mark.slow
def test_a_diverged_run_has_its_exit_code_on_the_server(
    server: WandbServer, start: Start, logged: list[str], online: dict[str, str], tmp_path: Path
) -> None:
    diverging = ["optim.lr=1e6", "optim.grad_clip=0", "train.max_steps=200", "hydra.run.dir=diverged"]
    code, _, _ = ended(start("train", *logged, *diverging, env=online))
    assert code == 5
    assert server.runs[run_id(tmp_path / "diverged")].exit_code == 5


@pytest.mark.e2e
def test_an_interrupted_run_has_its_exit_code_and_its_alert_on_the_server(
    server: WandbServer, start: Start, logged: list[str], online: dict[str, str], tmp_path: Path
) -> None:
    stopped = start(
        "train", *logged, "train.max_steps=100000", "train.eval_every=0", "hydra.run.dir=stopped", env=online
    )
    metrics = tmp_path / "stopped/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, stopped)
    os.kill(stopped.pid, signal.SIGTERM)
    code, _, err = ended(stopped)
    assert code == 143, err
    run = server.runs[run_id(tmp_path / "stopped")]
    assert (run.exit_code, run.preempting, run.summary["status"]) == (143, True, "interrupted")
    assert [alert["title"] for alert in run.alerts] == ["stopped within the warm-up of 1,280,000 tokens"]


@pytest.mark.e2e
def test_the_runs_of_a_sweep_are_a_group_with_its_report(
    server: WandbServer, start: Start, logged: list[str], online: dict[str, str], tmp_path: Path
) -> None:
    code, _, err = ended(
        start("train", "-m", *logged, "optim.lr=1e-3,2e-3", "train.seed=3", "sweep.name=grid", env=online)
    )
    assert code == 0, err
    runs = {run.display_name: run for run in server.runs.values()}
    assert runs.keys() == {"nano-lr1e-3-b128-seed3", "nano-lr2e-3-b128-seed3", "grid-report"}
    assert {run.group for run in runs.values()} == {"grid"}
    assert {run.job_type for run in runs.values()} == {"train", "report"}
    [report] = runs["grid-report"].artifacts
    assert report.files["report.html"] == (tmp_path / "outputs/grid/report.html").read_bytes()
    assert [row["report"]["_type"] for row in runs["grid-report"].history] == ["html-file"]
    assert [a.type for a in runs["nano-lr1e-3-b128-seed3"].artifacts] == ["run_table"]  # the report is the sweep's


@pytest.mark.slow
def test_an_agent_of_a_wandb_sweep_trains_its_trials(
    server: WandbServer, logged: list[str], online: dict[str, str], tmp_path: Path
) -> None:
    """Uses conf/wandb_sweep.yaml with a grid of two cells, because the stand-in has no Bayesian optimisation."""
    sweep = yaml.safe_load((ROOT / "conf/wandb_sweep.yaml").read_text())
    grid = {"optim.lr": {"values": [1e-3, 2e-3]}, "batch.total_batch_size": {"values": [256]}}
    assert sweep["parameters"].keys() == grid.keys() | {"model"}
    fixed = [text for text in logged if text.partition("=")[0] not in grid]
    sweep |= {"method": "grid", "parameters": grid, "command": [*sweep["command"], *fixed]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))

    env = {**online, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # `python` is this one

    def wandb(*argv: str) -> None:
        swift = "import wandb.wandb_agent as w, wandb.cli.cli as c; w.Agent.POLL_INTERVAL = 0.2; c.cli()"
        done = subprocess.run(
            [sys.executable, "-c", swift, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr

    wandb("sweep", "sweep.yaml")
    [made] = server.sweeps.values()
    wandb("agent", f"{ENTITY}/gptexp/{made.id}")
    assert len(made.runs) == 2
    assert server.runs.keys() == set(made.runs)
    assert sorted(run.config["optim"]["value"]["lr"] for run in server.runs.values()) == [1e-3, 2e-3]
    for run in server.runs.values():
        assert (run.sweep, run.exit_code) == (made.id, 0)
        assert "min" in run.summary["val/loss"]
        assert run.config["batch"]["value"]["total_batch_size"] == 256


@pytest.mark.e2e
def test_a_preempted_trial_goes_on_from_its_checkpoint(start: Start, logged: list[str], tmp_path: Path) -> None:
    """wandb starts a preempted trial again with the same ids. Another trial of its sweep has another directory."""
    ids = {"WANDB_SWEEP_ID": "a/sweep", "WANDB_RUN_ID": "trial"}
    trial = ["train", *logged, "train.max_steps=200", "train.save_every=20", "log.wandb.mode=offline"]
    training = start(*trial, env={**os.environ, **ids})
    wait_for(lambda: len(list(tmp_path.glob("outputs/*/*/checkpoints/step-*"))) >= 2, training)
    training.kill()
    training.wait()
    code, out, err = ended(start(*trial, env={**os.environ, **ids}))
    assert code == 0, err
    assert "resuming" in out
    [directory] = tmp_path.glob("outputs/*/*")
    assert run_id(directory) == "trial"
    assert [event["step"] for event in events(directory, "step")] == list(range(200))
    other = start(*trial, "train.max_steps=2", env={**os.environ, **ids, "WANDB_RUN_ID": "other"})
    assert ended(other)[0] == 0
    assert len(list(tmp_path.glob("outputs/*/*"))) == 2
    assert summary(directory)["steps"] == 200


def test_the_sweep_file_names_keys_and_metrics_that_exist() -> None:
    sweep = yaml.safe_load((ROOT / "conf/wandb_sweep.yaml").read_text())
    keys = {key for key, _, _ in fields_of(from_dict({}))}
    assert sweep["parameters"].keys() <= keys | {"model"}
    assert sweep["metric"]["name"] in set(Metric)
