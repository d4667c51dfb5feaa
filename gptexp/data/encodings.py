"""The byte-pair encodings of tiktoken. No other file imports tiktoken.

The ranks of gpt2, which are those of r50k_base, are in a file beside this one, so that tokenising needs no network.
Their hash is checked. tiktoken downloads its other encodings.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import regex
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext.openai_public import r50k_pat_str

from gptexp.data.shards import Tokens, id_dtype
from gptexp.process.errors import UnavailableError, first_line

_RANKS = Path(__file__).with_name("gpt2.tiktoken")
_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
_END_OF_TEXT = 50256


class Encoding:
    """An encoding of tiktoken. Raises `UnavailableError` if it cannot be downloaded."""

    exact = True

    def __init__(self, name: str) -> None:
        self._encoding = _bundled() if name in ("gpt2", "r50k_base") else _downloaded(name)
        self.n_vocab = self._encoding.n_vocab
        self.eot_token = self._encoding.eot_token
        # In newer patterns, line ends can belong to a token that begins with a visible character.
        self.cut_before = " \t\r\n" if self.splits_as_gpt2 else " \t"
        self._dtype = id_dtype(self.n_vocab)

    @property
    def ranks(self) -> dict[bytes, int]:
        """The id of each token that is not special. The pair with the lowest id is merged first."""
        return self._encoding._mergeable_ranks

    @property
    def special_tokens(self) -> dict[str, int]:
        return self._encoding._special_tokens

    @property
    def pattern(self) -> str:
        """The regular expression of the words into which a text is split before it is encoded."""
        return self._encoding._pat_str

    @property
    def splits_as_gpt2(self) -> bool:
        return bool(self.pattern == r50k_pat_str)

    @property
    def is_gpt2(self) -> bool:
        return self.splits_as_gpt2 and self.n_vocab == _END_OF_TEXT + 1

    def encode_ordinary(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text).tolist()
        return ids

    def encode_array(self, text: str) -> Tokens:
        return self._encode(text).astype(self._dtype)

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # a half of a surrogate pair, which tiktoken's other methods replace too
            return self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except ValueError:  # tiktoken's regular expressions cannot split a million blanks; those of regex can
            words = regex.findall(self.pattern, text)
            return np.array([id for word in words for id in self._encoding._encode_single_piece(word)], np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.decode_tokens_bytes(tokens)).decode(errors="replace")

    def decode_tokens_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        return [self._bytes(token) for token in tokens]

    def _bytes(self, token: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(token)
        except KeyError:  # some encodings have gaps between their special tokens; a model may still draw such an id
            return b""


def _bundled() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=load_tiktoken_bpe(str(_RANKS), expected_hash=_RANKS_SHA256),
        special_tokens={"<|endoftext|>": _END_OF_TEXT},
    )


def _downloaded(name: str) -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # ValueError: the hash differs from the published file's
        cause: BaseException = error
        while cause.__context__ is not None:  # the first error of the chain has the system's own few words
            cause = cause.__context__
        raise UnavailableError(
            f"data.tokenizer={name}: tiktoken cannot download it ({first_line(cause)}); use gpt2, which needs no "
            "network, or set TIKTOKEN_CACHE_DIR to a folder that has it"
        ) from None
