"""`init_from`: where the first weights of a run come from, and the model that they are for.

They come from another run, from a directory or a repository of the hub with a model of transformers, or from a
checkpoint of nanoGPT or build-nanogpt. This file checks what can be checked before torch is loaded;
run/first_weights.py reads the weights.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gptexp.config.paths import HUB_MODELS, is_hub_model
from gptexp.config.schema import Config, ModelConfig, fields_of
from gptexp.config.transformers_json import CONFIG_JSON, checked_model, read_config_json
from gptexp.config.vocabulary import VOCAB_SIZES, padded, padding_multiple
from gptexp.process.errors import ConfigError, first_line
from gptexp.process.fields import AUTO
from gptexp.process.imports import permanent
from gptexp.process.words import shown
from gptexp.storage import run_dir
from gptexp.storage.inventory import located
from gptexp.storage.reader import read_json

MOST_UNUSED = 1023  # most rows of the embedding without an id: with more, the weights are for another tokenizer
_ALIASES = {"r50k_base": "gpt2"}  # the same ids


@dataclass(frozen=True)
class Source:
    """A place with weights, on this machine."""

    given: str  # the setting that names it, for errors
    kind: Literal["run", "transformers", "nanogpt"]
    path: Path  # a directory; for nanoGPT, a file
    step: int | None = None  # of the run's checkpoint; None: its newest intact one
    checkpoint: Path | None = None  # the run's checkpoint, once it is found

    def model(self) -> ModelConfig:
        """The model that the weights are for, without dropout. Raises `ConfigError` or `CheckpointError`."""
        try:
            if self.kind == "run":
                return run_dir.load_resolved(self.path).model
            return _of_transformers(self.path) if self.kind == "transformers" else _of_nanogpt(self.path)
        except ConfigError as error:
            raise ConfigError(f"{self.given}: {error}", error.code) from None


def find(name: str, given: str, weights: bool = False) -> Source:
    """Find the weights `name`. If they are on the hub, download config.json, and with `weights` also the weights.

    Errors begin with `given`. Raises `ConfigError` if there are no such weights, or if the download fails.
    """
    if is_hub_model(name):
        from gptexp.storage import hub  # imports huggingface_hub, which takes half a second

        model, _, revision = name.partition("@")
        repository = HUB_MODELS.get(model, model)
        return Source(given, "transformers", hub.download_model(given, repository, revision or None, weights))
    directory, chosen = run_dir.run_and_checkpoint(name)
    if run_dir.is_run(Path(directory)):
        return Source(given, "run", Path(directory), run_dir.choose_step(Path(directory), chosen, given))
    path = Path(name)
    if path.is_file():
        if path.suffix in (".safetensors", ".bin"):
            raise ConfigError(f"{given}: one file of a model; give the directory that it lies in")
        return Source(given, "nanogpt", path)
    if (path / CONFIG_JSON).is_file():
        return Source(given, "transformers", path)
    if (Path(directory) / run_dir.SWEEP).is_file():
        raise ConfigError(f"{given}: a sweep; give the directory of one of its runs")
    what = f"it has neither {run_dir.CONFIG} nor {CONFIG_JSON}" if path.is_dir() else "no such file or directory"
    raise ConfigError(
        f"{given}: {what}; give a run, a directory that transformers saved, a ckpt.pt of nanoGPT, "
        f"{', '.join(HUB_MODELS)}, or OWNER/NAME on the hub"
    )


def of_config(init_from: str, weights: bool = False) -> Source:
    """`find` for a value of `init_from`."""
    return find(init_from, f"init_from={init_from}", weights)


def with_step(config: Config) -> Config:
    """`config` with the path of the run that `init_from` names (`located`), if it names none of the hub.

    In place of `best` it has the step of the checkpoint: another one may be the best later. Raises `ConfigError` if
    that run has no best checkpoint.
    """
    if config.init_from is not None and not is_hub_model(config.init_from):
        try:
            path = located(config.init_from)
        except ConfigError as error:
            raise ConfigError(f"init_from={error}", error.code) from None
        config = replace(config, init_from=os.path.abspath(path))  # noqa: PTH100
    directory, checkpoint = run_dir.run_and_checkpoint(config.init_from or "")
    if checkpoint != run_dir.BEST or not run_dir.is_run(Path(directory)):
        return config
    step = run_dir.choose_step(Path(directory), checkpoint, f"init_from={config.init_from}")
    return replace(config, init_from=f"{directory}@{step}")


def check(config: Config, init_from: str) -> None:
    """Raise unless the weights of `init_from` exist, and are for the model of `config`, dropout aside."""
    source, model = of_config(init_from), config.model.spelled_out()
    wanted = source.model().spelled_out()
    free = _free(model, wanted)
    pairs = [(key, getattr(model, key), was) for key, _, was in fields_of(wanted) if key not in free]
    different = [(key, shown(now), shown(was)) for key, now, was in pairs if now not in (was, AUTO)]
    if lines := [
        f"model.{key}={now}: init_from={init_from} has {key}={was}; use the same value, or model=from_init"
        for key, now, was in different
    ]:
        raise ConfigError(lines)
    if config.model.vocab_size == AUTO and (n_vocab := VOCAB_SIZES.get(config.data.tokenizer)) is not None:
        choose_vocab_size(config, n_vocab)
    check_tokenizer(config, source)
    if source.kind == "run":
        run_dir.require_checkpoint(source.path)


def _free(model: ModelConfig, was: ModelConfig) -> tuple[str, ...]:
    """The keys in which a model may differ from the one of its weights: no weight depends on them."""
    is_shorter = model.block_size <= was.block_size and was.position != "learned"
    return ("dropout", "block_size") if is_shorter else ("dropout",)


def check_tokenizer(config: Config, source: Source) -> None:
    """Raise `ConfigError` if `source` is a run whose tokenizer, by its name, has other ids.

    Tokenizers of characters or from files are compared after tokenisation: `run.first_weights.refuse_other_ids`.
    """
    if source.kind != "run":
        return
    before, now = run_dir.load_config(source.path).data.tokenizer, config.data.tokenizer
    if {before, now} <= VOCAB_SIZES.keys() and _ALIASES.get(before, before) != _ALIASES.get(now, now):
        raise ConfigError(f"data.tokenizer={now}: {source.given} was trained with another; use data.tokenizer={before}")


def choose_vocab_size(config: Config, n_vocab: int) -> tuple[int, str]:
    """What `model.vocab_size=auto` is for a tokenizer with `n_vocab` ids, and the reason. Raises `ConfigError`."""
    if config.init_from is not None:
        size = of_config(config.init_from).model().resolved_vocab_size
        if size < n_vocab:
            raise ConfigError(
                f"data.tokenizer={config.data.tokenizer}: has {n_vocab:,} ids, and the weights of "
                f"init_from={config.init_from} are for {size:,}; use the tokenizer that they were trained with"
            )
        if size > n_vocab + MOST_UNUSED:
            raise ConfigError(
                f"data.tokenizer={config.data.tokenizer}: has {n_vocab:,} ids, and the weights of "
                f"init_from={config.init_from} are for {size:,}; use the tokenizer that they were trained with, or, to "
                f"leave the other ids unused, model.vocab_size={size}"
            )
        return size, f"that of init_from={config.init_from}"
    ids = f"the {n_vocab:,} ids of data.tokenizer={config.data.tokenizer}"
    return padded(n_vocab), f"{ids}, padded to a multiple of {padding_multiple(n_vocab)}"


def _of_transformers(directory: Path) -> ModelConfig:
    try:
        content = read_json((directory / CONFIG_JSON).resolve())  # the hub's cache consists of links
    except (OSError, ValueError) as error:
        raise ConfigError(f"{CONFIG_JSON}: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{CONFIG_JSON}: not a JSON object")
    return read_config_json(content)


def _of_nanogpt(path: Path) -> ModelConfig:
    with permanent():
        from gptexp.storage.weight_files import read_nanogpt  # imports torch, for which other checks do not wait

    args, _ = read_nanogpt(path, "meta")
    sizes = {key: args.get(key) for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    return checked_model({**sizes, "bias": args.get("bias", True)})
