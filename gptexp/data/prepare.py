"""Tokenise a corpus once into the cache, safely when many processes want it at the same time."""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from filelock import FileLock

from gptexp.config import DataConfig
from gptexp.data import corpora
from gptexp.data.shards import MANIFEST, VERSION, ShardWriter, TokenStream, naming, verify
from gptexp.data.tokenizer import END_OF_TEXT, load_tokenizer
from gptexp.errors import DataError

PIECES_AT_ONCE = 64  # of text, shared out among tiktoken's threads


def cache_dir(data: DataConfig) -> Path:
    """Where tokens lie: data.cache_dir, else $GPTEXP_CACHE, else the user's cache directory."""
    return Path(data.cache_dir or os.environ.get("GPTEXP_CACHE") or platformdirs.user_cache_dir("gptexp"))


def downloads_dir(data: DataConfig) -> Path:
    """Where corpora lie that are not this machine's own."""
    return cache_dir(data) / "downloads"


def prepare(data: DataConfig) -> tuple[Path, Path | None]:
    """Directories of the training tokens and of `data.val_path`'s (or None), tokenised now if they are not yet.

    A file lock lets one process on a node (on a shared file system: one of all) do the work while the others wait.
    """
    train = _tokenised(find_corpus(data), data)
    val = _tokenised(corpora.text(corpora.path_list(data.val_path)), data) if data.val_path else None
    return train, val


def find_corpus(data: DataConfig) -> corpora.Corpus:
    """The corpus that `data` names; downloads shakespeare if it must."""
    if data.name == "stdlib":
        return corpora.stdlib()
    if data.name == "shakespeare":
        downloads = downloads_dir(data)
        there = corpora.is_file(downloads / corpora.SHAKESPEARE_FILE)  # the cache may be read-only
        with nullcontext() if there else _lock(downloads.with_name("downloads.lock")):
            return corpora.shakespeare(downloads)
    return corpora.text(corpora.path_list(data.path))


def tokens_dir(corpus: corpora.Corpus, data: DataConfig) -> Path:
    """Where the tokens of `corpus` lie once they are prepared."""
    return cache_dir(data) / f"{corpus.name}-{data.tokenizer}-v{VERSION}-{corpus.key}"


def _tokenised(corpus: corpora.Corpus, data: DataConfig) -> Path:
    target = tokens_dir(corpus, data)
    if not corpora.is_file(target / MANIFEST):
        with _lock(target.with_name(f"{target.name}.lock")):
            if not corpora.is_file(target / MANIFEST):
                _tokenise(corpus, data.tokenizer, target)
    verify(target)
    return target


def data_hash(data: DataConfig) -> str:
    """Hash of the training and validation tokens: the same wherever the text lies. Prepares them if need be."""
    return tokens_hash(*prepare(data))


def tokens_hash(train: Path, val: Path | None) -> str:
    """Hash of prepared tokens."""
    streams = [TokenStream(directory).hash for directory in (train, val) if directory]
    return hashlib.sha256("".join(streams).encode()).hexdigest()[:16]


def _lock(path: Path) -> FileLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise DataError(f"data.cache_dir={path.parent}: cannot be written ({error.strerror}); choose another") from None
    return FileLock(path)


def _tokenise(corpus: corpora.Corpus, tokenizer: str, target: Path) -> None:
    started = time.perf_counter()
    encoding = load_tokenizer(tokenizer)
    unfinished = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # a process that was killed here left it
    about = {"corpus": corpus.name, "tokenizer": tokenizer, "documents": len(corpus.files)}
    with naming(unfinished), ShardWriter(unfinished, about) as writer, _progress(corpus) as advance:
        texts = _texts(corpus)
        while group := list(islice(texts, PIECES_AT_ONCE)):
            pieces = [piece for piece, _ in group]
            for (_, starts), ids in zip(group, encoding.encode_ordinary_batch(pieces), strict=True):
                between = [END_OF_TEXT] if starts and writer.tokens else []
                writer.append(np.array(between + ids, np.uint16))
            advance(sum(len(piece.encode()) for piece in pieces))
    shutil.rmtree(target, ignore_errors=True)  # without its manifest, or we would not be here
    unfinished.replace(target)
    seconds = time.perf_counter() - started
    print(
        f"tokenised {corpus.name}: {len(corpus.files):,} files, {writer.tokens:,} tokens in {seconds:.1f} s; {target}",
        file=sys.stderr,
    )


def _texts(corpus: corpora.Corpus) -> Iterator[tuple[str, bool]]:
    """Pieces of text, and whether a document begins with it; empty files are no documents."""
    for file in corpus.files:
        with naming(file):
            for number, piece in enumerate(corpora.pieces(file)):
                yield piece, number == 0


def _progress(corpus: corpora.Corpus) -> AbstractContextManager[Any]:
    """A progress bar in bytes on a terminal, nothing elsewhere; gives the function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def bar() -> Any:
        columns = (TextColumn("tokenising {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(corpus.name, total=corpus.bytes)
            yield lambda count: progress.advance(task, count)

    return bar()
