"""Helpers for texts and their tokens."""

import codecs
import random
from collections.abc import Iterator
from pathlib import Path

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
