"""Helpers for texts and their tokens."""

import codecs
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gptexp.config.schema import DataConfig
from gptexp.data.stream import TokenStream
from gptexp.data.tokenizer import load_tokenizer


def ids_of(text: str) -> list[int]:
    """GPT-2's ids of `text`, without special tokens."""
    return load_tokenizer("gpt2").encode_ordinary(text)


def blocks(text: str, draw: random.Random) -> Iterator[bytes]:
    """The bytes of `text` in blocks of random sizes, which may end within a character."""
    content, at = text.encode(), 0
    while at < len(content):
        size = draw.randint(1, 12)
        yield content[at : at + size]
        at += size


def decoded(blocks: Iterator[bytes]) -> Iterator[str]:
    return codecs.iterdecode(blocks, "utf-8")


def stream_of(directory: Path, **kwargs: int) -> list[int]:
    """All tokens of a directory of shards."""
    stream = TokenStream(directory, **kwargs)
    return stream.read(0, len(stream)).tolist()


def text_config(*paths: Path, **kwargs: object) -> DataConfig:
    return DataConfig(name="text", path=[str(p) for p in paths], **kwargs)  # type: ignore[arg-type]


def write_megatron(
    path: Path, ids: Sequence[int], lengths: Sequence[int], code: int = 8, ends: Sequence[int] = ()
) -> None:
    """A token file of Megatron-LM, and beside it the index that says the `lengths` of its sequences.

    `code` is Megatron-LM's for the type of the ids: 8 for 16 bits, 4 for 32. `ends` are the numbers of sequences before
    each document, and of all; by default each sequence is a document.
    """
    dtype, ends = np.dtype({8: "<u2", 4: "<i4"}[code]), ends or range(len(lengths) + 1)
    np.array(ids).astype(dtype).tofile(path)
    starts = np.cumsum([0, *lengths[:-1]]) * dtype.itemsize
    path.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(ends)) + np.array(lengths, "<i4").tobytes()
        + np.array(starts, "<i8").tobytes() + np.array(ends, "<i8").tobytes()
    )  # fmt: skip
