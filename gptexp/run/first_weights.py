"""Puts the weights that `init_from` names into a new model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gptexp.config.schema import ModelConfig
from gptexp.config.transformers_json import CONFIG_JSON
from gptexp.distributed.sharding import Parameters
from gptexp.model.flops import count_parameters
from gptexp.model.huggingface import from_nanogpt, from_transformers
from gptexp.process.errors import CheckpointError
from gptexp.process.words import counted
from gptexp.storage import checkpoint, run_dir
from gptexp.storage.init_from import Source
from gptexp.storage.weight_files import find_weight_files, read_nanogpt, read_transformers
from gptexp.training.snapshot import load_own_weights, load_weights


def choose_weights(source: Source, model: ModelConfig) -> Source:
    """Return `source`, of a run with its newest checkpoint whose files are intact, which reads all of them.

    Raises `CheckpointError` if the files are too small for `model`, before one of that size is built.
    """
    parameters = count_parameters(model)
    if source.kind == "run":
        path, _ = checkpoint.newest(source.path / run_dir.CHECKPOINTS)
        checkpoint.refuse_other_size(path, parameters)
        return replace(source, checkpoint=path)
    files = find_weight_files(source.path) if source.kind == "transformers" else [source.path]
    size = sum(file.stat().st_size for file in files)
    if size < parameters:
        what = CONFIG_JSON if source.kind == "transformers" else "model_args"
        raise CheckpointError(
            f"{source.path}: {what} describes {counted(parameters, 'parameter')}, and its weights are "
            f"{counted(size, 'byte')}; copy or download it again"
        )
    return source


def load_first_weights(source: Source, parameters: Parameters) -> None:
    """Load the weights of `source`, in the precision of `parameters`. Raises `CheckpointError` if they do not fit.

    Files are mapped into memory: a rank that has rows of the parameters reads little else.
    """
    if source.kind == "run":
        assert source.checkpoint is not None
        load_own_weights(source.checkpoint, parameters)
        return
    try:
        if source.kind == "transformers":
            weights = from_transformers(read_transformers(source.path))
        else:
            weights = from_nanogpt(read_nanogpt(source.path)[1])
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {error}") from None
    _check(source.path, weights, parameters.shapes)
    load_weights(weights.items(), parameters)


def _check(path: Path, weights: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    """Raise `CheckpointError` that names the first of the weights, which have our names, that does not fit."""
    if missing := wanted.keys() - weights.keys():
        raise CheckpointError(f"{path}: lacks the weight {min(missing)}; give a complete GPT-2")
    if unknown := weights.keys() - wanted.keys():
        raise CheckpointError(f"{path}: has the weight {min(unknown)}, which gptexp's GPT-2 lacks; give another model")
    for name, shape in wanted.items():
        found = weights[name]
        if found.shape != shape:
            raise CheckpointError(
                f"{path}: {name} has the shape {tuple(found.shape)}, and the model {tuple(shape)}; its config "
                "does not describe its weights"
            )
        if not torch.is_floating_point(found):
            raise CheckpointError(f"{path}: {name} has the type {found.dtype}; give weights that are not quantised")
