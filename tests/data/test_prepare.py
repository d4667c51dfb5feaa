"""From text to cached shards: a corpus is tokenised once, and again after its text changes."""

import errno
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ForkServer
from texts import ids_of, stream_of, text_config

from gptexp.config.schema import DataConfig
from gptexp.data import prepare as preparation
from gptexp.data.comparison import compare
from gptexp.data.documents import Part, Span
from gptexp.data.prepare import prepare
from gptexp.data.shards import ShardWriter, Tokens
from gptexp.data.tokenise import Encoder, tokenise
from gptexp.process.errors import DataError


def test_end_of_text_separates_several_files_and_is_not_added_to_one(tmp_path: Path) -> None:
    a, empty, b = tmp_path / "a", tmp_path / "empty", tmp_path / "b"
    a.write_text("one <|endoftext|> document\n")
    empty.write_text("")
    b.write_text("another")
    assert stream_of(prepare(text_config(a))[0]) == ids_of(a.read_text())
    assert stream_of(prepare(text_config(a, empty, b))[0]) == [
        *ids_of(a.read_text()), 50256, *ids_of(b.read_text())
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["<eos>", "</s>", "[END]"])
def test_a_tokenizer_without_a_known_end_of_text_is_named(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["one", "two", name]
    vocabulary = {word: id for id, word in enumerate(words)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="one"))
    library.add_special_tokens([name])
    library.save(str(tmp_path / "own.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "one.txt").write_text("two")
    own = str(tmp_path / "own.json")
    prepare(text_config(tmp_path / "one.txt", tokenizer=own))
    assert len(capsys.readouterr().err.splitlines()) == 1
    directory, _ = prepare(text_config(tmp_path / "a.jsonl", tokenizer=own))
    line = (
        f"{own}: has no token <|endoftext|> or <|end_of_text|> or </s> or <eos>, so documents follow one another "
        "without an end; add one of them to its special tokens"
    )
    unknown = name == "[END]"
    assert stream_of(directory) == ([0, 1] if unknown else [0, 2, 1])
    assert capsys.readouterr().err.splitlines()[1:] == ([line] if unknown else [])


def test_characters_have_no_end_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "b"}\n')
    (tmp_path / "one.txt").write_text("ab")
    lines = []
    for name in ("one.txt", "a.jsonl"):
        prepare(text_config(tmp_path / name, tokenizer="chars"))
        lines.append(capsys.readouterr().err.splitlines()[1:])
    line = "chars: has no end of text, so documents follow one another without an end; data.tokenizer=bytes has one"
    assert lines == [[], [line]]


def test_no_text_is_an_error(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("empty", "b", "c")]
    for file in files:
        file.write_text("")
    for tokenizer in ("gpt2", "chars"):
        with pytest.raises(DataError, match=f"^{files[0]}: contains no text; give files that are not empty$"):
            prepare(text_config(files[0], tokenizer=tokenizer))
        with pytest.raises(DataError, match=f"^{files[0]} and 2 other files: contains no text"):
            prepare(text_config(*files, tokenizer=tokenizer))


def test_a_changed_file_is_tokenised_again(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("first")
    before = prepare(text_config(path))[0]
    assert prepare(text_config(path))[0] == before
    path.write_text("second, longer")
    assert stream_of(prepare(text_config(path))[0]) == ids_of("second, longer")
    assert stream_of(before) == ids_of("first")


def test_a_bit_changed_under_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one plain text")
    before, _ = prepare(text_config(path))
    times = path.stat()
    path.write_bytes(path.read_bytes().replace(b"plain", b"pla\x69l"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    after, _ = prepare(text_config(path))
    assert stream_of(after) == ids_of("one plail text")
    assert stream_of(before) == ids_of("one plain text")


@pytest.mark.parametrize(
    ("change", "token"),
    [
        (lambda ids: ids, None),
        (lambda ids: [*ids[:30_000], 7, *ids[30_001:]], 30_000),
        (lambda ids: [7, *ids[1:]], 0),
        (lambda ids: ids[:-1], -1),
        (lambda ids: [*ids, 7], 0),
        (lambda ids: ids[:100], 100),
    ],
)
def test_verifying_compares_the_cache_with_the_text(
    tmp_path: Path, corpus: Path, change: Callable[[list[int]], list[int]], token: int | None
) -> None:
    """Also a cache whose hashes are right, as after a change of the text that no time shows."""
    data = text_config(corpus, cache_dir=str(tmp_path))
    directory, _ = prepare(data)
    ids = stream_of(directory)
    shutil.rmtree(directory)
    with ShardWriter(directory, 50257, {}, tokens_per_shard=10_000) as writer:
        writer.append(np.array(change(ids), np.uint16))
    assert prepare(data)[0] == directory  # finds nothing wrong
    if token is None:
        compare(data)
        return
    at = token if token > 0 or change(ids)[0] == 7 else len(ids) + token
    with pytest.raises(DataError, match=rf"differs from the text from token {at:,} on; delete it to tokenise"):
        compare(data)


def test_prepare_verify_reads_the_text_and_the_validation_text(
    light_server: ForkServer, tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "val.txt").write_text("held out " * 100)
    argv = ["prepare", "data=text", f"data.path={corpus}", "data.val_path=val.txt", "--verify"]
    done = light_server.ask(argv, tmp_path)
    assert done["code"] == 0, done["stderr"]
    train, val = done["stdout"].splitlines()
    verified = [line for line in done["stderr"].splitlines() if "are those of the text" in line]
    assert [line.partition(":")[0] for line in verified] == [train, val]
    shutil.rmtree(val)
    with ShardWriter(Path(val), 50257, {}) as writer:
        writer.append(np.array([1, 2, 3], np.uint16))
    refused = light_server.ask(argv, tmp_path)
    assert (refused["code"], refused["stderr"].splitlines()[-1]) == (
        3, f"gptexp: {val}: differs from the text from token 0 on; delete it to tokenise the text again"
    )  # fmt: skip


def _prepare_in_process(path: str, cache: str, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    prepare(DataConfig(name="text", path=[path], cache_dir=cache))


@pytest.mark.e2e
def test_processes_that_prepare_a_corpus_at_once_tokenise_it_once(tmp_path: Path, corpus: Path, capfd: object) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    args = (str(corpus), str(tmp_path / "cache"), barrier)
    processes = [context.Process(target=_prepare_in_process, args=args) for _ in range(4)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
    assert [p.exitcode for p in processes] == [0] * 4
    assert capfd.readouterr().err.count("tokenised text") == 1  # type: ignore[attr-defined]
    [manifest] = (tmp_path / "cache").glob("*/manifest.json")
    assert stream_of(manifest.parent) == ids_of(corpus.read_text())


def test_shards_without_a_manifest_are_built_again(tmp_path: Path, corpus: Path) -> None:
    data = DataConfig(name="text", path=[str(corpus)], cache_dir=str(tmp_path / "cache"))
    directory, _ = prepare(data)
    (directory / "manifest.json").unlink()
    assert prepare(data) == (directory, None)
    assert stream_of(directory) == ids_of(corpus.read_text())


def test_a_killed_preparation_leaves_no_valid_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_text("some text")
    data = text_config(path, cache_dir=str(tmp_path / "cache"))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "append", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(data)
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
    assert stream_of(prepare(data)[0]) == ids_of("some text")


@pytest.mark.e2e
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("tokenizer", ["gpt2", "chars"])
def test_nothing_stays_of_a_text_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, tokenizer: str
) -> None:
    """Also where earlier parts of it are complete."""
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text('{"text": "one row"}\n' * 500 + "oops\n")
    monkeypatch.setattr(preparation, "PART_BYTES", 4000)
    with pytest.raises(DataError, match=r"a.jsonl: line 501: not JSON"):
        prepare(text_config(path, cache_dir=str(cache), workers=workers, tokenizer=tokenizer))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_complete_parts_stay_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text('{"text": "one row"}\n' * 500)
    monkeypatch.setattr(preparation, "PART_BYTES", 4000)
    data = text_config(path, cache_dir=str(cache), workers=1)
    append, appended = ShardWriter.append, list[int]()

    def full(writer: ShardWriter, ids: Tokens) -> None:
        appended.append(len(ids))
        if len(appended) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(writer, ids)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "append", full)
        with pytest.raises(DataError, match=r"tmp: No space left on device; no tokens were saved"):
            prepare(data)
    assert len(list(cache.glob("*.tmp/parts/part-*.ids"))) == 3
    assert stream_of(prepare(data)[0]) == [*ids_of("one row"), *[50256, *ids_of("one row")] * 499]


def test_parts_that_are_there_at_the_start_do_not_count_as_tokenised_now(tmp_path: Path) -> None:
    parts: list[Part] = []
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("word " * (number + 1))
        parts.append([Span(tmp_path / f"{number}.txt", "text")])

    def made() -> list[tuple[int, int]]:
        calls = list[tuple[int, int]]()
        encoder = Encoder("bytes", tmp_path, "text", None)
        for _ in tokenise(parts, encoder, tmp_path, 1, lambda *call: calls.append(call)):
            pass
        return calls

    assert made() == [(0, 6), (1, 11), (2, 16)]
    next(tmp_path.glob("part-000001-*")).unlink()
    assert made() == [(0, 0), (1, 11), (2, 0)]


def test_an_unwritable_cache_raises_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(DataError, match=r"data.cache_dir=.*cannot be written"):
        prepare(text_config(tmp_path / "file", cache_dir=str(tmp_path / "file" / "below")))


@pytest.mark.e2e
@pytest.mark.parametrize(("file", "limit"), [("text.txt", 20_000), ("/proc/self/mem", resource.RLIM_INFINITY)])
def test_an_error_of_the_file_system_is_one_line_that_names_the_file(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, corpus: Path, file: str, limit: int
) -> None:
    """In a real process: its shard exceeds the limit of file sizes, or its text cannot be read."""
    (tmp_path / "text.txt").write_text(corpus.read_text())
    process = start(
        "prepare", "data=text", f"data.path={file}", f"data.cache_dir={tmp_path / 'cache'}",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    _, err = process.communicate(timeout=60)
    assert (process.returncode, len(err.splitlines())) == (3, 1), err
    assert re.search(r"part-000000-[0-9a-f]{8}\.ids: " if file == "text.txt" else f"{file}: ", err)
    assert "no tokens were saved" in err
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
    assert prepare(text_config(tmp_path / "text.txt", cache_dir=str(tmp_path / "cache")))
