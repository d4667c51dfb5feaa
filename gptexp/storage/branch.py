"""`branch_from`, `continue_from`: finds the checkpoint of another run that a run continues, before torch is loaded."""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptexp.config.branching import Parent, start_of
from gptexp.config.schema import Config, from_dict, result_deciding
from gptexp.process.errors import CheckpointError, ConfigError
from gptexp.process.words import shown
from gptexp.storage import reader, run_dir
from gptexp.storage.inventory import located


def find(cfg: Any) -> Parent | None:
    """The checkpoint with which the run of a composed or saved config begins; None if it begins with no other run's.

    Hashes of weights are not checked. Raises `ConfigError`, or `CheckpointError` if no checkpoint can be read.
    """
    start = start_of(cfg)
    if start is None:
        return None
    key, value = start
    given = f"{key}={shown(value)}"
    try:
        name, checkpoint = run_dir.run_and_checkpoint(located(value))
    except ConfigError as error:
        raise ConfigError(f"{key}={error}", error.code) from None
    directory = Path(name).absolute()
    _refuse_no_run(given, directory)
    try:
        config = run_dir.load_config(directory)
    except ConfigError as error:
        raise ConfigError(f"{given}: {error}", error.code) from None
    published = run_dir.published(directory / run_dir.CHECKPOINTS)
    steps = [run_dir.step_of(path) for path in published]
    if not published:
        raise CheckpointError(f"{given}: no checkpoint has been saved yet")
    step = run_dir.choose_step(directory, checkpoint, given)
    for path in published if step is None else [path for path in published if run_dir.step_of(path) == step]:
        with suppress(CheckpointError):
            return _of_checkpoint(path, directory, config, steps)
    raise CheckpointError(f"{given}: the checkpoint is damaged; give another one")


def _refuse_no_run(given: str, directory: Path) -> None:
    if run_dir.is_run(directory):
        return
    if (directory / run_dir.SWEEP).is_file():
        fix = f"give one of its runs, which gptexp ls {directory} --sort loss lists"
        raise ConfigError(f"{given}: a sweep; {fix}", "not-a-run")
    raise ConfigError(f"{given}: no run is in {directory}; give RUN_DIR@STEP", "not-a-run")


def _of_checkpoint(path: Path, directory: Path, config: Config, steps: list[int]) -> Parent:
    """The `Parent` at checkpoint `path`. Raises `CheckpointError`, or `ConfigError` if the run's config was edited."""
    try:
        manifest, state = reader.read_json(path / "manifest.json"), run_dir.read_state(path)
        files = [f"{name} {manifest[name][1]}" for name in sorted(manifest) if name != "state.json"]
        step, tokens, trained = int(state["step"]), int(state["tokens"]), state["about"]["config"]
        before = result_deciding(from_dict(trained))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    now = result_deciding(run_dir.load_resolved(directory))
    for key in run_dir.changed(now, before):
        raise ConfigError(
            f"{directory / run_dir.CONFIG}: {key}={shown(now[key])}, and {path.name} was trained with "
            f"{shown(before[key])}; restore that value"
        )
    identity = hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
    return Parent(directory, config, step, tokens, steps, identity, choices(directory))


def choices(directory: Path) -> dict[str, str]:
    """The config groups that a run was started with, and their options; empty if Hydra's record cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = reader.read_yaml(directory / run_dir.HYDRA / "hydra.yaml")["hydra"]["runtime"]["choices"]
        return {str(group): str(option) for group, option in found.items() if option is not None}
    return {}
