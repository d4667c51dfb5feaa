"""sweep.json: what was saved is loaded; what no sweep writes is refused in one line that names the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptexp.process.errors import ConfigError
from gptexp.reporting.listings.progress import survey
from gptexp.storage import sweep_record
from gptexp.storage.sweep_record import MOST_CELLS, PlannedCell, SweepRecord

CELL = {"values": {"optim.lr": "1e-3"}, "total_batch_size": 4096, "tokens": 8192, "first_tokens": 1024}
WHOLE = {
    "name": "sweep",
    "overrides": ["model=nano"],
    "to_choose": 2,
    "cells": {"a": CELL},
    "commands": [["train", "-m"]],
    "objective": "val/loss",
}


def test_a_saved_record_is_loaded(tmp_path: Path) -> None:
    record = SweepRecord(
        "sweep", ["model=nano"], 2, {"a": PlannedCell({"optim.lr": "1e-3"}, 4096, 8192, 1024)}, [["train", "-m"]]
    )
    sweep_record.save(tmp_path, record)
    assert sweep_record.load(tmp_path) == record
    assert json.loads((tmp_path / "sweep.json").read_text()) == WHOLE


def test_the_record_of_an_earlier_version_is_loaded(tmp_path: Path) -> None:
    """Its cells began with their first token."""
    older = {key: value for key, value in CELL.items() if key != "first_tokens"}
    old = {key: value for key, value in WHOLE.items() if key != "objective"}
    (tmp_path / "sweep.json").write_text(json.dumps({**old, "cells": {"a": older}}))
    record = sweep_record.load(tmp_path)
    assert record is not None
    assert record.cells["a"].first_tokens == 0


def test_a_directory_without_a_record_is_no_sweep(tmp_path: Path) -> None:
    assert sweep_record.load(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"to_choose": MOST_CELLS + 1}, "to_choose=1000001: must lie in"),
        ({"to_choose": -1}, "to_choose=-1: must lie in"),
        ({"to_choose": True}, "to_choose=true in a saved SweepRecord: wrong type"),
        ({"overrides": [7]}, "an override or an argument is not text: 7"),
        ({"overrides": "model=nano"}, "wrong type"),
        ({"name": None}, "wrong type"),
        ({"new": 1}, "unknown key 'new'"),
        ({"cells": []}, "'list' object has no attribute"),
        ({"cells": {"a": 1}}, "must be a mapping"),
        ({"cells": {"a": {**CELL, "tokens": 0}}}, "tokens=0 of a: must be above 0"),
        ({"cells": {"a": {**CELL, "first_tokens": 8192}}}, "first_tokens=8192 of a: must be below tokens=8192"),
        ({"cells": {"a": {**CELL, "first_tokens": -1}}}, "first_tokens=-1 of a"),
        ({"cells": {"a": {**CELL, "total_batch_size": 2**63}}}, "total_batch_size=9223372036854775808 of a"),
        ({"cells": {"a": {**CELL, "tokens": 1.5}}}, "tokens=1.5 in a saved PlannedCell: wrong type"),
        *[
            ({"cells": {name: CELL}}, "is not the name of a directory")
            for name in ("../x", "/etc", "a/b", "", "..", "\0")
        ],
    ],
)
def test_a_value_that_no_sweep_has_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({**WHOLE, **change}))
    with pytest.raises(ConfigError) as error:
        survey(tmp_path)
    [line] = error.value.problems
    assert line.startswith(f"{tmp_path / 'sweep.json'}: not the record of a sweep (")
    assert why in line
