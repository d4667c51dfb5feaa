"""The tensors of a checkpoint, in safetensors files: one file of each kind, or one of each kind for each rank.

If FSDP2 has split the parameters, each rank has ceil(rows / ranks) rows of each tensor; the last ones may have fewer.
So the number of files says which file has a row, and a reader opens only the files that have its rows. Tensors without
dimensions are in all files. If ZeRO has split the optimizer's state, each tensor is whole, in one of the files.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptexp.distributed.group import rank_index
from gptexp.process.errors import CheckpointError, first_line

MODEL, OPTIMIZER, AVERAGE = "model", "optimizer", "ema"  # the kinds of files
DTYPES = {torch.float32: "F32", torch.float64: "F64"}  # as safetensors calls them
ALIGNMENT = 8  # bytes
CHUNK = 1 << 24  # bytes that are hashed and written at a time


@dataclass(frozen=True)
class Part:
    """The rows of a tensor that a rank has."""

    tensor: Tensor
    first: int = 0  # where its first row is in the whole tensor
    rows: int | None = None  # number of rows of the whole tensor; None: it is not split

    @property
    def whole_shape(self) -> list[int]:
        shape = list(self.tensor.shape)
        return shape if self.rows is None else [self.rows, *shape[1:]]


def file_name(kind: str, number: int, count: int) -> str:
    """The name of file `number`, counted from 0, of the `count` files of a kind."""
    return f"{kind}.safetensors" if count == 1 else f"{kind}-{number + 1:05d}-of-{count:05d}.safetensors"


def write(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write `tensors`, which are on the host, and wait for the disk. Returns the size and the SHA-256 of the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _chunks(len(text).to_bytes(8, "little") + text, tensors):
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def _chunks(header: bytes, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors.values():
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(data), CHUNK):
            yield data[begin : begin + CHUNK]


def read(folder: Path, kind: str, count: int, is_split: bool, wanted: Mapping[str, Part]) -> None:
    """Fill the tensors of `wanted`, by name, from the `count` files of a kind; if `is_split`, each has some rows.

    Raises `CheckpointError` if a file cannot be read, or a name or a shape differs.
    """
    with ExitStack() as stack:
        opened: dict[int, _File] = {}

        def file(number: int) -> _File:
            if number not in opened:
                opened[number] = _File(folder / file_name(kind, number, count), stack)
            return opened[number]

        # A rank may want only some tensors of the optimizer's state.
        if count == 1 and kind != OPTIMIZER and (unknown := file(0).names - wanted.keys()):
            raise file(0).misfit(f"it has {min(unknown)}")
        for name, part in wanted.items():
            if is_split and part.tensor.dim():
                _read_rows(file, count, name, part)
            elif is_split:  # all files have it; the ranks read different files
                file(rank_index() % count).copy(name, part.whole_shape, part.first, part.tensor)
            else:
                number = next((n for n in range(count) if name in file(n).names), 0)
                file(number).copy(name, part.whole_shape, part.first, part.tensor)


def _read_rows(file: "Callable[[int], _File]", count: int, name: str, part: Part) -> None:
    """Fill `part` from the files that have its rows."""
    whole = part.whole_shape
    each = -(-whole[0] // count)  # rows in a file
    first, end = part.first, part.first + len(part.tensor)
    for number in range(first // each, -(-end // each) if end > first else 0):
        begins, ends = number * each, min(number * each + each, whole[0])
        begin, stop = max(first, begins), min(end, ends)
        shape = [ends - begins, *whole[1:]]
        file(number).copy(name, shape, begin - begins, part.tensor[begin - first : stop - first])


def size(path: Path) -> int:
    """The number of elements of all tensors in a file. Raises `CheckpointError` if it cannot be read."""
    with ExitStack() as stack:
        return _File(path, stack).size


def shapes(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, without memory. Raises `CheckpointError` if it cannot be read."""
    with ExitStack() as stack:
        return _File(path, stack).shapes


class _File:
    """An open file of safetensors."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        try:
            self._tensors = stack.enter_context(opened(path))
        except (OSError, SafetensorError) as error:
            raise self.misfit(first_line(error)) from None
        self.names = set(self._tensors.keys())

    @property
    def size(self) -> int:
        return sum(math.prod(self._tensors.get_slice(name).get_shape()) for name in self.names)

    @property
    def shapes(self) -> dict[str, Tensor]:
        dtypes = {name: dtype for dtype, name in DTYPES.items()}
        slices = {name: self._tensors.get_slice(name) for name in self.names}
        return {
            name: torch.empty(one.get_shape(), dtype=dtypes[one.get_dtype()], device="meta")
            for name, one in slices.items()
        }

    def misfit(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: does not fit the model ({why})")

    def copy(self, name: str, shape: list[int], first: int, target: Tensor) -> None:
        """Fill `target` with rows of the tensor `name`, from row `first`. The file's tensor must have shape `shape`."""
        try:
            if name not in self.names:
                raise self.misfit(f"{name} is missing")
            stored = self._tensors.get_slice(name)
            if stored.get_shape() != shape:
                raise self.misfit(f"{name} has the shape {tuple(stored.get_shape())}, not {tuple(shape)}")
            with torch.no_grad():
                target.copy_(stored[first : first + len(target)] if shape else self._tensors.get_tensor(name))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise self.misfit(first_line(error)) from None


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. safetensors refuses names that are not UTF-8; such a file is opened by descriptor."""
    with path.open("rb") as file:
        name = str(path) if str(path).isprintable() else f"/dev/fd/{file.fileno()}"
        with safe_open(name, "pt") as tensors:
            yield tensors
