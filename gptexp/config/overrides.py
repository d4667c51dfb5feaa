"""Checks of the command line's overrides against the schema, before Hydra parses them.

Hydra itself accepts `+key` for an unknown key, prints a dozen lines for an error and stops at the first one. Here each
wrong override gets one line: an unknown key or group, a value of the wrong type, or one that breaks the key's rule.

Also the conversion of whole numbers in a composition, which files and interpolations write as overrides do.
"""

import copy
import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, IntegerNode, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from gptexp.config.aliases import ALIASES
from gptexp.config.describe import PACKAGE, nearest
from gptexp.config.paths import Groups, options
from gptexp.config.schema import (
    NUMBER,
    Config,
    OwnKeys,
    every_key,
    field_problem,
    fields_by_key,
    keys_of_parts,
    kinds_of,
    not_a_choice,
)
from gptexp.config.spelling import MAY_BE_NULL, NULL, OF_USER, canonical
from gptexp.process.errors import ConfigError, Problem
from gptexp.process.fields import AUTO, count_rule, parse_count, unit_of
from gptexp.process.words import shown

SECRET = re.compile(r".*(API_KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)  # names of environment variables
WORD = re.compile(r"[a-zA-Z_/][\w./-]*", re.ASCII)  # a text that Hydra reads without quotes,
NO_TEXTS = ("null", "none", "true", "false", "nan", "inf")  # but for these
KINDS = {float: "a number", bool: "true or false", str: "text", list: "a list of texts",
         dict: "a mapping"}  # fmt: skip


def quoted(text: str) -> str:
    """`text` as a value that neither Hydra nor OmegaConf changes."""
    uninterpolated = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return QuotedString(uninterpolated, Quote.double).with_quotes()


def as_value(value: Any) -> str:
    """A value in the grammar of Hydra's command line, which reads it as the same value."""
    if isinstance(value, str):
        return value if WORD.fullmatch(value) and value.lower() not in NO_TEXTS else quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(as_value, value))}]"
    if isinstance(value, dict):
        escaped = {re.sub(r"([\\\\()\[\]{}:=, \t])", r"\\\1", str(key)): part for key, part in value.items()}
        return f"{{{','.join(f'{key}:{as_value(part)}' for key, part in escaped.items())}}}"
    return shown(value)


class Count(IntegerNode):
    """A whole number of a composition, set by what `parse_count` reads, and by `auto` if the field takes texts."""

    def __init__(self, value: int | str | None, field: dataclasses.Field[Any]) -> None:
        self.unit, self.takes_auto = unit_of(field), str in kinds_of(field)
        super().__init__(value, is_optional=type(None) in get_args(field.type))

    def validate_and_convert(self, value: Any) -> Any:
        if value is None:
            return super().validate_and_convert(value)
        try:
            return AUTO if self.takes_auto and value == AUTO else parse_count(str(value), self.unit)
        except ValueError as error:
            raise ValidationError(f"Value '$VALUE' {error}") from None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Count":
        copied = copy.copy(self)
        self._deepcopy_impl(copied, memo)
        return copied


def structured(config: Any) -> DictConfig:
    """A new config dataclass as OmegaConf's typed config, with its whole numbers as `Count`."""

    def add_counts(section: Any) -> None:
        for f in dataclasses.fields(section):
            value = getattr(section, f.name)
            if dataclasses.is_dataclass(value):
                add_counts(value)
            elif int in kinds_of(f):
                setattr(section, f.name, Count(value, f))

    add_counts(config)
    typed: DictConfig = OmegaConf.structured(config)
    return typed


def override_problems(overrides: Sequence[str], multirun: bool, folders: Sequence[Path]) -> list[Problem]:
    """One line for each wrong override. `folders` contain the YAML files of the groups."""
    groups = options(folders)
    own = keys_of_parts(overrides, groups)
    fields = {**fields_by_key(), **{key: f for key, (f, _) in own.items()}}
    parser = OverridesParser.create()
    problems = list[Problem]()
    for text, spelt in zip(overrides, canonical(overrides), strict=True):
        try:
            override = parse_override(parser, spelt)
        except ConfigError as error:
            problems += error.problems
            continue
        except (HydraException, ValueError):  # ValueError: Python parses no number of more than 4,300 digits
            rule = (
                "not a key=value override; quote a value that contains = , : { [ spaces or letters outside ASCII, "
                "inside the shell's quotes"
            )
            problems.append(Problem("not-an-override", f"{shown(text)}: {rule}: 'key=\"a=b\"'"))
            continue
        # Secrets are refused here too, because Hydra saves the overrides before the config is checked.
        secrets = list(secret_problems((override.key_or_group, value) for value in _values(override)))
        misuse = _misuse(override, shown(text), fields, groups, multirun)
        problems += secrets or ([misuse] if misuse else _wrong_values(override, fields, groups, own))
    return problems


