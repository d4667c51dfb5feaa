"""From Hydra's command line to a checked `Config`; the only door through which Hydra comes in.

Hydra composes once, in one process. What comes out is a plain dataclass, checked, with absolute paths and a world
size: everything after this reads that and not Hydra. Problems are found before torch is imported and before a file
is created, and print as one line each with exit code 2.
"""

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptexp import check, run_dir
from gptexp.config import Config, fields_of
from gptexp.distributed import launcher_rank
from gptexp.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, UserError

KIND = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}


def conf_dir() -> Path:
    """Where the YAML files lie: $GPTEXP_CONF, else the wheel's copy, else the checkout's conf/."""
    package = Path(__file__).resolve().parent
    for candidate in (os.environ.get("GPTEXP_CONF"), package / "conf", package.parent / "conf"):
        if candidate and Path(candidate, "config.yaml").is_file():
            return Path(candidate).resolve()
    raise ConfigError(f"conf/config.yaml not found beside {package}; set GPTEXP_CONF to the folder that holds it")


def register() -> None:
    """Tell Hydra of the typed schema and of the launcher and sweeper of gptexp."""
    from gptexp import sweep

    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    launcher, sweeper = (f"{sweep.PLUGINS}.{cls.__name__}" for cls in (sweep.CellLauncher, sweep.GridSweeper))
    store.store(group="hydra/launcher", name="cells", node={"_target_": launcher})
    store.store(group="hydra/sweeper", name="grid", node={"_target_": sweeper, "max_batch_size": None, "params": None})
    plugins = Plugins.instance()  # scans hydra_plugins, so it comes before the alias below
    plugins.register(sweep.CellLauncher)
    plugins.register(sweep.GridSweeper)
    # Hydra takes plugins from packages below hydra_plugins only; a second top-level package just for that would be
    # one more thing to install.
    parent, _, child = sweep.PLUGINS.partition(".")
    try:
        package = import_module(parent)
    except ImportError:
        package = sys.modules[parent] = ModuleType(parent)
    sys.modules[sweep.PLUGINS] = sweep
    setattr(package, child, sweep)


def hydra_main(task: Callable[[DictConfig], Any]) -> None:
    """Run `task` under `hydra.main` on `sys.argv`; `CheckBeforeStart` refuses a bad config before anything exists."""
    args = get_args_parser().parse_args()
    multirun = args.multirun or any(text.startswith(("sweep=", "hydra.mode=")) for text in args.overrides)
    only_asks = args.cfg or args.info or args.shell_completion or args.help or args.hydra_help
    if not only_asks and (found := override_problems(args.overrides, multirun, args.config_dir)):
        raise ConfigError(found)
    register()
    # Hydra would print its errors over many lines and exit with 1; this makes it raise them to `report_errors`.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(task)()


def compose(overrides: list[str], config_dir: str | None = None) -> Config:
    """Compose and check one config without starting anything (for verbs that do not train)."""
    if found := override_problems(overrides, False, config_dir):
        raise ConfigError(found)
    register()
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("config", overrides=[*search, *overrides]))


def to_config(cfg: DictConfig) -> Config:
    """The checked, self-contained `Config` of a composition: paths absolute, world size filled in."""
    config = job_of(cfg)
    launcher = launcher_rank()
    if launcher and config.world.size not in (None, launcher.world_size):
        raise ConfigError(
            f"world.size={config.world.size}: the launcher started {launcher.world_size} ranks; "
            f"leave world.size out or start {config.world.size}"
        )
    config.world.size = config.world.size or (launcher.world_size if launcher else 1)
    check.check(config, config.world.size)
    for key in ("path", "val_path"):
        if (value := getattr(config.data, key)) is not None:
            setattr(config.data, key, [_absolute(item) for item in check.path_list(value)])
    if config.data.cache_dir:
        config.data.cache_dir = _absolute(config.data.cache_dir)
    return config


def job_of(cfg: DictConfig) -> Config:
    """A composition without Hydra's own part, as dataclasses; unchecked."""
    job = cfg.copy()
    OmegaConf.set_struct(job, False)
    job.pop("hydra", None)
    config = OmegaConf.to_object(job)
    assert isinstance(config, Config)
    return config


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


