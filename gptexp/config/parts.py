"""Parts of the user's own, such as an optimizer in the user's package: their keys, their saved form, their import.

A part is an option of `model`, `optim`, `schedule` or `data` whose file in the user's --config-dir has
`_target_: package.module.NAME`, or an entry of `train.evaluations` with it. Its keys are the parameters of what the
name stands for, with their types and defaults. contracts.py says what gptexp gives to it and expects of it.

The config of a run holds the target, the hash of its source file, and its keys as they are. To read it imports nothing,
so a report never runs a stranger's code. `bound` imports the target: from what is installed or on PYTHONPATH, and never
from a run's directory.
"""

import dataclasses
import difflib
import hashlib
import inspect
import math
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from operator import eq
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from gptexp.process.errors import ConfigError, Problem, first_line
from gptexp.process.fields import ruled
from gptexp.process.imports import permanent
from gptexp.process.words import counted, shown

TARGET, SOURCE = "_target_", "_source_"
OWN = "_own_"  # class variable: the keys that the part takes
EVALUATIONS, METRICS = "train.evaluations", "log.metrics"  # lists: each of their entries is a part
DIGITS = 16  # of the hash of a source file
GIVEN: dict[str, tuple[str, ...]] = {  # group -> the parameters that gptexp gives; the others are keys
    "model": ("vocab_size", "block_size"),
    "optim": ("params",),
    "schedule": ("tokens", "warmup_tokens", "decay_tokens"),
    "data": (),
    EVALUATIONS: ("model", "tokenizer", "batches"),
    METRICS: ("model",),
}
BLOCK = ("n_embd", "block_size")  # the same of a model that is one block; gptexp has the rest
_PLAIN = (bool, int, float, str)


