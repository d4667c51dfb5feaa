"""HellaSwag (Zellers et al. 2019, arXiv 1905.07830): beginnings of texts, each with four endings, one of them right.

Reads the published jsonl format. A text is made as in llm.c's dev/data/hellaswag.py: the context as it is, and each
ending after a space. lm_eval makes other texts of it, so its figures are not comparable.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptexp.data.documents import refuse_pointer
from gptexp.data.downloads import Download
from gptexp.data.tokenizer import Tokenizer
from gptexp.process.errors import DataError, first_line

VALIDATION = Download(
    "HellaSwag's validation part",
    "hellaswag_val.jsonl",
    "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
    "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
    "give another with --hellaswag FILE",
)


@dataclass(frozen=True)
class Example:
    """One beginning with its endings, as token ids."""

    context: list[int]
    endings: list[list[int]]
    label: int  # index of the right ending


def read_examples(path: Path, tokenizer: Tokenizer) -> list[Example]:
    """The examples in a file, in its order. Raises `DataError` with the line of a damaged one."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines(): a string may contain other line ends
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({first_line(error)})") from None
    refuse_pointer(path, lines[0].encode())
    examples = [_example(f"{path}:{number}", line, tokenizer) for number, line in enumerate(lines, 1) if line.strip()]
    if not examples:
        raise DataError(f"{path}: has no example; give a file of HellaSwag")
    return examples


def _example(where: str, line: str, tokenizer: Tokenizer) -> Example:
    try:
        content: Any = json.loads(line)
        context, endings, label = content["ctx"], content["endings"], content["label"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: no example of HellaSwag ({type(error).__name__}: {first_line(error)})") from None
    are_texts = isinstance(endings, list) and all(isinstance(text, str) and text for text in [context, *endings])
    if not (are_texts and len(endings) > 1 and type(label) is int and 0 <= label < len(endings)):
        raise DataError(
            f"{where}: no example of HellaSwag: ctx and endings must be texts, label the right one's number"
        )
    try:
        ids = [tokenizer.encode_ordinary(text) for text in (context, *(f" {ending}" for ending in endings))]
    except DataError as error:  # a vocabulary of characters lacks a character
        raise DataError(f"{where}: {error}") from None
    return Example(ids[0], ids[1:], label)