def parse_override(parser: OverridesParser, spelt: str) -> Override:
    """Parse an override as `canonical` spells it. Raises Hydra's error; for wrong counts in range(…) `ConfigError`."""
    try:
        return parser.parse_overrides([spelt])[0]  # `parse_override` does not set the loader that a glob needs
    except HydraException:
        key, _, value = spelt.partition("=")
        field = fields_by_key().get(key)
        wrong = [word for word in NUMBER.findall(value) if not re.fullmatch("[+-]?[0-9]+", word)]
        if field is not None and int in kinds_of(field) and wrong:
            raise ConfigError(_wrong_type(key, field, wrong[0])) from None
        raise


def secret_problems(values: Iterable[tuple[str, object]]) -> Iterator[Problem]:
    """Yield a line for each (key, value) whose value is a secret of the environment and would be saved with the run."""
    secrets = {value: name for name, value in os.environ.items() if value and SECRET.fullmatch(name)}
    for key, value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and item in secrets:
                rule = f"equals the secret ${secrets[item]}, which would be saved with the run; leave it out"
                yield Problem("secret", f"{key}: {rule}")


def _misuse(
    override: Override, text: str, fields: dict[str, dataclasses.Field[Any]], groups: Groups, multirun: bool
) -> Problem | None:
    """The problem of an override that is wrong whatever its value is; `text` is what the user typed."""
    key, is_sweep = override.key_or_group, override.is_sweep_override()

    def refuse(code: str, rule: str) -> Problem:
        return Problem(code, f"{text}: {rule}")

    if key == "hydra.searchpath":
        return refuse("not-supported", "not supported; give one folder with config groups: --config-dir DIR")
    if key.startswith(("hydra.job.env_set", "hydra.job.env_copy")):
        rule = "not supported, because Hydra would save the values; set the variables in the shell"
        return refuse("not-supported", rule)
    if key == "hydra/launcher" and override.value() == "joblib":
        rule = "not supported, because it cannot stop a cell after a checkpoint; use sweep.parallel=N"
        return refuse("not-supported", rule)
    if key in ("hydra/sweeper", "hydra/launcher") and not multirun:
        return refuse("needs-multirun", "applies only to a sweep; add -m (--multirun)")
    if key == "hydra":
        return refuse("group-of-keys", "hydra is a group of keys; set one of them, such as hydra.run.dir=DIR")
    if _is_hydras(key):
        return None  # Hydra checks its own keys
    if key.startswith(OF_USER):
        return refuse("needs-multirun", "several values need -m (--multirun)") if is_sweep and not multirun else None
    if key not in fields and key not in groups:
        if inside := ", ".join(known for known in fields if known.startswith(f"{key}.")):
            return refuse("group-of-keys", f"{key} is a group of keys; set one of them: {inside}")
        return refuse("unknown-key", f"unknown key '{shown(key)}'; {_suggestion(key, fields, groups)}")
    if override.is_delete():
        if key in MAY_BE_NULL:
            return refuse("key-removed", f"write ~{key} alone")
        if key in groups:
            return refuse("key-removed", f"a run needs an option of this group; choose one: {key}=NAME")
        return refuse("key-removed", "a key cannot be removed; set it to another value")
    is_mapping = key in fields and kinds_of(fields[key]) == [dict]
    if (override.is_add() or override.is_force_add()) and not is_mapping:
        return refuse("key-added", f"'{key}' exists already; write {key}=… without the plus sign")
    if is_sweep and not multirun:
        return refuse("needs-multirun", "several values need -m (--multirun)")
    if is_sweep and key == "sweep":
        return refuse("two-sweeps", "a command runs only one named sweep; use a command for each")
    return None


def _is_hydras(key: str) -> bool:
    return re.match(r"hydra[./]", key) is not None


def _wrong_values(
    override: Override, fields: dict[str, dataclasses.Field[Any]], groups: Groups, own: OwnKeys
) -> list[Problem]:
    """The problems of the values of an override."""
    key = override.key_or_group
    if _is_hydras(key) or key.startswith(OF_USER):
        return []
    problems = (
        _wrong_option(key, value, groups[key]) if key in groups else _wrong_value(key, fields[key], value, own)
        for value in _values(override)
    )
    return [problem for problem in problems if problem]


