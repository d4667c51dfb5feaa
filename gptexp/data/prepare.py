"""Tokenisation of a corpus into the cache, once, with a lock against concurrent processes."""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from gptexp.config.parts import SOURCE, TARGET, bound, is_part
from gptexp.config.paths import is_file, path_list, remember_key, remembered_key
from gptexp.config.schema import DataConfig
from gptexp.config.vocabulary import CHARS, VOCAB_SIZES
from gptexp.data import corpora, references
from gptexp.data.cache import build_once, cache_dir, downloads_dir, label, lock, removed_if_refused, write_tokenizer
from gptexp.data.characters import CharTokenizer
from gptexp.data.documents import END_LINE, Part, Span, first_replaced
from gptexp.data.mix import mix_dir, most_of, write_mix
from gptexp.data.progress import progress
from gptexp.data.shards import MANIFEST, ShardWriter, Tokens, data_errors
from gptexp.data.stream import TokenStream, mark_verified, read_manifest, verify
from gptexp.data.tokenise import Encoder, characters, tokenise
from gptexp.data.tokenizer import load_tokenizer
from gptexp.data.tokenizer_file import END_OF_TEXT, FileTokenizer
from gptexp.process.cores import count_cores
from gptexp.process.errors import DataError
from gptexp.process.terminal import warn
from gptexp.process.words import counted
from gptexp.storage.run_dir import TOKENIZER

PART_BYTES = 16 << 20  # bytes of text that a worker tokenises at a time
FILE_TOKENS = 100_000_000  # rough size of a file of the hub; limits the processes, so that none reads an unneeded file
LAYOUT = 1  # version of a directory of tokens
_said: set[corpora.GoneFiles] = set()  # of which this process has said that they are gone


def prepare(data: DataConfig) -> tuple[Path, Path | None]:
    """Tokenise the corpus and `data.val_path` if they are not in the cache. Returns both directories (None: no path).

    A file lock lets one process that uses the cache do the work while the others wait. Raises `DataError`.
    """
    if data.name == "tokens":
        return references.prepare(data)
    train = _mixed(data) if data.mix else _tokenised(find_corpus(data), data)
    val = _tokenised(*validation_corpus(data, train)) if data.val_path else None
    return train, val


def prepare_texts(data: DataConfig) -> dict[str, Path]:
    """Tokenise the texts of `data.validation` if they are not in the cache. Returns the directory of each by name."""
    return {name: directory for name, one in texts(data).items() if (directory := prepare(one)[1])}


def texts(data: DataConfig) -> dict[str, DataConfig]:
    """The config with which each text of `data.validation` would be the only one, by its name."""
    alone = replace(data, validation={}, val_ratio=None, val_split="spread")
    return {name: replace(alone, val_path=path) for name, path in data.validation.items()}


def has_own_validation(data: DataConfig) -> bool:
    """Whether the validation text has files of its own, so that the corpus holds out nothing. Raises `DataError`."""
    return data.val_path is not None or (data.name == "tokens" and bool(references.find(data)[1]))


def sources(data: DataConfig) -> dict[str, DataConfig]:
    """The config of each source of `data.mix`, by its path."""
    most = most_of(data.mix, data.max_tokens)
    return {path: replace(data, path=path, mix=None, max_tokens=most[path]) for path in data.mix}


def _mixed(data: DataConfig) -> Path:
    directories = {path: _tokenised(find_corpus(one), one) for path, one in sources(data).items()}
    target = mix_dir(cache_dir(data), directories, data.mix, data.max_tokens)
    build_once(target, lambda: write_mix(target, directories, data.mix, data.max_tokens, data.tokenizer))
    return target


def validation_corpus(data: DataConfig, train: Path) -> tuple[corpora.Corpus, DataConfig]:
    """The corpus `data.val_path`, and the config with the tokenizer of the training tokens in `train`."""
    if is_file(own := train / TOKENIZER):
        data = replace(data, tokenizer=str(own))
    return _text(path_list(data.val_path), data), data


