"""A pointer of git-lfs in place of a file, wherever one is opened; of text and ids, tests/data has the cases."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptexp.data.characters import ByteTokenizer
from gptexp.data.hellaswag import read_examples
from gptexp.data.tokenizer import load_tokenizer
from gptexp.process.errors import UserError
from gptexp.storage.checkpoint import read_tensors
from gptexp.storage.weight_files import find_weight_files, read_nanogpt

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
READERS: dict[str, Callable[[Path], Any]] = {
    "hellaswag_val.jsonl": lambda path: read_examples(path, ByteTokenizer()),
    "tokenizer.json": lambda path: load_tokenizer(str(path)),
    "model.safetensors": read_tensors,
    "ckpt.pt": read_nanogpt,
    "model.safetensors.index.json": lambda path: find_weight_files(path.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_is_called_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UserError, match="a git-lfs pointer in place of the file; run: git lfs pull") as refused:
        READERS[name](tmp_path / name)
    assert str(tmp_path / name) in str(refused.value)
    assert "\n" not in str(refused.value)
