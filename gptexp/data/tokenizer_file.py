"""Tokenizers from a tokenizer.json, by Hugging Face's package tokenizers. No other file imports it."""

import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptexp.data.characters import BYTE_CHARACTERS
from gptexp.data.shards import Tokens, id_dtype
from gptexp.process.errors import ConfigError, DataError, first_line

# The usual names of the special token that ends a document; the first one that a file has is used.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
MOST_IDS = 16  # most ids for each token: a few tokenizers leave some out
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte that is no character
_BYTES = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
# Characters with every byte of UTF-8, and those that tokenizers change: capitals, blanks, control characters, ….
_CHARACTERS = [*range(0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x400)]


class FileTokenizer:
    """The tokenizer in the file `path`, whose JSON is `content`.

    Raises `DataError` for a damaged file, and `ConfigError` if the package is missing.
    """

    # Not exact for every tokenizer: one that does not split at white space gets other ids at each cut, one per MB.
    cut_before = " \t\r\n"

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError(
                f"data.tokenizer={path}: needs the package tokenizers; run: pip install 'gptexp[tokenizers]'"
            ) from None
        self.content = _plain(content)
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(self.content))
            self._vocab: dict[str, int] = self._tokenizer.get_vocab()
        except Exception as error:  # the package raises `Exception` itself
            raise DataError(f"{path}: not a tokenizer.json ({first_line(error)}); give another file") from None
        self._tokenizer.encode_special_tokens = True  # a special token's name in a text is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.n_vocab = max(self._vocab.values(), default=0) + 1
        if self.n_vocab > MOST_IDS * (len(self._vocab) + 64):  # each id takes memory
            largest, has = f"its largest id is {self.n_vocab - 1:,}", f"it has {len(self._vocab):,} tokens"
            raise DataError(f"{path}: {largest}, and {has}; number the tokens without such gaps")
        self.path = path
        self.eot_text = next((name for name in END_OF_TEXT if name in self._vocab), None)
        self.eot_token = None if self.eot_text is None else self._vocab[self.eot_text]
        self._dtype = id_dtype(self.n_vocab)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {id: "" if token.special else token.content for id, token in added.items()}
        self._bytes = self._bytes_of_all(json.dumps(content.get("decoder")))

    @property
    def exact(self) -> bool:
        """Whether the ids of a text stand for its bytes, tried on a text of many characters and all added tokens.

        A tokenizer with an id for unknown words, or that changes capitals or blanks, is not exact. One that composes
        accents (NFC) counts as exact, because in most texts they are composed already.
        """
        text = unicodedata.normalize("NFC", "".join(map(chr, _CHARACTERS)) + "  A  ".join(["", *self._added.values()]))
        return all(
            b"".join(self.decode_tokens_bytes(self.encode_ordinary(one))) == one.encode() for one in (text, f" {text} ")
        )

    def encode_ordinary(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_array(self, text: str) -> Tokens:
        return np.array(self.encode_ordinary(text), self._dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def decode_tokens_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        return [self._bytes[token] for token in tokens]

    def _bytes_of_all(self, decoder: str) -> list[bytes]:
        """The bytes that each id adds to a text: none for special tokens. `decoder` is that part of the JSON."""
        found = [b""] * self.n_vocab
        texts = {id: token for token, id in self._vocab.items() if self._added.get(id) != ""}
        before = min(texts, default=0)  # any id: decoders treat the first id of a text differently
        start = len(self.decode([before]))
        for id, token in texts.items():
            byte = None if "ByteLevel" in decoder else _BYTE.fullmatch(token)
            if byte:
                found[id] = bytes.fromhex(byte[1])
            elif id in self._added:  # it stands in a text as it is
                found[id] = token.encode()
            elif "ByteLevel" in decoder:
                found[id] = _of_byte_level(token)
            else:
                found[id] = self.decode([before, id])[start:].encode()
        return found


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    """`content` without what adds tokens to each text (`<s>`), or encodes it at random (dropout of merges).

    gptexp trains without them, so an export is without them too.
    """
    content, processor = dict(content), content.get("post_processor")
    if isinstance(processor, dict) and processor.get("type") != "ByteLevel":  # which moves only offsets
        content["post_processor"] = None
    if isinstance(model := content.get("model"), dict) and model.get("dropout"):
        content["model"] = {**model, "dropout": None}
    return content


def _of_byte_level(token: str) -> bytes:
    """The bytes that the characters of a token stand for. A token with other characters stands for itself."""
    return bytes(_BYTES[character] for character in token) if _BYTES.keys() >= set(token) else token.encode()
