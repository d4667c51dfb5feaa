"""Reads the weights that `init_from` names into a new model."""

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from gptexp.model.flops import count_parameters
from gptexp.model.gpt import GPT
from gptexp.model.huggingface import from_nanogpt, from_transformers
from gptexp.process.errors import CheckpointError, first_line
from gptexp.storage import checkpoint, run_dir
from gptexp.storage.init_from import Source, nanogpt_checkpoint

TIED = "lm_head.weight"
# Of transformers, the first that exists counts: one file, or an index that says which file has which weight.
SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def load_first_weights(source: Source, gpt: GPT) -> None:
    """Load the weights of `source` into `gpt`, in its precision. Raises `CheckpointError` if they do not fit."""
    if source.kind == "run":
        path, _ = checkpoint.newest(source.path / run_dir.CHECKPOINTS)
        checkpoint.refuse_other_size(path, count_parameters(gpt.cfg))
        checkpoint.load_weights(path, gpt)
    elif source.kind == "transformers":
        weights = [read_weights(file) for file in weight_files(source.path)]
        _load(source.path, from_transformers({name: w for part in weights for name, w in part.items()}), gpt)
    else:
        content = nanogpt_checkpoint(source.path, torch.device("cpu"))
        _load(source.path, from_nanogpt(content["model"]), gpt)


def weight_files(directory: Path) -> list[Path]:
    """The files with weights that transformers has saved in `directory`. Raises `CheckpointError` if one is missing."""
    for name, index in ((SAFETENSORS, SAFETENSORS_INDEX), (PICKLED, PICKLED_INDEX)):
        files = [directory / name]
        if (directory / index).is_file():
            try:
                files = [directory / part for part in sorted(set(_weight_map(directory / index).values()))]
            except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
                raise CheckpointError(f"{directory / index}: not an index of weights ({first_line(error)})") from None
        elif not files[0].is_file():
            continue
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file}: is missing, and {index} names it; copy or download it again")
        return files
    raise CheckpointError(f"{directory}: has no {SAFETENSORS} and no {PICKLED}; give a directory with weights")


def _weight_map(index: Path) -> dict[str, str]:
    names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    if any(Path(name).name != name for name in names.values()):
        raise ValueError("it names a file in another directory")
    return names


def read_weights(file: Path) -> dict[str, Tensor]:
    """The weights in a file that transformers has saved; runs no code in it. Raises `CheckpointError`."""
    if file.suffix == ".safetensors":
        return checkpoint.read_tensors(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{file}: cannot be read ({first_line(error)}); copy or download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds no weights by name; give another model")
    return content


def _load(path: Path, weights: Mapping[str, Tensor], gpt: GPT) -> None:
    """Load weights under our names. Raises `CheckpointError` that names the first weight that does not fit."""
    wanted = {name: tensor for name, tensor in gpt.state_dict().items() if name != TIED}
    if missing := wanted.keys() - weights.keys():
        raise CheckpointError(f"{path}: lacks the weight {min(missing)}; give a complete GPT-2")
    if unknown := weights.keys() - wanted.keys():
        raise CheckpointError(f"{path}: has the weight {min(unknown)}, which gptexp's GPT-2 lacks; give another model")
    for name, tensor in wanted.items():
        if weights[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} has the shape {tuple(weights[name].shape)}, and the model {tuple(tensor.shape)}; its "
                "config does not describe its weights"
            )
    gpt.load_state_dict({**weights, TIED: weights["wte.weight"]})
