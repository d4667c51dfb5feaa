"""Whether a directory may hold the run of a config: a new one, or the same one, which then continues."""

from pathlib import Path
from typing import Any, Literal

from gptexp.config.schema import Config, result_deciding
from gptexp.config.vocabulary import VOCAB_SIZES, padded, with_vocab_size
from gptexp.process.errors import ConfigError
from gptexp.process.fields import AUTO
from gptexp.process.words import shown
from gptexp.storage import branch, init_from, run_dir


def check_free(directory: Path, config: Config) -> Literal["new", "unfinished", "completed"]:
    """`check_same` for a run that is about to start. Raises `InUseError` if a process is running in `directory`."""
    run_dir.check_unlocked(directory)
    return check_same(directory, config)


def check_same(directory: Path, config: Config) -> Literal["new", "unfinished", "completed"]:
    """State of the run of `config` in `directory`.

    Raises `ConfigError` if the directory or its newest checkpoint belongs to another config, or if a new run's
    `init_from` is missing or for another model. Raises `CheckpointError` if `init_from` is a run without checkpoints.
    """
    for below in (".", run_dir.HYDRA, run_dir.PROFILE):
        run_dir.refuse_links(directory / below)
    if not run_dir.is_run(directory):
        if config.init_from is not None and config.branch_from is None:
            init_from.check(config, config.init_from)
        return "new"
    if not (directory / run_dir.CONFIG).exists():
        raise ConfigError(
            f"{directory}: holds a run that has lost its {run_dir.CONFIG}; restore it, or use a new directory"
        )
    # config.yaml may have been edited since the checkpoint was saved.
    before, trained = run_dir.load_resolved(directory), run_dir.trained_with(directory)
    if config.model.vocab_size == AUTO:
        config = with_vocab_size(config, _chosen_vocab_size(directory, config, before, trained))
    old, new = result_deciding(before) | trained, result_deciding(config)
    completed = run_dir.status(directory) == "completed"
    changed = run_dir.changed(old, new)
    if completed and set(changed) & {"train.max_tokens", "train.max_steps", "train.epochs"}:
        raise ConfigError(
            f"{directory}: the run is completed, and its learning rate has decayed; to train longer, start a new run "
            f"that warms up again, with continue_from={directory}"
        )
    lines = [f"{key} was {shown(old[key])}, now {shown(new[key])}; {_fix(key, config)}" for key in changed]
    if config.branch_from != before.branch_from and not _has_moved(directory, config):
        lines.append(f"branch_from was {shown(before.branch_from)}, now {shown(config.branch_from)}; start a new run")
    if lines:
        raise ConfigError([f"{directory}: cannot resume with another config: {line}" for line in lines])
    return "completed" if completed else "unfinished"


def _fix(key: str, config: Config) -> str:
    if key == "train.max_tokens" and config.data.name in ("text", "tokens"):
        return "if that is one epoch (train.max_tokens=auto), the text has changed; restore it, or start a new run"
    return "start a new run"


def _has_moved(directory: Path, config: Config) -> bool:
    """Whether the run in `directory` branched from the checkpoint that `config` names by another path."""
    parent, begun = branch.find(config), run_dir.read_json(directory / run_dir.SUMMARY).get("branched_from")
    return parent is not None and isinstance(begun, dict) and begun.get("checkpoint") == parent.identity


def _chosen_vocab_size(directory: Path, config: Config, before: Config, trained: dict[str, Any]) -> int | str:
    """What `model.vocab_size=auto` in `config` becomes in a directory whose run has the config `before`.

    The size depends on the tokenizer, which `check_same` compares, and on the data, which are compared later.
    """
    if run_dir.load_config(directory).model.vocab_size != AUTO and config.data.tokenizer in VOCAB_SIZES:
        return padded(VOCAB_SIZES[config.data.tokenizer])
    chosen = before.model.vocab_size
    if (weights := trained.get("model.vocab_size", chosen)) != chosen:
        raise ConfigError(
            f"{directory / run_dir.EFFECTIVE}: vocab_size={shown(chosen)}, and the weights were trained with "
            f"{shown(weights)}; restore that value"
        )
    return chosen
