"""From files to shards to batches."""

import hashlib
import json
import multiprocessing
import random
import resource
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from gptexp.batch import plan_batch
from gptexp.config import DataConfig
from gptexp.data import corpora, shards
from gptexp.data.loader import fingerprint, micro_batches, open_dataset, val_batches
from gptexp.data.prepare import prepare
from gptexp.data.shards import ShardWriter, TokenStream
from gptexp.data.tokenizer import END_OF_TEXT, VOCAB_SIZES, load_tokenizer
from gptexp.errors import DataError


def ids_of(text: str) -> list[int]:
    return load_tokenizer("gpt2").encode_ordinary(text)


def stream_of(directory: Path, **kwargs: int) -> list[int]:
    stream = TokenStream(directory, **kwargs)
    return stream.read(0, len(stream)).tolist()


def text_config(*paths: Path, **kwargs: object) -> DataConfig:
    return DataConfig(name="text", path=[str(p) for p in paths], **kwargs)  # type: ignore[arg-type]


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_tokenizer_is_gpt2s() -> None:
    """Known ids (the examples of OpenAI's and Hugging Face's own documentation), and no network."""
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.encode_ordinary("Hello world") == [15496, 995]
    assert tokenizer.encode_ordinary("<|endoftext|>") != [END_OF_TEXT]
    assert tokenizer.eot_token == END_OF_TEXT
    assert tokenizer.n_vocab == VOCAB_SIZES["gpt2"] == 50257
    assert tokenizer.decode(tokenizer.encode_ordinary("naïve 漢字 🙂\r\n\tx")) == "naïve 漢字 🙂\r\n\tx"


