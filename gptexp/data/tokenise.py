"""Tokenisation of a corpus by several processes.

Each worker tokenises whole parts of the corpus. The ids of a part are one file, which appears when it is complete; so
after a kill only missing parts are tokenised again. The parts are joined in their order while later ones are tokenised.
So the result depends neither on the number of workers nor on interruptions. If only the first tokens of a corpus are
wanted, at most (number of workers - 1) parts are begun that are not needed.

Memory: a worker holds about a megabyte of text and its ids, or one row, or one row group of parquet.
"""

import hashlib
import os
import signal
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from functools import partial
from itertools import islice, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from gptexp.data.characters import CharTokenizer, characters_of
from gptexp.data.decoding import Seen
from gptexp.data.documents import Part, texts
from gptexp.data.shards import Tokens, data_errors, id_dtype
from gptexp.data.tokenizer import Tokenizer, load_tokenizer
from gptexp.process.errors import DataError, UnavailableError
from gptexp.process.signals import die_with_parent
from gptexp.process.words import shown
from gptexp.storage.run_dir import atomic

READ_IDS = 1 << 22  # ids of a part that are joined at once
_HEAD = struct.Struct(f"<{len(fields(Seen))}Q")  # head of a part's file: what was seen in it; the ids follow


@dataclass(frozen=True)
class Encoder:
    """How parts are tokenised."""

    tokenizer: str  # data.tokenizer
    directory: Path  # with tokenizer.json, if the tokenizer needs one
    column: str  # data.text_column
    max_tokens: int | None  # wanted from all parts together; None: all


def tokenise(
    parts: Sequence[Part], encoder: Encoder, folder: Path, workers: int, advance: Callable[[int, int], None]
) -> Generator[tuple[Tokens, int], None, list[Seen]]:
    """Yield the ids of the parts in their order, with the end of a text between documents, while later parts are
    tokenised. The first ids of a part come with the number of documents that begin in it, others with 0. The last part
    is the one that exceeds `encoder.max_tokens`; workers that have begun later parts are killed. Returns what was seen
    in each part.

    Each part has a file in `folder`; parts whose file exists are not tokenised again. `advance` is called with the
    number of each part whose ids have been yielded, and with its tokens, or 0 if its file existed at the start.
    Raises `DataError`.
    """
    tokenizer = load_tokenizer(encoder.tokenizer, encoder.directory)
    dtype = np.dtype(id_dtype(tokenizer.n_vocab))
    unneeded = tokenizer.eot_token is not None  # the end of a text before the first document
    files, yielded, seen = _files(folder, parts), 0, list[Seen]()
    there = {file for file in files if file.exists()}
    window = workers if encoder.max_tokens is not None else len(parts)
    with _mapping(workers, window) as run:
        for number, _ in enumerate(run(_tokenise_part, parts, repeat(encoder), files)):
            with files[number].open("rb") as file:
                seen.append(Seen(*_HEAD.unpack(file.read(_HEAD.size))))
                begun = seen[-1].documents
                while len(ids := np.fromfile(file, dtype, READ_IDS)):
                    yield ids[1:] if unneeded else ids, begun
                    unneeded, begun = False, 0
                tokens = (file.tell() - _HEAD.size) // dtype.itemsize
                advance(number, 0 if files[number] in there else tokens)
            yielded += tokens
            if encoder.max_tokens is not None and yielded > encoder.max_tokens:
                break
    return seen


def characters(parts: Sequence[Part], column: str, workers: int) -> str:
    """The distinct characters of all parts."""
    with _mapping(workers, len(parts)) as run:
        return characters_of(run(_characters_of_part, parts, repeat(column)))


@contextmanager
def _mapping(workers: int, window: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield a `map` over `workers` new processes, with inputs begun as by `_map`; for one worker `map` itself.

    Raises `UnavailableError` if a worker is lost.
    """
    if workers == 1:
        yield map
        return
    # Not forked, as this process may have threads and torch.
    executor = ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker, (os.getpid(),))
    try:
        yield partial(_map, executor, window)
        # Do not wait for work that has begun but is not needed. Python 3.14 has `kill_workers` for this.
        for process in list(executor._processes.values()):
            process.kill()
    except BrokenProcessPool:
        raise UnavailableError(
            "a process that tokenises has ended, perhaps for lack of memory; start again, it goes on where it "
            "stopped; data.workers=1 needs the least memory"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _map(
    executor: ProcessPoolExecutor, window: int, function: Callable[..., Any], *inputs: Iterable[Any]
) -> Iterator[Any]:
    """`executor.map`, but an input begins only after the input `window` places before it has been dealt with."""
    calls = zip(*inputs, strict=False)  # some inputs repeat without an end
    results = deque(executor.submit(function, *call) for call in islice(calls, window))
    while results:
        yield results.popleft().result()
        results.extend(executor.submit(function, *call) for call in islice(calls, 1))


def _begin_worker(parent: int) -> None:
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a terminal sends it to all processes; only the first one reports it


def _tokenise_part(part: Part, encoder: Encoder, target: Path) -> None:
    """Write the file `target` of a part, unless an earlier preparation, which was killed, has written it."""
    if target.exists():
        return
    tokenizer = load_tokenizer(encoder.tokenizer, encoder.directory)
    end = [] if tokenizer.eot_token is None else [tokenizer.eot_token]
    between = np.array(end, id_dtype(tokenizer.n_vocab)).tobytes()
    seen, tokens = Seen(), 0
    with data_errors(target), atomic(target, "wb") as file:
        file.write(bytes(_HEAD.size))
        for path, text, first in texts(part, tokenizer.cut_before, encoder.column, seen):
            ids = _ids(tokenizer, text, path)
            file.write(between if first else b"")
            file.write(ids.data)
            tokens += len(ids) + first * len(end)
            if encoder.max_tokens is not None and tokens > encoder.max_tokens:
                break
        file.seek(0)
        file.write(_HEAD.pack(*astuple(seen)))


def _ids(tokenizer: Tokenizer, text: Any, path: Path | str) -> Tokens:
    """The ids of a text, or of a document that a source of the user's own gives as ids. Raises `DataError`."""
    if not isinstance(text, str):
        ids = np.asarray(text)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= tokenizer.n_vocab:
            rule = f"a document must be a text, or a list of ids from 0 to {tokenizer.n_vocab - 1:,}"
            raise DataError(f"{path}: yields {shown(str(text)[:60])}: {rule}")
        return ids.astype(id_dtype(tokenizer.n_vocab))
    try:
        return tokenizer.encode_array(text)
    except (DataError, UnicodeEncodeError) as error:  # half of a surrogate pair, which only own documents can have
        raise DataError(f"{path}: {error}") from None


def _characters_of_part(part: Part, column: str) -> str:
    found = (text for _, text, _ in texts(part, CharTokenizer.cut_before, column, Seen()))
    return characters_of(text if isinstance(text, str) else "" for text in found)


def _files(folder: Path, parts: Sequence[Part]) -> list[Path]:
    """The files of the parts. If another version of gptexp divides or writes otherwise, its parts have other names."""
    digests = (hashlib.sha256(f"{_HEAD.format} {part!r}".encode()).hexdigest()[:8] for part in parts)
    return [folder / f"part-{number:06d}-{digest}.ids" for number, digest in enumerate(digests)]
