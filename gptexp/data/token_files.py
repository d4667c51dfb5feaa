"""Token files of other projects, read in place: `data=tokens`.

| data.format | files | ids |
|---|---|---|
| raw16 | nanoGPT's train.bin and val.bin, with meta.pkl for characters; OLMo's .npy without a header | 16 bits |
| raw32 | OLMo's .npy without a header | 32 bits |
| llmc | llm.c and modded-nanogpt: .bin with a header of 1,024 bytes | 16 or 32 bits, by the version |
| npy | build-nanogpt: numpy's .npy | as its header says |
| megatron | Megatron-LM: .bin with an index in .idx | as the index says |

The format of a file follows from its first bytes, then from the files beside it, then from its name. A wrong guess
would train on noise without an error, so the ids are checked when they are read for the first time. Nothing is written
beside the files: their manifest is in the cache.
"""

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError, _Unpickler
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from gptexp.config.paths import matching_files
from gptexp.data.documents import refuse_pointer
from gptexp.data.shards import data_errors
from gptexp.data.stream import BLOCK_BYTES, Shard
from gptexp.process.errors import DataError, first_line
from gptexp.process.words import counted, shown

META = "meta.pkl"
_SUFFIXES = (".bin", ".npy")
_NPY = b"\x93NUMPY"
_LLMC_HEADER = struct.Struct("<3i1012x")  # magic, version, number of ids
_LLMC = {(20240520, 1): 2, (20240801, 7): 4}  # (magic, version) -> bytes per id
_LLMC_EVALUATION = 20240522  # HellaSwag and MMLU: no stream of tokens
_INDEX = struct.Struct("<9sQBQQ")  # magic, version, code of the type, number of sequences, number of documents
_INDEX_MAGIC = b"MMIDIDX\0\0"
_INDEX_ID_BYTES = {8: 2, 4: 4}  # code of the type -> bytes per id
# In a file's name.
_TRAINING = re.compile(r"(^|[_-])train(ing)?([_.-]|$)", re.IGNORECASE)
_VALIDATION = re.compile(r"(^|[_-])(val|valid|validation|dev)([_.-]|$)", re.IGNORECASE)
_TEST = re.compile(r"(^|[_-])test([_.-]|$)", re.IGNORECASE)
JUDGED = 10_000  # with fewer ids, only their range is checked
LONG = 10_000_000  # a stream of this many ids has an end of text somewhere
NOISE = 0.002  # a text's most frequent id has a larger share: " the", "," or a line feed has 0.02


@dataclass(frozen=True)
class TokenFile:
    """Where the ids of a file are."""

    path: Path
    format: str  # a value of data.format
    offset: int  # bytes before the first id
    tokens: int
    id_bytes: int  # 2 or 4, little endian


def find(patterns: Sequence[str], asked: str | None) -> tuple[list[TokenFile], list[TokenFile]]:
    """The training and the validation files of `patterns`, sorted by name. `asked` is `data.format`.

    Files are for validation if their name says so, as each project names them. Raises `DataError`.
    """
    paths = [path for pattern in patterns for path in _files(pattern)]
    files = [_open(path, asked) for path in dict.fromkeys(paths)]
    validation = [file for file in files if _VALIDATION.search(file.path.name)]
    training = [file for file in files if file not in validation]
    if not training:
        names = ", ".join(path.name for path in paths)
        raise DataError(f"{', '.join(patterns)}: no training file, only {names}; give its path too")
    first = files[0]
    for file in files:
        if (file.format, file.id_bytes) != (first.format, first.id_bytes):
            raise DataError(
                f"{file.path}: {file.format} with ids of {8 * file.id_bytes} bits, but {first.path} is {first.format} "
                f"with {8 * first.id_bytes}; give files of one kind"
            )
    return training, validation


def _files(pattern: str) -> list[Path]:
    folder = Path(pattern)
    if folder.is_dir():
        return _files_in(folder)
    if not (found := matching_files(pattern)):
        raise DataError(f"{pattern}: no such file; give a folder, a file, a glob or a list of them")
    return found


