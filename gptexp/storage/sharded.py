"""The tensors of a checkpoint in one file for each rank, by torch.distributed.checkpoint (DCP).

    checkpoints/step-00000050/.metadata        which part of which tensor is where
                              __0_0.distcp     the parts of rank 0; tensors in torch's format
                              __1_0.distcp     …
                              state.json, manifest.json as in any checkpoint

Any number of ranks can read a checkpoint. Each reads the parts that it needs.
"""

import pickle
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

if TYPE_CHECKING:  # importing it takes a second, and most runs need none of it
    from torch.distributed.checkpoint.metadata import Metadata

from gptexp.process.errors import CheckpointError, first_line

METADATA = ".metadata"
MODEL, OPTIMIZER, AVERAGE = "model.", "optimizer.", "average."  # before the names of the tensors
PART = re.compile(r"__\d+_\d+\.distcp")
_OF_METADATA = {  # module -> the classes and functions that the metadata consists of
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Reads the metadata, and refuses a file that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _OF_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of it")
        return super().find_class(module, name)


def is_sharded(path: Path) -> bool:
    """Whether checkpoint `path` has one file for each rank."""
    return (path / METADATA).exists()


def _read_metadata(path: Path) -> "Metadata":
    """Read which tensors checkpoint `path` has. Raises `CheckpointError` if the file is damaged, or would run code."""
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with (path / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"{type(metadata).__name__} is not its type")
    except Exception as error:  # pickle raises whatever the damaged bytes cause
        raise CheckpointError(f"{path / METADATA}: cannot be read ({first_line(error)})") from None
    return metadata


def shapes(path: Path) -> dict[str, torch.Size]:
    """The shapes of the whole tensors in checkpoint `path`, by name."""
    found = _read_metadata(path).state_dict_metadata
    return {name: of.size for name, of in found.items() if hasattr(of, "size")}


def read(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read `tensors`, of which DTensors are parts, in place. Raises `CheckpointError` if a name or a shape differs."""
    from torch.distributed.checkpoint import FileSystemReader, load

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> "Metadata":  # torch's would run code in it
            return _read_metadata(path)

    found = shapes(path)
    for name, tensor in tensors.items():
        if found.get(name) != tensor.shape:
            has = f"has the shape {tuple(found[name])}" if name in found else "is missing"
            raise CheckpointError(f"{path / METADATA}: does not fit the model ({name} {has})")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process reads all parts
            load(dict(tensors), storage_reader=Reader(path), no_dist=True)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({first_line(error)})") from None


def write(folder: Path, tensors: Mapping[str, torch.Tensor], group: ProcessGroup) -> "Future[Any]":
    """Begin to write this rank's parts of `tensors` into `folder`. *Collective* in `group`, which nothing else uses.

    Returns once they are copied to the host's memory. The future is done when all ranks have written.
    """
    from torch.distributed.checkpoint import FileSystemWriter, async_save

    writer = FileSystemWriter(folder)  # it waits until the disk has the files
    begun = async_save(dict(tensors), storage_writer=writer, process_group=group)
    assert isinstance(begun, Future)
    return begun
