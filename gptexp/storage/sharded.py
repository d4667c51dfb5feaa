"""The tensors of a checkpoint in one file for each rank, by torch.distributed.checkpoint (DCP).

    checkpoints/step-00000050/parts.json       which part of which tensor is where, in place of DCP's pickle
                              __0_0.distcp     the parts of rank 0; tensors in torch's format
                              __1_0.distcp     …
                              state.json, manifest.json as in any checkpoint

Any number of ranks can read a checkpoint. Each reads the parts that it needs.
"""

import json
import math
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from gptexp.process.errors import CheckpointError, first_line
from gptexp.storage.reader import read_json

if TYPE_CHECKING:  # importing it takes a second, and most runs need none of it
    from torch.distributed.checkpoint.metadata import Metadata

PARTS = "parts.json"
PART = re.compile(r"__\d+_\d+\.distcp")
MODEL, OPTIMIZER, AVERAGE = "model.", "optimizer.", "average."  # before the names of the tensors


def is_sharded(path: Path) -> bool:
    """Whether checkpoint `path` has one file for each rank."""
    return (path / PARTS).exists()


def shapes(path: Path) -> dict[str, torch.Size]:
    """The shapes of the whole tensors in checkpoint `path`, by name. Raises `CheckpointError`."""
    return {name: torch.Size(of["shape"]) for name, of in _described(path).items()}


def read(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read `tensors`, of which DTensors are parts, in place. Raises `CheckpointError` if a name or a shape differs."""
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load

    described = _described(path)

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> "Metadata":
            return _metadata({name: described[name] for name in tensors})

    for name, tensor in tensors.items():
        if name not in described or torch.Size(described[name]["shape"]) != tensor.shape:
            has = f"has the shape {tuple(described[name]['shape'])}" if name in described else "is missing"
            raise CheckpointError(f"{path / PARTS}: does not fit the model ({name} {has})")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process reads all parts
            load(dict(tensors), storage_reader=Reader(path), no_dist=True)
    except (Exception, CheckpointException) as error:  # which is not an `Exception`
        raise CheckpointError(f"{path}: cannot be read ({cause_of(error)})") from None


def write(folder: Path, tensors: Mapping[str, torch.Tensor], group: ProcessGroup) -> "Future[Any]":
    """Begin to write this rank's parts of `tensors` into `folder`. *Collective* in `group`, which nothing else uses.

    Returns once they are copied to the host's memory. The future is done when all ranks have written.
    """
    from torch.distributed.checkpoint import FileSystemWriter, async_save

    class Writer(FileSystemWriter):  # it waits until the disk has the files
        def finish(self, metadata: "Metadata", results: list[list[Any]]) -> None:
            places: dict[str, dict[tuple[int, ...], Any]] = {}
            for result in (result for of_rank in results for result in of_rank):
                places.setdefault(result.index.fqn, {})[tuple(result.index.offset)] = result.storage_data
            described = {name: _description(of, places[name]) for name, of in metadata.state_dict_metadata.items()}
            (folder / PARTS).write_text(json.dumps(described) + "\n")

    begun = async_save(dict(tensors), storage_writer=Writer(folder), process_group=group)
    assert isinstance(begun, Future)
    return begun


def cause_of(error: BaseException) -> str:
    """The first line of an error, or of a rank's, if DCP has collected them."""
    failures = getattr(error, "failures", None)  # of its CheckpointException: rank -> (error, traceback)
    return first_line(next(iter(failures.values()))[0] if failures else error)


def _description(tensor: Any, places: Mapping[tuple[int, ...], Any]) -> dict[str, Any]:
    """A tensor's entry in the file. Each of its chunks is a block of the tensor, and bytes of a file."""
    chunks = []
    for chunk in tensor.chunks:
        place = places[tuple(chunk.offsets)]
        chunks.append(
            {
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
                "file": place.relative_path,
                "at_byte": place.offset,
                "bytes": place.length,
            }
        )
    return {
        "shape": list(tensor.size),
        "dtype": str(tensor.properties.dtype).removeprefix("torch."),
        "chunks": chunks,
    }


def _described(path: Path) -> dict[str, Any]:
    """The content of `PARTS`. Raises `CheckpointError` if it is damaged."""
    try:
        found: dict[str, Any] = read_json(path / PARTS)
        for of in found.values():
            for chunk in of["chunks"]:
                if not PART.fullmatch(chunk["file"]):
                    raise ValueError(f"{chunk['file']} is no file of a checkpoint")
            if sum(math.prod(chunk["sizes"]) for chunk in of["chunks"]) != math.prod(of["shape"]):
                raise ValueError(f"the parts of a tensor of shape {of['shape']} are not all there")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path / PARTS}: cannot be read ({first_line(error)})") from None
    return found


def _metadata(described: Mapping[str, Any]) -> "Metadata":
    """What DCP would have saved of these tensors."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    places = {}
    for name, of in described.items():
        chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in of["chunks"]]
        properties = TensorProperties(getattr(torch, of["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(of["shape"]), chunks)
        for number, chunk in enumerate(of["chunks"]):
            index = MetadataIndex(name, torch.Size(chunk["offsets"]), number)
            places[index] = _StorageInfo(chunk["file"], chunk["at_byte"], chunk["bytes"])
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())
