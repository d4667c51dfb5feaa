"""Sinks: whole lines, resumed files, and a wandb that may fail."""

import errno
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gptexp.alerts import Alerts
from gptexp.checkpoint import TrainState
from gptexp.config import WandbConfig
from gptexp.errors import StorageError, first_line
from gptexp.flops import Utilisation
from gptexp.loggers import JsonlSink, RunLog, straggler
from gptexp.loggers.console import BarSink, JsonSink, LineSink, build_console
from gptexp.loggers.wandb import WandbSink, _mode, build_wandb

STEP = {
    "step": 3, "tokens": 400, "epoch": 0.5, "loss": 2.5, "lr": 6e-4, "grad_norm": 1.25, "clip_fraction": 0.25,
    "seconds": 0.5, "phases_ms": {"forward": 20.0}, "work_ms": [20.0], "noise_scale": {"gns/cos": 0.5},
    "fingerprint": 255,
}  # fmt: skip


class Memory:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def rewind(self, state: TrainState) -> None: ...

    def close(self, summary: dict[str, Any], exit_code: int) -> None: ...


def log_to(sink: Memory, peak: float | None = None) -> RunLog:
    return RunLog([sink], 100, Utilisation(150, 1000, 800, peak, "somebody said so"), Alerts(0, 1.0))


def test_rates_and_utilisation() -> None:
    with_peak, without = Memory(), Memory()
    log_to(with_peak, 1e6).step(**STEP)  # type: ignore[arg-type]
    log_to(without).step(**STEP)  # type: ignore[arg-type]
    [known], [unknown] = with_peak.events, without.events
    assert known["perf/tokens_per_s"] == 200
    assert known["perf/step_ms"] == 500
    assert known["perf/forward_ms"] == 20
    assert (known["perf/mfu_palm"], known["perf/mfu_causal"]) == (0.2, 0.16)
    assert (unknown["perf/mfu_palm"], unknown["perf/mfu_causal"]) == (None, None)
    assert known["flops"] == 400 * 1000
    assert known["gns/cos"] == 0.5
    assert known["data/fingerprint"] == "00000000000000ff"
    assert known["optim/clip_fraction"] == 0.25
    assert "perf/slowest_rank" not in known  # one rank is nobody's straggler


def test_the_slowest_of_several_ranks_is_told_from_the_usual_one() -> None:
    assert straggler([10.0, 30.0, 12.0, 8.0]) == {"perf/straggler_ratio": 3.0, "perf/slowest_rank": 1}
    assert straggler([10.0, 20.0]) == {"perf/straggler_ratio": 2.0, "perf/slowest_rank": 1}
    assert straggler([0.0, 0.0]) == {}  # nobody has said anything yet


def test_an_alert_is_an_event_of_its_own() -> None:
    sink = Memory()
    log_to(sink).step(**{**STEP, "epoch": 1.5})  # type: ignore[arg-type]
    assert [event["event"] for event in sink.events] == ["step", "alert"]
    assert sink.events[1]["text"].startswith("the text repeats")


def test_jsonl_has_no_nan_and_a_resumed_file_ends_at_the_checkpoint(tmp_path: Path) -> None:
    log = JsonlSink(tmp_path, TrainState())
    for tokens in (100, 200, 300):
        log.write({"event": "step", "tokens": tokens, "train/loss": math.nan})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "tok')  # a process killed in the middle of a line
    JsonlSink(tmp_path, TrainState(tokens=200)).write({"event": "step", "tokens": 300, "train/loss": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(e["tokens"], e["train/loss"]) for e in lines] == [(100, None), (200, None), (300, 1.0)]


def test_a_disk_that_is_full_when_metrics_reach_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = JsonlSink(tmp_path, TrainState())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
        log.sync()


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("one\ntwo", "one"),
        ("\n  late", "late"),
        (
            "Error(s) in loading state_dict for GPT:\n\tMissing key(s)",
            "Error(s) in loading state_dict for GPT: Missing key(s)",
        ),
        ("", "RuntimeError"),
    ],
)
def test_what_a_library_says_fits_into_a_line(said: str, line: str) -> None:
    assert first_line(RuntimeError(said)) == line


