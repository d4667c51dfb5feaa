"""Tokenizers that need no training: one for bytes, and one for the characters of a text."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gptexp.data.shards import Tokens, id_dtype
from gptexp.process.errors import DataError
from gptexp.process.words import counted
from gptexp.storage.run_dir import atomic

# Byte -> the character that stands for it in a vocabulary of bytes: printable ones stand for themselves (GPT-2).
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARACTERS = "".join(chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256))

CHARACTERS = "characters"  # the only key in the file of a vocabulary of characters


class ByteTokenizer:
    """UTF-8: an id is the value of a byte. 256 is the id between two documents."""

    exact = True
    n_vocab = 257
    eot_token = 256
    cut_before = " \t\r\n"

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_array(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(id for id in tokens if id != self.eot_token).decode(errors="replace")

    def decode_tokens_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        return [b"" if id == self.eot_token else bytes([id]) for id in tokens]


class CharTokenizer:
    """One id for each character of a corpus, in the order of code points, as in nanoGPT's shakespeare_char.

    No id is left for the end of a document.
    """

    exact = True
    eot_token = None
    cut_before = " \t\r\n"

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.n_vocab = len(characters)
        code_points = _code_points(characters)
        self._ids = np.argsort(code_points)
        self._code_points = code_points[self._ids]  # ascending

    def encode_ordinary(self, text: str) -> list[int]:
        return list(map(int, self.encode_array(text)))

    def encode_array(self, text: str) -> Tokens:
        code_points = _code_points(text)
        indices = np.minimum(np.searchsorted(self._code_points, code_points), self.n_vocab - 1)
        unknown = np.flatnonzero(self._code_points[indices] != code_points)
        if len(unknown):
            raise DataError(
                f"character {text[unknown[0]]!r}: not among the {counted(self.n_vocab, 'character')} of the vocabulary"
                "; use only those of the corpus that it was made from, or data.tokenizer=bytes"
            )
        return self._ids[indices].astype(id_dtype(self.n_vocab))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.characters[id] for id in tokens)

    def decode_tokens_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        return [self.characters[id].encode() for id in tokens]

    def save(self, path: Path) -> None:
        with atomic(path) as file:
            file.write(json.dumps({CHARACTERS: self.characters}) + "\n")


def characters_of(texts: Iterable[str]) -> str:
    """The distinct characters of `texts`, in the order of code points."""
    found: set[int] = set()
    for text in texts:
        found.update(np.unique(_code_points(text)).tolist())
    return "".join(map(chr, sorted(found)))


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
