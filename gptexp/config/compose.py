"""Composition of YAML files and overrides by Hydra into a checked `Config`.

Other code reads the `Config` and does not use Hydra. Errors are raised before torch is imported and before a file is
created.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from gptexp.config import branching, rules
from gptexp.config.batch import legal_micro_batches
from gptexp.config.branching import Parent
from gptexp.config.describe import settings_by_place
from gptexp.config.overrides import override_problems, secret_problems, structured
from gptexp.config.parts import EVALUATIONS, METRICS, TARGET, keys_class, nearest, takes, target_in
from gptexp.config.paths import (
    CONFIG_NAME,
    OUTPUTS,
    absolute,
    conf_dir,
    folders,
    is_file,
    is_path_list,
    own_config,
)
from gptexp.config.schema import (
    LISTS,
    MOST_AUTO_TOKENS,
    PARTS,
    Config,
    FittedConfig,
    field_problem,
    field_problems,
    fields_of,
    optimizers_with,
    to_dict,
)
from gptexp.config.spelling import MAY_BE_NULL, NULL, canonical
from gptexp.config.vocabulary import NAMES
from gptexp.optim import OPTIMIZERS
from gptexp.optim.base import OptimConfig
from gptexp.process.errors import ConfigError, Problem, UserError, first_line
from gptexp.process.fields import AUTO, LIMIT
from gptexp.process.words import counted, shown


@cache
def register_schema() -> None:
    """Make the schema, and the resolvers of `optim=fitted` and of a run's directory, known to Hydra."""
    OmegaConf.register_new_resolver("power_law", power_law, replace=True)
    OmegaConf.register_new_resolver("or_trial", or_trial, replace=True)
    OmegaConf.register_new_resolver("outputs", lambda given: str(given or OUTPUTS), replace=True)
    Plugins.instance()  # registers the source of files that `PartFiles` replaces
    SourcesRegistry.instance().types["file"] = PartFiles
    store = ConfigStore.instance()
    store.store(name="schema", node=structured(Config(optim=OptimConfig())))
    for name, keys in OPTIMIZERS.items():
        store.store(group="optim_keys", name=name, node=structured(keys()))
    for group in MAY_BE_NULL:
        store.store(group=group, name=NULL, node={}, package="_global_")