def test_console_is_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build_console("auto", 10, TrainState()), LineSink)
    assert isinstance(build_console("json", 10, TrainState()), JsonSink)
    assert build_console("off", 10, TrainState()) is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bar = build_console("auto", 10, TrainState())
    assert isinstance(bar, BarSink)
    bar.close({}, 0)


@pytest.mark.parametrize(("mfu", "shown"), [(None, ""), (0.4213, "  MFU 42.1%")])
def test_bar_shows_losses_rate_utilisation_and_time_left(
    mfu: float | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = BarSink(10, TrainState(step=4, val_loss=9.0))
    step = {"event": "step", "step": 6, "train/loss": 3.14159, "perf/tokens_per_s": 12345.6, "perf/mfu_palm": mfu}

    def drawn() -> str:
        console = Console(width=120, record=True, force_terminal=True)
        console.print(bar._progress.get_renderable())
        return console.export_text()

    bar.write(step)
    assert f"loss 3.1416  val 9.0000  12,346 tok/s{shown}" in drawn()
    bar.write({"event": "eval", "step": 6, "val/loss": 4.5, "val/ppl": 90.0})
    bar.write({**step, "step": 7})
    assert "val 4.5000" in (text := drawn())
    assert "8/10" in text
    assert "left" in text
    bar.write({"event": "alert", "step": 7, "text": "look out"})
    assert "step    7 | warning: look out" in capsys.readouterr().out
    bar.close({}, 0)


class _Failing:
    """A wandb run whose service has died."""

    def define_metric(self, *_: object, **__: object) -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        raise ConnectionResetError("gone")

    def finish(self, **_: object) -> None:
        raise AssertionError("called after it failed")


def test_a_dead_wandb_is_said_once_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WandbSink, "_init", lambda self: _Failing())
    sink = build_wandb(WandbConfig(mode="offline"), tmp_path, {}, None)
    assert sink is not None
    for _ in range(3):
        sink.write({"event": "step", "tokens": 1})
    sink.close({"status": "completed"}, 0)
    assert capsys.readouterr().err.count("wandb: failed (ConnectionResetError: gone)") == 1


def test_a_stuck_wandb_is_given_up_and_never_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Stuck(_Failing):
        def log(self, values: dict[str, Any]) -> None:
            release.wait(60)

    monkeypatch.setattr(WandbSink, "_init", lambda self: Stuck())
    monkeypatch.setattr("gptexp.loggers.wandb.MOST_WAITING", 5)
    sink = build_wandb(WandbConfig(mode="offline"), tmp_path, {}, None)
    assert sink is not None
    for _ in range(20):
        sink.write({"event": "step", "tokens": 1})
    sink.close({"status": "completed"}, 0)
    release.set()
    assert capsys.readouterr().err.count("wandb: is stuck; going on without it") == 1


def test_a_start_that_hangs_is_left_to_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(WandbSink, "_init", lambda self: release.wait(60))
    monkeypatch.setattr("gptexp.loggers.wandb.INIT_TIMEOUT_S", 0.2)
    monkeypatch.setattr("gptexp.loggers.wandb.FINISH_TIMEOUT_S", 0.0)
    monkeypatch.setattr("gptexp.loggers.wandb.SPARE_S", 0.2)
    sink = build_wandb(WandbConfig(mode="offline"), tmp_path, {}, None)  # and goes on
    assert sink is not None
    sink.write({"event": "step", "tokens": 1})
    sink.close({"status": "completed"}, 0)
    release.set()
    assert capsys.readouterr().err.count("wandb: hangs; going on without it") == 1


