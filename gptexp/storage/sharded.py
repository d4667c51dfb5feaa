"""The tensors of a checkpoint in one file for each rank, by torch.distributed.checkpoint (DCP).

    checkpoints/step-00000050/parts.json       the shape of each tensor, and the number of ranks
                              __0_0.distcp     the rows of rank 0 of each tensor; in torch's format
                              __0_0.json       where in that file they are, in place of DCP's pickle
                              __1_0.distcp     …
                              state.json, manifest.json as in any checkpoint

Which rows of a tensor a rank has follows from the number of ranks. So each rank writes its files alone, and nothing has
an entry for each tensor of each rank. Any number of ranks can read a checkpoint: each reads the files with its rows.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gptexp.distributed.group import rank_index
from gptexp.process.errors import CheckpointError, first_line
from gptexp.process.words import shown
from gptexp.storage.reader import read_json
from gptexp.storage.run_dir import fsync

if TYPE_CHECKING:  # importing it takes a second, and most runs need none of it
    from torch.distributed.checkpoint.metadata import Metadata

PARTS = "parts.json"
ALONE = "torch.distributed is disabled"  # DCP's warning that no other rank takes part
MODEL, OPTIMIZER, AVERAGE = "model.", "optimizer.", "average."  # before the names of the tensors


def is_sharded(path: Path) -> bool:
    """Whether checkpoint `path` has one file for each rank."""
    return (path / PARTS).exists()


def files_of(rank: int) -> tuple[str, str]:
    """The names of a rank's files: its rows of the tensors, and where in it they are."""
    return f"__{rank}_0.distcp", f"__{rank}_0.json"


def files(path: Path) -> set[str]:
    """The names of the files of all ranks that checkpoint `path` should have. Raises `CheckpointError`."""
    return {name for rank in range(_saved(path)[0]) for name in files_of(rank)}


def shapes(path: Path) -> dict[str, torch.Size]:
    """The shapes of the whole tensors in checkpoint `path`, by name. Raises `CheckpointError`."""
    return {name: of.shape for name, of in _saved(path)[1].items()}


def read(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read `tensors`, of which DTensors are parts, in place. Raises `CheckpointError` if a name or a shape differs."""
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load

    ranks, saved = _saved(path)
    for name, tensor in tensors.items():
        if name not in saved or saved[name].shape != tensor.shape:
            has = f"has the shape {tuple(saved[name].shape)}" if name in saved else "is missing"
            raise CheckpointError(f"{path / PARTS}: does not fit the model ({name} {has})")
    metadata = _metadata(path, ranks, saved, tensors)

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> "Metadata":
            return metadata

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ALONE)
            load(dict(tensors), storage_reader=Reader(path), no_dist=True)
    except (Exception, CheckpointException) as error:  # which is not an `Exception`
        raise CheckpointError(f"{path}: cannot be read ({cause_of(error)})") from None


def write(
    folder: Path, tensors: Mapping[str, torch.Tensor], rank: int, ranks: int, group: dist.ProcessGroup | None = None
) -> "Future[Any]":
    """Begin to write this rank's rows of `tensors`, of which DTensors are split by rows, into `folder`.

    Returns once they are copied to the host's memory. The future is done when this rank has written. Tensors that are
    not split are in the files of all ranks. `group` is one of gloo, which DCP asks for beside NCCL; nothing is sent.
    """
    from torch.distributed.checkpoint import FileSystemWriter, async_save
    from torch.distributed.tensor import DTensor

    class Writer(FileSystemWriter):  # it waits until the disk has the files
        def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
            super().set_up_storage_writer(is_coordinator, **{**kwargs, "rank": rank})

        def finish(self, metadata: "Metadata", results: list[list[Any]]) -> None:
            [own] = results
            file = folder / files_of(rank)[1]
            places = {result.index.fqn: [result.storage_data.offset, result.storage_data.length] for result in own}
            file.write_text(json.dumps(places) + "\n")
            fsync(file)
            if rank == 0:
                (folder / PARTS).write_text(json.dumps({"ranks": ranks, "tensors": described}) + "\n")

    described = {
        name: {"shape": list(tensor.shape), "split": isinstance(tensor, DTensor)} for name, tensor in tensors.items()
    }
    warnings.filterwarnings("ignore", ALONE)  # for good: a thread warns
    begun = async_save(
        dict(tensors), storage_writer=Writer(folder), process_group=group, no_dist=True, use_collectives=False
    )
    assert isinstance(begun, Future)
    return begun


def cause_of(error: BaseException) -> str:
    """The first line of an error, or of a rank's, if DCP has collected them."""
    failures = getattr(error, "failures", None)  # of its CheckpointException: rank -> (error, traceback)
    return first_line(next(iter(failures.values()))[0] if failures else error)


@dataclass(frozen=True)
class _Saved:
    """What `PARTS` has of a tensor."""

    shape: torch.Size
    is_split: bool  # each rank has rows of it; else all have it whole


def _saved(path: Path) -> tuple[int, dict[str, _Saved]]:
    """The content of `PARTS`: the number of ranks, and the tensors by name. Raises `CheckpointError` if damaged."""
    try:
        content = read_json(path / PARTS)
        ranks, tensors = content["ranks"], {}
        for name, of in content["tensors"].items():
            tensors[name] = _Saved(torch.Size(map(_whole_number, of["shape"])), bool(of["split"]))
            if tensors[name].is_split and not tensors[name].shape:
                raise ValueError(f"{name} has no rows")
        if _whole_number(ranks) == 0:
            raise ValueError("it has no ranks")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path / PARTS}: cannot be read ({first_line(error)})") from None
    return ranks, tensors