class PartFiles(FileConfigSource):
    """Hydra's YAML files, of which some name parts of the user's own: these have their keys in GROUP_keys/NAME.

    The keys are typed by the part, so they are merged before any file sets one of them.
    """

    def is_config(self, config_path: str) -> bool:
        return super().is_config(config_path) or self._part(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        if (part := self._part(config_path)) is not None:
            keys = structured(keys_class(*part)())  # type: ignore[arg-type]  # mypy: a type has no hash
            return ConfigResult(self.provider, f"file://{self.path}", keys, header={"package": None})
        result = super().load_config(config_path)
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if group in PARTS.values() and isinstance(result.config, DictConfig):
            section = result.config.get(group, result.config)  # a file of the package _global_ has it below its name
            if isinstance(section, DictConfig) and section.pop(TARGET, None) is not None:
                section["name"] = name
                chosen = {f"override /{group}_keys@_global_.{group}": name}
                result.config["defaults"] = [*result.config.get("defaults", []), chosen]
        return result

    def _part(self, config_path: str) -> tuple[type[Any], str, str, str] | None:
        """(class of its group, group, name, target) of the part whose keys have this path."""
        folder, _, name = config_path.removesuffix(".yaml").rpartition("/")
        base = next((cls for cls, group in PARTS.items() if folder == f"{group}_keys"), None)
        if base is None:
            return None
        target = target_in(Path(self.path) / PARTS[base] / f"{name}.yaml", PARTS[base])
        return None if target is None else (base, PARTS[base], name, target)


@contextmanager
def hydra_engine(config_dir: str | None = None) -> Iterator[Any]:
    """Initialise Hydra on gptexp's YAML files and the user's, and yield its engine, which composes configs.

    `config_dir` is the folder of the user's files. Errors of Hydra in the body become `ConfigError`.
    """
    register_schema()
    _, *own = folders(config_dir)
    with (
        hydra_errors_as_config_errors(),
        hydra.initialize_config_dir(str(conf_dir()), job_name="train", version_base="1.3"),
    ):
        engine: Any = GlobalHydra.instance().hydra
        for folder in own:  # as `hydra.main` does for --config-dir; hydra.searchpath finds no primary config
            path = engine.config_loader.get_search_path()
            path.prepend("command-line", f"file://{folder.resolve()}", anchor="schema")
            engine.config_loader.repository.initialize_sources(path)
        yield engine


def power_law(tokens: int, value: float, at_tokens: float, exponent: float) -> float:
    """The value of a power law at a batch size of `tokens`. `gptexp report --write-optim` writes such laws."""
    return float(value * (tokens / at_tokens) ** exponent)


def or_trial(name: str) -> str:
    """The `name` of a run in outputs/; but for a trial of a wandb sweep, one that its next start has too."""
    sweep, run = (quote(os.environ.get(variable, ""), safe="") for variable in ("WANDB_SWEEP_ID", "WANDB_RUN_ID"))
    return f"wandb-{sweep}/run-{run}" if sweep and run else name


def is_multirun(overrides: Sequence[str]) -> bool:
    """Whether the overrides request several runs without the flag -m."""
    named = [text for text in canonical(overrides) if text.startswith("sweep=") and text != f"sweep='{NULL}'"]
    return bool(named) or "hydra.mode=MULTIRUN" in overrides


def compose(
    overrides: Sequence[str],
    config_dir: str | None = None,
    config_name: str | None = None,
    launcher_world_size: int | None = None,
    find_parent: Callable[[DictConfig], Parent | None] | None = None,
    count_epoch: Callable[[Config], int] | None = None,
) -> Config:
    """Compose and check the config of one run. Raises `ConfigError` with a line for each problem.

    `find_parent` finds the checkpoint that `branch_from` or `continue_from` names; without it, both are refused. For
    `count_epoch` see `to_config`.
    """
    with hydra_engine(config_dir) as engine:
        composed = composition(engine, overrides, config_dir, multirun=False, config_name=config_name)
        if find_parent is None and (start := branching.start_of(composed)) is not None:
            raise ConfigError(f"{'='.join(start)}: only train, plan and prepare take it", "branch-not-taken")
        parent = None if find_parent is None else find_parent(composed)
        return to_config(composed, composed.hydra.overrides.task, launcher_world_size, parent, count_epoch)


def composition(
    engine: Any, overrides: Sequence[str], config_dir: str | None, multirun: bool, config_name: str | None = None
) -> DictConfig:
    """Compose the files and `overrides`, including Hydra's own keys. For a multirun, the swept keys are not set.

    `config_dir` is the folder that `engine` was built with, and `config_name` names the user's primary config in it.
    Raises `ConfigError` for wrong overrides or a wrong primary config.
    """
    if violations := override_problems(overrides, multirun, folders(config_dir)):
        raise ConfigError(violations)
    mode = RunMode.MULTIRUN if multirun else RunMode.RUN
    cfg: DictConfig = engine.compose_config(primary_config(config_dir, config_name), canonical(overrides), mode)
    if cfg.hydra.job.chdir:
        rule = "not supported: the ranks of a run and the cells of a sweep stay in the folder where the command starts"
        raise ConfigError(f"hydra.job.chdir=true: {rule}; leave it out", "not-supported")
    if multirun:
        cfg.hydra.mode = RunMode.MULTIRUN
    HydraConfig.instance().set_config(cfg)
    return cfg


def primary_config(config_dir: str | None, config_name: str | None) -> str:
    """The name of the config that composition begins with.

    Raises `ConfigError` if the user's config does not exist, or does not include gptexp's: without gptexp's, the schema
    and the settings of Hydra would be missing.
    """
    file = own_config(config_dir, config_name)
    if file is None:
        return CONFIG_NAME
    try:
        content = yaml.load(file.read_text(), yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {first_line(error)}", "unreadable-yaml") from None
    defaults = content.get("defaults") if isinstance(content, dict) else None
    included = [entry for entry in defaults or [] if entry in (CONFIG_NAME, "_self_")]
    if included != [CONFIG_NAME, "_self_"]:
        raise ConfigError(
            f"{file}: does not build on gptexp's config; its defaults list must contain '- config' and after it "
            "'- _self_'",
            "config-not-included",
        )
    return file.stem


def is_sweep(cfg: DictConfig) -> bool:
    """Whether a composition describes a sweep: by -m, or because a file sets `hydra.mode`."""
    return bool(cfg.hydra.mode == RunMode.MULTIRUN)


@contextmanager
def hydra_errors_as_config_errors() -> Iterator[None]:
    """Convert errors of Hydra, OmegaConf and YAML, which have many lines, to a `ConfigError` of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise _of_a_resolver(error) or ConfigError(_one_line(error), "hydra") from None


def _of_a_resolver(error: BaseException) -> UserError | None:
    """The `UserError` that a resolver has raised, inside OmegaConf's own errors; None if there is none."""
    inner = error.__cause__ or error.__context__
    return inner if inner is None or isinstance(inner, UserError) else _of_a_resolver(inner)


def _one_line(error: BaseException) -> str:
    parts = [error] if error.__cause__ is None else [error, error.__cause__]
    lines = [line.strip() for part in parts for line in str(part).splitlines()]
    noise = ("full_key", "object_type", "reference_type", "Config search path", "provider=", "Set the environment")
    kept = dict.fromkeys(line for line in lines if line and not line.startswith((*noise, "To append to your config")))
    keys = [key for line in lines if line.startswith("full_key:") and (key := line.removeprefix("full_key:").strip())]
    text = " ".join(kept)
    if match := _NO_SUCH_KEY.search(text):
        return _no_such_key(match[1], match[2], text)
    return f"{keys[-1]}: {text}" if keys and keys[-1] not in text else text


_CLASSES = {cls.__name__: name for name, cls in OPTIMIZERS.items()}
_OF_PARTS = [f"{group}_[^']+" for group in (*PARTS.values(), *LISTS)]
_SECTIONS = {cls.__name__: group for cls, group in PARTS.items()}
_NO_SUCH_KEY = re.compile(rf"Key '(\w+)' not in '({'|'.join([*_CLASSES, *_SECTIONS, *_OF_PARTS])})'")


def _no_such_key(key: str, cls: str, text: str) -> Problem:
    """The error for a key that the chosen optimizer or part does not have. `text` is Hydra's message about it."""
    found = re.search(r"In '([^']+)'", text)
    setter = f", which {found[1]} sets" if found else ""
    is_own = found is not None and not (conf_dir() / f"{found[1]}.yaml").exists()
    own = f"; if {found[1]} is a part of your own, its file needs {TARGET}" if found and is_own else ""
    if cls in _SECTIONS:
        return Problem("unknown-key", f"{_SECTIONS[cls]}.{key}{setter}: no such key{own}")
    if cls not in _CLASSES:
        group, _, name = cls.partition("_")
        bases: list[type[Any]] = [*PARTS, *LISTS.values()]
        made = [own for base in bases for own in base.__subclasses__() if own.__name__ == cls]
        known = [f.name for own in made for f in fields(own)]
        close = nearest(key, known)
        hint = f"; did you mean {close}?" if close else ""
        return Problem("unknown-key", f"{group}.{key}{setter}: not a parameter of {group}={name}{hint}")
    name, having = _CLASSES[cls], optimizers_with(f"optim.{key}")
    others = f", but of {', '.join(having)}" if having else ""
    keys = ", ".join(f.name for f in fields(OPTIMIZERS[name]) if f.name != "name")
    rule = f"not a key of optim={name}{others}; keys of optim={name}: {keys}"
    return Problem("key-of-other-optimizer", f"optim.{key}{setter}: {rule}{own}")


def to_config(
    cfg: DictConfig,
    overrides: Sequence[str],
    launcher_world_size: int | None = None,
    parent: Parent | None = None,
    count_epoch: Callable[[Config], int] | None = None,
) -> Config:
    """Convert a composition to a checked `Config` that depends on no other file.

    `overrides` are the command line's: a length given there in tokens takes precedence over a length in steps from a
    file. `launcher_world_size` is the number of ranks that a launcher has started. `parent` is the checkpoint of
    `branch_from`. `count_epoch` gives the tokens of an epoch; without it, `train.epochs` sets no length. Raises
    `ConfigError` with a line for each problem.
    """
    config = job_of(cfg)
    by_law = _is_by_law(cfg)
    given = {text.split("=", 1)[0].lstrip("+") for text in overrides}
    if parent is not None:
        # A branch takes a chosen schedule as a whole, so the keys of its file do not count as given.
        given |= {key for key in _of_chosen_files(cfg.hydra, overrides) if not key.startswith("schedule.")}
        config = branching.inherited(config, parent, given)
        if launcher_world_size is not None and "world.size" not in given:
            config.world.size = None  # the launcher sets it
    if parent is not None or not by_law:
        config.fitted = FittedConfig()  # no law sets the learning rate; a branch takes it from its parent
    _let_the_command_line_win(config, given)
    config.train.evaluations = _entries(EVALUATIONS, config.train.evaluations)
    config.log.metrics = _entries(METRICS, config.log.metrics)
    problems = [
        *(_two_lengths(config, given) if config.train.epochs is not None else ()),
        *(_law_scaled_twice(cfg) if by_law else ()),
        *_take_from_environment(config, given),
        *_make_paths_absolute(config),
        *_settle_world_size(config, launcher_world_size),
        *secret_problems((key, value) for key, _, value in fields_of(config)),
    ]
    _fit_micro_batch(config, given)
    changed = [*branching.differences(config, parent)] if parent is not None else []
    is_auto = config.train.max_tokens == AUTO
    if is_auto and (count_epoch is None or config.train.max_steps is not None):
        config.train.max_tokens = MOST_AUTO_TOKENS
    if not problems and not changed and count_epoch is not None:
        if config.train.epochs is not None:
            _settle_length(config, config.train.epochs, count_epoch)
        elif is_auto and config.train.max_steps is None and not rules.problems(config, config.world.size or 1):
            config.train.max_tokens = _at_most_one_epoch(config, count_epoch)
    problems += changed or rules.problems(config, config.world.size or 1)  # the rules would name the same keys
    if parent is not None and not problems:
        problems += branching.history_problems(config, parent)
    if problems:
        raise ConfigError(problems)
    return config


def _two_lengths(config: Config, given: set[str]) -> Iterator[Problem]:
    for key in ("train.max_tokens", "train.max_steps"):
        if {key, "train.epochs"} <= given and attrgetter(key)(config) is not None:
            rule = f"is another length than train.epochs={config.train.epochs:g}; leave out one of them"
            yield Problem("two-lengths", f"{key}: {rule}")


def _settle_length(config: Config, epochs: float, count_epoch: Callable[[Config], int]) -> None:
    """Set `train.max_tokens` to so many epochs, unless there are problems that do not depend on it."""
    config.train.max_steps, config.train.max_tokens = None, LIMIT - 1
    if not rules.problems(config, config.world.size or 1):
        config.train.max_tokens = max(1, round(epochs * count_epoch(config)))


def _at_most_one_epoch(config: Config, count_epoch: Callable[[Config], int]) -> int | str:
    """What `train.max_tokens=auto` becomes. It stays if the text is not tokenised and must not be now."""
    try:
        return min(MOST_AUTO_TOKENS, count_epoch(config))
    except ConfigError as error:
        if error.code != "not-tokenised":
            raise
        return AUTO


def _entries(key: str, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a list of parts with all keys of their parts. Raises `ConfigError`."""
    full: dict[str, dict[str, Any]] = {}
    for entry in entries:
        try:
            with hydra_errors_as_config_errors():
                whole = _entry(key, entry)
        except ConfigError as error:
            if error.code != "hydra":
                raise
            raise ConfigError(f"{key}: {entry.get(TARGET)}: {error}", "wrong-type") from None
        full[whole["name"]] = whole
    if len(full) < len(entries):
        raise ConfigError(f"{key}: two have one name; give each a name of its own", "metric-given-twice")
    return [*full.values()]


def _entry(key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of the list `key` with all keys of its part. Raises `ConfigError` or OmegaConf's error."""
    if TARGET not in entry:
        rule = f"needs {TARGET}, such as {{{TARGET}: my_lab.metrics.accuracy}}"
        raise ConfigError(f"{key}: {shown(entry)}: {rule}", "not-a-target")
    target = str(entry[TARGET])
    name = str(entry.get("name", target.rpartition(".")[2]))
    typed = structured(keys_class(LISTS[key], key, name, target)())  # type: ignore[arg-type]  # mypy: a type has no hash
    keys: Any = OmegaConf.to_object(OmegaConf.merge(typed, entry))
    of_all = LISTS[key](**{f.name: getattr(keys, f.name) for f in fields(LISTS[key])})
    if found := [*(field_problems(keys, f"{key}.") | field_problems(of_all, f"{key}.")).values()]:
        raise ConfigError(found)
    return to_dict(keys)


def _make_paths_absolute(config: Config) -> Iterator[Problem]:
    """Make every path absolute. Yields a problem if two sources of `data.mix` are then the same path."""
    data = config.data
    if data.name == "text" and isinstance(data.mix, dict):
        sources = {absolute(str(path)): weight for path, weight in data.mix.items()}
        if len(sources) < len(data.mix):
            yield Problem("mix-overlaps", f"data.mix={shown(data.mix)}: names a source twice; give each one weight")
        data.mix = sources
    for key in ("path", "val_path"):
        value = getattr(data, key)
        if (key, data.name) != ("path", "hf") and not takes(data, key):
            setattr(data, key, _absolute(value))
    data.validation = {name: _absolute(paths) for name, paths in data.validation.items()}
    # Not by `absolute`, which would treat these paths as globs.
    if data.tokenizer not in NAMES and is_file(Path(data.tokenizer)):
        data.tokenizer = os.path.abspath(data.tokenizer)  # noqa: PTH100
    if data.cache_dir:
        data.cache_dir = absolute(data.cache_dir)


def _absolute(paths: Any) -> Any:
    """An absolute path, or a list of them. What is neither stays, and is refused later."""
    if not is_path_list(paths):
        return paths
    return absolute(paths) if isinstance(paths, str) else list(map(absolute, paths))


def _settle_world_size(config: Config, started: int | None) -> Iterator[Problem]:
    """If `world.size` is null, set it to the number of ranks that a launcher has `started`, or to 1 without one."""
    size = config.world.size
    if started is not None and size not in (None, started):
        rule = f"the launcher started {counted(started, 'rank')}"
        fix = f"leave out world.size, or start {counted(size, 'rank')}"
        yield Problem("other-world-size", f"world.size={size}: {rule}; {fix}")
    config.world.size = size or started or 1


def _fit_micro_batch(config: Config, given: set[str]) -> None:
    """Reduce a micro-batch size from a file to one that divides a step whose tokens are on the command line."""
    batch, tokens = config.batch, config.seq_len * (config.world.size or 1)
    quantum, asked = batch.step_sizes.quantum, batch.asked_micro_batch_size
    if "batch.total_batch_size" in given and "batch.micro_batch_size" not in given and tokens > 0 and asked:
        sizes = legal_micro_batches(quantum, tokens, 1) if quantum % tokens == 0 else []
        best = max((size for size in sizes if size <= asked), default=asked)
        if 2 * best >= asked or best == sizes[0]:  # else steps would be slow, and the rules name better sizes
            batch.micro_batch_size = best


def _is_by_law(cfg: DictConfig) -> bool:
    """Whether a fitted law sets the learning rate."""
    return "${power_law:" in str(OmegaConf.to_container(cfg.optim, resolve=False)["lr"])  # type: ignore[index,call-overload]


def _law_scaled_twice(cfg: DictConfig) -> list[Problem]:
    """An error for each scaling rule that changes a learning rate set by a fitted law, or depends on it."""
    rules = {"lr": "scales lr with the batch size already", "weight_decay": "changes lr, and with it the timescale"}
    return [
        Problem("law-scaled-twice", f"scaling.{key}={cfg.scaling[key]}: the fitted law of optim {why}; use none")
        for key, why in rules.items()
        if cfg.scaling[key] != "none"
    ]


def _of_chosen_files(hydra: Any, overrides: Sequence[str]) -> set[str]:
    """Dotted keys that files chosen by `overrides` (GROUP=OPTION) set in their own groups."""
    sections = {f.name for f in fields(Config)}
    chosen = [(group, option) for group, _, option in (text.partition("=") for text in overrides) if group in sections]
    keys = ((group, key) for group, option in chosen for key in keys_set_by(hydra, group, option))
    return {key for group, key in keys if key.startswith(f"{group}.")}


def keys_set_by(hydra: Any, group: str, option: str) -> set[str]:
    """The dotted keys that an option's file (the first on the search path) sets; empty if there is no such file.

    A key that the file sweeps has the prefix `SWEPT`. The group of a primary config is "".
    """
    files = (Path(source.path) / group / f"{option}.yaml" for source in hydra.runtime.config_sources)
    file = next(filter(is_file, files), None)
    return {key for key, _ in settings_by_place(file, group)} if file is not None else set()


def take_choices(cfg: DictConfig, overrides: Sequence[str], parent: Parent | None) -> None:
    """Copy the parent's options into Hydra's record of a branch: Hydra names the directory after them."""
    if parent is None:
        return
    sections, given = {f.name for f in fields(Config)}, {text.partition("=")[0] for text in overrides}
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        for group in sections.intersection(parent.choices) - given:
            cfg.hydra.runtime.choices[group] = parent.choices[group]


# For each key, the keys that take precedence over it.
PRECEDING = {
    "schedule.warmup_ratio": ("warmup_tokens", "warmup_steps"),
    "schedule.warmup_tokens": ("warmup_steps",),
    "data.val_tokens": ("val_ratio",),
    "schedule.decay_ratio": ("decay_tokens", "decay_steps"),
    "schedule.decay_tokens": ("decay_steps",),
    "train.max_tokens": ("max_steps", "epochs"),
    "train.max_steps": ("epochs",),
    "train.epochs": ("max_steps",),
    "train.eval_every_tokens": ("eval_every",),
    "train.save_every_tokens": ("save_every",),
    "train.keep_every_tokens": ("keep_every",),
}


def _let_the_command_line_win(config: Config, given: set[str]) -> None:
    """Set to null all keys from files that would override, in another unit, a length on the command line."""
    for key in PRECEDING.keys() & given:
        section = key.split(".")[0]
        for name in PRECEDING[key]:
            if f"{section}.{name}" not in given:
                setattr(getattr(config, section), name, None)


# wandb's own environment variables, and the key that each one sets. WANDB_MODE and WANDB_DIR: see loggers/wandb.py.
WANDB_VARIABLES = {
    "WANDB_ENTITY": "log.wandb.entity",
    "WANDB_PROJECT": "log.wandb.project",
    "WANDB_RUN_GROUP": "log.wandb.group",
    "WANDB_NAME": "log.wandb.name",
    "WANDB_TAGS": "log.wandb.tags",
    "WANDB_NOTES": "log.note",
}


def _take_from_environment(config: Config, given: set[str]) -> list[Problem]:
    """Set keys of wandb from its environment variables, unless a file or the command line sets them.

    The config keeps them, so that a resumed run continues its wandb run. Returns a line for each wrong value.
    """
    if config.log.wandb.mode == "disabled":
        return []
    problems, fields = list[Problem](), {key: (f, default) for key, f, default in fields_of(Config())}
    for variable, key in WANDB_VARIABLES.items():
        if variable == "WANDB_NAME" and config.sweep.name is not None:
            continue  # all cells would have the same name
        section: Any = config.log if key == "log.note" else config.log.wandb
        name = key.rpartition(".")[2]
        field, default = fields[key]
        text = os.environ.get(variable, "").strip()
        if not text or key in given or getattr(section, name) != default:
            continue
        value = [tag.strip() for tag in text.split(",") if tag.strip()] if isinstance(default, list) else text
        if problem := field_problem(variable, field, value, typed=shown(text)):
            problems.append(Problem(problem.code, f"{problem}; or set {key}"))
        else:
            setattr(section, name, value)
    return problems


def job_of(cfg: DictConfig) -> Config:
    """Convert a composition, except for Hydra's own keys, to dataclasses. The values are not checked."""
    with hydra_errors_as_config_errors():
        parts: dict[str, Any] = {f.name: cfg[f.name] for f in fields(Config)}
        parts |= {name: OmegaConf.to_object(part) for name, part in parts.items() if OmegaConf.is_config(part)}
        return Config(**parts)