def count_ids(data: DataConfig) -> int | None:
    """Number of ids of the tokenizer. None: it follows from the corpus, which `prepare` has not tokenised yet."""
    if data.tokenizer in VOCAB_SIZES:
        return VOCAB_SIZES[data.tokenizer]
    if data.tokenizer != CHARS:
        return load_tokenizer(data.tokenizer).n_vocab
    prepared = prepared_dir(data)
    return None if prepared is None else read_manifest(prepared).n_vocab


def prepared_dir(data: DataConfig) -> Path | None:
    """The directory of the training tokens, or None if the cache does not hold them."""
    if data.name == "tokens":
        target = references.directory(references.find(data)[0], data)
        return target if is_file(target / MANIFEST) else None
    if data.mix:
        found = {path: prepared_dir(one) for path, one in sources(data).items()}
        directories = {path: directory for path, directory in found.items() if directory is not None}
        target = mix_dir(cache_dir(data), directories, data.mix, data.max_tokens)
        return target if len(directories) == len(found) and is_file(target / MANIFEST) else None
    download = str(downloads_dir(data) / corpora.SHAKESPEARE.name)
    if data.name == "shakespeare" and not (is_file(Path(download)) or _gone("shakespeare", [download], data)):
        return None
    directory = tokens_dir(find_corpus(data), data)
    return directory if is_file(directory / MANIFEST) else None


def find_corpus(data: DataConfig) -> corpora.Corpus:
    """The corpus `data.name`. Downloads shakespeare if it is missing. Raises `DataError`."""
    if data.name == "stdlib":
        return corpora.stdlib()
    if data.name == "shakespeare":
        downloads = downloads_dir(data)
        exists = is_file(downloads / corpora.SHAKESPEARE.name)  # then no lock, as the cache may be read-only
        if not exists and (gone := _gone("shakespeare", [str(downloads / corpora.SHAKESPEARE.name)], data)):
            return gone
        with nullcontext() if exists else lock(downloads.with_name("downloads.lock")):
            return corpora.shakespeare(downloads)
    if is_part(data):
        keys = json.dumps(bound("data", data).keywords, sort_keys=True)
        target, source = getattr(data, TARGET), getattr(data, SOURCE)
        return corpora.OwnCorpus(data.name, target, source, keys, data.max_tokens)
    if data.name == "hf":
        return corpora.HubCorpus(data.path, data.subset, data.split, data.max_tokens, data.text_column)
    return _text(path_list(data.path), data)


def _text(patterns: list[str], data: DataConfig) -> corpora.Corpus:
    try:
        return corpora.text(patterns, *data.reading)
    except DataError:
        if gone := _gone("text", patterns, data):
            return gone
        raise


def _gone(name: str, patterns: list[str], data: DataConfig) -> corpora.GoneFiles | None:
    """The files of `patterns` if all are gone and the cache has their tokens; the first call says so."""
    if not (key := remembered_key(cache_dir(data), patterns, data.reading)):
        return None
    gone = corpora.GoneFiles(name, tuple(patterns), key)
    if not is_file((directory := tokens_dir(gone, data)) / MANIFEST):  # those of another tokenizer
        return None
    if gone not in _said:
        _said.add(gone)
        warn(f"{gone.place}: gone since it was tokenised; its tokens in the cache are used: {directory}")
    return gone


def tokens_dir(corpus: corpora.Corpus, data: DataConfig) -> Path:
    """The directory of the prepared tokens of `corpus`."""
    return cache_dir(data) / f"{corpus.name}-{label(data.tokenizer)}-v{LAYOUT}-{corpus.key}"


def _tokenised(corpus: corpora.Corpus, data: DataConfig) -> Path:
    target = tokens_dir(corpus, data)
    build_once(target, lambda: _tokenise(corpus, data, target))
    verify(target)
    if isinstance(corpus, corpora.Files) and corpus.patterns:
        remember_key(cache_dir(data), corpus.patterns, data.reading, corpus.key)
    return target


