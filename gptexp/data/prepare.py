"""Tokenisation of a corpus into the cache, once, with a lock against concurrent processes."""

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from gptexp.config.paths import is_file, path_list, user_cache_dir, why_not_creatable
from gptexp.config.schema import DataConfig
from gptexp.config.vocabulary import CHARS, NAMES, VOCAB_SIZES
from gptexp.data import corpora, token_files
from gptexp.data.characters import CharTokenizer
from gptexp.data.documents import Part
from gptexp.data.mix import mix_dir, write_mix
from gptexp.data.shards import MANIFEST, ShardWriter, Tokens, data_errors, no_text
from gptexp.data.stream import TokenStream, mark_verified, read_manifest, verify, write_references
from gptexp.data.token_files import TokenFile
from gptexp.data.tokenise import Encoder, characters, tokenise
from gptexp.data.tokenizer import load_tokenizer
from gptexp.distributed.ranks import count_cores
from gptexp.process.errors import DataError, UnavailableError, UserError
from gptexp.process.words import counted
from gptexp.storage.run_dir import TOKENIZER

PART_BYTES = 16 << 20  # of text that a worker tokenises at a time
FILE_TOKENS = 100_000_000  # of a file of the hub, roughly; more processes would read files that are not needed
SHOWN = 3  # names of token files in a message
LAYOUT = 1  # version of a directory of tokens


def cache_dir(data: DataConfig) -> Path:
    """The directory of token files: data.cache_dir, else $GPTEXP_CACHE, else the user's cache directory."""
    return Path(data.cache_dir or os.environ.get("GPTEXP_CACHE") or user_cache_dir())


def downloads_dir(data: DataConfig) -> Path:
    """The directory of downloaded corpora."""
    return cache_dir(data) / "downloads"


def prepare(data: DataConfig) -> tuple[Path, Path | None]:
    """Tokenise the corpus and `data.val_path` if they are not in the cache. Returns both directories; None for no path.

    A file lock lets one process that uses the cache do the work while the others wait. Raises `DataError`.
    """
    if data.name == "tokens":
        training, validation = _token_files(data)
        return _referenced(training, data), _referenced(validation, data) if validation else None
    train = _mixed(data) if data.mix else _tokenised(find_corpus(data), data)
    val = _tokenised(*_validation(data, train)) if data.val_path else None
    return train, val


def has_own_validation(data: DataConfig) -> bool:
    """Whether nothing is held out of the corpus: the validation text is in files of its own. Raises `DataError`."""
    return data.val_path is not None or (data.name == "tokens" and bool(_token_files(data)[1]))


def _token_files(data: DataConfig) -> tuple[list[TokenFile], list[TokenFile]]:
    """The training and the validation files of data=tokens; of the latter none if the run does not validate."""
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
    target = _references_dir(files, data)

    def build() -> None:
        with _removed_if_refused(target):
            _write_references(files, data, target)

    _build_once(target, build)
    verify(target)
    return target


def _build_once(target: Path, build: Callable[[], None]) -> None:
    """Call `build`, which makes the directory `target`, unless it is complete. Other processes wait for one."""
    if not is_file(target / MANIFEST):
        with _lock(target.with_name(f"{target.name}.lock")), data_errors(target):
            if not is_file(target / MANIFEST):
                build()


def _references_dir(files: Sequence[TokenFile], data: DataConfig) -> Path:
    key = corpora.Files("tokens", [*(file.path for file in files), *token_files.sidecars(files)]).key
    key = hashlib.sha256(f"{key} {data.format} {_label(data.tokenizer)}".encode()).hexdigest()[:16]
    return cache_dir(data) / f"tokens-{key}"


