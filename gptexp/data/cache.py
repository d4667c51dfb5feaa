"""The cache of tokens: one process makes each directory once, and complete parts of an unfinished one stay."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gptexp.config import paths
from gptexp.config.paths import is_file
from gptexp.config.schema import DataConfig
from gptexp.config.vocabulary import CHARS, NAMES
from gptexp.data.characters import CharTokenizer
from gptexp.data.shards import MANIFEST, data_errors
from gptexp.data.tokenizer import load_tokenizer
from gptexp.process.errors import DataError, UnavailableError, UserError
from gptexp.storage import locks
from gptexp.storage.locks import Lock
from gptexp.storage.run_dir import TOKENIZER


def cache_dir(data: DataConfig) -> Path:
    """The directory of token files."""
    return paths.cache_dir(data.cache_dir)


def downloads_dir(data: DataConfig) -> Path:
    """The directory of downloaded corpora."""
    return cache_dir(data) / "downloads"


def label(tokenizer: str) -> str:
    """The part of a directory's name that stands for the tokenizer: its name, or for a file the hash of its content."""
    if tokenizer in NAMES:
        return tokenizer
    with data_errors(Path(tokenizer)):
        return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()[:16]


def build_once(target: Path, build: Callable[[], None]) -> None:
    """Call `build` to make the directory `target`, unless it is complete. One process builds, the others wait."""
    if not is_file(target / MANIFEST):
        with lock(target.with_name(f"{target.name}.lock")), data_errors(target):
            if not is_file(target / MANIFEST):
                build()


def lock(path: Path) -> Lock:
    """A lock on the file `path` of the cache, which is created if it is missing. Raises `DataError` if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise DataError(f"data.cache_dir={path.parent}: cannot be written ({error.strerror}); choose another") from None
    return locks.take(path)


@contextmanager
def removed_if_refused(unfinished: Path) -> Iterator[None]:
    """Remove the directory `unfinished` if the body refuses the input. After other errors complete parts stay."""
    try:
        yield
    except UserError as error:
        refused = isinstance(error, DataError) and not isinstance(error, UnavailableError)
        if refused or not list(unfinished.glob("parts/part-*")):
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_tokenizer(tokenizer: str, directory: Path, find_characters: Callable[[], str]) -> None:
    """Write tokenizer.json into `directory`, for a tokenizer that needs one."""
    path = directory / TOKENIZER
    if tokenizer == CHARS and not path.exists():
        CharTokenizer(find_characters()).save(path)
    elif tokenizer not in NAMES:
        load_tokenizer(tokenizer)  # so that an error names the file that was given
        shutil.copyfile(tokenizer, path)  # at each start, as a preparation may be killed while it copies