def tokens_of(corpus: corpora.Corpus, data: DataConfig, directory: Path, folder: Path) -> Iterator[tuple[Tokens, int]]:
    """Tokenise `corpus` as `tokenise` does, with the tokenizer.json in `directory` if there is one; show the progress.

    `folder` is for the files of the parts. In the end, prints what in the text is probably not meant as it is.
    """
    encoder = Encoder(data.tokenizer, directory, data.text_column, corpus.max_tokens)
    parts = corpora.parts(corpus, load_tokenizer(data.tokenizer, directory).cut_before, PART_BYTES)
    with progress(corpus.name, parts) as advance:
        seen = yield from tokenise(parts, encoder, folder, _workers(data, corpus, parts), advance)
    if replaced := sum(one.replaced for one in seen):
        first = next(first_replaced(part, one) for part, one in zip(parts, seen, strict=False) if one.replaced)
        print(f"{first}; {counted(replaced, 'such byte')} became U+FFFD; see data.encoding", file=sys.stderr)
    separators = {span.separator for part in parts for span in part if isinstance(span, Span)} - {None}
    if separators and not any(one.separated for one in seen):
        print(f"{corpus.place}: no line is data.separator={data.separator}: a file is a document", file=sys.stderr)
    if end_lines := sum(one.end_lines for one in seen):
        is_text = isinstance(span := parts[0][0], Span) and span.kind == "text"
        fix = f"data.separator='{END_LINE}' splits the text there" if is_text else "give each document a row of its own"
        lines = counted(end_lines, "line")
        print(f"{corpus.place}: {lines} with {END_LINE} alone became ordinary tokens; {fix}", file=sys.stderr)


def _workers(data: DataConfig, corpus: corpora.Corpus, parts: Sequence[Part]) -> int:
    """The number of processes for these parts: data.workers, else one per core; but no more than have work."""
    wanted = len(parts) if corpus.max_tokens is None else 1 + corpus.max_tokens // FILE_TOKENS
    return min(data.workers or min(count_cores(), wanted), max(1, len(parts)))


def data_hash(data: DataConfig) -> str:
    """Hash of the training and validation tokens, independent of paths. Prepares the tokens if they are missing."""
    return tokens_hash(*(TokenStream(directory) for directory in prepare(data) if directory))


def tokens_hash(*streams: TokenStream) -> str:
    """Hash of the tokens of the training stream, and of the validation stream if it has one of its own; 16 digits."""
    hashes = [stream.hash for stream in streams]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def _tokenise(corpus: corpora.Corpus, data: DataConfig, target: Path) -> None:
    """Tokenise a corpus into the directory `target`. Continues an earlier preparation that was stopped."""
    started = time.perf_counter()
    unfinished = target.with_name(f"{target.name}.tmp")
    folder = unfinished / "parts"
    with removed_if_refused(unfinished), data_errors(unfinished):
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(data.tokenizer, unfinished, lambda: _characters(corpus, data))
        about = {"corpus": corpus.name, "tokenizer": data.tokenizer}
        tokenizer, documents = load_tokenizer(data.tokenizer, unfinished), 0
        with ShardWriter(unfinished, tokenizer.n_vocab, about) as writer:
            for ids, begun in tokens_of(corpus, data, unfinished, folder):
                writer.append(ids)
                documents += begun
            if not writer.tokens:
                raise _no_text(corpus)
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
    if tokenizer.eot_token is None and documents > 1:
        missing, mend = "end of text", "data.tokenizer=bytes has one"
        if isinstance(tokenizer, FileTokenizer):
            missing, mend = f"token {' or '.join(END_OF_TEXT)}", "add one of them to its special tokens"
        print(
            f"{data.tokenizer}: has no {missing}, so documents follow one another without an end; {mend}",
            file=sys.stderr,
        )


def _no_text(corpus: corpora.Corpus) -> DataError:
    return DataError(f"{corpus.place}: contains no text; give files that are not empty")


def _characters(corpus: corpora.Corpus, data: DataConfig) -> str:
    """The distinct characters of a corpus. Raises `DataError` if there are none."""
    parts = corpora.parts(corpus, CharTokenizer.cut_before, PART_BYTES)
    found = characters(parts, data.text_column, _workers(data, corpus, parts))
    if not found:
        raise _no_text(corpus)
    return found