def _write_references(files: Sequence[TokenFile], data: DataConfig, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    folder = files[0].path.parent
    if (folder / token_files.META).is_file() != (data.tokenizer == CHARS):
        is_there = "is there, so the ids are characters; use" if data.tokenizer != CHARS else "is missing; leave out"
        raise DataError(f"{folder / token_files.META}: {is_there} data.tokenizer=chars")
    _keep_tokenizer(data.tokenizer, target, lambda: token_files.characters_in(folder))
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


def sources(data: DataConfig) -> dict[str, DataConfig]:
    """The config of each source of `data.mix`, by its path."""
    return {path: replace(data, path=path, mix=None) for path in data.mix}


def _mixed(data: DataConfig) -> Path:
    directories = {path: _tokenised(find_corpus(one), one) for path, one in sources(data).items()}
    target = mix_dir(cache_dir(data), directories, data.mix, data.max_tokens)
    _build_once(target, lambda: write_mix(target, directories, data.mix, data.max_tokens, data.tokenizer))
    return target


def _validation(data: DataConfig, train: Path) -> tuple[corpora.Corpus, DataConfig]:
    """The corpus `data.val_path`, and the config with the tokenizer of the training tokens in `train`."""
    own = train / TOKENIZER
    return corpora.text(path_list(data.val_path)), replace(data, tokenizer=str(own)) if is_file(own) else data


def count_ids(data: DataConfig) -> int | None:
    """Number of ids of the tokenizer. None: it follows from the corpus, which `prepare` has not tokenised yet."""
    if data.tokenizer in VOCAB_SIZES:
        return VOCAB_SIZES[data.tokenizer]
    if data.tokenizer != CHARS:
        return load_tokenizer(data.tokenizer).n_vocab
    prepared = prepared_dir(data)
    return None if prepared is None else vocabulary_of(prepared, data.tokenizer)


def vocabulary_of(directory: Path, tokenizer: str) -> int:
    """Number of ids of the tokenizer of prepared tokens."""
    saved = read_manifest(directory).n_vocab
    return VOCAB_SIZES[tokenizer] if saved is None else saved  # an older version knew only tokenizers of this table


def prepared_dir(data: DataConfig) -> Path | None:
    """The directory of the training tokens, or None if the cache does not hold them."""
    if data.name == "tokens":
        target = _references_dir(_token_files(data)[0], data)
        return target if is_file(target / MANIFEST) else None
    if data.mix:
        found = {path: prepared_dir(one) for path, one in sources(data).items()}
        directories = {path: directory for path, directory in found.items() if directory is not None}
        target = mix_dir(cache_dir(data), directories, data.mix, data.max_tokens)
        return target if len(directories) == len(found) and is_file(target / MANIFEST) else None
    if data.name == "shakespeare" and not is_file(downloads_dir(data) / corpora.SHAKESPEARE.name):
        return None
    directory = tokens_dir(find_corpus(data), data)
    return directory if is_file(directory / MANIFEST) else None


def compare(data: DataConfig) -> None:
    """Tokenise the corpus and `data.val_path` again and compare them with the cache, which `prepare` has filled.

    Raises `DataError` if a token differs: a file has changed and kept its size and times, or the cache is damaged.
    """
    if data.name == "tokens":
        for directory in prepare(data):
            if directory is not None:
                verify(directory, again=True)
        return
    for one in sources(data).values() if data.mix else [data]:
        _compare(find_corpus(one), one)
    if data.val_path:
        _compare(*_validation(data, prepare(data)[0]))


def find_corpus(data: DataConfig) -> corpora.Corpus:
    """The corpus `data.name`. Downloads shakespeare if it is missing. Raises `DataError`."""
    if data.name == "stdlib":
        return corpora.stdlib()
    if data.name == "shakespeare":
        downloads = downloads_dir(data)
        exists = is_file(downloads / corpora.SHAKESPEARE.name)  # then no lock, as the cache may be read-only
        with nullcontext() if exists else _lock(downloads.with_name("downloads.lock")):
            return corpora.shakespeare(downloads)
    if data.name == "hf":
        return corpora.HubCorpus(data.path, data.subset, data.split, data.max_tokens)
    return corpora.text(path_list(data.path))


def tokens_dir(corpus: corpora.Corpus, data: DataConfig) -> Path:
    """The directory of the prepared tokens of `corpus`."""
    key = corpus.key
    if data.text_column != DataConfig.text_column:
        key = hashlib.sha256(f"{key} {data.text_column}".encode()).hexdigest()[:16]
    return cache_dir(data) / f"{corpus.name}-{_label(data.tokenizer)}-v{LAYOUT}-{key}"


def _label(tokenizer: str) -> str:
    """The tokenizer in the name of a directory: a file is known by its content."""
    if tokenizer in NAMES:
        return tokenizer
    with data_errors(Path(tokenizer)):
        return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()[:16]


def _tokenised(corpus: corpora.Corpus, data: DataConfig) -> Path:
    target = tokens_dir(corpus, data)
    _build_once(target, lambda: _tokenise(corpus, data, target))
    verify(target)
    return target


def _compare(corpus: corpora.Corpus, data: DataConfig) -> None:
    target = tokens_dir(corpus, data)
    stream, done = TokenStream(target), 0
    encoder = Encoder(data.tokenizer, target, data.text_column, corpus.max_tokens)
    parts = _parts(corpus, encoder)
    is_read_only = why_not_creatable(cache_dir(data)) is not None
    folders = Path(tempfile.gettempdir()) if is_read_only else cache_dir(data)
    with (
        data_errors(folders),
        tempfile.TemporaryDirectory(dir=folders, prefix=".gptexp-compare-") as folder,
        _progress(corpus) as progress,
    ):
        for ids, _ in tokenise(parts, encoder, Path(folder), _workers(data, corpus, parts), progress.part(parts)):
            cached = stream.read(done, min(len(ids), len(stream) - done))
            same = len(cached) == len(ids) and bool((cached == ids).all())
            if not same:
                raise DataError(_differs(target, done + _equal_at_the_start(cached, ids)))
            done += len(ids)
    if done < len(stream):
        raise DataError(_differs(target, done))
    print(f"{target}: its {counted(done, 'token')} are those of the text", file=sys.stderr)


def _parts(corpus: corpora.Corpus, encoder: Encoder) -> list[Part]:
    return corpora.parts(corpus, load_tokenizer(encoder.tokenizer, encoder.directory).cut_before, PART_BYTES)


def _workers(data: DataConfig, corpus: corpora.Corpus, parts: Sequence[Part]) -> int:
    """The number of processes for these parts: data.workers, else one for each core, and none too many."""
    wanted = len(parts) if corpus.max_tokens is None else 1 + corpus.max_tokens // FILE_TOKENS
    return min(data.workers or min(count_cores(), wanted), max(1, len(parts)))


def _equal_at_the_start(a: Tokens, b: Tokens) -> int:
    """The number of ids before the first that differs."""
    both = min(len(a), len(b))
    different = np.flatnonzero(a[:both] != b[:both])
    return int(different[0]) if len(different) else both


def _differs(target: Path, token: int) -> str:
    return f"{target}: differs from the text from token {token:,} on; delete it to tokenise the text again"


def data_hash(data: DataConfig) -> str:
    """Hash of the training and validation tokens, independent of paths. Prepares the tokens if they are missing."""
    return tokens_hash(*prepare(data))


def tokens_hash(train: Path, val: Path | None) -> str:
    """Hash of the tokens in the directories `train` and `val`; 16 hex digits."""
    hashes = [TokenStream(directory).hash for directory in (train, val) if directory]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def _lock(path: Path) -> FileLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise DataError(f"data.cache_dir={path.parent}: cannot be written ({error.strerror}); choose another") from None
    return FileLock(path)


def _tokenise(corpus: corpora.Corpus, data: DataConfig, target: Path) -> None:
    """Tokenise a corpus into the directory `target`. A preparation that was stopped before goes on."""
    started = time.perf_counter()
    unfinished = target.with_name(f"{target.name}.tmp")
    folder = unfinished / "parts"
    with _removed_if_refused(unfinished), data_errors(unfinished):
        folder.mkdir(parents=True, exist_ok=True)
        _keep_tokenizer(data.tokenizer, unfinished, lambda: _characters(corpus, data))
        encoder = Encoder(data.tokenizer, unfinished, data.text_column, corpus.max_tokens)
        parts = _parts(corpus, encoder)
        about = {"corpus": corpus.name, "tokenizer": data.tokenizer}
        n_vocab, documents = load_tokenizer(data.tokenizer, unfinished).n_vocab, 0
        with ShardWriter(unfinished, n_vocab, about) as writer, _progress(corpus) as progress:
            for ids, begun in tokenise(parts, encoder, folder, _workers(data, corpus, parts), progress.part(parts)):
                writer.append(ids)
                documents += begun
            writer.about["documents"] = documents
        shutil.rmtree(folder)
    shutil.rmtree(target, ignore_errors=True)  # incomplete: it has no manifest
    unfinished.replace(target)
    mark_verified(target)  # `ShardWriter` has read what it wrote
    seconds = time.perf_counter() - started
    print(
        f"tokenised {corpus.name}: {counted(documents, 'document')}, {counted(writer.tokens, 'token')} in "
        f"{seconds:.1f} s; saved in {target}",
        file=sys.stderr,
    )


@contextmanager
def _removed_if_refused(unfinished: Path) -> Iterator[None]:
    """Remove the directory `unfinished` if the body refuses the input. Else complete parts stay for the next start."""
    try:
        yield
    except UserError as error:
        refused = isinstance(error, DataError) and not isinstance(error, UnavailableError)
        if refused or not list(unfinished.glob("parts/part-*")):
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _keep_tokenizer(tokenizer: str, directory: Path, find_characters: Callable[[], str]) -> None:
    """Write tokenizer.json into `directory`, for a tokenizer that needs one."""
    path = directory / TOKENIZER
    if tokenizer == CHARS and not path.exists():
        CharTokenizer(find_characters()).save(path)
    elif tokenizer not in NAMES:
        shutil.copyfile(tokenizer, path)  # again at each start, as a preparation may be killed here


def _characters(corpus: corpora.Corpus, data: DataConfig) -> str:
    """The distinct characters of a corpus. Raises `DataError` if there are none."""
    parts = corpora.parts(corpus, CharTokenizer.cut_before, PART_BYTES)
    found = characters(parts, data.text_column, _workers(data, corpus, parts))
    if not found:
        raise no_text(corpus.name)
    return found


class _Progress:
    """Shows how much of a corpus is tokenised, if stderr is a terminal."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task
        self._tokens, self._started = 0, time.perf_counter()

    def part(self, parts: Sequence[Part]) -> Callable[[int, int], None]:
        """A function to call with the number and the tokens of each complete part."""
        sizes = [sum(span.size for span in part) for part in parts]
        self._bar.update(self._task, total=sum(sizes))

        def advance(number: int, tokens: int) -> None:
            self._tokens += tokens
            rate = self._tokens / (time.perf_counter() - self._started)
            self._bar.update(self._task, advance=sizes[number], rate=f"{rate / 1e6:.1f}M tokens/s")

        return advance


@contextmanager
def _progress(corpus: corpora.Corpus) -> Iterator[_Progress]:
    # Imported here because most calls of `prepare` find the tokens in the cache.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    text = TextColumn("tokenising {task.description}")
    columns = (text, BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield _Progress(bar, bar.add_task(corpus.name, total=None, rate=""))
