"""What a key means, and which files set it: the answer to `gptexp train --help KEY`.

The meanings are the comments on the lines of the keys, in schema.py and gptexp/optim. Nothing here imports Hydra, so
that the answer takes no time.
"""

import dataclasses
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gptexp.config.parts import SOURCE, TARGET
from gptexp.config.paths import FILE_FLAGS, Groups, conf_dir, folders, options, own_config
from gptexp.config.schema import every_key, keys_of_parts, kinds_of, optimizers_with
from gptexp.optim import OPTIMIZERS
from gptexp.process.errors import ConfigError, Problem, first_line
from gptexp.process.fields import count_forms, unit_of
from gptexp.process.words import shown

SWEPT = "hydra.sweeper.params."  # in a file, prefix of the keys that it sweeps

# The comment at the top of a file from which Hydra reads the file's package.
PACKAGE = re.compile(r"(?:[ \t]*(?:#.*)?\n)*?[ \t]*#[ \t]*@package[ \t]+(\S+)")


def answer_help(argv: Sequence[str]) -> bool:
    """Print the meaning of each key and group that is named after --help.

    Returns whether any is named; if not, the verb prints its own help. Raises `ConfigError` for an unknown key.
    """
    asked, files, names = False, dict[str, str | None](), list[str]()
    texts = iter(argv)
    for text in texts:
        flag, equals, value = text.partition("=")
        if flag in FILE_FLAGS:
            files[FILE_FLAGS[flag]] = value if equals else next(texts, None)
        elif asked and not text.startswith("-") and "=" not in text:
            names.append(text)
        asked |= text in ("-h", "--help")
    if names:
        config_dir = files.get("dir")
        own = own_config(config_dir, files.get("name"))
        print(*describe(names, options(folders(config_dir)), own), sep="\n\n")
    return names != []


def describe(names: Sequence[str], groups: Groups, own: Path | None = None) -> list[str]:
    """A text for each key or group. `own` is the user's primary config. Raises `ConfigError` for unknown names."""
    keys = [key for key, _, _, _ in every_key()]
    known = list(dict.fromkeys([*keys, *groups, *(key.rpartition(".")[0] for key in keys if "." in key)]))
    unknown = [name for name in names if name not in known]
    of_parts = _of_parts(unknown, groups) if unknown else {}
    if strange := [_unknown(name, [*known, *of_parts]) for name in unknown if name not in of_parts]:
        raise ConfigError(strange)
    defaults = _defaults(groups, own)
    return [
        of_parts.get(name)
        or (_key(name, groups, own, defaults) if name in keys else _group(name, groups.get(name, {}), defaults))
        for name in names
    ]


def _of_parts(names: Sequence[str], groups: Groups) -> dict[str, str]:
    """The texts for the keys of the user's own parts in the groups of `names`. Imports the parts."""
    return {
        key: "\n".join(
            [
                key,
                f"  meaning   a parameter of {getattr(part, TARGET)}",
                f"  values    {kind(field)}",
                f"  default   {_default_of(field)}",
                f"  of        {key.partition('.')[0]}={vars(part)['name']}",
            ]
        )
        for key, (field, part) in keys_of_parts(names, groups).items()
        if field.name not in (TARGET, SOURCE)
    }


