"""TensorBoard's event files, read back by tensorboard itself: its accumulator of events and its HParams plugin."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import TINY, events, summary, wait_for
from real_runs import begun, train_here
from refusals import codes_in
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.util.tensor_util import make_ndarray

from gptexp.config.compose import compose
from gptexp.config.metrics import SHARPNESS, Metric
from gptexp.config.schema import Config, to_dict
from gptexp.config.vocabulary import with_vocab_size
from gptexp.loggers.tensorboard import TensorBoardSink
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.removal import check_removable

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

ON = "log.tensorboard=true"
NOT_DRAWN = {"time", "tokens", "data/fingerprint"}  # the two axes, and 16 hex digits


def read(directory: Path) -> EventAccumulator:
    """What TensorBoard shows of a run, with no point left out."""
    return EventAccumulator(str(directory), tensor_size_guidance=dict.fromkeys(("scalars", "text"), 0)).Reload()


def curves(shown: EventAccumulator) -> list[str]:
    return list(shown.PluginTagToContent("scalars"))


def curve(shown: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(point.step, float(make_ndarray(point.tensor_proto))) for point in shown.Tensors(name)]


def texts(shown: EventAccumulator, name: str) -> list[tuple[int, list[str]]]:
    """The steps and the lines of a text, which is a block of code in Markdown."""
    found = []
    for point in shown.Tensors(f"{name}/text_summary"):
        lines = point.tensor_proto.string_val[0].decode().split("\n")
        assert all(line.startswith("    ") for line in lines if line), lines
        found.append((point.step, [line.removeprefix("    ") for line in lines]))
    return found


def check_equals_metrics(directory: Path) -> None:
    """Check that TensorBoard shows every number of metrics.jsonl once, at its tokens, and no other."""
    logged: dict[str, list[tuple[int, float]]] = {}
    for event in (event for kind in ("step", "eval", "sharpness") for event in events(directory, kind)):
        for name, value in event.items():
            if name in set(Metric) and name not in NOT_DRAWN and value is not None:
                logged.setdefault(name, []).append((event["tokens"], value))
    assert {"train/loss", "val/loss", "val/bpb", "optim/lr", "perf/step_ms"} <= logged.keys()
    shown = read(directory)
    assert {*curves(shown)} == logged.keys()
    for name, points in logged.items():
        at_once = [(tokens, pytest.approx(value, rel=1e-6)) for tokens, value in sorted(points)]
        assert sorted(curve(shown, name)) == at_once, name


def step(tokens: int, loss: float) -> dict[str, object]:
    return {"event": "step", "time": 1.0, "step": tokens // 100 - 1, "tokens": tokens, "train/loss": loss}


def evaluation(tokens: int, loss: float) -> dict[str, object]:
    return {"event": "eval", "time": 1.0, "step": tokens // 100 - 1, "tokens": tokens, "val/loss": loss}


def test_a_run_shows_its_metrics_over_tokens_its_config_and_its_sample(tiny: list[str], tmp_path: Path) -> None:
    directory, overrides = tmp_path / "out", [*tiny, ON, "train.eval_every=2", "log.sample_tokens=8"]
    assert train_here(overrides, directory) == 0
    check_equals_metrics(directory)
    shown = read(directory)
    [(at, config)], [(end, sample)] = texts(shown, "config"), texts(shown, "sample")
    assert (at, end) == (0, 4 * 128)
    assert yaml.safe_load("\n".join(config)) == to_dict(with_vocab_size(compose(overrides), 50304))
    [logged] = events(directory, "sample")
    assert sample == logged["text"].split("\n")
    check_removable(directory)


def test_a_resumed_or_rewound_run_shows_one_line(tmp_path: Path) -> None:
    """Twelve times within a second: TensorBoard reads the files in the order of their names."""
    log = TensorBoardSink(Config(), tmp_path, TrainState())
    for number in range(12):
        for tokens in (100, 200, 300, 400):
            log.write(step(tokens, number))
        log.write(evaluation(200, number))
        log.write(evaluation(400, number))
        if number < 6:
            log.rewind(TrainState(step=2, tokens=200))
        else:  # killed, and resumed from its only checkpoint
            log = TensorBoardSink(Config(), tmp_path, TrainState(step=2, tokens=200))
        for tokens in (300, 400):
            log.write(step(tokens, number + 0.5))
    shown = read(tmp_path)
    assert curve(shown, "train/loss")[-2:] == [(300, 11.5), (400, 11.5)]
    assert [tokens for tokens, _ in curve(shown, "train/loss")].count(300) == 1
    assert curve(shown, "val/loss")[-1] == (200, 11.0)
    again = TensorBoardSink(Config(), tmp_path, TrainState())  # killed before its first checkpoint
    again.write(step(100, 9.0))
    assert curve(read(tmp_path), "train/loss") == [(100, 9.0)]
    assert [tokens for tokens, _ in texts(read(tmp_path), "config")] == [0]


def test_what_is_no_number_is_left_out_and_nan_is_shown(tmp_path: Path) -> None:
    log = TensorBoardSink(Config(), tmp_path, TrainState())
    log.write({**step(100, math.nan), "perf/mfu_palm": None, "data/fingerprint": "00", "of a plugin": 3.0})
    log.write({"event": "checkpoint", "time": 1.0, "step": 0, "tokens": 100, "path": "x"})
    shown = read(tmp_path)
    assert {*curves(shown)} == {"step", "train/loss"}
    assert math.isnan(curve(shown, "train/loss")[0][1])


def test_the_scores_of_an_evaluation_are_curves(tmp_path: Path) -> None:
    log = TensorBoardSink(Config(), tmp_path, TrainState())
    log.write({**evaluation(100, 1.0), "lambada_openai/acc": 0.5})
    assert {*curves(read(tmp_path))} == {"step", "val/loss", "lambada_openai/acc"}


def test_measured_sharpness_is_four_curves(tmp_path: Path) -> None:
    log = TensorBoardSink(Config(), tmp_path, TrainState())
    found = {**dict.fromkeys(SHARPNESS, 2.0), "sharpness/preconditioned": None}
    log.write({"event": "sharpness", "time": 1.0, "step": 0, "tokens": 100, **found})
    assert {*curves(read(tmp_path))} == {"step", "sharpness/hessian", "sharpness/threshold", "sharpness/sam"}


def test_a_record_is_in_the_file_at_once_and_a_torn_one_is_skipped(tmp_path: Path) -> None:
    log = TensorBoardSink(Config(), tmp_path, TrainState())
    log.write(step(100, 1.0))
    [file] = tmp_path.iterdir()
    assert curve(read(tmp_path), "train/loss") == [(100, 1.0)]
    size = file.stat().st_size
    log.write(step(200, 2.0))
    os.truncate(file, size + 20)  # killed while it wrote
    TensorBoardSink(Config(), tmp_path, TrainState(step=1, tokens=100)).write(step(200, 3.0))
    assert curve(read(tmp_path), "train/loss") == [(100, 1.0), (200, 3.0)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_event_file_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = TensorBoardSink(Config(), tmp_path, TrainState())
    log._file = open("/dev/full", "wb")  # noqa: PTH123, SIM115
    for tokens in (100, 200):
        log.write(step(tokens, 1.0))
    log.rewind(TrainState())
    log.close({"status": "completed", "best_val_loss": 1.0, "tokens": 200}, 0)
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot be written (No space left on device); continuing without TensorBoard, metrics.jsonl is" in line


# As if tensorboard were not installed. The working directory, which may hold a folder of that name, is on sys.path.
WITHOUT_PACKAGE = """
import sys
from importlib.machinery import PathFinder
real = PathFinder.find_spec
here = [""]
def find_spec(name, path=None, target=None):
    return real(name, here if name == "tensorboard" else path, target)
