"""Helpers for texts and their tokens."""

from pathlib import Path

from gptexp.config.schema import DataConfig
from gptexp.data.shards import TokenStream
from gptexp.data.tokenizer import load_tokenizer


def ids_of(text: str) -> list[int]:
    """GPT-2's ids of `text`, without special tokens."""
    return load_tokenizer("gpt2").encode_ordinary(text)


def stream_of(directory: Path, **kwargs: int) -> list[int]:
    """All tokens of a directory of shards."""
    stream = TokenStream(directory, **kwargs)
    return stream.read(0, len(stream)).tolist()


def text_config(*paths: Path, **kwargs: object) -> DataConfig:
    return DataConfig(name="text", path=[str(p) for p in paths], **kwargs)  # type: ignore[arg-type]