@pytest.mark.parametrize(
    ("value", "mode", "said"),
    [
        ("", "auto", ""),
        ("dryrun", "offline", ""),
        ("offline", "offline", ""),
        ("garbage", "auto", "WANDB_MODE=garbage:"),
    ],
)
def test_the_mode_of_the_environment(
    value: str, mode: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", value)
    assert _mode() == mode
    assert os.environ.get("WANDB_MODE") == (mode if mode != "auto" else None)
    err = capsys.readouterr().err
    assert said in err
    assert bool(said) == bool(err)


def test_a_damaged_id_file_and_an_agents_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wandb.json").write_text("garbage")
    monkeypatch.setattr(WandbSink, "_init", lambda self: self._id())
    monkeypatch.setattr(WandbSink, "_work", lambda self: self._begun.set())
    sink = build_wandb(WandbConfig(mode="offline"), tmp_path, {}, None)
    assert sink is not None
    made = sink._id()
    assert "beginning a new run" in capsys.readouterr().err
    assert sink._id() == made == json.loads((tmp_path / "wandb.json").read_text())["id"]
    monkeypatch.setenv("WANDB_RUN_ID", "ofagent")
    assert sink._id() == made  # what a run has, it keeps
    (tmp_path / "wandb.json").unlink()
    assert sink._id() == "ofagent"
    (tmp_path / "wandb.json").unlink()
    cell = build_wandb(WandbConfig(mode="offline"), tmp_path, {}, "sweep")
    assert cell is not None
    assert cell._id() != "ofagent"  # not one run for all cells


def test_disabled_never_imports_wandb(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from gptexp.loggers.wandb import build_wandb; from gptexp.config import WandbConfig; "
        "assert build_wandb(WandbConfig(mode='disabled'), pathlib.Path('.'), {}, None) is None; "
        "assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_offline_writes_the_run_and_keeps_its_id(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What lands in the offline file is read back with wandb's own reader."""
    ids = set()
    for attempt in range(2):
        sink = build_wandb(WandbConfig(mode="auto", name="a-name"), tmp_path, {"optim": {"lr": 0.5}}, "grid")
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


@pytest.mark.slow
def test_online_without_a_server_falls_back_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    sink = build_wandb(WandbConfig(mode="auto"), tmp_path, {}, None)
    assert sink is not None
    sink.write({"event": "step", "tokens": 1, "train/loss": 1.0})
    sink.close({"status": "completed"}, 0)
    assert "logging offline instead" in capfd.readouterr().err
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_stdout_is_json_from_the_first_line_to_the_last(gptexp: Any, tiny: list[str], tmp_path: Path) -> None:
    """Of a run, of the same one again, of a resumed one, of two ranks and of a sweep."""
    json_mode = [*tiny, "log.progress=json", "log.sample_tokens=4"]
    commands = {
        "run": ("train", *json_mode, "hydra.run.dir=out"),
        "again": ("train", *json_mode, "hydra.run.dir=out"),
        "resumed": ("resume", "out"),
        "ranks": ("train", *json_mode, "world.size=2"),
        "sweep": ("train", "-m", *json_mode, "optim.lr=1e-3,2e-3"),
    }
    kinds = {}
    for name, command in commands.items():
        done = gptexp(*command)
        assert done.returncode == 0, done.stderr
        kinds[name] = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    for name, times in (("run", 1), ("ranks", 1), ("sweep", 2)):
        assert (kinds[name][0], kinds[name][-1]) == ("start", "end")
        assert [kinds[name].count(kind) for kind in ("start", "step", "sample", "end")] == [
            times,
            4 * times,
            times,
            times,
        ]
    assert kinds["again"] == kinds["resumed"] == []  # there is nothing to do: that is for people


def test_quiet_is_a_line(gptexp: Any, tiny: list[str], tmp_path: Path) -> None:
    assert gptexp("prepare", *tiny).returncode == 0  # who tokenises a text first, says so
    done = gptexp("train", *tiny, "hydra.run.dir=out")
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    assert line.startswith("completed after 4 steps")
