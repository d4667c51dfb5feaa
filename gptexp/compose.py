"""From Hydra's command line to a checked `Config`; the only door through which Hydra comes in.

Hydra composes once, in one process. What comes out is a plain dataclass, checked, with absolute paths and a world
size: everything after this reads that and not Hydra. Problems are found before torch is imported and before a file
is created, and print as one line each with exit code 2.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
import yaml
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gptexp import check, run_dir
from gptexp.config import Config, fields_of, shown
from gptexp.data.corpora import absolute, is_path_list
from gptexp.distributed import launcher_rank
from gptexp.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, UserError
from gptexp.overrides import options, override_problems
from gptexp.terminal import hush, say, talk_as_asked

if TYPE_CHECKING:
    from gptexp.sweep.cells import Draft

OWN_CONF = "GPTEXP_CONF"  # names a folder that takes the place of conf/


def conf_dir() -> Path:
    """Where the YAML files lie: $GPTEXP_CONF, else `packaged_conf`."""
    own = os.environ.get(OWN_CONF)
    if not own:
        return packaged_conf()
    if not (Path(own) / "config.yaml").is_file():
        raise ConfigError(f"no config.yaml in {own}; set {OWN_CONF} to the folder that holds it")
    return Path(own).resolve()


def packaged_conf() -> Path:
    """The wheel's copy of conf/, else the checkout's."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"no config.yaml in {package / 'conf'}; set {OWN_CONF} to the folder that holds it")


def register() -> None:
    """Tell Hydra of the typed schema, of our resolver, and of the launchers and sweepers of gptexp."""
    from gptexp import sweep

    OmegaConf.register_new_resolver("power_law", power_law, replace=True)
    ConfigStore.instance().store(name="schema", node=Config)
    sweep.register()


def power_law(tokens: int, lr: float, at_tokens: float, exponent: float) -> float:
    """The learning rate at a batch size in tokens, by what `gptexp report --write-optim` fitted."""
    return float(lr * (tokens / at_tokens) ** exponent)


def hydra_main(task: Callable[[DictConfig], Any]) -> None:
    """Run `task` under `hydra.main` on `sys.argv`; `CheckBeforeStart` refuses a bad config before anything exists."""
    parser = get_args_parser()
    parser.error = _usage_error  # type: ignore[method-assign]
    args = parser.parse_intermixed_args()
    flags = sys.argv[1:]
    for override in args.overrides:
        flags.remove(override)
    sys.argv[1:] = [*args.overrides, *flags]  # Hydra itself takes no override after a flag
    modes = {"--run": args.run, "--multirun": args.multirun, "--cfg": args.cfg, "--info": args.info}
    modes["--shell-completion"] = args.shell_completion
    if len(given := [flag for flag, value in modes.items() if value]) > 1:
        raise ConfigError(f"{' '.join(given)}: exclude each other; give one")
    for flag, value in (("--config-path", args.config_path), ("--config-name", args.config_name)):
        if value:
            raise ConfigError(f"{flag} {value}: not supported; give a folder of groups with --config-dir")
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve: goes with --cfg only; add --cfg job")
    if args.experimental_rerun:
        raise ConfigError(f"--experimental-rerun {args.experimental_rerun}: not supported; use gptexp resume RUN_DIR")
    if not (args.shell_completion or args.hydra_help):
        multirun = args.multirun or is_multirun(args.overrides)
        _refuse(args.overrides, multirun, args.config_dir)
        _refuse_code_of_files(args.overrides, multirun, args.config_dir)
    if args.help:
        _print_help(args.overrides, args.config_dir)
        return
    register()
    # Hydra would print its errors over many lines and exit with 1; this makes it raise them to `report_errors`.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(task)()
    except SystemExit as leaving:
        if args.cfg and leaving.code == 1:  # Hydra's answer to an unknown --package
            raise SystemExit(EXIT_CONFIG) from None
        raise


def is_multirun(overrides: Sequence[str]) -> bool:
    """Whether they ask for several runs without -m."""
    return any(text.startswith(("sweep=", "hydra.mode=")) for text in overrides)


