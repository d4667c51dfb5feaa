"""Loads the weights of `init_from` into a new model, if its tokenizer gives the ids the same meaning."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gptexp.config.schema import ModelConfig
from gptexp.config.transformers_json import CONFIG_JSON
from gptexp.config.vocabulary import VOCAB_SIZES
from gptexp.data.tokenizer import Tokenizer, load_tokenizer
from gptexp.data.tokenizer_json import gpt2_vocabulary
from gptexp.distributed.sharding import Parameters
from gptexp.model.huggingface import from_nanogpt, from_transformers
from gptexp.model.shapes import count_parameters
from gptexp.process.errors import CheckpointError, ConfigError, DataError
from gptexp.process.terminal import warn
from gptexp.process.words import counted
from gptexp.storage import checkpoint, run_dir
from gptexp.storage.init_from import Source
from gptexp.storage.reader import read_json
from gptexp.storage.weight_files import find_weight_files, read_nanogpt, read_transformers
from gptexp.training.snapshot import load_own_weights, load_weights

VOCABULARY = "vocab.json"  # the file of GPT-2's tokenizer in transformers


def choose_weights(source: Source, model: ModelConfig) -> Source:
    """Return `source`; for a run, with its checkpoint, whose files are all read to check them.

    Raises `CheckpointError` if the files are too small for `model`, before a model of that size is built.
    """
    parameters = count_parameters(model)
    if source.kind == "run":
        path, _ = checkpoint.newest(source.path / run_dir.CHECKPOINTS, source.step)
        checkpoint.refuse_other_size(path, parameters)
        return replace(source, checkpoint=path)
    files = find_weight_files(source.path) if source.kind == "transformers" else [source.path]
    size = sum(file.stat().st_size for file in files)
    if size < parameters:
        what = CONFIG_JSON if source.kind == "transformers" else "its config"
        raise CheckpointError(
            f"{source.path}: {what} describes {counted(parameters, 'parameter')}, and its weights are "
            f"{counted(size, 'byte')}; copy or download it again"
        )
    return source


def load_first_weights(source: Source, parameters: Parameters) -> None:
    """Load the weights of `source` into `parameters`, in their precision. Raises `CheckpointError` if they do not fit.

    Files are mapped into memory, so a rank that has only some rows of the parameters reads little else.
    """
    if source.kind == "run":
        assert source.checkpoint is not None
        load_own_weights(source.checkpoint, parameters)
        return
    try:
        if source.kind == "transformers":
            weights = from_transformers(read_transformers(source.path), source.model())
        else:
            weights = from_nanogpt(read_nanogpt(source.path)[1], source.model())
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {error}") from None
    _check(source.path, weights, parameters.shapes)
    load_weights(weights.items(), parameters)


def _check(path: Path, weights: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    """Raise `CheckpointError` for the first of `weights` that does not fit. They have the names of a `GPT`."""
    if missing := wanted.keys() - weights.keys():
        raise CheckpointError(f"{path}: lacks the weight {min(missing)}; give a complete model")
    if unknown := weights.keys() - wanted.keys():
        raise CheckpointError(f"{path}: has the weight {min(unknown)}, which its config lacks; give another model")
    for name, shape in wanted.items():
        found = weights[name]
        if found.shape != shape:
            raise CheckpointError(
                f"{path}: {name} has the shape {tuple(found.shape)}, and the model {tuple(shape)}; its config "
                "does not describe its weights"
            )
        if not torch.is_floating_point(found):
            raise CheckpointError(f"{path}: {name} has the type {found.dtype}; give weights that are not quantised")


def tokenizer_of(source: Source) -> Tokenizer | None:
    """The tokenizer that lies beside the weights of `source`; None if there is none.

    Raises `DataError` if its file is damaged, `ConfigError` if a package is missing.
    """
    name = _name_of(source)
    return None if name is None else load_tokenizer(name, source.path if source.kind == "run" else None)


def refuse_other_ids(source: Source, name: str, tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` if an id means other text in `source` than in `tokenizer`, which is `data.tokenizer=name`.

    Special tokens are not compared. Weights without a tokenizer are accepted as they are.
    """
    try:
        theirs = tokenizer_of(source)
    except (ConfigError, DataError) as error:
        warn(f"{source.given}: its tokenizer is not compared with data.tokenizer={name} ({error})")
        return
    if theirs is None or theirs is tokenizer:
        return
    ids = range(min(tokenizer.n_vocab, theirs.n_vocab))
    pairs = zip(tokenizer.decode_tokens_bytes(ids), theirs.decode_tokens_bytes(ids), strict=True)
    for id, (now, was) in enumerate(pairs):
        if now and was and now != was:  # a special token may have no bytes
            raise ConfigError(
                f"data.tokenizer={name}: {source.given} was trained with another, in which id {id} is "
                f"{was.decode(errors='replace')!r}, not {now.decode(errors='replace')!r}; use "
                f"data.tokenizer={_to_use(source)}"
            )


def _name_of(source: Source) -> str | None:
    """The value of `data.tokenizer` for the tokenizer of `source`."""
    if source.kind == "run":
        return run_dir.load_config(source.path).data.tokenizer
    if source.kind == "nanogpt":
        return None
    vocabulary, whole = source.path / VOCABULARY, source.path / run_dir.TOKENIZER
    if vocabulary.is_file():
        with suppress(OSError, ValueError):  # then it is not GPT-2's
            if read_json(vocabulary.resolve()) == gpt2_vocabulary():
                return "gpt2"
    return str(whole) if whole.is_file() else None


def _to_use(source: Source) -> str:
    """The value of `data.tokenizer` for a source that has a tokenizer, valid with any corpus."""
    name = _name_of(source)
    return name if name in VOCAB_SIZES and name is not None else str(source.path / run_dir.TOKENIZER)