def _files_in(folder: Path) -> list[Path]:
    """The files for training and validation, not for tests. If a name says training, unmarked files are left out."""
    if (folder / "index.json").is_file():
        raise DataError(f"{folder}: has an index.json, so it is litdata's or MosaicML's; use data=text on its source")
    paths = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if any(_TRAINING.search(path.name) for path in paths):
        paths = [path for path in paths if _TRAINING.search(path.name) or _VALIDATION.search(path.name)]
    paths = [path for path in paths if not _TEST.search(path.name)]
    if not paths:
        raise DataError(f"{folder}: no file {' or '.join(_SUFFIXES)}; give the folder of token files, or a glob")
    return paths


def sidecars(files: Sequence[TokenFile]) -> list[Path]:
    """The files beside `files` that say how to read them."""
    beside = {path for file in files for path in (file.path.with_suffix(".idx"), file.path.parent / META)}
    return sorted(path for path in beside if path.is_file())


def _open(path: Path, asked: str | None) -> TokenFile:
    """Find the ids of a file. Raises `DataError` unless its size fits its header and its ids."""
    with data_errors(path), path.open("rb") as file:
        head = file.read(_LLMC_HEADER.size)
        size = path.stat().st_size
    refuse_pointer(path, head)
    kind = asked or _format_of(path, head)
    layout = {"llmc": _llmc, "npy": _npy, "megatron": _megatron, "raw16": _raw, "raw32": _raw}[kind]
    found = TokenFile(path, kind, *layout(path, head, size, asked))
    expected = found.offset + found.id_bytes * found.tokens
    if size != expected:
        raise DataError(
            f"{path}: {counted(size, 'byte')}, but for {found.tokens:,} ids of {8 * found.id_bytes} bits, as it says, "
            f"it must have {expected:,}; copy it again"
        )
    if not found.tokens:
        raise DataError(f"{path}: contains no ids; leave it out")
    return found


def _format_of(path: Path, head: bytes) -> str:
    """The format of a file. Raises `DataError` if it is unknown."""
    magic = int.from_bytes(head[:4], "little")
    if magic == _LLMC_EVALUATION:
        raise DataError(f"{path}: llm.c's file of an evaluation, not a stream of tokens; leave it out")
    if magic in {known for known, _ in _LLMC}:
        return "llmc"
    if head.startswith(_NPY):
        return "npy"
    if head.startswith(_INDEX_MAGIC):
        raise DataError(f"{path}: Megatron-LM's index; give the file of ids, {path.with_suffix('.bin').name}")
    if head.startswith(b"gptexp\r\n"):
        raise DataError(f"{path}: part of gptexp's own cache; give the text that it was made from, with data=text")
    if head.startswith((b"PAR1", b"{", b"\x1f\x8b", b"PK\x03\x04")):
        raise DataError(f"{path}: not a file of ids ({head[:8]!r}); data=text reads text")
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return "megatron"
    if path.suffix in _SUFFIXES:
        return "raw16"
    raise DataError(f"{path}: of an unknown format; give a file .bin or .npy, or set data.format")


Layout = tuple[int, int, int]  # bytes before the first id, number of ids, bytes per id


def _llmc(path: Path, head: bytes, _size: int, asked: str | None) -> Layout:
    if len(head) < _LLMC_HEADER.size:
        raise DataError(f"{path}: {counted(len(head), 'byte')}, fewer than llm.c's header; copy it again")
    magic, version, tokens = _LLMC_HEADER.unpack(head)
    if (magic, version) not in _LLMC or tokens < 0:
        raise DataError(
            f"{path}: magic {magic}, version {version}, {tokens:,} ids: not llm.c's header of a stream of tokens; "
            f"{'leave out data.format, or ' if asked else ''}give another file"
        )
    return _LLMC_HEADER.size, tokens, _LLMC[magic, version]


def _npy(path: Path, _head: bytes, _size: int, _asked: str | None) -> Layout:
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            offset = file.tell()
    except Exception as error:  # numpy parses the header as Python, so a damaged one raises errors of many types
        raise DataError(f"{path}: not numpy's format ({first_line(error)}); copy it again") from None
    if len(shape) != 1 or dtype.str not in ("<u2", "<u4", "<i4"):
        raise DataError(f"{path}: shape {shape}, type {dtype.str}: must have one dimension and type <u2, <u4 or <i4")
    return offset, int(shape[0]), dtype.itemsize


