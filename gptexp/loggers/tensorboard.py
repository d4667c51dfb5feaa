"""Event files of TensorBoard, in the run directory, on rank 0. A failure to write them does not stop the run.

TensorBoard names a run by the directory of its event files. They lie in the run directory itself, so that
`tensorboard --logdir outputs` shows each run, and each cell of a sweep, under its own name.

The step of TensorBoard's x axis is the number of tokens.
"""

import itertools
import os
import socket
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import RecordWriter
from torch.utils.tensorboard.summary import hparams, text

from gptexp.config.metrics import Metric
from gptexp.config.schema import Config, fields_of, to_dict
from gptexp.loggers.run_log import Sink
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import warn
from gptexp.storage import sweep_record
from gptexp.storage.checkpoint import TrainState

VERSION = "brain.Event:2"  # of the file format; it has session starts, which hide the steps that a rewind discards
AXES = ("time", "tokens")  # metrics that TensorBoard keeps as the time and the step of every event
FINAL, BEST = Metric.VAL_LOSS, "best_val_loss"  # the metrics of a cell in HParams; val/loss shows its newest value

_files = itertools.count()  # numbers the files of this process: several may begin in the same second


class TensorBoardSink(Sink):
    """Writes one record per event, unbuffered: SummaryWriter writes one per value and takes 16 times as long.

    Opening, and every rewind, begins a new file, which hides the events after `state` in earlier files. The cell of a
    sweep is a session of the HParams plugin. The session is in the same files, because in a directory of its own it
    would be shown as another run.
    """

    def __init__(self, cfg: Config, directory: Path, state: TrainState) -> None:
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._failed = False
        self._swept = swept_values(cfg, directory)
        self._open(state)
        self._log(state.tokens, time.time(), text("config", verbatim(yaml.safe_dump(to_dict(cfg), sort_keys=False))))
        if self._swept:
            experiment, session, self._session_end = hparams(self._swept, dict.fromkeys((FINAL, BEST)))
            self._log(state.tokens, time.time(), experiment)
            self._log(state.tokens, time.time(), session)

    def write(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("step", "eval", "sharpness"):
            # An evaluation has scores too, named by their tasks.
            names = event if kind == "eval" else [*Metric, *(name for name in event if name.startswith("own/"))]
            drawn = [name for name in names if name not in AXES and isinstance(event.get(name), int | float)]
            self._log(event["tokens"], event["time"], scalars({name: event[name] for name in drawn}))
        elif kind == "sample":
            self._log(event["tokens"], event["time"], text("sample", verbatim(event["text"])))

    def rewind(self, state: TrainState) -> None:
        self._close()
        self._open(state)

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        if self._swept:
            if summary["best_val_loss"] is not None:
                self._log(summary["tokens"], time.time(), scalars({BEST: summary["best_val_loss"]}))
            if summary["status"] == "completed":
                self._log(summary["tokens"], time.time(), self._session_end)
        self._close()

    def _open(self, state: TrainState) -> None:
        now = time.time()  # TensorBoard reads the files in the order of their names
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files):06d}"
        self._path = self._directory / name
        self._append(Event(wall_time=now, file_version=VERSION))
        # Hides the events at this step and later in earlier files.
        first = state.tokens + 1 if state.step else 0
        self._append(Event(wall_time=now, step=first, session_log=SessionLog(status=SessionLog.START)))

    def _log(self, tokens: int, wall_time: float, summary: Summary) -> None:
        self._append(Event(wall_time=wall_time, step=tokens, summary=summary))

    def _append(self, event: Event) -> None:
        """Append a record to the file. After the first failure, appends no more records."""
        if self._failed:
            return
        try:
            if self._file is None:
                self._file = self._path.open("xb")
            records = RecordWriter(self._file)
            records.write(event.SerializeToString())
            records.flush()
        except OSError as error:
            self._failed = True
            warn(
                f"{self._path}: cannot be written ({error.strerror}); continuing without TensorBoard, metrics.jsonl is "
                "complete"
            )

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # from records that could not be written before
                self._file.close()
            self._file = None


def scalars(values: dict[str, float]) -> Summary:
    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])


def verbatim(content: str) -> str:
    """`content` as a block of code: TensorBoard shows texts as Markdown."""
    return textwrap.indent(content, "    ", lambda line: True)


def swept_values(cfg: Config, directory: Path) -> dict[str, float | str]:
    """The swept keys of a cell and their values: numbers as such, anything else as typed. Empty for a single run."""
    if cfg.sweep.name is None:
        return {}
    try:
        record = sweep_record.load(directory.parent)
    except ConfigError as error:
        warn(f"TensorBoard's HParams lack this run: {error}")
        return {}
    if record is None or directory.name not in record.cells:
        return {}
    composed = {key: value for key, _, value in fields_of(cfg)}
    typed = record.cells[directory.name].values
    numbers = {key: composed[key] for key in typed if type(composed.get(key)) in (int, float)}
    return {key: numbers.get(key, str(value)) for key, value in typed.items()}