def _values(override: Override) -> list[Any]:
    """The values of an override: both ends of an interval, and none of a glob, which Hydra expands."""
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        return []
    value = override.value()
    if isinstance(value, IntervalSweep):
        return [int(end) if isinstance(end, float) and end.is_integer() else end for end in (value.start, value.end)]
    values = override.sweep_iterator() if override.is_sweep_override() else [value]
    return [item.text if isinstance(item, QuotedString) else item for item in values]


def _wrong_option(group: str, value: Any, known: dict[str, Path]) -> Problem | None:
    if value == NULL and group in MAY_BE_NULL:
        return None
    if isinstance(value, str) and value in known:
        return _misplaced_keys(group, known[value])
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? Options" if close else "options"
    return Problem("no-such-option", f"{group}={shown(value)}: no such option; {hint}: {', '.join(sorted(known))}")


def _misplaced_keys(group: str, file: Path) -> Problem | None:
    """The error if a file sets keys outside its group and lacks the package line. Hydra's own error is obscure."""
    try:
        text = file.read_text()
        keys = {str(key) for key in yaml.safe_load(text) or {}}
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return None  # Hydra reports it
    sections = {f.name for f in dataclasses.fields(Config)} | {"hydra"}
    if PACKAGE.match(text) or not (keys if group == "experiment" else keys & sections):
        return None
    rule = f"its first line must be '# @package _global_'; without it, its keys belong to {group}"
    return Problem("package-line-missing", f"{file}: {rule}")


@cache
def _sections() -> dict[str, DictConfig]:
    """Key -> the OmegaConf section with it. Checks reuse the sections: building one takes longer than a check."""
    classes = {key: cls for key, _, _, cls in every_key()}
    sections = {cls: structured(cls()) for cls in {*classes.values()}}
    return {key: sections[cls] for key, cls in classes.items()}


def _wrong_value(key: str, field: dataclasses.Field[Any], value: Any, own: OwnKeys) -> Problem | None:
    if isinstance(value, str) and "${" in value:
        return None  # Hydra resolves and checks an interpolation
    kind = kinds_of(field)[0]
    section = structured(own[key][1]()) if key in own else _sections()[key]
    name = key.rpartition(".")[2]
    try:
        OmegaConf.update(section, name, value, merge=False)
        wrong = kind is bool and not isinstance(value, bool | str)  # OmegaConf converts any number to a bool
        wrong |= field.type == list[str] and any(not isinstance(item, str) for item in value)
    except OmegaConfBaseException:
        wrong = True
    if not wrong:
        return field_problem(key, field, OmegaConf.select(section, name), typed=shown(value))
    if choices := field.metadata.get("choices"):
        return not_a_choice(f"{key}={shown(value)}", choices)
    return _wrong_type(key, field, value)


def _wrong_type(key: str, field: dataclasses.Field[Any], value: Any) -> Problem:
    kinds = kinds_of(field)
    of_mappings = kinds == [list] and any(get_origin(inner) is dict for inner in get_args(field.type))
    what = "a list of mappings, such as [{_target_: my_lab.NAME}]" if of_mappings else KINDS.get(kinds[0], "a value")
    rule = count_rule(unit_of(field)) if int in kinds else f"must be {what}"
    optional = ", or null" if type(None) in get_args(field.type) else f", or {AUTO}" if kinds == [int, str] else ""
    return Problem("wrong-type", f"{key}={shown(value)}: {rule}{optional}")


def _suggestion(key: str, fields: dict[str, dataclasses.Field[Any]], groups: Groups) -> str:
    """Suggest a key with the same last part, what other trainers call so, a similar key, or those of the same group."""
    known = [*fields, *groups]
    section, _, last = key.rpartition(".")
    if last not in {other.rpartition(".")[2] for other in known} and (alias := ALIASES.get(last.lower())):
        return f"gptexp has {alias}"
    # for `dataset`, suggest the group `data`, not data.offset
    similar = nearest(key, groups, most=1, cutoff=0.7) if key.isidentifier() else []
    if close := similar or nearest(key, known, most=1, cutoff=0.7):
        return f"did you mean '{close[0]}'?"
    if section and (inside := [k.rpartition(".")[2] for k in fields if k.rpartition(".")[0] == section]):
        return f"keys of {section}: {', '.join(inside)}"
    return "gptexp train --help lists all keys"