def target_in(file: Path, group: str) -> str | None:
    """The target that the YAML file of an option names, also below the group's name; None if it is an ordinary file."""
    try:
        content = yaml.load(file.read_text(), yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None  # Hydra says why
    section = content.get(group, content) if isinstance(content, dict) else None
    return section.get(TARGET) if isinstance(section, dict) else None


@cache
def imported(group: str, target: str) -> Callable[..., Any]:
    """What the dotted name `target` stands for. Raises `ConfigError` unless it can be a part of `group`."""

    def refuse(code: str, rule: str) -> ConfigError:
        return ConfigError(f"{group}.{TARGET}={shown(target)}: {rule}", code)

    module, _, name = target.rpartition(".")
    if not module or not all(part.isidentifier() for part in target.split(".")):
        raise refuse("not-a-target", "must be a dotted name, such as my_lab.optim.Sophia")
    if module.partition(".")[0] in {*sys.stdlib_module_names, "gptexp"}:
        raise refuse("not-a-target", "must be in a package of your own")
    if (run := _run_around(module.partition(".")[0])) is not None:
        rule = f"lies in the directory of a run, {run}, from which nothing is imported; use the package itself"
        raise refuse("not-importable", rule)
    try:
        parent = import_module(module)
    except ModuleNotFoundError as error:
        fix = "install the package (pip install -e .), or put its folder on PYTHONPATH"
        raise refuse("not-importable", f"{first_line(error)}; {fix}") from None
    except Exception as error:  # whatever the user's module raises
        raise refuse("not-importable", in_one_line(error)) from error
    if not hasattr(parent, name):
        if hasattr(parent, "__path__") and find_spec(target) is not None:
            raise refuse("not-a-target", f"is a module; name a class or a function in it, such as {target}.NAME")
        close = nearest(name, vars(parent))
        raise refuse("not-importable", f"{module} has no {name}{f'; did you mean {close}?' if close else ''}")
    found = getattr(parent, name)
    if why := _why_no_part(group, found):
        raise refuse("wrong-contract", why)
    return found  # type: ignore[no-any-return]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The most similar of the `known` names, if one is near."""
    return next(iter(difflib.get_close_matches(name, [one for one in known if not one.startswith("_")], n=1)), None)


def _run_around(package: str) -> Path | None:
    """The directory of a run in which a package lies that is not imported yet. It may be a stranger's."""
    spec = None if package in sys.modules else find_spec(package)
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec is not None else []
    parents = (parent for place in places if place for parent in Path(place).absolute().parents)
    return next((parent for parent in parents if (parent / "effective.json").is_file()), None)


def in_one_line(error: BaseException) -> str:
    """The type of an error of the user's code, its text, and the line that raised it."""
    *_, at = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {first_line(error)} ({at.filename}:{at.lineno})"


def own_lines(error: BaseException) -> list[str]:
    """The traceback of an error of the user's code, without the lines of gptexp, torch and Python."""
    others = [sys.modules[name] for name in ("gptexp", "torch", "inspect") if name in sys.modules]
    installed = tuple(str(Path(module.__file__ or "").parent) for module in others)
    frames = [at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith(installed)]
    return [line for text in traceback.format_list(frames) for line in text.rstrip().splitlines()]


def _why_no_part(group: str, found: Any) -> str | None:
    """What the contract of the group asks for and `found` lacks."""
    if not callable(found):
        return f"is a {type(found).__name__}, not a class or a function"
    try:
        inspect.getsource(inspect.getmodule(found) or found)
        parameters = inspect.signature(found).parameters
    except (OSError, TypeError, ValueError):
        return "has no Python source"
    given = _given(group, parameters)
    if (first := tuple(parameters)[: len(given)]) != given:
        or_block = f" ({', '.join(BLOCK)} if it is a block)" if group == "model" else ""
        return f"must take {', '.join(given)} first{or_block}, and takes {', '.join(first) or 'nothing'}"
    if group in ("model", "optim"):
        with permanent():  # the user's module has imported torch already
            from torch.nn import Module
            from torch.optim import Optimizer

        base = Module if group == "model" else Optimizer
        if not (isinstance(found, type) and issubclass(found, base)):
            return f"must be a class derived from torch.{'nn' if group == 'model' else 'optim'}.{base.__name__}"
        if group == "optim" and "lr" not in parameters:
            return "must take lr, the peak learning rate"
        if group == "optim" and (needed := _needed(getattr(found, "step"))):  # noqa: B009  mypy: of both classes
            return f"its step() must need no argument, and needs {', '.join(needed)}"
    if group == "data" and not (inspect.isgeneratorfunction(found) or hasattr(found, "__iter__")):
        return "must be a generator function, or a class with __iter__"
    for name, parameter in keys_among(group, parameters).items():
        if parameter.default is parameter.empty and _kind(found, parameter) is None:
            untyped = parameter.annotation is parameter.empty
            what = "which has no type" if untyped else f"whose type {parameter.annotation} cannot be written in YAML"
            return f"takes {name}, {what}; give it {'a type or ' if untyped else ''}a default"
    return None


def is_block(found: Callable[..., Any]) -> bool:
    """Whether a part of the group `model` is one block, not a whole model."""
    return tuple(inspect.signature(found).parameters)[: len(BLOCK)] == BLOCK


def _given(group: str, parameters: Iterable[str]) -> tuple[str, ...]:
    """The parameters that gptexp gives."""
    return BLOCK if group == "model" and tuple(parameters)[: len(BLOCK)] == BLOCK else GIVEN[group]


def _needed(method: Callable[..., Any]) -> list[str]:
    """The arguments that a method needs beside `self`."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [*inspect.signature(method).parameters.values()][1:]
    return [p.name for p in parameters if p.default is p.empty and p.kind in named]


def keys_among(group: str, parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """The parameters that are keys: neither given by gptexp, nor *args or **kwargs."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = _given(group, parameters)
    return {name: p for name, p in parameters.items() if name not in given and p.kind in named}


def _kind(found: Any, parameter: inspect.Parameter) -> Any:
    """The type of a key: the parameter's if YAML can hold it, else that of its default; None if neither will do."""
    hint = _hints(found).get(parameter.name)
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [option for option in options if option is not type(None)]
    kind = get_origin(kinds[0]) or kinds[0] if len(kinds) == 1 else None
    if kind not in (*_PLAIN, list, tuple, dict):
        default = parameter.default
        kind = type(default) if isinstance(default, (*_PLAIN, list, tuple, dict)) else None
    if kind in (list, tuple, dict):
        return Any
    return kind | None if kind is not None and len(kinds) < len(options) else kind


def _kinds_of(annotation: Any) -> set[Any]:
    """The types in an annotation, and Any for one that is not plain. A float may be given as a whole number."""
    kinds = {*(get_args(annotation) or (annotation,))} - {type(None)}
    if kinds - {*_PLAIN}:
        kinds = {*_PLAIN, Any}
    return kinds | ({int} if float in kinds else set())


def _takes_tuple(found: Any, parameter: inspect.Parameter) -> bool:
    hint = _hints(found).get(parameter.name)
    kinds = (hint, *get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return isinstance(parameter.default, tuple) or any(kind is tuple or get_origin(kind) is tuple for kind in kinds)


def _hints(found: Any) -> dict[str, Any]:
    """The annotations of the parameters; none if one does not evaluate."""
    try:
        return get_type_hints(found.__init__ if isinstance(found, type) else found)  # type: ignore[misc]
    except Exception:
        return {}


def source_hash(found: Callable[..., Any]) -> str:
    """The hash of the file that defines the part."""
    file = inspect.getsourcefile(inspect.unwrap(found))
    return hashlib.sha256(Path(file or "").read_bytes()).hexdigest()[:DIGITS]


@cache
def keys_class(base: type[Any], group: str, name: str, target: str) -> type[Any]:
    """`base`, a dataclass of the group's keys, with the keys of the part that the option `name` chooses.

    Its class variables that the part has too are the part's: `may_split_rows` of an optimizer, for example. Raises
    `ConfigError`.
    """
    found = imported(group, target)
    own = keys_among(group, inspect.signature(found).parameters)
    if reserved := [key for key in own if key == "name" or _is_reserved(base, key)]:
        rule = f"takes {reserved[0]}, a name that gptexp uses itself; give the parameter another one"
        raise ConfigError(f"{group}.{TARGET}={target}: {rule}", "wrong-contract")
    fields = _fixed_fields(group, name, target, source_hash(found))
    for key, parameter in own.items():
        if (kind := _kind(found, parameter)) is not None:
            old = base.__dataclass_fields__.get(key)
            if old is not None and not _kinds_of(kind) & _kinds_of(old.type):
                rule = f"takes {key}, a key of gptexp's with another type ({old.type}); give the parameter another name"
                raise ConfigError(f"{group}.{TARGET}={target}: {rule}", "wrong-contract")
            fields.append((key, *_typed(base.__dataclass_fields__.get(key), kind, parameter.default)))
    if group == "optim" and "weight_decay" not in own:
        rule = f"must be 0, because {target} has no weight_decay"
        fields.append(("weight_decay", float, ruled(0.0, lambda v: v == 0, rule)))
    read = {*own, *(("n_embd", "n_layer") if group == "model" and is_block(found) else ())}
    flags = ({*base.__annotations__} - {f.name for f in dataclasses.fields(base)}) & {*dir(found)}
    return _made(base, group, name, fields, {**{key: getattr(found, key) for key in flags}, OWN: frozenset(read)})


@cache
def saved_class(base: type[Any], group: str, name: str, target: str, source: str, keys: tuple[str, ...]) -> type[Any]:
    """`base` with the saved `keys` of a part, of any type. Imports nothing."""
    fixed = _fixed_fields(group, name, target, source)
    known = {*base.__dataclass_fields__, *(field[0] for field in fixed)}
    own = [(key, Any, None) for key in keys if key not in known]
    if reserved := [key for key, *_ in own if _is_reserved(base, key)]:
        raise ValueError(f"{group}={shown(name)}: {shown(reserved[0])} is no key of a part")
    return _made(base, group, name, [*fixed, *own], {})


def _is_reserved(base: type[Any], key: str) -> bool:
    """Whether a key has the name of something else that `base` has, such as a method."""
    return key.startswith("__") or (hasattr(base, key) and key not in {f.name for f in dataclasses.fields(base)})


def _made(base: type[Any], group: str, name: str, fields: list[Any], flags: Mapping[str, Any]) -> type[Any]:
    def build(self: Any, groups: Any, *_: Any, **__: Any) -> Any:  # `OptimConfig.build`
        return bound(group, self)(groups)

    namespace = {**flags, "__module__": __name__, **({"build": build} if group == "optim" else {})}
    try:
        return dataclasses.make_dataclass(f"{group}_{name}", fields, bases=(base,), namespace=namespace)
    except TypeError as error:  # a saved key that is no name
        raise ValueError(f"{group}={shown(name)}: {error}") from None


def _fixed_fields(group: str, name: str, target: str, source: str) -> list[Any]:
    rule = f"is in the part's file, FOLDER/{group}/NAME.yaml; choose it by --config-dir FOLDER {group}=NAME"
    of_file = {"name": name, TARGET: target}
    fixed = [(key, str, ruled(value, partial(eq, value), rule, "part-name")) for key, value in of_file.items()]
    return [*fixed, (SOURCE, str, source)]


def _typed(old: dataclasses.Field[Any] | None, kind: Any, default: Any) -> tuple[Any, Any]:
    """The type and the field of a key. A key that gptexp has too keeps its type and its rule.

    Its default is the part's; one that must be given is gptexp's, or missing (`???`, as Hydra writes it).
    """
    is_required, metadata = default is inspect.Parameter.empty, {} if old is None else dict(old.metadata)
    if old is None and float in _kinds_of(kind) and Any not in _kinds_of(kind):
        metadata["rule"] = (lambda v: not isinstance(v, float) or math.isfinite(v), "must be finite", "out-of-range")
    if is_required:
        default = "???" if old is None else old.default
    if isinstance(default, list | tuple | dict):
        copied = list(default) if isinstance(default, tuple) else default
        if isinstance(default, tuple):
            rule = f"must be a list of {counted(len(default), 'value')}"
            fits = partial(_is_list_of, len(default))
            metadata["rule"] = (fits, rule, "wrong-type")
        return kind, dataclasses.field(default_factory=lambda: type(copied)(copied), metadata=metadata)
    return (kind if old is None else old.type), dataclasses.field(default=default, metadata=metadata)


def _is_list_of(count: int, value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == count


def is_part(section: Any) -> bool:
    """Whether a section of a config, as a dataclass or as saved values, is a part of the user's own."""
    return TARGET in section if isinstance(section, dict) else hasattr(section, TARGET)


def name_of(section: Any) -> str:
    """The option that chooses a part."""
    return str(section.name)


def takes(section: Any, key: str) -> bool:
    """Whether the section is an imported part that takes the key."""
    return key in getattr(section, OWN, ())


def bound(group: str, section: Any) -> "partial[Any]":
    """The imported part with the values of its keys, to be called with what gptexp gives. Raises `ConfigError`."""
    found = imported(group, getattr(section, TARGET))
    if (now := source_hash(found)) != getattr(section, SOURCE):
        rule = f"its file has changed since the run began (hash {getattr(section, SOURCE)}, now {now})"
        fix = "restore the file; or begin a new run, or a branch of this one (branch_from=RUN_DIR)"
        raise ConfigError(f"{group}.{TARGET}={getattr(section, TARGET)}: {rule}; {fix}", "part-changed")
    arguments = {}
    for key, parameter in keys_among(group, inspect.signature(found).parameters).items():
        if hasattr(section, key):
            value = getattr(section, key)
            arguments[key] = tuple(value) if isinstance(value, list) and _takes_tuple(found, parameter) else value
    return partial(found, **arguments)


def problems_of(call: Callable[[], object]) -> list[Problem]:
    """The problems that a call of the user's code raises."""
    try:
        call()
    except ConfigError as error:
        return error.problems
    except Exception as error:  # whatever the part raises
        return [Problem("part-fails", in_one_line(error))]
    return []


def loaded(group: str, section: Any) -> Any:
    """A section that was read from a run, with the types and flags of its part, which it imports."""
    keys: Any = keys_class(type(section).__bases__[0], group, section.name, getattr(section, TARGET))
    return keys(**vars(section))


def origin(group: str, section: Any) -> str:
    """The target of a part and its file, for the terminal."""
    return f"{group}={name_of(section)}: {getattr(section, TARGET)} from {source_file(group, section)}"


def source_file(group: str, section: Any) -> str:
    """The file that defines an imported part."""
    return inspect.getsourcefile(inspect.unwrap(imported(group, getattr(section, TARGET)))) or ""
