"""A tokenizer as the files that Hugging Face's transformers loads. Needs neither that package nor tokenizers.

Byte-level vocabularies write a byte as a character, as GPT-2's encoder.py does. tiktoken keeps the ranks of tokens, but
no merges. The merge of a token is the last step when its own bytes are encoded with the lower ranks only.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from gptexp.data.characters import BYTE_CHARACTERS, ByteTokenizer, CharTokenizer
from gptexp.data.encodings import Encoding
from gptexp.data.tokenizer import Tokenizer, load_tokenizer
from gptexp.data.tokenizer_file import FileTokenizer

END_OF_TEXT = "<|endoftext|>"
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def transformers_files(tokenizer: Tokenizer, block_size: int) -> dict[str, str]:
    """The files, name -> content, of a tokenizer whose model sees at most `block_size` tokens."""
    if isinstance(tokenizer, Encoding):
        return _of_encoding(tokenizer, block_size)
    if isinstance(tokenizer, FileTokenizer):
        return {
            TOKENIZER: _json(tokenizer.content),
            SETTINGS: _settings(tokenizer.eot_text, block_size),
        }
    if isinstance(tokenizer, CharTokenizer):
        vocab = {character: id for id, character in enumerate(tokenizer.characters)}
        model = _tokenizer_json(vocab, [], {}, None, {"type": "Fuse"})
        return {TOKENIZER: _json(model), SETTINGS: _settings(None, block_size)}
    assert isinstance(tokenizer, ByteTokenizer)
    vocab = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    model = _tokenizer_json(vocab, [], {END_OF_TEXT: tokenizer.eot_token}, _byte_level(False), _byte_level(False))
    return {TOKENIZER: _json(model), SETTINGS: _settings(END_OF_TEXT, block_size)}


def gpt2_vocabulary() -> dict[str, int]:
    """The content of OpenAI's encoder.json, which transformers calls vocab.json."""
    encoding = load_tokenizer("gpt2")
    assert isinstance(encoding, Encoding)
    return _vocabulary(encoding) | encoding.special_tokens


def _vocabulary(encoding: Encoding) -> dict[str, int]:
    return {_characters(token): rank for token, rank in sorted(encoding.ranks.items(), key=lambda item: item[1])}


def _of_encoding(encoding: Encoding, block_size: int) -> dict[str, str]:
    vocab = _vocabulary(encoding)
    pairs = [(_characters(left), _characters(right)) for left, right in merges(encoding.ranks)]
    split: dict[str, Any] = _byte_level(True)
    if not encoding.splits_as_gpt2:
        pattern = {"Regex": for_oniguruma(encoding.pattern)}
        splitting = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        split = {"type": "Sequence", "pretokenizers": [splitting, _byte_level(False)]}
    model = _tokenizer_json(vocab, pairs, encoding.special_tokens, split, _byte_level(True))
    files = {TOKENIZER: _json(model), SETTINGS: _settings(END_OF_TEXT, block_size)}
    if encoding.is_gpt2:  # OpenAI's two files, which transformers' GPT2Tokenizer reads
        files[SETTINGS] = _settings(END_OF_TEXT, block_size, "GPT2Tokenizer")
        files["vocab.json"] = json.dumps(vocab | encoding.special_tokens)
        files["merges.txt"] = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in pairs)
    return files


def merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the two parts of each token of several bytes, in the order of ranks.

    A token that two others do not make gets no merge: with `ignore_merges` it is found as a whole word.
    """
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
            lowest = min(pairs)
            if lowest == len(ranks):
                break
            at = pairs.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def for_oniguruma(pattern: str) -> str:
    """A pattern of tiktoken in the syntax of the package tokenizers, where `{1,3}+` repeats and `$` ends a line."""
    return pattern.replace("}+", "}").replace("$", r"\z")


def _characters(token: bytes) -> str:
    return "".join(BYTE_CHARACTERS[byte] for byte in token)


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _tokenizer_json(
    vocab: Mapping[str, int],
    pairs: list[tuple[str, str]],
    special_tokens: Mapping[str, int],
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": text, **flags} for text, id in special_tokens.items()],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": bool(pairs),  # tiktoken looks a word up as a whole first
            "vocab": vocab,
            "merges": pairs,
        },
    }


def _settings(end_of_text: str | None, block_size: int, tokenizer_class: str = "PreTrainedTokenizerFast") -> str:
    roles = ["bos_token", "eos_token", "pad_token", *(["unk_token"] if tokenizer_class == "GPT2Tokenizer" else [])]
    special = dict.fromkeys(roles, end_of_text) if end_of_text is not None else {}
    return _json(
        {
            "tokenizer_class": tokenizer_class,
            **special,
            "model_max_length": block_size,
            "clean_up_tokenization_spaces": False,
        }
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"