def _default_of(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return shown(field.default_factory())
    return "none: it must be given" if field.default == "???" else shown(field.default)


def _defaults(groups: Groups, own: Path | None) -> dict[str, tuple[str, str]]:
    """Key -> (its default as written, what sets that default; "" for the default in the schema)."""
    defaults = {key: (shown(default), "") for key, _, default, _ in every_key()}
    own_settings = dict(settings(own, "_global_")) if own is not None else {}
    for group, option in default_options().items():
        option = str(own_settings.get(group, option))
        if file := groups.get(group, {}).get(option):
            defaults |= {key: (value, f"{group}={option}") for key, value in settings(file, group)}
    return defaults | {key: (value, str(own)) for key, value in own_settings.items()}


def _unknown(name: str, known: list[str]) -> Problem:
    close = ", ".join(nearest(name, known))
    fix = f"nearest: {close}" if close else "gptexp train --help lists all keys"
    return Problem("unknown-key", f"--help {shown(name)}: unknown key; {fix}")


def nearest(name: str, known: Iterable[str], most: int = 3, cutoff: float = 0.5) -> list[str]:
    """The keys with the same last part, else keys of similar spelling."""
    known = list(known)
    same = [key for key in known if name.rpartition(".")[2] in key.split(".")[1:]]
    return same[:most] or difflib.get_close_matches(name, known, n=most, cutoff=cutoff)


def _key(key: str, groups: Groups, own: Path | None, defaults: Mapping[str, tuple[str, str]]) -> str:
    field, section = next((f, cls) for k, f, _, cls in every_key() if k == key)
    counts = f"; {count_forms(unit_of(field))}" if int in kinds_of(field) else ""
    lines = [key, f"  meaning   {meaning(key, field.name, section)}", f"  values    {kind(field)}{counts}"]
    default, setter = defaults[key]
    lines += [f"  default   {default}" + (f", set by {setter}" if setter else "")]
    if section_doc := doc(root(section)):
        lines.append(f"  part of   {key.rpartition('.')[0] or 'the config'}: {section_doc}")
    setters = [
        f"{group}={name} ({value})"
        for group, files in sorted(groups.items())
        for name, file in sorted(files.items())
        for set_key, value in settings(file, group)
        if set_key == key
    ]
    if own is not None:
        setters += [f"{own} ({value})" for set_key, value in settings(own, "_global_") if set_key == key]
    return "\n".join([*lines, "  set by    " + "\n            ".join(setters or ["no file"])])


def _group(group: str, files: dict[str, Path], defaults: Mapping[str, tuple[str, str]]) -> str:
    leaves = [leaf for leaf in every_key() if leaf[0].startswith(f"{group}.")]
    docs = {doc(root(section)) for key, _, _, section in leaves if key.count(".") == group.count(".") + 1} - {""}
    lines = [": ".join([group, *docs])]
    lines += [f"  {group}={name:<22} {comment(file)}".rstrip() for name, file in sorted(files.items())]
    for key, field, _, section in leaves:
        lines.append(f"  {key}={defaults[key][0]}  ({kind(field)})  {meaning(key, field.name, section)}")
    return "\n".join(lines)


def root(section: type) -> type:
    """The topmost base class of `section`: `OptimConfig` for an optimizer, the class itself for the others."""
    return section.__mro__[-2]


def doc(cls: type) -> str:
    """The first line of a class's docstring; empty if it is the one that Python generates for a dataclass."""
    text = (cls.__doc__ or "").strip()
    return "" if text.startswith(f"{cls.__name__}(") else text.splitlines()[0]


def kind(f: dataclasses.Field[Any]) -> str:
    """The values that a key takes: its choices, or its type and rule."""
    if choices := f.metadata.get("choices"):
        return ", ".join(choices)
    name = f.type.__name__ if isinstance(f.type, type) and not hasattr(f.type, "__args__") else str(f.type)
    text = name.replace("typing.Any", "Any").replace("None", "null").replace(" | ", " or ")
    rule: str = f.metadata["rule"][1] if f.metadata else ""
    rule = re.sub(r"^must (be )?(lie )?(have )?|, below 2\^63$", "", rule)
    if rule.endswith("or auto"):
        return rule
    return f"{text}, {rule}" if rule else text


def meaning(key: str, name: str, section: type) -> str:
    """The comment on a key's line, after the optimizers that have it if not all of them do.

    An optimizer whose comment or default differs from that of the first one follows with its own.
    """
    having = optimizers_with(key)
    of = "" if len(having) == len(OPTIMIZERS) else f"{', '.join(having)}: "
    common = meanings(section).get(name, "")
    text = of + common
    for optimizer in having if key.startswith("optim.") and name != "name" else ():
        own, default = meanings(OPTIMIZERS[optimizer]).get(name, ""), getattr(OPTIMIZERS[optimizer], name)
        differing = [own] if own != common else []
        differing += [f"default {shown(default)}"] if default != getattr(section, name) else []
        text += f"; {optimizer}: {', '.join(differing)}" if differing else ""
    return text


def meanings(section: type) -> dict[str, str]:
    """Key -> the comment on its line, for the keys of a class and of its base classes."""
    files = {cls: _comments_in(sys.modules[cls.__module__].__file__ or "") for cls in section.__mro__[:-1]}
    return {key: text for cls in reversed(files) for key, text in files[cls].get(cls.__name__, {}).items()}


@cache
def _comments_in(file: str) -> dict[str, dict[str, str]]:
    """Class -> key -> the comment on the key's line and on the comment lines that follow."""
    comments: dict[str, dict[str, str]] = {}
    keys, key = dict[str, str](), ""
    for line in Path(file).read_text().splitlines():
        if start := re.match(r"class (\w+)", line):
            keys = comments.setdefault(start[1], {})
        elif start := re.match(r" {4}(\w+): .*?=.*?  # (.*)", line):
            key = start[1]
            keys[key] = start[2]
        elif key and line.startswith("    # "):
            keys[key] += line.removeprefix("    #")
        else:
            key = ""
    return comments


def comment(file: Path) -> str:
    """The comment at the top of a YAML file. Its indented lines are commands, and are put in backquotes."""
    lines = []
    for line in file.read_text(errors="replace").splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        if not text.startswith("@package"):
            lines.append(f"`{text}`" if line.startswith("#   ") else text)
    return " ".join(lines)


def default_options() -> dict[str, str]:
    """Group -> the option that conf/config.yaml selects."""
    entries = yaml.safe_load((conf_dir() / "config.yaml").read_text()).get("defaults", [])
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


def settings(file: Path, group: str) -> list[tuple[str, str]]:
    """(name, value as written) for each group and key that an option's file sets, and for each key that it sweeps."""
    return [(key.removeprefix(SWEPT), value) for key, value in settings_by_place(file, group)]


@cache
def settings_by_place(file: Path, group: str) -> list[tuple[str, str]]:
    """`settings` with `SWEPT` before each swept key. Includes the settings of files in its group that it extends."""
    try:
        text = file.read_text()
        values = yaml.load(text, yaml.BaseLoader) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {first_line(error)}", "unreadable-yaml") from None
    if not isinstance(values, dict):
        return []  # not a config: Hydra refuses it if it is selected
    package = match[1] if (match := PACKAGE.match(text)) else group.replace("/", ".")
    chosen = []
    for entry in values.pop("defaults", None) or []:
        if isinstance(entry, str) and entry != file.stem:
            extended = (folder / f"{entry}.yaml" for folder in (file.parent, conf_dir() / group))
            chosen += [*settings_by_place(base, group)] if (base := next(filter(Path.is_file, extended), None)) else []
        elif isinstance(entry, dict):  # optim_keys@optim says which keys an optimizer has, and sets none
            options = {name.removeprefix("override ").removeprefix("/"): option for name, option in entry.items()}
            chosen += [(name, option) for name, option in options.items() if "_keys@" not in name]
    return [*chosen, *_flat(values, "" if package in ("", "_global_") else f"{package}.")]


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            # A sweep of several grids. They may share keys by a merge (<<), which yaml.BaseLoader leaves as a key.
            value = _together([{**grid.pop("<<", {}), **grid} for grid in value])
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _together(grids: list[dict[str, Any]]) -> dict[str, str]:
    """Each key with the values that it has in any of the grids."""
    keys = dict.fromkeys(key for grid in grids for key in grid)
    return {
        key: ",".join(dict.fromkeys(",".join(f"{grid[key]}" for grid in grids if key in grid).split(",")))
        for key in keys
    }