def _megatron(path: Path, _head: bytes, size: int, _asked: str | None) -> Layout:
    index = path.with_suffix(".idx")
    with data_errors(index):
        content = index.read_bytes()
    broken = f"{index}: not Megatron-LM's index of {path.name}"
    if len(content) < _INDEX.size:
        raise DataError(f"{broken} ({counted(len(content), 'byte')}); copy it again")
    magic, version, code, sequences, documents = _INDEX.unpack_from(content)
    if magic != _INDEX_MAGIC or version != 1:
        raise DataError(f"{broken} (magic {magic!r}, version {version}); copy it again")
    if code not in _INDEX_ID_BYTES:
        raise DataError(f"{index}: type {code} of the ids is neither 8 (16 bits) nor 4 (32 bits)")
    if len(content) == _INDEX.size + 13 * sequences + 8 * documents:
        raise DataError(f"{index}: of a multimodal data set, in which each sequence has a mode; give one of text alone")
    if len(content) != _INDEX.size + 12 * sequences + 8 * documents:
        raise DataError(f"{broken} ({counted(len(content), 'byte')} for {sequences:,} sequences); copy it again")
    id_bytes = _INDEX_ID_BYTES[code]
    lengths = np.frombuffer(content, "<i4", sequences, _INDEX.size).astype(np.int64)
    starts = np.frombuffer(content, "<i8", sequences, _INDEX.size + 4 * sequences)
    if (lengths < 0).any() or not np.array_equal(starts, id_bytes * (np.cumsum(lengths) - lengths)):
        raise DataError(f"{index}: the sequences do not follow one another in {path.name}; write it again in order")
    tokens = int(lengths.sum())
    if (size - id_bytes * tokens) % id_bytes == 0 and (missing := size // id_bytes - tokens) > 0:
        ends = np.frombuffer(content, "<i8", documents, _INDEX.size + 12 * sequences)
        tokens += _count_left_out_ends(path, np.dtype(f"<u{id_bytes}"), lengths, ends, missing)
    return 0, tokens, id_bytes


def _count_left_out_ends(
    path: Path, dtype: np.dtype[Any], lengths: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], missing: int
) -> int:
    """`missing`, if the index leaves out an id that each document of `path` ends with; else 0.

    So Megatron-LM's preprocess_data.py --append-eod wrote files until August 2023. `ends` are the numbers of sequences
    before each document, and all of them.
    """
    ends = np.unique(ends[ends > 0])
    if len(ends) != missing or ends[-1] > len(lengths):
        return 0
    ids = np.memmap(path, dtype, "r")[np.cumsum(lengths)[ends - 1] + np.arange(missing)]
    return missing if (ids == ids[0]).all() else 0


def _raw(path: Path, head: bytes, size: int, asked: str | None) -> Layout:
    begins = _LLMC_HEADER.unpack(head)[:2] if len(head) == _LLMC_HEADER.size else None
    other = "npy" if head.startswith(_NPY) else "llmc" if begins in _LLMC else None
    if other is not None:
        raise DataError(f"{path}: begins with the header of the format {other}; leave out data.format={asked}")
    id_bytes = 4 if asked == "raw32" else 2
    if size % id_bytes:
        raise DataError(f"{path}: {counted(size, 'byte')}, no whole number of {8 * id_bytes}-bit ids; copy it again")
    return 0, size // id_bytes, id_bytes


@dataclass
class _Seen:
    """What is known of the ids of a file after it was read."""

    max_id: int = 0
    ends: int = 0  # how many ids are the end of a text
    zeros: np.ndarray = field(default_factory=lambda: np.zeros(4, np.int64))  # ids that are 0, by their position mod 4
    tokens: int = 0
    commonest: float = 1.0  # the share of the most frequent id in the first block

    def true_id_bytes(self, id_bytes: int) -> int:
        """The bytes of an id that was written: more than `id_bytes`, as which it was read, if upper halves are 0."""
        for factor in (4, 2) if id_bytes == 2 else (2,):
            least = min(self.zeros[[position for position in range(4) if position % factor]])
            # A quarter of the ids is at each position. Padding with 0 is as frequent at the lowest one.
            if self.tokens >= 64 and least > self.tokens / 8 and self.zeros[0] < 0.75 * least:
                return factor * id_bytes
        return id_bytes


@dataclass(frozen=True)
class Vocabulary:
    """What is known of the ids of a tokenizer."""

    tokenizer: str  # data.tokenizer
    n_vocab: int
    end: int | None  # the id of the end of a text


