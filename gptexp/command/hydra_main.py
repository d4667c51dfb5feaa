"""Hydra's command line: checks the overrides, composes once, then runs one job or a sweep.

`hydra.main` composes twice, first to find the mode and then to run, and creates the run directory before the config
can be checked. So it is used only for flags that run nothing (--cfg, --info, …). A run calls the same public parts of
Hydra as `hydra.main`, in the same order, with the check in between.

Files in conf/ and in --config-dir are trusted. A run directory, a checkpoint and downloaded data are not: they are read
as data only.
"""

import os
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from gptexp.command.arguments import Once
from gptexp.command.like import like
from gptexp.config.compose import (
    composition,
    hydra_engine,
    hydra_errors_as_config_errors,
    is_multirun,
    is_sweep,
    primary_config,
    register_schema,
    take_choices,
    to_config,
)
from gptexp.config.fitted import fitted_warnings
from gptexp.config.overrides import override_problems, quoted
from gptexp.config.paths import CONFIG_NAME, conf_dir, folders, options, why_not_creatable
from gptexp.config.schema import Config
from gptexp.config.spelling import canonical
from gptexp.data.epoch import count_epoch
from gptexp.process.errors import EXIT_CONFIG, ConfigError, UserError, first_line
from gptexp.process.imports import permanent
from gptexp.process.terminal import print_error, reserve_stdout, say, warn
from gptexp.process.words import shown
from gptexp.run.requirements import require_devices, require_tasks
from gptexp.storage import branch, run_dir
from gptexp.storage.continuation import check_free
from gptexp.storage.init_from import of_config, with_step
from gptexp.storage.inventory import refuse_run_in, refuse_sweep_in

# Trains a config, given the composition that it came from. Returns an exit code.
Task = Callable[[Config, DictConfig], int]


def hydra_main(train: Task, begin_cell: Task, launcher_world_size: int | None) -> int:
    """Run `sys.argv`: call `train` for one run, or `begin_cell` for each cell of a sweep. Returns the exit code.

    Raises `ConfigError`, before any directory is made, for a command line or a config that cannot run.
    """
    args = _parse()
    register_from_init()
    multirun = args.multirun or is_multirun(args.overrides)
    if args.help:
        _print_help(args.overrides, args.config_dir, args.config_name)
        return 0
    if args.cfg and any(text.startswith(("branch_from=", "continue_from=")) for text in args.overrides):
        rule = "shows what files and overrides set, and a branch has the other keys of its run"
        fix = "leave it out, the new run has a config.yaml"
        raise ConfigError(f"--cfg {args.cfg}: {rule}; {fix}", "cfg-of-branch")
    question = args.cfg or args.info or args.hydra_help or args.shell_completion or args.resolve
    if question or (args.run and args.multirun):  # Hydra refuses this pair of flags
        return _let_hydra_answer(args, multirun)
    with hydra_engine(args.config_dir) as engine:
        cfg = composition(engine, args.overrides, args.config_dir, multirun, args.config_name)
        context = HydraContext(config_loader=engine.config_loader, callbacks=Callbacks(cfg))
        if is_sweep(cfg):
            return _sweep(cfg, context, begin_cell)
        return _run(cfg, context, train, launcher_world_size)


def _parse() -> Namespace:
    """Parse the command line with Hydra's own parser; flags and overrides may be in any order."""
    sys.argv[1:] = spelled_out(sys.argv[1:])
    args = train_parser().parse_intermixed_args()
    if args.config_path:
        rule = "not supported; give a folder with config groups: --config-dir DIR"
        raise ConfigError(f"--config-path {args.config_path}: {rule}", "not-supported")
    if args.experimental_rerun:
        rule = "not supported; use gptexp resume RUN_DIR"
        raise ConfigError(f"--experimental-rerun {args.experimental_rerun}: {rule}", "not-supported")
    return args


def train_parser() -> ArgumentParser:
    """Hydra's own parser, which has no public name."""
    parser = get_args_parser()
    parser.error = _usage_error  # type: ignore[method-assign]
    for action in parser._actions:
        if action.option_strings and type(action) is parser._registry_get("action", None):
            action.__class__ = Once
    return parser


def spelled_out(argv: Sequence[str]) -> list[str]:
    """`argv` with overrides in place of `--tag T --tag U --note TEXT` and `--like RUN_DIR`.

    Raises `ConfigError`.
    """
    try:
        short, rest = short_forms_parser().parse_known_args(argv)
    except ArgumentError as error:
        _usage_error(str(error))
    short_forms = []
    if short.tag is not None:
        short_forms.append(("--tag", "log.tags", f"[{','.join(map(quoted, short.tag))}]"))
    if short.note is not None:
        short_forms.append(("--note", "log.note", quoted(short.note)))
    for flag, key, value in short_forms:
        if any(text.startswith(f"{key}=") for text in rest):
            rule = f"a short form of {key}=…, which is given too; leave out one of them"
            raise ConfigError(f"{flag}: {rule}", "key-given-twice")
        rest.append(f"{key}={value}")
    return rest if short.like is None else [*like(short.like, rest), *rest]