class CheckBeforeStart(Callback):
    """Refuses what cannot run before Hydra makes the run directory (or rewrites the `.hydra/` of an old one).

    Hydra swallows every exception of a callback but `SystemExit`.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with report_errors():
            HydraConfig.instance().set_config(config)
            directory = Path(config.hydra.run.dir)
            if run_dir.check_reusable(directory, to_config(config)) == "completed":
                print(f"gptexp: {directory} holds this very run, completed; nothing to do")
                raise SystemExit(0)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with report_errors():
            from gptexp.sweep import name_sweep

            name_sweep(config)


class report_errors:
    """Turn what a user can cause into lines on stderr and an exit code; let everything else keep its traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            sys.exit(130)
        if isinstance(error, UserError):
            kind = "config error: " if isinstance(error, ConfigError) else ""
            print(*(f"gptexp: {kind}{line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
            sys.exit(error.exit_code)
        if isinstance(error, HydraException | OmegaConfBaseException):
            print(f"gptexp: config error: {_one_line(error)}", file=sys.stderr)
            sys.exit(EXIT_CONFIG)
        if error is not None and not isinstance(error, SystemExit):
            # Nothing a user is expected to cause: the traceback is the message, under the documented code.
            import traceback

            traceback.print_exception(error)
            sys.exit(EXIT_FAILED)


def _one_line(error: BaseException) -> str:
    parts = [str(error)]
    if error.__cause__ is not None:
        parts.append(str(error.__cause__))
    lines = [line.strip() for part in parts for line in part.splitlines()]
    skip = ("full_key", "object_type", "reference_type", "Config search path", "provider=", "Set the environment")
    return " ".join(dict.fromkeys(line for line in lines if line and not line.startswith(skip)))


def lr_source(choices: dict[str, str], overrides: Sequence[str]) -> str:
    """Which file or override the learning rate came from, in Hydra's order of precedence."""
    if any(text.split("=")[0].lstrip("+") == "optim.lr" for text in overrides):
        return "the command line"
    loader = GlobalHydra.instance().config_loader()
    for group in ("sweep", "experiment", "optim", "model"):
        option = choices.get(group)
        if not option:
            continue
        found = loader.load_configuration(f"{group}/{option}", overrides=[], run_mode=hydra.types.RunMode.RUN)
        if OmegaConf.select(found, "optim.lr") is not None:
            return f"{group}={option}"
    return "the default"


# --- overrides, checked one by one against the schema before Hydra sees them -----------------------------------------


def override_problems(overrides: Sequence[str], multirun: bool, config_dir: str | None = None) -> list[str]:
    """One line for each override that names no key or group, or whose value has the wrong type."""
    keys = {key: f.type for key, f, _ in fields_of(Config())}
    groups = _options([conf_dir(), *([Path(config_dir)] if config_dir else [])])
    parser = OverridesParser.create()
    found: list[str] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except OverrideParseException:
            found.append(f"{text}: not a key=value override; quote a value that holds = , {{ or spaces: key='\"a=b\"'")
            continue
        found += _override_problem(override, keys, groups, multirun)
    return found


def _options(folders: list[Path]) -> dict[str, set[str]]:
    """Group -> the names of its files."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    return groups


def _override_problem(
    override: Override, keys: dict[str, Any], groups: dict[str, set[str]], multirun: bool
) -> Iterator[str]:
    key, text = override.key_or_group, override.input_line
    if key.split(".")[0].split("/")[0] == "hydra":
        return
    if key not in keys and key not in groups:
        nodes = {k.rpartition(".")[0] for k in keys} | {k.split(".")[0] for k in keys}
        if key in nodes:
            inside = ", ".join(k for k in keys if k.startswith(f"{key}."))
            yield f"{text}: {key} is a group of keys; set one of them: {inside}"
        else:
            yield f"{text}: unknown key '{key}'{_did_you_mean(key, [*keys, *groups])}"
        return
    if override.is_delete():
        yield f"{text}: a key cannot be removed; set it to another value"
        return
    if override.is_add() or override.is_force_add():
        yield f"{text}: '{key}' is there already; write {key}=… without the plus sign"
        return
    if override.is_sweep_override():
        if not multirun:
            yield f"{text}: several values need -m (--multirun)"
            return
        values: list[Any] = list(override.sweep_iterator()) if override.is_discrete_sweep() else []
    else:
        values = [override.value()]
    for value in values:
        if key in groups:
            if value is not None and value not in groups[key]:
                options = ", ".join(sorted(groups[key]))
                yield f"{key}={value}: no such option{_did_you_mean(str(value), groups[key])}; there are {options}"
        elif line := _type_problem(key, keys[key], value):
            yield line


def _did_you_mean(word: str, known: Sequence[str] | set[str]) -> str:
    """The closest known name, as a clause: by spelling, or because `word` is the last part of it."""
    by_tail = [name for name in known if name.rpartition(".")[2] == word]
    close = by_tail or difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    if not close and "." in word:
        tail = difflib.get_close_matches(
            word.rpartition(".")[2], [n.rpartition(".")[2] for n in known], n=1, cutoff=0.6
        )
        close = [n for n in known if tail and n.rpartition(".")[2] == tail[0]]
    return f"; did you mean '{close[0]}'?" if close else ""


def _type_problem(key: str, annotation: Any, value: Any) -> str | None:
    if isinstance(value, str) and "${" in value:
        return None  # an interpolation: Hydra resolves and checks it
    try:
        OmegaConf.update(_schema(), key, value)
    except OmegaConfBaseException:
        kinds = [t for t in getattr(annotation, "__args__", (annotation,)) if t is not type(None)]
        optional = " or null" if type(None) in getattr(annotation, "__args__", ()) else ""
        kind = KIND.get(getattr(kinds[0], "__origin__", kinds[0]), "a value")
        if list in (annotation, getattr(annotation, "__origin__", None)):
            kind = KIND[list]
        whole = isinstance(value, float) and value.is_integer() and int in kinds
        fix = f"; write {int(value)}" if whole else ""
        return f"{key}={value}: must be {kind}{optional}{fix}"
    return None


def _schema() -> DictConfig:
    schema: DictConfig = OmegaConf.structured(Config)
    return schema