PathFinder.find_spec = find_spec
sys.argv = ["gptexp", *{argv}]
from gptexp.cli import main
try:
    main()
finally:
    print(sorted({{"torch", "tensorboard"}} & sys.modules.keys()), file=sys.stderr)
"""


def run_without_package(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_PACKAGE.format(argv=argv)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.mark.e2e
@pytest.mark.parametrize("folder", [False, True])
def test_a_missing_package_is_one_line_before_torch_is_imported(tmp_path: Path, folder: bool) -> None:
    if folder:  # which Python would import as a package without content
        (tmp_path / "tensorboard").mkdir()
    done = run_without_package(["train", ON, "hydra.run.dir=out"], tmp_path)
    line, imported = done.stderr.splitlines()
    assert codes_in(line) == ["package-missing"]
    assert "pip install 'gptexp[tensorboard]'" in line
    assert (done.returncode, imported) == (2, "[]")
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"] * folder


@pytest.mark.e2e
def test_a_run_without_tensorboard_does_not_import_it(tiny: list[str], tmp_path: Path) -> None:
    done = run_without_package(["train", *tiny, "hydra.run.dir=out"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "['torch']"
    assert not [*(tmp_path / "out").glob("events*")]


@pytest.mark.e2e
def test_a_killed_and_resumed_run_shows_one_line(gptexp: Gptexp, start: Start, tiny: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    lengths = ["train.max_steps=60", "train.save_every=10", "train.eval_every=5"]
    process = start("train", *tiny, ON, *lengths, "hydra.run.dir=out")
    for steps in (15, 35):
        wait_for(begun(directory, steps), process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = start("resume", "out")
    assert process.wait(120) == 0
    assert len([*directory.glob("events.out.tfevents.*")]) == 3
    assert len(curve(read(directory), "train/loss")) == 60
    check_equals_metrics(directory)
    assert gptexp("rm", "out", "--yes").returncode == 0
    assert not directory.exists()


@pytest.mark.e2e
def test_hparams_has_the_swept_keys_and_losses_of_each_cell_and_tensorboard_its_name(
    gptexp: Gptexp, corpus: Path, tmp_path: Path
) -> None:
    swept = ["optim.lr=1e-3,2e-3", "data.order=shuffled", "model=nano"]
    done = gptexp("train", "-m", *TINY, f"data.path={corpus}", ON, *swept, "train.eval_every=1", "sweep.name=mine",
                  "hydra.sweep.dir=outputs/mine")  # fmt: skip
    assert done.returncode == 0, done.stderr
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "outputs"))
    multiplexer.Reload()
    context = backend_context.Context(TBContext(data_provider=MultiplexerDataProvider(multiplexer, "outputs")))
    wanted = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=9, allowed_statuses=[api_pb2.STATUS_SUCCESS],
        col_params=[api_pb2.ColParams(hparam="optim.lr")],
    )  # fmt: skip
    found = list_session_groups.Handler(RequestContext(), context, "", wanted).run().session_groups
    cells = {f"mine/{path.name}": path for path in (tmp_path / "outputs/mine").glob("lr=*")}
    assert len(cells) == 2
    assert {*multiplexer.Runs()} == {group.name for group in found} == cells.keys()
    for group in found:
        of_cell = summary(cells[group.name])
        lr = float(group.name.split("lr=")[1].split("-")[0])
        assert {key: value.number_value for key, value in group.hparams.items()} == {"optim.lr": lr}
        assert {metric.name.tag: metric.value for metric in group.metric_values} == {
            "val/loss": pytest.approx(of_cell["final_val_loss"]),
            "best_val_loss": pytest.approx(of_cell["best_val_loss"]),
        }


def test_hparams_take_numbers_as_numbers_and_anything_else_as_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = Config()
    cfg.sweep.name, cfg.optim.lr, cfg.data.path = "s", 2e-3, ["/a"]
    values = {"optim.lr": "0.2e-2", "model": "nano", "model.bias": "true", "data.path": "a.txt"}
    cell = {"values": values, "total_batch_size": 1, "tokens": 1}
    (tmp_path / "cell").mkdir()
    (tmp_path / "sweep.json").write_text(json.dumps({"name": "s", "overrides": [], "cells": {"cell": cell}}))
    log = TensorBoardSink(cfg, tmp_path / "cell", TrainState())
    assert log._swept == {"optim.lr": 2e-3, "model": "nano", "model.bias": "true", "data.path": "a.txt"}
    (tmp_path / "sweep.json").write_text("{")
    assert TensorBoardSink(cfg, tmp_path / "cell", TrainState())._swept == {}
    assert "TensorBoard's HParams lack this run" in capsys.readouterr().err
