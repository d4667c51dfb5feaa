"""What differs between runs: keys of their configs, and what each run recorded of its data, machine and versions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptexp.config.schema import fields_of
from gptexp.process.terminal import printable
from gptexp.process.words import KEYS_SHOWN, shown
from gptexp.reporting.listings.records import Run, short_commit
from gptexp.storage import run_dir

# What a difference means for the results.
CONFIG = "config"
NO_EFFECT = "config, without effect on the weights"
RECORDED = "recorded by the runs"

LEFT_OUT = ("log.", "sweep.", "fitted.", "data.cache_dir")  # names, places, and facts about other runs
OF_SUMMARY = ("data_hash", "world_size", "device", "git_commit")
# Keys of effective.json that are no choices; the summary has the name of the device.
NO_CHOICES = ("device", "device_name", "memory_key", "runs_at_once")
LABEL_CHARS = 40
SHORT = {"batch.total_batch_size": "batch"}  # in a label


@dataclass(frozen=True)
class Difference:
    """A key whose values are not equal in all runs."""

    key: str
    kind: str
    values: list[Any]  # of each run; for the kind `RECORDED`, None if the run has not recorded it

    @property
    def texts(self) -> list[str]:
        return [printable(self._text(value)) for value in self.values]

    def _text(self, value: Any) -> str:
        if self.kind == RECORDED and value is None:
            return "unknown"
        if self.key == "git_commit":
            return short_commit(str(value))
        return shown(value)


def differences(runs: Sequence[Run]) -> list[Difference]:
    """The keys in which `runs` differ, in the order of the config. Raises `ConfigError` if a file is damaged."""
    deciding = {key for run in runs for key in run.config}
    configs = [{key: value for key, _, value in fields_of(run_dir.load_resolved(run.directory))} for run in runs]
    rows = [
        Difference(d.key, CONFIG if d.key in deciding else NO_EFFECT, d.values)
        for d in _differing(configs, NO_EFFECT)
        if not d.key.startswith(LEFT_OUT)
    ]
    rows.sort(key=lambda d: d.kind != CONFIG)
    return [*rows, *_differing([recorded(run) for run in runs], RECORDED)]


def recorded(run: Run) -> dict[str, Any]:
    """What a run has recorded of its data, machine and versions, and the values that it chose for `auto`."""
    versions = run_dir.read_json(run.directory / run_dir.SUMMARY).get("versions")
    chosen = run_dir.read_json(run.directory / run_dir.EFFECTIVE)
    return {
        **{key: run.summary.get(key) for key in OF_SUMMARY},
        **{
            printable(f"versions.{name}"): value
            for name, value in (versions if isinstance(versions, dict) else {}).items()
        },
        **{
            printable(f"effective.{key}"): value
            for key, value in chosen.items()
            if key not in NO_CHOICES and not isinstance(value, dict)
        },
    }


def _differing(of_runs: Sequence[Mapping[str, Any]], kind: str) -> list[Difference]:
    keys = dict.fromkeys(key for values in of_runs for key in values)
    rows = [Difference(key, kind, [values.get(key) for values in of_runs]) for key in keys]
    return [row for row in rows if any(value != row.values[0] for value in row.values)]


def what_differs(runs: Sequence[Run], differing: Sequence[Difference]) -> list[str]:
    """A short text for each run: its values of the first keys of the config that differ, or its directory's name."""
    texts = [""] * len(runs)
    for difference in [d for d in differing if d.kind == CONFIG][:KEYS_SHOWN]:
        parts = [f"{_short(difference.key)}={text}" for text in difference.texts]
        longer = [f"{text}, {part}" if text else part for text, part in zip(texts, parts, strict=True)]
        if max(map(len, longer)) <= LABEL_CHARS:  # no value is cut: it would read as another one
            texts = longer
    return [text or printable(run.directory.name) for text, run in zip(texts, runs, strict=True)]


def _short(key: str) -> str:
    """`optim.lr` is lr; `optim.name` is optim."""
    group, _, name = key.rpartition(".")
    return SHORT.get(key, group if name == "name" else name)
