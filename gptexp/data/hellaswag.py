"""HellaSwag (Zellers et al. 2019, arXiv 1905.07830): beginnings of texts, each with four endings, one of them right.

Its published jsonl format. The text is as in llm.c's dev/data/hellaswag.py: the context as it is, and each ending after
a space. lm_eval writes it in another way, so its figures do not compare.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptexp.data.downloads import Download
from gptexp.data.tokenizer import Tokenizer
from gptexp.process.errors import DataError, first_line
from gptexp.process.words import counted

VALIDATION = Download(
    "HellaSwag's validation part",
    "hellaswag_val.jsonl",
    "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
    "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
    "give another with --hellaswag FILE",
)


@dataclass(frozen=True)
class Example:
    """Token ids."""

    context: list[int]
    endings: list[list[int]]
    label: int  # index of the right ending


def read_examples(path: Path, tokenizer: Tokenizer) -> list[Example]:
    """The examples in a file, in its order. Raises `DataError` for one that is damaged, with its line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({first_line(error)})") from None
    examples = [_example(f"{path}:{number}", line, tokenizer) for number, line in enumerate(lines, 1) if line.strip()]
    if not examples:
        raise DataError(f"{path}: has no example; give a file of HellaSwag")
    return examples


def _example(where: str, line: str, tokenizer: Tokenizer) -> Example:
    try:
        content: Any = json.loads(line)
        context, endings, label = content["ctx"], content["endings"], content["label"]
        if not (isinstance(context, str) and context and isinstance(label, int) and 0 <= label < len(endings)):
            raise ValueError("a wrong ctx, endings or label")
        ids = [tokenizer.encode_ordinary(f" {ending}") for ending in endings]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where}: no example of HellaSwag ({type(error).__name__}: {first_line(error)})") from None
    if len(ids) < 2:
        raise DataError(f"{where}: no example of HellaSwag ({counted(len(ids), 'ending')})")
    return Example(tokenizer.encode_ordinary(context), ids, label)
