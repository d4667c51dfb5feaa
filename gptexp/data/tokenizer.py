"""What a tokenizer offers, and GPT-2's byte-pair encoding by tiktoken. No other file imports tiktoken.

The ranks of gpt2, which are those of r50k_base, are in a file beside this one, so that tokenising needs no network.
Their hash is checked. tiktoken downloads its other encodings.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from tiktoken import Encoding, get_encoding
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext.openai_public import r50k_pat_str

from gptexp.process.errors import DataError

END_OF_TEXT = 50256  # id of <|endoftext|> in all four encodings

_RANKS = Path(__file__).with_name("gpt2.tiktoken")
_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


class Tokenizer(Protocol):
    """Turns text into ids and back. A `tiktoken.Encoding` is one."""

    @property
    def n_vocab(self) -> int:
        """Number of ids, special tokens included. The model's vocabulary may be larger: the rest is padding."""

    @property
    def eot_token(self) -> int:
        """The id between two documents."""

    def encode_ordinary(self, text: str) -> list[int]:
        """The ids of `text`, in which special tokens are text too."""

    def encode_ordinary_batch(self, text: list[str]) -> list[list[int]]:
        """The ids of several texts."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids below `n_vocab`. Bytes that are not UTF-8 become U+FFFD."""

    def decode_tokens_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each id."""


@cache
def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer `name`. Raises `DataError` if it cannot be downloaded."""
    if name not in ("gpt2", "r50k_base"):
        try:
            return get_encoding(name)
        except OSError as error:
            raise DataError(f"data.tokenizer={name}: tiktoken cannot download it ({error}); use gpt2") from None
    return Encoding(
        name,
        pat_str=r50k_pat_str,
        mergeable_ranks=load_tiktoken_bpe(str(_RANKS), expected_hash=_RANKS_SHA256),
        special_tokens={"<|endoftext|>": END_OF_TEXT},
    )


def bytes_of_ids(tokenizer: Tokenizer) -> list[int]:
    """How many bytes of text each id stands for; none for the id between two documents."""
    lengths = [len(text) for text in tokenizer.decode_tokens_bytes(range(tokenizer.n_vocab))]
    lengths[tokenizer.eot_token] = 0
    return lengths
