"""Comparison of the cache with the text: `gptexp prepare --verify`."""

import sys
import tempfile
from pathlib import Path

import numpy as np

from gptexp.config.paths import why_not_creatable
from gptexp.config.schema import DataConfig
from gptexp.data.cache import cache_dir
from gptexp.data.corpora import Corpus
from gptexp.data.prepare import (
    find_corpus,
    prepare,
    prepare_texts,
    sources,
    texts,
    tokens_dir,
    tokens_of,
    validation_corpus,
)
from gptexp.data.shards import Tokens, data_errors
from gptexp.data.stream import TokenStream, verify
from gptexp.process.errors import DataError
from gptexp.process.words import counted


def compare(data: DataConfig) -> None:
    """Tokenise the corpus and the validation texts again, and compare them with the cache, which `prepare` has filled.

    Raises `DataError` if a token differs: a file has changed and kept its size and times, or the cache is damaged.
    """
    if data.name == "tokens":
        for directory in (*prepare(data), *prepare_texts(data).values()):
            if directory is not None:
                verify(directory, again=True)
                tokens = counted(len(TokenStream(directory)), "token")
                print(f"{directory}: the files of its {tokens} have not changed since they were read", file=sys.stderr)
        return
    for one in sources(data).values() if data.mix else [data]:
        _compare(find_corpus(one), one)
    for one in (data, *texts(data).values()):
        if one.val_path:
            _compare(*validation_corpus(one, prepare(data)[0]))


def _compare(corpus: Corpus, data: DataConfig) -> None:
    target = tokens_dir(corpus, data)
    stream, done = TokenStream(target), 0
    is_read_only = why_not_creatable(cache_dir(data)) is not None
    folders = Path(tempfile.gettempdir()) if is_read_only else cache_dir(data)
    with data_errors(folders), tempfile.TemporaryDirectory(dir=folders, prefix=".gptexp-compare-") as folder:
        for ids, _ in tokens_of(corpus, data, target, Path(folder)):
            cached = stream.read(done, min(len(ids), len(stream) - done))
            same = len(cached) == len(ids) and bool((cached == ids).all())
            if not same:
                raise DataError(_differs(target, done + _equal_at_the_start(cached, ids)))
            done += len(ids)
    if done < len(stream):
        raise DataError(_differs(target, done))
    print(f"{target}: its {counted(done, 'token')} are those of the text", file=sys.stderr)


def _equal_at_the_start(a: Tokens, b: Tokens) -> int:
    """The number of ids before the first that differs."""
    both = min(len(a), len(b))
    different = np.flatnonzero(a[:both] != b[:both])
    return int(different[0]) if len(different) else both


def _differs(target: Path, token: int) -> str:
    return f"{target}: differs from the text from token {token:,} on; delete it to tokenise the text again"