def _places(path: Path, rank: int) -> dict[str, list[int]]:
    """For each tensor the first byte, and the number of bytes, in a rank's file. Raises `CheckpointError`."""
    file = path / files_of(rank)[1]
    try:
        return {name: [_whole_number(at), _whole_number(size)] for name, (at, size) in read_json(file).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({first_line(error)})") from None


def _whole_number(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{shown(value)} is no size")
    return value


def _chunks(saved: _Saved, ranks: int, tensor: Any) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield the parts of `tensor` in a checkpoint of so many `ranks`: the rank that has it, its offsets and sizes.

    As FSDP2 splits a tensor: each rank has the same number of its rows, rounded up, but for the last ranks.
    """
    shape = list(saved.shape)
    if not saved.is_split:
        yield rank_index() % ranks, [0] * len(shape), shape  # all have it; so not all read one file
        return
    wanted = range(shape[0])
    if hasattr(tensor, "__create_chunk_list__"):  # a DTensor
        [own] = tensor.__create_chunk_list__()
        wanted = wanted[own.offsets[0] :][: own.sizes[0]]
    each = -(-shape[0] // ranks)
    if wanted:
        for rank in range(wanted[0] // each, wanted[-1] // each + 1):
            first = rank * each
            yield rank, [first, *[0] * (len(shape) - 1)], [min(each, shape[0] - first), *shape[1:]]


def _metadata(path: Path, ranks: int, saved: Mapping[str, _Saved], tensors: Mapping[str, torch.Tensor]) -> "Metadata":
    """What DCP would have saved of those parts of `tensors` that this rank reads."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    places_of = lru_cache(None)(partial(_places, path))
    described: dict[str, Any] = {}
    places = {}
    for name, tensor in tensors.items():
        chunks: list[ChunkStorageMetadata] = []
        for rank, offsets, sizes in _chunks(saved[name], ranks, tensor):
            if name not in (found := places_of(rank)):
                raise CheckpointError(f"{path / files_of(rank)[1]}: cannot be read (it lacks {name})")
            index = MetadataIndex(name, torch.Size(offsets), len(chunks))
            places[index] = _StorageInfo(files_of(rank)[0], found[name][0], found[name][1])
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        described[name] = TensorStorageMetadata(TensorProperties(), saved[name].shape, chunks)
    return Metadata(described, storage_data=places, storage_meta=StorageMeta())
