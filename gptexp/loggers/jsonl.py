"""metrics.jsonl: one JSON object per event."""

import errno
import json
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptexp.loggers.run_log import Sink
from gptexp.process.errors import StorageError
from gptexp.process.terminal import as_command, warn
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.missing_steps import described, missing_steps
from gptexp.storage.reader import open_bytes, parse_line
from gptexp.storage.run_dir import METRICS as METRICS_FILE
from gptexp.storage.run_dir import atomic, finite, storage


class JsonlSink(Sink):
    """Writes one line per event, unbuffered. Raises `StorageError` if the file cannot be written.

    Opening removes the lines of steps after `state`: the resumed run logs them again. It prints a line if steps from
    `first_step`, where the run begins, to `state` are missing.
    """

    def __init__(self, directory: Path, state: TrainState, log_every: int, first_step: int = 0) -> None:
        self._path = directory / METRICS_FILE
        self.alerts_before: set[str] = set()  # kinds of the alerts that earlier attempts have logged
        self.earlier_steps: dict[str, list[int]] = defaultdict(list)  # kind of event -> the steps of those events
        self._open(state)
        if gaps := missing_steps(self.earlier_steps.pop("step", []), state.step, log_every, first_step):
            warn(f"{self._path}: {described(gaps)}; the curves have a gap there")

    def write(self, event: dict[str, Any]) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            raise StorageError(f"{self._path}: deleted while the run trains, so nothing can be saved; start again")
        line = (json.dumps(finite(event)) + "\n").encode()
        end = self._file.tell()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)  # leaves no partial line
            again = as_command(["resume", str(self._path.parent)])
            raise StorageError(
                f"{self._path}: cannot be written ({error.strerror}); free disk space, then continue from the newest "
                f"checkpoint with {again}"
            ) from None

    def sync(self) -> None:
        with storage(self._path):
            os.fsync(self._file.fileno())

    def rewind(self, state: TrainState) -> None:
        self._file.close()
        self._open(state)

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        self._file.close()

    def _open(self, state: TrainState) -> None:
        """Open the file for further lines."""
        if self._path.exists():
            with storage(self._path), atomic(self._path, "wb") as kept, open_bytes(self._path) as lines:
                for line in lines:
                    try:
                        event = parse_line(line)
                    except ValueError:  # the partial last line of a killed process
                        continue
                    if isinstance(event, dict) and _is_before(event, state):
                        kept.write(line)
                        self._remember(str(event.get("event")), event)
        with storage(self._path):
            self._file = self._path.open("ab", buffering=0)

    def _remember(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "alert":
            self.alerts_before.add(str(event.get("about")))
        if isinstance(event.get("step"), int):
            self.earlier_steps[kind].append(event["step"])


def _is_before(event: dict[str, Any], state: TrainState) -> bool:
    """Whether an event was logged before the checkpoint with `state` was saved."""
    tokens = event.get("tokens", 0)
    before = state.evaluated_tokens if event.get("event") == "eval" else state.tokens
    return isinstance(tokens, int) and tokens <= before
