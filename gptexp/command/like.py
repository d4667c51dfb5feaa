"""`--like RUN_DIR`: a command line that has the config of a run, but for what it says itself."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gptexp.config.compose import PRECEDING, composition, hydra_engine, job_of
from gptexp.config.overrides import as_value
from gptexp.config.parts import SOURCE
from gptexp.config.paths import FILE_FLAGS, config_flags
from gptexp.config.schema import LISTS, Config, fields_of, parts_of
from gptexp.process.terminal import warn
from gptexp.reporting.statistics.best import one_run
from gptexp.storage import branch, reader, run_dir
from gptexp.storage.inventory import located

OF_ONE_RUN = (  # what another run does not take
    "sweep.", "fitted.", "branch_from", "schedule.begin_tokens", "log.wandb.name", "log.wandb.group",
)  # fmt: skip


def like(given: str, arguments: Sequence[str]) -> list[str]:
    """The arguments that a command needs before its own `arguments` to have the config of the run `given`, or of the
    best run of a sweep.

    A group that the arguments choose (`optim=muon`) is theirs as a whole, and so is a key that they set. Raises
    `ConfigError`.
    """
    directory = Path(run_dir.run_and_checkpoint(located(given))[0])
    run_dir.require_directory(directory, "a run or a sweep", "--like")
    directory = one_run(directory)
    config = run_dir.load_config(directory)
    if config.branch_from is not None:
        warn(f"--like {given}: began with the checkpoint {config.branch_from}; this run begins with random weights")
    files = [] if {*FILE_FLAGS} & {text.partition("=")[0] for text in arguments} else _files(directory, config)
    own = {text.lstrip("+").partition("=")[0] for text in arguments if "=" in text}
    groups = {*Config.__dataclass_fields__} - own - {"sweep"}  # an option of `sweep` would begin a sweep
    chosen = {**branch.choices(directory), "optim": config.optim.name}
    options = [f"{group}={option}" for group, option in chosen.items() if group in groups]
    folder, name = (_value(FILE_FLAGS, kind, [*files, *arguments]) for kind in ("dir", "name"))
    with hydra_engine(folder) as engine:
        plain = dict(_values(job_of(composition(engine, options, folder, multirun=False, config_name=name))))
    differing = {key: value for key, value in _values(config) if value != plain.get(key, plain)}
    if "train.epochs" in differing:
        differing.pop("train.max_tokens", None)  # follows from them
    less = {f"{key.partition('.')[0]}.{name}" for key in own for name in PRECEDING.get(key, ())}
    kept = [key for key in differing if key not in own | less and key.partition(".")[0] not in own]
    return [*files, *options, *(f"{key}={as_value(differing[key])}" for key in kept)]


def _files(directory: Path, config: Config) -> list[str]:
    """The flags of the user's YAML files with which the run was composed, if parts of the user's own need them."""
    hydra = reader.read_yaml(directory / run_dir.HYDRA / "hydra.yaml") if (directory / run_dir.HYDRA).is_dir() else {}
    return config_flags(hydra["hydra"]) if parts_of(config) and hydra else []


def _values(config: Config) -> list[tuple[str, Any]]:
    """The keys and values that an override may set."""
    of_options = ["optim.name", *(f"{group}.name" for group, _ in parts_of(config))]
    found = []
    for key, _, value in fields_of(config):
        if key in LISTS:
            value = [{name: part for name, part in entry.items() if name != SOURCE} for entry in value]
        if not (key.startswith(OF_ONE_RUN) or key in of_options or "._" in key):
            found.append((key, value))
    return found


def _value(flags: dict[str, str], kind: str, arguments: Sequence[str]) -> str | None:
    """The value of the flag of a kind, given as `--flag VALUE` or `--flag=VALUE`."""
    for text, following in pairwise([*arguments, ""]):
        flag, equals, value = text.partition("=")
        if flags.get(flag) == kind:
            return value if equals else following
    return None