def read(file: TokenFile, vocabulary: Vocabulary, trusted: bool) -> tuple[Shard, int]:
    """Read a file. Returns its entry in the manifest, and its largest id.

    Raises `DataError` for ids that are improbable for this tokenizer. If the format was given (`trusted`), raises it
    only for ids outside of the vocabulary, or of another width.
    """
    end = vocabulary.end
    digest, seen = hashlib.sha256(), _Seen()
    dtype = np.dtype(f"<u{file.id_bytes}")
    with data_errors(file.path), file.path.open("rb") as content:
        digest.update(content.read(file.offset))
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
            ids = np.frombuffer(block, dtype)
            seen.max_id = max(seen.max_id, int(ids.max()))
            if not seen.tokens and seen.max_id < vocabulary.n_vocab:
                seen.commonest = float(np.bincount(ids).max()) / len(ids)
            seen.ends += 0 if end is None else int(np.count_nonzero(ids == end))
            seen.zeros += [np.count_nonzero(ids[position::4] == 0) for position in range(4)]
            seen.tokens += len(ids)
    _refuse_improbable(file, seen, vocabulary, trusted)
    size = file.offset + file.id_bytes * file.tokens
    return Shard(file.path, file.tokens, digest.hexdigest(), file.offset, size, is_own=False), seen.max_id


def _refuse_improbable(file: TokenFile, seen: _Seen, vocabulary: Vocabulary, trusted: bool) -> None:
    n_vocab, end = vocabulary.n_vocab, vocabulary.end
    fix = "set data.tokenizer to that of these files, or data.format to their format"
    of_vocabulary = f"the {n_vocab:,} ids of data.tokenizer={vocabulary.tokenizer}"
    is_raw = file.format in ("raw16", "raw32")  # the others have a header, which is proof of the format
    if is_raw and (true_bytes := seen.true_id_bytes(file.id_bytes)) != file.id_bytes:
        rule = f"ids of {8 * true_bytes} bits, read as {8 * file.id_bytes}: most of their upper halves are 0"
        convert = f"numpy.fromfile({file.path.name!r}, '<i8').astype('<u4').tofile('ids32.bin')"
        fix = "use data.format=raw32" if true_bytes == 4 else f"convert them, {convert}, and use data.format=raw32"
        raise DataError(f"{file.path}: {rule}; {fix}")
    if file.id_bytes == 2 and n_vocab > 2**16:
        raise DataError(f"{file.path}: ids of 16 bits, which cannot hold {of_vocabulary}; {fix}")
    if seen.max_id >= n_vocab:
        raise DataError(f"{file.path}: contains id {seen.max_id:,}, outside {of_vocabulary}; {fix}")
    if trusted or seen.tokens < JUDGED:
        return
    if seen.max_id < n_vocab // 2:
        raise DataError(f"{file.path}: its largest id is {seen.max_id:,}, too small for {of_vocabulary}; {fix}")
    if is_raw and seen.commonest < NOISE:
        raise DataError(
            f"{file.path}: its most frequent id has a share of {seen.commonest:.2%}, as in noise, not in text; {fix}. "
            f"If the ids are right, give data.format={file.format}"
        )
    if end is not None and (seen.ends > seen.tokens // 4 or (seen.ends == 0 and seen.tokens >= LONG)):
        raise DataError(
            f"{file.path}: {counted(seen.ends, 'id')} of {seen.tokens:,} are the end of a text ({end:,}); {fix}"
        )


def characters_in(folder: Path) -> str:
    """The characters in nanoGPT's meta.pkl, in the order of their ids. Raises `DataError`. Runs no code of the file."""
    path = folder / META
    try:
        content = _PlainUnpickler(BytesIO(path.read_bytes())).load()
        numbers = content["itos"]
        characters = [numbers[i] for i in range(len(numbers))]
        if content["vocab_size"] != len(characters) or not all(isinstance(c, str) and len(c) == 1 for c in characters):
            raise ValueError("itos must map each of vocab_size ids to a character")
    except Exception as error:  # a damaged pickle raises errors of any type
        raise DataError(f"{path}: not nanoGPT's table of characters ({first_line(error)}); prepare it again") from None
    return "".join(characters)


class _PlainUnpickler(_Unpickler):
    """Loads numbers, text, lists and dictionaries, and refuses everything that could run code.

    It is Python's own: the one in C makes room for as many objects as a number in the file says.
    """

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnpicklingError(f"it refers to {module}.{name}, which is not plain data")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise UnpicklingError(f"it refers to {shown(str(pid))}, which is not plain data")
