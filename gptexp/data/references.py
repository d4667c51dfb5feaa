"""data=tokens: a directory of the cache with a manifest of other projects' token files, which stay in their place."""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gptexp.config.paths import path_list
from gptexp.config.schema import DataConfig
from gptexp.config.vocabulary import CHARS
from gptexp.data import token_files
from gptexp.data.cache import build_once, cache_dir, label, removed_if_refused, write_tokenizer
from gptexp.data.corpora import Files
from gptexp.data.stream import mark_verified, verify, write_references
from gptexp.data.token_files import TokenFile
from gptexp.data.tokenizer import load_tokenizer
from gptexp.process.errors import DataError
from gptexp.process.words import counted

SHOWN = 3  # names of files in a message


def prepare(data: DataConfig) -> tuple[Path, Path | None]:
    """The directories of the training and the validation files. New files are read. Raises `DataError`."""
    training, validation = find(data)
    return _referenced(training, data), _referenced(validation, data) if validation else None


def find(data: DataConfig) -> tuple[list[TokenFile], list[TokenFile]]:
    """The training and the validation files of data=tokens; no validation files if the run does not validate."""
    training, validation = token_files.find(path_list(data.path), data.format)
    if data.val_path is not None:
        validation = [file for files in token_files.find(path_list(data.val_path), data.format) for file in files]
    elif validation and (data.val_ratio is not None or data.val_split == "tail"):
        key = "data.val_split=tail" if data.val_ratio is None else f"data.val_ratio={data.val_ratio:g}"
        raise DataError(
            f"{key}: {validation[0].path} is the validation text; leave it out; data.val_tokens=N takes its first N "
            "tokens"
        )
    return training, validation if data.validates else []


def _referenced(files: Sequence[TokenFile], data: DataConfig) -> Path:
    """The directory with the manifest of token files that lie elsewhere; new files are read. Raises `DataError`."""
    target = directory(files, data)

    def build() -> None:
        with removed_if_refused(target):
            _write_references(files, data, target)

    build_once(target, build)
    verify(target)
    return target


def directory(files: Sequence[TokenFile], data: DataConfig) -> Path:
    """The directory of the manifest of token files. Its name changes with the files, and with how they are read."""
    key = Files("tokens", [*(file.path for file in files), *token_files.sidecars(files)]).key
    key = hashlib.sha256(f"{key} {data.format} {label(data.tokenizer)}".encode()).hexdigest()[:16]
    return cache_dir(data) / f"tokens-{key}"


def _write_references(files: Sequence[TokenFile], data: DataConfig, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    folder = files[0].path.parent
    if (folder / token_files.META).is_file() != (data.tokenizer == CHARS):
        is_there = "is there, so the ids are characters; use" if data.tokenizer != CHARS else "is missing; leave out"
        raise DataError(f"{folder / token_files.META}: {is_there} data.tokenizer=chars")
    write_tokenizer(data.tokenizer, target, lambda: token_files.characters_in(folder))
    tokenizer = load_tokenizer(data.tokenizer, target)
    vocabulary = token_files.Vocabulary(data.tokenizer, tokenizer.n_vocab, tokenizer.eot_token)
    read = [token_files.read(file, vocabulary, trusted=data.format is not None) for file in files]
    shards, max_id = [shard for shard, _ in read], max(largest for _, largest in read)
    dtype = np.dtype(f"<u{files[0].id_bytes}")
    about = {"corpus": "tokens", "tokenizer": data.tokenizer}
    write_references(target, shards, dtype, max_id, tokenizer.n_vocab, about)
    mark_verified(target)
    tokens = sum(shard.tokens for shard in shards)
    names = ", ".join(file.path.name for file in files[:SHOWN]) + (", …" if len(files) > SHOWN else "")
    print(f"read {counted(len(files), 'token file')} in place ({names}): {counted(tokens, 'token')}", file=sys.stderr)