def _usage_error(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see --help")


def _refuse(overrides: Sequence[str], multirun: bool, config_dir: str | None) -> None:
    """Raise `ConfigError` for a folder that is none and for wrong overrides."""
    # Hydra saves the overrides as typed.
    if secrets := list(_secrets((key, value) for key, _, value in (text.partition("=") for text in overrides))):
        raise ConfigError(secrets)
    if found := override_problems(overrides, multirun, _folders(config_dir)):
        raise ConfigError(found)


def _refuse_code_of_files(overrides: list[str], multirun: bool, config_dir: str | None) -> None:
    """Raise `ConfigError` where a file that is not ours has Hydra call code; before Hydra builds anything."""
    if config_dir or os.environ.get(OWN_CONF):
        typed = [text for text in overrides if text.lstrip("+~").partition("=")[0].startswith("hydra")]
        cfg = _composition(overrides, config_dir, with_hydra=True, multirun=multirun)
        refuse_foreign_code(cfg, _composition(typed, None, with_hydra=True, multirun=multirun, conf=packaged_conf()))


def _folders(config_dir: str | None) -> list[Path]:
    """Where groups lie: ours and the user's own, which must exist."""
    if config_dir is None:
        return [conf_dir()]
    if not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {shown(config_dir)}: no such folder")
    return [conf_dir(), Path(config_dir)]


def compose(overrides: list[str], config_dir: str | None = None) -> Config:
    """Compose and check one config without starting anything (for verbs that do not train)."""
    _refuse(overrides, False, config_dir)
    return to_config(_composition(overrides, config_dir), overrides)


@dataclass(frozen=True)
class Grid:
    """A multirun as it would run."""

    drafts: "list[Draft]"  # its cells; of Optuna's, some that hold every value there is
    of: int  # how many will run
    at_once: int
    on_gpus: bool


def compose_sweep(overrides: list[str], config_dir: str | None = None) -> Grid:
    """Compose and check every cell of a multirun without starting anything."""
    from gptexp.sweep.cells import draft, name_sweep
    from gptexp.sweep.space import axes

    _refuse(overrides, True, config_dir)
    _refuse_code_of_files(overrides, True, config_dir)
    with _engine(None) as engine:
        config = engine.compose_config("config", _searched(overrides, config_dir), RunMode.MULTIRUN, from_shell=False)
        HydraConfig.instance().set_config(config)
        name_sweep(config)
        context = HydraContext(config_loader=engine.config_loader, callbacks=Callbacks())
        sweeper: Any = Plugins.instance().instantiate_sweeper(
            hydra_context=context, task_function=lambda _: None, config=config
        )
        space = axes(sweeper.params, list(config.hydra.overrides.task), engine.config_loader)
        combinations = sweeper.combinations(space)
        of = sweeper.count(combinations)
        drafts = draft(engine.config_loader, config, combinations, of)
    legal = [drafted.config for drafted in drafts if drafted.config is not None]
    at_once, gpus = sweeper.cell_launcher.places(legal) if legal else (1, None)
    return Grid(drafts, of, at_once, bool(gpus))


def _composition(
    overrides: list[str],
    config_dir: str | None,
    with_hydra: bool = False,
    multirun: bool = False,
    conf: Path | None = None,
) -> DictConfig:
    """What Hydra makes of `overrides`; `with_hydra`: its own part too. Of a multirun, what all cells begin with."""
    with _engine(conf) as engine:
        mode = RunMode.MULTIRUN if multirun else RunMode.RUN
        cfg: DictConfig = engine.compose_config("config", _searched(overrides, config_dir), mode, from_shell=False)
    if not with_hydra:
        with open_dict(cfg):
            del cfg["hydra"]
    return cfg


@contextmanager
def _engine(conf: Path | None) -> Iterator[Any]:
    """Hydra on the files in `conf`, else on those of `conf_dir`."""
    register()
    with hydra.initialize_config_dir(str(conf or conf_dir()), version_base="1.3"):
        yield GlobalHydra.instance().hydra


def _searched(overrides: list[str], config_dir: str | None) -> list[str]:
    """`overrides` with the user's own files among those that are searched."""
    return [*([f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []), *overrides]


# What of Hydra's own config calls code by its name, or sets up the processes that do, or says where they write.
CODE = (
    "callbacks",
    "job_logging",
    "hydra_logging",
    "launcher",
    "sweeper",
    "job.env_set",
    "job.env_copy",
    "output_subdir",
)
PLACES = ("run.dir", "sweep.dir")


def refuse_foreign_code(cfg: DictConfig, own: DictConfig) -> None:
    """Raise `ConfigError` where `cfg` names other code to call than `own`, which no foreign file had a part in.

    Hydra runs what `hydra.callbacks` and its logging name, and builds launcher and sweeper with all that is in them,
    before any of our code sees the config. Compared as written: what an interpolation comes to may change. A file may
    choose where runs lie, below the working directory.
    """
    theirs: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    ours: Any = OmegaConf.to_container(own.hydra, resolve=False)
    for node in (theirs, ours):
        params = node["sweeper"].pop("params", None)
        if node is theirs and params and not all(isinstance(v, str | int | float) for v in params.values()):
            raise ConfigError("hydra.sweeper.params: a file names the values of a key as text: optim.lr: 1e-3,2e-3")
    for key in CODE:
        if _at(theirs, key) != _at(ours, key):
            raise ConfigError(
                f"hydra.{key}: set by a file of --config-dir or ${OWN_CONF}; it may choose values, not code; drop it"
            )
    for key in PLACES:
        place = str(_at(theirs, key))
        outside = Path(place).is_absolute() or ".." in Path(place).parts or place.startswith("~") or "${oc." in place
        if place != _at(ours, key) and outside:
            raise ConfigError(f"hydra.{key}={shown(place)}: a file may name a place below the working directory only")


def _at(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _print_help(overrides: list[str], config_dir: str | None) -> None:
    """The answer to --help. Hydra's own takes a second: it copies the repository of configs once per group."""
    job = _composition(overrides, config_dir, with_hydra=True)
    with open_dict(job):
        text = job.pop("hydra").help
    groups = options(_folders(config_dir))
    print(text.header)
    print("Groups (override as group=option):\n")
    print(*(f"  {group:<11}{', '.join(sorted(names))}" for group, names in sorted(groups.items())), sep="\n")
    print(f"\nKeys of this composition (override as key=value):\n\n{OmegaConf.to_yaml(job)}\n{text.footer}")


def to_config(cfg: DictConfig, overrides: Sequence[str], cwd: str | None = None) -> Config:
    """The checked, self-contained `Config` of a composition: paths absolute (below `cwd`), world size filled in.

    `overrides` are what the user gave: a length in tokens given there wins over one in steps out of a file.
    """
    config = job_of(cfg)
    _let_the_command_line_win(config, {text.split("=", 1)[0] for text in overrides})
    for key in ("path", "val_path"):
        value = getattr(config.data, key)
        if isinstance(value, str):
            setattr(config.data, key, absolute(value, cwd))
        elif is_path_list(value):
            setattr(config.data, key, [absolute(item, cwd) for item in value])
    if config.data.cache_dir:
        config.data.cache_dir = absolute(config.data.cache_dir, cwd)
    if config.init_from:
        config.init_from = os.path.abspath(os.path.join(cwd or "", config.init_from))  # noqa: PTH100, PTH118  no glob
    launcher = launcher_rank()
    problems = []
    if launcher and config.world.size not in (None, launcher.world_size):
        problems.append(
            f"world.size={config.world.size}: the launcher started {launcher.world_size} ranks; "
            f"leave world.size out or start {config.world.size}"
        )
    if config.world.size is None:
        config.world.size = launcher.world_size if launcher else 1
    problems += _secrets((key, value) for key, _, value in fields_of(config))
    if problems := [*problems, *check.problems(config, config.world.size)]:
        raise ConfigError(problems)
    return config


# A key, and those that would win over it.
WINNERS = {
    "schedule.warmup_ratio": ("warmup_tokens", "warmup_steps"),
    "schedule.warmup_tokens": ("warmup_steps",),
    "schedule.decay_tokens": ("decay_steps",),
    "train.max_tokens": ("max_steps",),
    "train.eval_every_tokens": ("eval_every",),
    "train.save_every_tokens": ("save_every",),
    "train.keep_every_tokens": ("keep_every",),
}


SECRET = re.compile(r".*(API_KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)  # names of environment variables


def _secrets(values: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Yield a line for each (key, value) that equals a secret of the environment: the run directory would keep it."""
    secrets = {value: name for name, value in os.environ.items() if value and SECRET.fullmatch(name)}
    for key, value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and item in secrets:
                name = secrets[item]
                yield f"{key}: equals ${name}, and would be saved with the run; leave it to the environment"


def _let_the_command_line_win(config: Config, given: set[str]) -> None:
    """Reset what a file says of the same length in a unit that would win."""
    for key, winners in WINNERS.items():
        section, _, _name = key.partition(".")
        for winner in winners:
            if key in given and f"{section}.{winner}" not in given:
                setattr(getattr(config, section), winner, None)


def job_of(cfg: DictConfig) -> Config:
    """A composition without Hydra's own part, as dataclasses; unchecked."""
    job = cfg.copy()
    OmegaConf.set_struct(job, False)
    job.pop("hydra", None)
    config = OmegaConf.to_object(job)
    assert isinstance(config, Config)
    return config


class CheckBeforeStart(Callback):
    """Refuses what cannot run before Hydra makes the run directory (or rewrites the `.hydra/` of an old one).

    Hydra swallows every exception of a callback but `SystemExit`.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with report_errors():
            HydraConfig.instance().set_config(config)
            directory = Path(config.hydra.run.dir)
            _refuse_unusable(directory)
            composed = to_config(config, config.hydra.overrides.task)
            talk_as_asked(composed.log.progress)
            if run_dir.check_free(directory, composed) == "completed":
                say(f"gptexp: {directory} holds this very run, completed; nothing to do")
                raise SystemExit(0)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with report_errors():
            from gptexp.sweep.cells import name_sweep

            name_sweep(config)
            talk_as_asked(config.log.progress)


def _refuse_unusable(directory: Path) -> None:
    """Raise `ConfigError` where no directory can be made."""
    try:
        parent = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    except OSError as error:
        raise ConfigError(f"hydra.run.dir={shown(str(directory))}: {error.strerror}; use another name") from None
    if not parent.is_dir():
        raise ConfigError(f"hydra.run.dir={directory}: {parent} is a file; use another name")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"hydra.run.dir={directory}: {parent} cannot be written to; use another place")


class report_errors:
    """Turn what a user can cause into lines on stderr and an exit code; let everything else keep its traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            sys.exit(130)
        if isinstance(error, BrokenPipeError):  # whoever read our answer has seen enough
            hush()
            sys.exit(EXIT_FAILED)
        if isinstance(error, UserError):
            kind = "config error: " if isinstance(error, ConfigError) else ""
            print(*(f"gptexp: {kind}{line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
            sys.exit(error.exit_code)
        if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError | UnicodeDecodeError):
            print(f"gptexp: config error: {_one_line(error)}", file=sys.stderr)
            sys.exit(EXIT_CONFIG)
        if error is not None and not isinstance(error, SystemExit):
            # Nothing a user is expected to cause: the traceback is the message, under the documented code.
            import traceback

            traceback.print_exception(error)
            sys.exit(EXIT_FAILED)


def _one_line(error: BaseException) -> str:
    """Hydra's and OmegaConf's many lines as one that names the key."""
    parts = [error] if error.__cause__ is None else [error, error.__cause__]
    lines = [line.strip() for part in parts for line in str(part).splitlines()]
    noise = ("full_key", "object_type", "reference_type", "Config search path", "provider=", "Set the environment")
    kept = dict.fromkeys(line for line in lines if line and not line.startswith((*noise, "To append to your config")))
    keys = [key for line in lines if line.startswith("full_key:") and (key := line.removeprefix("full_key:").strip())]
    text = " ".join(kept)
    return f"{keys[-1]}: {text}" if keys and keys[-1] not in text else text


def lr_source(hydra_config: Any) -> str:
    """Which file or override the learning rate came from, in Hydra's order of precedence; for the reader only."""
    choices = hydra_config.runtime.choices
    if any(text.startswith("optim.lr=") for text in sys.argv):  # a cell's overrides hold what a named grid sweeps too
        return "the command line"
    swept_by = choices.get("sweep")
    if swept_by and "optim.lr" in (hydra_config.sweeper.params or {}):
        return f"sweep={swept_by}"
    for group in ("experiment", "optim", "model"):
        if option := choices.get(group):
            content = _yaml(hydra_config, group, option)
            if "lr" in content.get("optim", content if group == "optim" else {}):
                return f"{group}={option}"
    return "the default"


def _yaml(hydra_config: Any, group: str, option: str) -> dict[str, Any]:
    """The file of an option as plain data, from the first folder of the search path that has it."""
    for source in hydra_config.runtime.config_sources:
        file = Path(source.path) / group / f"{option}.yaml"
        if source.schema == "file" and file.is_file():
            return yaml.safe_load(file.read_text()) or {}
    return {}
