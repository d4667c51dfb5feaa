"""tune.jsonl, in the directory of a sweep: what a search for the best learning rate decided, when and why.

One JSON object a line, in the order in which things happened:

- `start`: a command begins; its budget, and the seconds that earlier commands took (`spent`).
- `choose`: a run was chosen: its cell, arm, batch size, learning rate and seed; why; the width of the interval before
  it and as expected after it (in octaves; of the loss, in nats, if arms are compared); how many runs had ended; the
  expected seconds.
- `wait`: no further run helps before one has ended.
- `end`: that run has ended here: its status.
- `stop`: a command ends: for each arm and batch size, why no further run was made.

`choose`, `wait` and `stop` hold the best values known then, each with its 95% interval.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptexp.storage import run_dir
from gptexp.storage.metrics_file import newest
from gptexp.storage.reader import open_text, parse_json

FILE = "tune.jsonl"
TIME = re.compile(rb'"time": (\d[\d.e+-]*)[,}]')
NUMBER = (int, float)
NUMBER_OR_NONE = (int, float, type(None))
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {  # what each event has, and its type
    "start": {"key": str, "within": NUMBER, "prior": list, "spread": NUMBER, "budget": (dict, type(None)),
              "spent": NUMBER},
    "choose": {"cell": str, "arm": list, "batch": int, "lr": NUMBER, "typed": str, "seed": int, "repeat": int,
               "why": str, "width": NUMBER_OR_NONE, "expected_width": NUMBER_OR_NONE, "tokens": int, "optima": list},
    "wait": {"optima": list},
    "end": {"cell": str, "status": (str, type(None))},
    "stop": {"stopped": list, "optima": list},
}  # fmt: skip


class SearchLog:
    """The events of all commands of a search. A damaged line, which a power cut can leave, is skipped."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self.read()

    def read(self) -> list[dict[str, Any]]:
        """The events so far, those of other commands too."""
        self.events = list(read_events(self.path.parent))
        return self.events

    def add(self, event: str, **values: Any) -> None:
        """Append an event. Raises `StorageError` if it cannot be written."""
        entry = {"event": event, "time": round(time.time(), 1), **values}
        run_dir.refuse_link(self.path)
        with run_dir.storage(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                file.seek(max(0, file.tell() - 1))
                is_torn = file.read(1) not in (b"", b"\n")  # a power cut can leave a line without its end
                file.write(b"\n" * is_torn + json.dumps(run_dir.finite(entry)).encode() + b"\n")
        self.events.append(entry)

    def seconds(self) -> float:
        """How long the commands of the search took. A killed one ends with its last event, or its runs' last step."""
        start = next((event for event in reversed(self.events) if event["event"] == "start"), None)
        if start is None:
            return 0.0
        ends = [event["time"] for event in self.events]
        for event in self.events:
            if event["event"] == "choose" and self.events[-1]["event"] != "stop":  # else nothing runs
                last = newest(self.path.parent / event["cell"] / run_dir.METRICS, TIME)
                ends += [float(last[1])] if last is not None else []  # the time of the file changes with a copy
        return float(start["spent"] + max(0.0, max(ends) - start["time"]))


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """The events of a search in `directory`; none without a search."""
    try:
        with open_text(directory / FILE, "replace") as lines:
            for line in lines:
                try:
                    event = parse_json(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and _is_whole(event):
                    yield event
    except OSError:
        return


def _is_whole(event: dict[str, Any]) -> bool:
    fields = FIELDS.get(str(event.get("event")))
    return fields is not None and all(
        isinstance(event.get(name), kind) for name, kind in {"time": NUMBER, **fields}.items()
    )