def test_ranks_are_checked_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptexp.data import tokenizer

    damaged = tmp_path / "gpt2.tiktoken"
    damaged.write_bytes(tokenizer._RANKS.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(tokenizer, "_RANKS", damaged)
    load_tokenizer.cache_clear()
    with pytest.raises(ValueError, match=r"[Hh]ash"):
        load_tokenizer("gpt2")
    load_tokenizer.cache_clear()


# --- corpora ---------------------------------------------------------------------------------------------------------


def test_pieces_tokenise_to_the_ids_of_the_whole(tmp_path: Path) -> None:
    """Random text of everything GPT-2's pattern treats apart, cut at every size."""
    alphabet = ["a", "Bc", "1", "23", " ", "  ", "\n", "\n\n", "\r\n", "\t", "'s", "'ll", "!", "…", "é", "漢", "\u00a0"]
    draw = random.Random(0)
    path = tmp_path / "text"
    cuts = 0
    for _ in range(300):
        text = "".join(draw.choices(alphabet, k=draw.randint(0, 60)))
        path.write_text(text, newline="")
        parts = list(corpora.pieces(path, piece_chars=draw.randint(1, 12)))
        assert "".join(parts) == text
        assert [i for part in parts for i in ids_of(part)] == ids_of(text)
        cuts += max(0, len(parts) - 1)
    assert cuts > 300


@pytest.mark.parametrize("between", ["\n", "\r\n", " ", "\t"])
def test_a_file_is_read_in_pieces_whatever_its_line_ends(tmp_path: Path, between: str) -> None:
    path = tmp_path / "text"
    path.write_text(between.join(["some words"] * 5000), newline="")
    assert max(map(len, corpora.pieces(path, piece_chars=1000))) < 1100


def test_stdlib_leaves_out_packages_and_tests() -> None:
    files = corpora.stdlib().files
    root = Path(sysconfig.get_path("stdlib"))
    inside = {part for f in files for part in f.relative_to(root).parts}
    assert not inside & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert {"argparse.py", "asyncio", "json"} <= inside
    assert 5e6 < corpora.stdlib().bytes < 40e6


def test_text_takes_globs_each_file_once_and_names_what_is_missing(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = corpora.text([f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"]).files
    assert [f.name for f in found] == ["a.txt", "b.txt", "c.txt"]
    with pytest.raises(DataError, match="nowhere: no such file"):
        corpora.text([str(tmp_path / "nowhere")])


def test_shakespeare_is_checked_by_size_and_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"To be, or not to be"
    source = tmp_path / "source.txt"
    source.write_bytes(body)
    monkeypatch.setattr(corpora, "SHAKESPEARE_URL", source.as_uri())
    with pytest.raises(DataError, match=r"tinyshakespeare.txt: 19 bytes, not tiny Shakespeare's 1,115,394"):
        corpora.shakespeare(tmp_path / "a")
    monkeypatch.setattr(corpora, "SHAKESPEARE_BYTES", len(body))
    monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", hashlib.sha256(body).hexdigest())
    assert corpora.shakespeare(tmp_path / "b").files[0].read_bytes() == body
    monkeypatch.setattr(corpora, "SHAKESPEARE_URL", (tmp_path / "gone").as_uri())
    assert corpora.shakespeare(tmp_path / "b").files[0].read_bytes() == body  # not downloaded again
    with pytest.raises(DataError, match="cannot be downloaded"):
        corpora.shakespeare(tmp_path / "c")


# --- prepare ---------------------------------------------------------------------------------------------------------


def test_documents_are_separated_and_a_single_file_is_unchanged(tmp_path: Path) -> None:
    a, empty, b = tmp_path / "a", tmp_path / "empty", tmp_path / "b"
    a.write_text("one <|endoftext|> document\n")
    empty.write_text("")
    b.write_text("another")
    assert stream_of(prepare(text_config(a))[0]) == ids_of(a.read_text())
    assert stream_of(prepare(text_config(a, empty, b))[0]) == [
        *ids_of(a.read_text()), END_OF_TEXT, *ids_of(b.read_text())
    ]  # fmt: skip


def test_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError, match="holds no text"):
        prepare(text_config(tmp_path / "empty"))


def test_a_changed_file_is_tokenised_anew(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("first")
    before = prepare(text_config(path))[0]
    assert prepare(text_config(path))[0] == before
    path.write_text("second, longer")
    assert stream_of(prepare(text_config(path))[0]) == ids_of("second, longer")
    assert stream_of(before) == ids_of("first")


def _prepare_in_process(path: str, cache: str, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    prepare(DataConfig(name="text", path=[path], cache_dir=cache))


def test_processes_that_want_it_at_once_tokenise_it_once(tmp_path: Path, corpus: Path, capfd: object) -> None:
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


def test_tokens_without_their_manifest_are_made_anew(tmp_path: Path, corpus: Path) -> None:
    data = DataConfig(name="text", path=[str(corpus)], cache_dir=str(tmp_path / "cache"))
    directory, _ = prepare(data)
    (directory / "manifest.json").unlink()
    assert prepare(data) == (directory, None)
    assert stream_of(directory) == ids_of(corpus.read_text())


def test_a_killed_preparation_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_name_with_glob_characters_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "d[1]").mkdir()
    for name in ("a[1].txt", "a1.txt"):
        (tmp_path / "d[1]" / name).write_text(name)
    assert [f.name for f in corpora.text([f"{tmp_path}/d[1]/a[1].txt"]).files] == ["a[1].txt"]


def test_unwritable_cache_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(DataError, match=r"data.cache_dir=.*cannot be written"):
        prepare(text_config(tmp_path / "file", cache_dir=str(tmp_path / "file" / "below")))


@pytest.mark.parametrize(("file", "limit"), [("text.txt", 20_000), ("/proc/self/mem", resource.RLIM_INFINITY)])
def test_what_the_file_system_refuses_is_one_line_that_names_the_file(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, corpus: Path, file: str, limit: int
) -> None:
    """A real process: a file that outgrows what may be written, like a full disk, and one that cannot be read."""
    (tmp_path / "text.txt").write_text(corpus.read_text())
    process = start(
        "prepare", "data=text", f"data.path={file}", f"data.cache_dir={tmp_path / 'cache'}",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    _, err = process.communicate(timeout=60)
    assert (process.returncode, len(err.splitlines())) == (3, 1), err
    assert ("tokens-00000.bin" if file == "text.txt" else file) in err
    assert "nothing was kept" in err
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
    assert prepare(text_config(tmp_path / "text.txt", cache_dir=str(tmp_path / "cache")))


# --- shards ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three_shards(tmp_path: Path) -> tuple[Path, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 50257, 2500).astype(np.uint16)
    with ShardWriter(tmp_path / "s", {"tokenizer": "gpt2"}, tokens_per_shard=1000) as writer:
        for part in np.array_split(ids, 7):
            writer.append(part)
    return tmp_path / "s", ids


def test_stream_reads_across_shards(three_shards: tuple[Path, np.ndarray]) -> None:
    directory, ids = three_shards
    assert len(list(directory.glob("*.bin"))) == 3
    stream = TokenStream(directory)
    assert len(stream) == 2500
    for start, count in ((0, 2500), (990, 20), (1000, 1000), (999, 1), (1000, 1), (2499, 1), (5, 2010), (7, 0)):
        assert np.array_equal(stream.read(start, count), ids[start : start + count])
    with pytest.raises(IndexError):
        stream.read(2490, 11)
    assert len(TokenStream(directory, max_tokens=1200)) == 1200


def test_threads_that_push_one_another_out_of_the_open_files_read_their_own(
    three_shards: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader reads ahead while an evaluation reads the same stream; one open file, three shards."""
    monkeypatch.setattr(shards, "OPEN_FILES", 1)
    directory, ids = three_shards
    stream = TokenStream(directory)

    def read(first: int) -> bool:
        starts = range(first, len(ids) - 7, 97)
        return all(np.array_equal(stream.read(start, 7), ids[start : start + 7]) for _ in range(20) for start in starts)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(8)))


def test_a_damaged_manifest_is_named(three_shards: tuple[Path, np.ndarray]) -> None:
    for text in ("", "{", "[]", '{"shards": []}'):
        (three_shards[0] / "manifest.json").write_text(text)
        with pytest.raises(DataError, match=r"manifest.json: no manifest .*delete"):
            TokenStream(three_shards[0])


def test_manifest_says_what_the_files_hold(three_shards: tuple[Path, np.ndarray]) -> None:
    directory, ids = three_shards
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["tokens"] == len(ids)
    assert manifest["max_id"] == ids.max()
    for shard in manifest["shards"]:
        body = (directory / shard["file"]).read_bytes()
        assert hashlib.sha256(body).hexdigest() == shard["sha256"]
        magic, version, width, count = shards.HEADER.unpack(body[: shards.HEADER.size])
        assert (magic, version, width, count) == (shards.MAGIC, 1, 2, shard["tokens"])


@pytest.mark.parametrize("damage", ["truncate", "append", "magic", "count", "remove"])
def test_a_damaged_shard_is_named(three_shards: tuple[Path, np.ndarray], damage: str) -> None:
    path = three_shards[0] / "tokens-00001.bin"
    body = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        head = {"magic": b"X" + body[1:], "count": body[:16] + b"\1" + body[17:]}
        path.write_bytes({"truncate": body[:-2], "append": body + b"\0\0", **head}[damage])
    with pytest.raises(DataError, match=r"tokens-00001.bin: .*delete .* to build it again"):
        TokenStream(three_shards[0])


# --- loader ----------------------------------------------------------------------------------------------------------


def dataset_of(corpus: Path, seq_len: int = 16, **kwargs: object) -> object:
    data = text_config(corpus, **{"val_tokens": 64, **kwargs})
    return open_dataset(data, *prepare(data), seq_len, 1337, 50304)


def read_all(dataset: object, micro_batch_size: int, world_size: int, steps: int) -> tuple[torch.Tensor, list[int]]:
    """Inputs of `steps` steps in global order, and the fingerprint after each step, over all ranks."""
    plan = plan_batch(8 * 16, micro_batch_size, 16, world_size)
    ranks = [micro_batches(dataset, plan, r, 0, steps, torch.device("cpu")) for r in range(world_size)]  # type: ignore[arg-type]
    inputs, total, prints = [], 0, []
    for _ in range(steps):
        for rank in ranks:
            for _ in range(plan.grad_accum_steps):
                batch = next(rank)
                assert torch.equal(batch.x[:, 1:], batch.y[:, :-1])
                inputs.append(batch.x)
                total = (total + batch.fingerprint) % 2**64
        prints.append(total)
    return torch.cat(inputs), prints


def test_a_step_is_the_same_tokens_for_every_cut(corpus: Path) -> None:
    dataset = dataset_of(corpus)
    reference, prints = read_all(dataset, 8, 1, 6)
    for micro_batch_size, world_size in ((1, 1), (2, 2), (4, 2), (1, 4), (2, 4)):
        inputs, others = read_all(dataset, micro_batch_size, world_size, 6)
        assert torch.equal(inputs, reference)
        assert others == prints
    assert len(set(prints)) == 6


def test_fingerprint_is_of_the_content_and_of_no_order() -> None:
    rows = np.arange(40, dtype=np.uint16).reshape(4, 10)
    assert fingerprint(rows) == fingerprint(rows[[2, 0, 3, 1]])
    assert fingerprint(rows) == (fingerprint(rows[:1]) + fingerprint(rows[1:])) % 2**64
    changed = rows.copy()
    changed[3, 9] += 1
    assert fingerprint(rows) != fingerprint(changed)


def test_reading_can_start_anywhere(corpus: Path) -> None:
    dataset = dataset_of(corpus)
    plan = plan_batch(8 * 16, 4, 16, 1)
    all_of_it = [b.x for b in micro_batches(dataset, plan, 0, 0, 5, torch.device("cpu"))]  # type: ignore[arg-type]
    from_third = [b.x for b in micro_batches(dataset, plan, 0, 3, 5, torch.device("cpu"))]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(all_of_it[6:]), torch.cat(from_third))


def test_sequential_order_is_the_text_itself_and_drops_the_tail(corpus: Path) -> None:
    dataset = dataset_of(corpus, order="sequential", val_tokens=0, max_tokens=16 * 20 + 7)
    inputs, _ = read_all(dataset, 8, 1, 3)
    ids = ids_of(corpus.read_text())
    assert inputs.flatten().tolist() == ids[:320] + ids[:64]  # 20 windows, then from the start


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_windows_do_not_depend_on_batch_or_world(corpus: Path, world_size: int) -> None:
    dataset = dataset_of(corpus, val_tokens=7 * 16)
    for batch_size in (1, 3, 8):
        rows = [
            x
            for rank in range(world_size)
            for x, _ in val_batches(dataset, batch_size, rank, world_size, torch.device("cpu"))  # type: ignore[arg-type]
        ]
        assert len(torch.cat(rows)) == 7
        first = torch.from_numpy(np.sort(dataset.val_windows)).tolist()  # type: ignore[attr-defined]
        ids = ids_of(corpus.read_text())
        assert torch.cat(rows).tolist() == [ids[w * 16 : w * 16 + 16] for w in first]


def test_held_out_windows_are_never_trained_on(corpus: Path) -> None:
    dataset = dataset_of(corpus, val_tokens=160)
    order = dataset.order  # type: ignore[attr-defined]
    trained = set(order.train_windows(np.arange(2 * order.n_train)).tolist())
    assert not trained & set(dataset.val_windows.tolist())  # type: ignore[attr-defined]
    assert len(trained) + 10 == order.n_windows


def test_val_path_takes_its_own_text_and_leaves_training_whole(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "val.txt"
    other.write_text("Something else entirely. " * 40)
    dataset = dataset_of(corpus, val_path=[str(other)], val_tokens=48)
    assert dataset.order.n_val == 0  # type: ignore[attr-defined]
    x = torch.cat([x for x, _ in val_batches(dataset, 2, 0, 1, torch.device("cpu"))])  # type: ignore[arg-type]
    ids = ids_of(other.read_text())
    assert len(x) == 3
    assert all(row.tolist() in [ids[w * 16 : w * 16 + 16] for w in range(len(ids) // 16)] for row in x)


def test_too_little_text_and_too_large_ids_are_named(tmp_path: Path, corpus: Path) -> None:
    short = tmp_path / "short"
    short.write_text("a b c")
    with pytest.raises(DataError, match=r"3 tokens, fewer than one window of seq_len\+1 = 17"):
        dataset_of(short)
    with pytest.raises(DataError, match="leave none of the corpus's"):
        dataset_of(corpus, val_tokens=10**6)
    data = text_config(corpus)
    with pytest.raises(DataError, match=r"outside model.vocab_size=100"):
        open_dataset(data, *prepare(data), 16, 0, 100)
