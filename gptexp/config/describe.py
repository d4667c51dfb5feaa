"""What a key means, and which files set it: the answer to `gptexp train --help KEY`.

The meanings are the comments in schema.py. Nothing here imports Hydra, so that the answer takes no time.
"""

import ast
import dataclasses
import difflib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gptexp.config import schema
from gptexp.config.paths import FILE_FLAGS, Groups, conf_dir, folders, options, own_config
from gptexp.config.schema import OPTIMIZERS, every_key, optimizers_with
from gptexp.process.errors import ConfigError, Problem, first_line
from gptexp.process.words import shown

# Hydra reads the package of a file in the comment at its top.
PACKAGE = re.compile(r"(?:[ \t]*(?:#.*)?\n)*?[ \t]*#[ \t]*@package[ \t]+(\S+)")


def answer_help(argv: Sequence[str]) -> bool:
    """Print what the keys and groups after --help mean. Returns whether there are any; else the verb's own help is due.

    Raises `ConfigError` for an unknown key.
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
    if unknown := [name for name in names if name not in known]:
        raise ConfigError([_unknown(name, known) for name in unknown])
    defaults = _defaults(groups, own)
    return [
        _key(name, groups, own, defaults) if name in keys else _group(name, groups.get(name, {}), defaults)
        for name in names
    ]


def _defaults(groups: Groups, own: Path | None) -> dict[str, tuple[str, str]]:
    """Key -> the value, as written, that a run has if nothing else is asked for, and what sets it; empty: schema.py."""
    found = {key: (shown(default), "") for key, _, default, _ in every_key()}
    of_own = dict(settings(own, "_global_")) if own is not None else {}
    for group, option in default_options().items():
        option = str(of_own.get(group, option))
        if file := groups.get(group, {}).get(option):
            found |= {key: (value, f"{group}={option}") for key, value in settings(file, group)}
    return found | {key: (value, str(own)) for key, value in of_own.items()}


def _unknown(name: str, known: list[str]) -> Problem:
    close = ", ".join(nearest(name, known))
    fix = f"nearest: {close}" if close else "gptexp train --help lists all keys"
    return Problem("unknown-key", f"--help {shown(name)}: unknown key; {fix}")


def nearest(name: str, known: Iterable[str], most: int = 3, cutoff: float = 0.5) -> list[str]:
    """The keys with the same last part, else those of similar spelling."""
    known = list(known)
    same = [key for key in known if name.rpartition(".")[2] in key.split(".")[1:]]
    return same[:most] or difflib.get_close_matches(name, known, n=most, cutoff=cutoff)


def _key(key: str, groups: Groups, own: Path | None, defaults: Mapping[str, tuple[str, str]]) -> str:
    field, section = next((f, cls) for k, f, _, cls in every_key() if k == key)
    lines = [key, f"  meaning   {meaning(key, field.name, section)}", f"  values    {kind(field)}"]
    default, setter = defaults[key]
    lines += [f"  default   {default}" + (f", set by {setter}" if setter else "")]
    if section_doc := doc(root(section)):
        lines.append(f"  part of   {key.rpartition('.')[0] or 'the config'}: {section_doc}")
    setters = [
        f"{group}={name} ({value})"
        for group, files in sorted(groups.items())
        for name, file in sorted(files.items())
        for of_key, value in settings(file, group)
        if of_key == key
    ]
    if own is not None:
        setters += [f"{own} ({value})" for of_key, value in settings(own, "_global_") if of_key == key]
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
    """The class from which `section` inherits: of an optimizer, that of the keys of all."""
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
    rule = re.sub(r"^must (be )?(lie )?(have )?(finite,? )?(and )?| \(integers.*", "", rule)
    if rule.endswith("or auto"):
        return rule
    return f"{text}, {rule}" if rule else text


def meaning(key: str, name: str, section: type) -> str:
    """The comment on a key's line in schema.py, after the optimizers that have it if not all of them do."""
    having = optimizers_with(key)
    of = "" if len(having) == len(OPTIMIZERS) else f"{', '.join(having)}: "
    return of + meanings(section).get(name, "")


@cache
def meanings(section: type) -> dict[str, str]:
    """Key -> the comment on its line in schema.py, and on the comment lines that follow."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        found |= _comments_in(cls.__name__)
    return found


@cache
def _comments_in(class_name: str) -> dict[str, str]:
    """Key -> comment for the keys that a class of schema.py itself defines."""
    comments, alone, classes = _source()
    found = {}
    for node in classes.get(class_name, []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno is not None:
            lines, number = [comments.get(node.end_lineno, "")], node.end_lineno + 1
            while number in alone:
                lines.append(comments[number])
                number += 1
            if text := " ".join(filter(None, lines)):
                found[node.target.id] = text
    return found


@cache
def _source() -> tuple[dict[int, str], set[int], dict[str, list[ast.stmt]]]:
    """Of schema.py: the comment of each line, the lines with nothing else, and the bodies of the classes."""
    source = Path(schema.__file__).read_text()
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    alone = {number for number, line in enumerate(source.splitlines(), 1) if line.strip().startswith("#")}
    return comments, alone, {n.name: n.body for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}


def comment(file: Path) -> str:
    """The comment that a YAML file begins with. In backquotes: its indented lines, which are commands."""
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


@cache
def settings(file: Path, group: str) -> list[tuple[str, str]]:
    """(key, value as written) for each group and key that an option's file sets, also for each key that it sweeps."""
    try:
        text = file.read_text()
        values = yaml.load(text, yaml.BaseLoader) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {first_line(error)}", "unreadable-yaml") from None
    if not isinstance(values, dict):
        return []  # not a config: Hydra refuses it if it is selected
    package = found[1] if (found := PACKAGE.match(text)) else group.replace("/", ".")
    chosen = [
        (of_group.removeprefix("override ").removeprefix("/"), option)
        for entry in values.pop("defaults", None) or []
        if isinstance(entry, dict)
        for of_group, option in entry.items()
        if "/optim_keys@" not in of_group  # says which keys an optimizer has, and sets none
    ]
    flat = _flat(values, "" if package == "_global_" else f"{package}.")
    return [(key.removeprefix("hydra.sweeper.params."), value) for key, value in (*chosen, *flat)]


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            # A sweep of several grids, which may share keys by a merge (<<) that yaml.BaseLoader keeps as a key.
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
