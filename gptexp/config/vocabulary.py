"""The sizes of vocabularies: how many ids a tokenizer has, and how many rows `model.vocab_size=auto` gives to wte."""

from dataclasses import replace

from gptexp.config.schema import Config

BYTES, CHARS = "bytes", "chars"

# Tokenizer -> number of ids, including special tokens. Source for tiktoken's: tiktoken_ext/openai_public.py.
VOCAB_SIZES = {
    BYTES: 257,
    "gpt2": 50257,
    "r50k_base": 50257,
    "p50k_base": 50281,
    "p50k_edit": 50284,
    "cl100k_base": 100277,
    "o200k_base": 200019,
    "o200k_harmony": 201088,
}
ASSUMED_CHARACTERS = 128  # ids of chars while the corpus is unread; English text has about 100
NAMES = (*VOCAB_SIZES, CHARS)  # every other value of data.tokenizer is the path of a file


def padding_multiple(n_vocab: int) -> int:
    """The rows of wte are padded to a multiple of this number, because matrix products of other sizes are slow."""
    return 128 if n_vocab >= 1024 else 64


def padded(n_vocab: int) -> int:
    """`n_vocab` rounded up to a multiple of `padding_multiple`."""
    multiple = padding_multiple(n_vocab)
    return -(-n_vocab // multiple) * multiple


def with_vocab_size(cfg: Config, vocab_size: int | str) -> Config:
    """A copy of `cfg` with this `model.vocab_size`."""
    return replace(cfg, model=replace(cfg.model, vocab_size=vocab_size))
