"""The interface of a tokenizer, and the loading of the one that `data.tokenizer` asks for.

`data.tokenizer` is a name, or the path of a file. A vocabulary that is not part of gptexp, of characters or from a
file, is kept as tokenizer.json beside the prepared tokens and in the run directory, so that a run can be sampled
without its corpus.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

from gptexp.config.schema import DataConfig
from gptexp.config.vocabulary import BYTES, NAMES
from gptexp.data.characters import CHARACTERS, ByteTokenizer, CharTokenizer
from gptexp.data.shards import Tokens
from gptexp.process import pointers
from gptexp.process.errors import ConfigError, DataError, first_line
from gptexp.storage.reader import read_json
from gptexp.storage.run_dir import TOKENIZER


class Tokenizer(Protocol):
    """Turns text into ids and back."""

    @property
    def n_vocab(self) -> int:
        """Number of ids, special tokens included. The model's vocabulary may be larger: the rest is padding."""

    @property
    def eot_token(self) -> int | None:
        """The id between two documents. None: documents are joined without one."""

    @property
    def exact(self) -> bool:
        """Whether the ids of a text stand for exactly its bytes."""

    @property
    def cut_before(self) -> str:
        """White space before which, after a visible character, a text can be cut without a change of its ids."""

    def encode_ordinary(self, text: str) -> list[int]:
        """The ids of `text`. Names of special tokens are text, too. Raises `DataError` for text that has no ids."""

    def encode_array(self, text: str) -> Tokens:
        """`encode_ordinary` as an array, which takes a tenth of a list's memory."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids below `n_vocab`. Bytes that are not UTF-8 become U+FFFD."""

    def decode_tokens_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each id."""


def load_tokenizer(name: str, directory: Path | None = None) -> Tokenizer:
    """Load the tokenizer `data.tokenizer=name`, or that in `directory` (of tokens or a run) if it has a tokenizer.json.

    Raises `DataError` if it cannot be downloaded or its file is damaged, `ConfigError` if a package is missing.
    """
    if directory is not None and (directory / TOKENIZER).is_file():
        return _from_file(directory / TOKENIZER)
    return _named(name) if name in NAMES else _from_file(Path(name).resolve())


@cache
def _named(name: str) -> Tokenizer:
    if name == BYTES:
        return ByteTokenizer()

    from gptexp.data.encodings import Encoding

    return Encoding(name)


def _from_file(path: Path) -> Tokenizer:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: not a tokenizer.json ({first_line(error)}); restore it, or give another") from None
    return _loaded(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(4)
def _loaded(path: Path, _mtime_ns: int, _size: int) -> Tokenizer:
    """The tokenizer in a file, cached, because a large one takes seconds to load. Loaded again if the file changes."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        why = f"not a tokenizer.json ({first_line(error)}); restore it, or give another"
        raise DataError(f"{path}: {pointers.why_unreadable(path) or why}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a tokenizer.json (it holds no object); restore it, or give another")
    if characters := _characters_in(content):
        return CharTokenizer(characters)

    from gptexp.data.tokenizer_file import FileTokenizer

    return FileTokenizer(path, content)


def _characters_in(content: dict[str, Any]) -> str:
    """The characters in a tokenizer.json of gptexp, or of `gptexp export`; empty if its vocabulary is another one.

    The package tokenizers is not used for them: it would drop other characters of a text without an error.
    """
    if isinstance(characters := content.get(CHARACTERS), str):
        return characters
    model = content.get("model")
    others = content.get("normalizer") or content.get("pre_tokenizer") or content.get("added_tokens")
    if others or not isinstance(model, dict) or model.get("merges") != []:
        return ""
    if not isinstance(vocab := model.get("vocab"), dict):
        return ""
    in_order = list(vocab.values()) == list(range(len(vocab)))
    return "".join(vocab) if in_order and all(len(token) == 1 for token in vocab) else ""


def document_start(tokenizer: Tokenizer) -> int:
    """The id after which a document begins. If documents are joined without an id: 0, a line feed in most texts."""
    return 0 if tokenizer.eot_token is None else tokenizer.eot_token


def masked_start(data: DataConfig, directory: Path | None = None) -> int | None:
    """The id with which a document begins, if attention stays within documents (`data.document_mask`); else None.

    `directory` is that of a run that has a copy of the tokenizer. Raises `ConfigError` if the tokenizer has no such id.
    """
    if not data.document_mask:
        return None
    end = load_tokenizer(data.tokenizer, directory).eot_token
    if end is None:
        raise ConfigError(
            f"data.document_mask=true: data.tokenizer={data.tokenizer} has no end of text, by which documents are told "
            "apart; use another, or leave the mask out"
        )
    return end


def bytes_of_ids(tokenizer: Tokenizer) -> list[int]:
    """How many bytes of text each id stands for; 0 for the id between two documents.

    Raises `DataError` for a tokenizer that loses or changes parts of a text, because bits per byte would be wrong.
    """
    if not tokenizer.exact:
        raise DataError("the tokenizer loses or changes parts of a text, so its ids do not stand for the text's bytes")
    lengths = [len(text) for text in tokenizer.decode_tokens_bytes(range(tokenizer.n_vocab))]
    if tokenizer.eot_token is not None:
        lengths[tokenizer.eot_token] = 0
    return lengths
