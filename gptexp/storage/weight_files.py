"""Files with the weights of a model that another program has saved. Code in a file is not run."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from gptexp.process import pointers
from gptexp.process.errors import CheckpointError, first_line
from gptexp.process.words import listed
from gptexp.storage.checkpoint import read_tensors
from gptexp.storage.reader import read_json

# transformers saves one file, or several files and an index that says which file has which weight. The first of these
# names that exists counts: an index beside a single file is left over from an earlier model.
SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def find_weight_files(directory: Path) -> list[Path]:
    """The files with weights that transformers has saved in `directory`. Raises `CheckpointError` if one is missing."""
    for name, index in ((SAFETENSORS, SAFETENSORS_INDEX), (PICKLED, PICKLED_INDEX)):
        if (directory / name).is_file():
            return [directory / name]
        if (directory / index).is_file():
            return _files_of(directory / index)
    raise CheckpointError(f"{directory}: has no {SAFETENSORS} and no {PICKLED}; give a directory with weights")


def _files_of(index: Path) -> list[Path]:
    """The files that an index of weights names. Raises `CheckpointError`."""
    try:
        names = sorted(set(read_json(index.resolve())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("it names a file in another directory")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        why = pointers.why_unreadable(index) or f"not an index of weights ({first_line(error)})"
        raise CheckpointError(f"{index}: {why}") from None
    files = [index.with_name(name) for name in names]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing, and {index.name} names it; copy or download it again")
    return files


def read_transformers(directory: Path) -> dict[str, Tensor]:
    """The weights that transformers has saved in `directory`. Raises `CheckpointError`."""
    weights: dict[str, Tensor] = {}
    for file in find_weight_files(directory):
        found = read_tensors(file) if file.suffix == ".safetensors" else _named_tensors(file, _unpickled(file, "cpu"))
        if twice := weights.keys() & found.keys():
            raise CheckpointError(f"{file}: has the weight {min(twice)}, which another file has too; copy them again")
        weights |= found
    return weights


class _GPTConfig:
    """In place of the class of the config in a checkpoint of build-nanogpt: gets its fields, not its code."""


def read_nanogpt(file: Path, device: str = "cpu") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The model's arguments and the weights in a checkpoint of nanoGPT or build-nanogpt, which are put on `device`.

    Raises `CheckpointError`.
    """
    content = _unpickled(file, device)
    found = content if isinstance(content, Mapping) else {}
    args = vars(config) if isinstance(config := found.get("config"), _GPTConfig) else found.get("model_args")
    if not isinstance(args, dict):
        raise CheckpointError(f"{file}: not a checkpoint of nanoGPT (it has neither 'model_args' nor a GPTConfig)")
    return args, _named_tensors(file, found.get("model"))


def _unpickled(file: Path, device: str) -> Any:
    """What `torch.save` has written, with its tensors on `device`."""
    foreign: list[str] = []
    try:
        mapped = zipfile.is_zipfile(file)  # False for files that torch before 1.6 saved
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(file) if mapped else []
        configs: list[Any] = [(_GPTConfig, name) for name in foreign if name.endswith(".GPTConfig")]
        with torch.serialization.safe_globals(configs):
            return torch.load(file, map_location=device, weights_only=True, mmap=mapped)
    except OSError as error:
        why = error.strerror or first_line(error)
    except UnpicklingError:
        why = "it is no file of torch.save, or holds more than tensors and plain values, which would run code"
        if foreign:
            held = f"holds {listed(foreign[:3])}, which would run code; save it with tensors and plain values only"
            raise CheckpointError(f"{file}: {held}") from None
    except Exception:  # torch's reader raises many types, some of them of the modules that it uses
        why = "it is damaged, or no file of torch.save"
    known = pointers.why_unreadable(file) or f"cannot be read ({why}); copy or download it again"
    raise CheckpointError(f"{file}: {known}")


def _named_tensors(file: Path, content: Any) -> dict[str, Tensor]:
    """`content` as a dictionary, if it maps names to tensors. Raises `CheckpointError` if not."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file}: holds no weights by name; give another model")
    for name, value in content.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise CheckpointError(f"{file}: {name!s:.80} is no tensor by name; give another model")
    return dict(content)
