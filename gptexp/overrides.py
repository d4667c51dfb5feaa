"""The command line's overrides, each checked by itself against the schema before Hydra sees it.

Hydra alone accepts `+key` for a key that does not exist, spreads an error over a dozen lines and stops at the first.
Here every override that names no key or group, or whose value has the wrong type or breaks the key's own rule, gets
one line.
"""

import dataclasses
import difflib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptexp.config import Config, field_problem, fields_of, shown

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list of text"}

Fields = dict[str, dataclasses.Field[Any]]
Groups = dict[str, set[str]]


def override_problems(overrides: Sequence[str], multirun: bool, folders: Sequence[Path]) -> list[str]:
    """One line for each wrong override; `folders` hold the groups' YAML files."""
    fields = {key: f for key, f, _ in fields_of(Config())}
    groups = options(folders)
    parser = OverridesParser.create()
    found: list[str] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError):  # Python reads no number of more than 4,300 digits
            found.append(
                f"{shown(text)}: not a key=value override; a value that holds = , : {{ [ or spaces needs quotes "
                "inside the shell's: 'key=\"a=b\"'"
            )
            continue
        found += _problems(override, fields, groups, multirun)
    return found


def options(folders: Sequence[Path]) -> Groups:
    """Group -> the names of its files."""
    groups: Groups = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    return groups


def _problems(override: Override, fields: Fields, groups: Groups, multirun: bool) -> Iterator[str]:
    key, text = override.key_or_group, shown(override.input_line)
    if key == "hydra.searchpath":
        yield f"{text}: not supported; give one folder of groups with --config-dir"
        return
    if key.startswith(("hydra.job.env_set", "hydra.job.env_copy")):
        yield f"{text}: not supported, Hydra would save the values; set variables in the shell"
        return
    if key == "hydra/launcher" and override.value() == "joblib":
        yield f"{text}: not supported, it cannot end a cell gracefully; use sweep.parallel=N"
        return
    if key in ("hydra/sweeper", "hydra/launcher") and not multirun:
        yield f"{text}: says how a sweep is run; add -m (--multirun)"
        return
    if key == "hydra":
        yield f"{text}: hydra is a group of keys; set one of them, such as hydra.run.dir=DIR"
        return
    if key.split(".")[0].split("/")[0] == "hydra":
        return  # Hydra's own, and its to refuse
    if key not in fields and key not in groups:
        inside = [known for known in fields if known.startswith(f"{key}.")]
        if inside:
            yield f"{text}: {key} is a group of keys; set one of them: {', '.join(inside)}"
        else:
            yield f"{text}: unknown key '{shown(key)}'; {_suggestion(key, fields, groups)}"
    elif override.is_delete():
        yield f"{text}: a key cannot be removed; set it to another value"
    elif override.is_add() or override.is_force_add():
        yield f"{text}: '{key}' is there already; write {key}=… without the plus sign"
    elif override.is_sweep_override() and not multirun:
        yield f"{text}: several values need -m (--multirun)"
    elif override.is_sweep_override() and key == "sweep":
        yield f"{text}: one at a time; start several sweeps one after the other"
    elif override.value_type != ValueType.GLOB_CHOICE_SWEEP:  # Hydra expands a glob to options that exist
        values = _values(override)
        for value in values:
            line = _no_option(key, value, groups[key]) if key in groups else _wrong_value(key, fields[key], value)
            if line:
                yield line


def _values(override: Override) -> list[Any]:
    """All that an override can come to; of an interval, which Hydra takes for fractions, its ends."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        return [int(end) if isinstance(end, float) and end.is_integer() else end for end in (value.start, value.end)]
    return list(override.sweep_iterator()) if override.is_sweep_override() else [value]


def _no_option(group: str, value: Any, known: set[str]) -> str | None:
    if isinstance(value, str) and value in known:
        return None
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{group}={shown(value)}: no such option; {hint}there are {', '.join(sorted(known))}"


def _wrong_value(key: str, field: dataclasses.Field[Any], value: Any) -> str | None:
    if isinstance(value, str) and "${" in value:
        return None  # an interpolation: Hydra resolves and checks it
    kinds = [kind for kind in getattr(field.type, "__args__", (field.type,)) if kind is not type(None)]
    is_list = list in (field.type, getattr(field.type, "__origin__", None))
    kind: Any = list if is_list else kinds[0]
    schema = OmegaConf.structured(Config)
    try:
        OmegaConf.update(schema, key, value)
        wrong = kind is bool and not isinstance(value, bool | str)  # OmegaConf takes any number for a truth value
        wrong |= is_list and any(not isinstance(item, str) for item in value)
    except OmegaConfBaseException:
        wrong = True
    if not wrong:
        return field_problem(key, field, OmegaConf.select(schema, key), typed=shown(value))
    if choices := field.metadata.get("choices"):
        return f"{key}={shown(value)}: must be one of {', '.join(choices)}"
    optional = " or null" if type(None) in getattr(field.type, "__args__", ()) else ""
    fix = f"; write {int(value)}" if kind is int and isinstance(value, float) and value.is_integer() else ""
    return f"{key}={shown(value)}: must be {KINDS.get(kind, 'a value')}{optional}{fix}"


def _suggestion(key: str, fields: Fields, groups: Groups) -> str:
    """The key that was probably meant: by its last part, by spelling, or the keys of its group."""
    known: Collection[str] = [*fields, *groups]
    section, _, name = key.rpartition(".")
    close = [k for k in known if name in k.split(".")[1:]]
    close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if close:
        return f"did you mean '{close[0]}'?"
    if inside := [k.rpartition(".")[2] for k in fields if section and k.rpartition(".")[0] == section]:
        return f"{section} has {', '.join(inside)}"
    return "gptexp train --help lists all keys"