def short_forms_parser() -> ArgumentParser:
    """The parser of `--tag T`, `--note TEXT` and `--like RUN_DIR`."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tag", action="append")
    parser.add_argument("--note", action=Once)
    parser.add_argument("--like", action=Once, metavar="RUN_DIR")
    return parser


def _usage_error(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see --help", "usage")


def register_from_init() -> None:
    """Register the resolver by which conf/model/from_init.yaml gets the sizes of the model of `init_from`."""

    def size(key: str, init_from: str | None) -> Any:
        if init_from is None:
            rule = "init_from is not given; give it, or choose another model"
            raise ConfigError(f"model=from_init: {rule}", "init-from-missing")
        return getattr(of_config(init_from).model(), key)

    OmegaConf.register_new_resolver("from_init", size, replace=True)


def _print_help(overrides: Sequence[str], config_dir: str | None, config_name: str | None) -> None:
    """Print usage, the config groups and the composed keys.

    Hydra's own --help takes a second, because it copies the repository of configs for each group.
    """
    with hydra_engine(config_dir) as engine:
        job = composition(engine, overrides, config_dir, is_multirun(overrides), config_name)
    with open_dict(job):
        text = job.pop("hydra").help
    print(text.header)
    print("Groups (override as group=option):\n")
    for group, names in sorted(options(folders(config_dir)).items()):
        print(f"  {group:<15} {', '.join(sorted(names))}")
    print(f"\nKeys of this composition (override as key=value):\n\n{OmegaConf.to_yaml(job)}\n{text.footer}")


def _let_hydra_answer(args: Namespace, multirun: bool) -> int:
    """Let `hydra.main` print the answer to a question about the config."""
    checked = not (args.shell_completion or args.hydra_help)
    if checked and (problems := override_problems(args.overrides, multirun, folders(args.config_dir))):
        raise ConfigError(problems)
    if checked:
        primary_config(args.config_dir, args.config_name)
    flags = sys.argv[1:]
    for override in args.overrides:
        flags.remove(override)
    sys.argv[1:] = [*canonical(args.overrides), *flags]  # Hydra itself accepts no override after a flag
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors instead of printing them
    register_schema()
    try:
        with hydra_errors_as_config_errors():
            hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base="1.3")(lambda _: None)()
    except ValueError as error:  # flags that exclude each other
        raise ConfigError(first_line(error), "usage") from None
    except SystemExit as leaving:
        return EXIT_CONFIG if args.cfg and leaving.code == 1 else int(leaving.code or 0)  # 1: an unknown --package
    return 0


def _run(cfg: DictConfig, context: HydraContext, train: Task, launcher_world_size: int | None) -> int:
    """Check the config and its directory, then train: the part of `hydra.main` for one job."""
    parent, overrides = branch.find(cfg), cfg.hydra.overrides.task
    config = with_step(to_config(cfg, overrides, launcher_world_size, parent, count_epoch))
    take_choices(cfg, overrides, parent)
    HydraConfig.instance().set_config(cfg)  # the name of the directory contains a choice of a group
    directory = Path(cfg.hydra.run.dir)
    reserve_stdout(config.log.progress)
    if state_of(directory, config) == "completed":
        say(f"gptexp: {directory}: this run is completed; nothing to do")
        return 0
    for line in fitted_warnings(config):
        warn(f"warning: {line}")
    require_tasks([config])
    if launcher_world_size is None:  # under a launcher, other nodes may have the devices
        require_devices([config])

    def job(_: Any) -> int:
        try:
            return train(config, cfg)
        except UserError as error:  # not raised, because Hydra would print a line of its own
            print_error(error)
            return error.exit_code

    context.callbacks.on_run_start(config=cfg, config_name=cfg.hydra.job.config_name)
    with run_dir.storage(directory):  # Hydra creates it and writes .hydra/
        result = run_job(job, cfg, job_dir_key="hydra.run.dir", job_subdir_key=None, hydra_context=context)
    context.callbacks.on_run_end(config=cfg, config_name=cfg.hydra.job.config_name, job_return=result)
    return int(result.return_value)


def state_of(directory: Path, config: Config) -> str:
    """The result of `check_free`. Also raises `ConfigError` if no run can be made in `directory`."""
    if why := why_not_creatable(directory):
        raise ConfigError(f"hydra.run.dir={shown(str(directory))}: {why}; use another directory", "not-creatable")
    refuse_run_in(directory)
    return check_free(directory, config)


def _sweep(cfg: DictConfig, context: HydraContext, begin_cell: Task) -> int:
    """Run the cells of a sweep: the part of `hydra.main` for a multirun."""
    from gptexp.sweep.grid import build_sweeper  # imports numpy, which a single run's parent does not need

    sweeper = build_sweeper(cfg, context, begin_cell)
    refuse_sweep_in(Path(cfg.hydra.sweep.dir))
    reserve_stdout(cfg.log.progress)
    if sweeper.is_search:
        with permanent():
            from gptexp.command.search_planning import confirm_search  # imports torch

        if not confirm_search(sweeper):
            say("nothing was run")
            return 0
    context.callbacks.on_multirun_start(config=cfg, config_name=cfg.hydra.job.config_name)
    code = sweeper.sweep(arguments=list(cfg.hydra.overrides.task))
    context.callbacks.on_multirun_end(config=cfg, config_name=cfg.hydra.job.config_name)
    return code
