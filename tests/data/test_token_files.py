"""Token files of other projects, read in place: the same ids, wrong guesses, damaged files."""

import json
import pickle
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from texts import ids_of, stream_of, write_megatron

from gptexp.config.schema import Config, DataConfig
from gptexp.data import token_files
from gptexp.data.comparison import compare
from gptexp.data.loader import build_dataset
from gptexp.data.prepare import prepare
from gptexp.data.stream import verify
from gptexp.process.errors import DataError, UserError

END_OF_TEXT = 50256
IDS = [i for text in range(40) for i in (*ids_of(f"Document {text} says: naïve 東京 def main() " * 30), END_OF_TEXT)]
SHORTER = IDS[:5000]


def raw(path: Path, ids: list[int], dtype: str = "<u2") -> None:
    np.array(ids, dtype).tofile(path)


def llmc(path: Path, ids: list[int], magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())


def llama(path: Path, ids: list[int]) -> None:
    llmc(path, ids, 20240801, 7, "<u4")


def npy(path: Path, ids: list[int], dtype: Any = np.uint16) -> None:
    np.save(path, np.array(ids, dtype))


def megatron(path: Path, ids: list[int], code: int = 8) -> None:
    write_megatron(path, ids, [1000] * (len(ids) // 1000) + [len(ids) % 1000], code)


Writer = Callable[[Path, list[int]], None]
# Format -> its writer, the names of the training and the validation file, and data.format if it is not found.
FORMATS: dict[str, tuple[Writer, str, str | None, str | None]] = {
    "nanoGPT": (raw, "train.bin", "val.bin", None),
    "llm.c": (llmc, "fineweb_train_000001.bin", "fineweb_val_000000.bin", None),
    "llm.c, 32 bits": (llama, "fineweb_train_000001.bin", "fineweb_val_000000.bin", None),
    "build-nanogpt": (npy, "edufineweb_train_000001.npy", "edufineweb_val_000000.npy", None),
    "numpy, 32 bits": (lambda p, ids: npy(p, ids, np.int32), "train.npy", "val.npy", None),
    "Megatron": (megatron, "my_text_document.bin", None, None),
    "Megatron, 32 bits": (lambda p, ids: megatron(p, ids, 4), "my_text_document.bin", None, None),
    "OLMo": (raw, "part-0-00000.npy", None, None),
    "OLMo, 32 bits": (lambda p, ids: raw(p, ids, "<u4"), "part-0-00000.npy", None, "raw32"),
}


def config(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(name="tokens", path=str(folder), cache_dir=str(folder.parent / "cache"), **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "theirs").mkdir()
    return tmp_path / "theirs"


@pytest.mark.parametrize("kind", FORMATS)
def test_the_ids_are_read_in_place(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    write, name, val_name, given = FORMATS[kind]
    write(folder / name, IDS)
    if val_name:
        write(folder / val_name, SHORTER)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    data = config(folder, format=given)
    train, val = prepare(data)
    assert stream_of(train) == IDS
    assert (val is None) == (val_name is None)
    assert val is None or stream_of(val) == SHORTER
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert sum(path.stat().st_size for path in train.iterdir()) < 2000  # a manifest, and no ids
    monkeypatch.setattr(token_files, "read", None)
    monkeypatch.setattr("gptexp.data.stream._check_content", None)
    assert prepare(data) == (train, val)  # reads nothing again


def test_shards_follow_one_another_by_name(folder: Path) -> None:
    for number in (3, 1, 2):
        llmc(folder / f"f_train_{number:06d}.bin", [number, *IDS])
    ids = stream_of(prepare(config(folder))[0])
    assert ids == [i for number in (1, 2, 3) for i in (number, *IDS)]
    glob = DataConfig(name="tokens", path=f"{folder}/f_train_00000[13].bin", cache_dir=str(folder.parent / "cache"))
    assert stream_of(prepare(glob)[0]) == [1, *IDS, 3, *IDS]


def test_validation_takes_the_first_tokens_of_their_split(folder: Path) -> None:
    """As the published losses on FineWeb: of 640 tokens with T=64, windows 0 to 9 of the validation file."""
    raw(folder / "train.bin", IDS)
    raw(folder / "val.bin", SHORTER)
    cfg = Config(data=config(folder, val_tokens=640))
    cfg.batch.seq_len = 64
    dataset = build_dataset(cfg)
    assert dataset.val_starts.tolist() == [64 * window for window in range(10)]
    rows = dataset.rows(dataset.val, dataset.val_starts)
    assert rows[:, 1:].ravel().tolist() == SHORTER[1:641]
    assert dataset.order.n_train == (len(IDS) - 1) // 64  # nothing is held out of the training file


@pytest.mark.parametrize("held_out", [{"val_split": "tail"}, {"val_ratio": 0.1}])
def test_nothing_is_held_out_beside_a_validation_split_of_their_own(folder: Path, held_out: dict[str, Any]) -> None:
    raw(folder / "train.bin", IDS)
    assert refusal(config(folder, **held_out)) is None
    raw(folder / "val.bin", SHORTER)
    error = refusal(config(folder, **held_out))
    assert error is not None
    assert error.startswith(
        f"data.{'='.join(map(str, *held_out.items()))}: {folder / 'val.bin'} is the validation text"
    )


def test_characters_of_nanogpt_come_with_their_table(folder: Path) -> None:
    text = "To be, or not to be: that is the question.\n" * 300
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    raw(folder / "train.bin", [number[c] for c in text])
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": number}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    with pytest.raises(DataError, match=r"meta.pkl: is there, so the ids are characters; use data.tokenizer=chars"):
        prepare(config(folder))
    train, _ = prepare(config(folder, tokenizer="chars"))
    from gptexp.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("chars", train)
    assert tokenizer.decode(stream_of(train)) == text
    characters = {i: c for c, i in number.items()}
    swapped = {**characters, 0: characters[1], 1: characters[0]}
    (folder / "meta.pkl").write_bytes(pickle.dumps({**meta, "itos": swapped}))
    train, _ = prepare(config(folder, tokenizer="chars"))
    assert load_tokenizer("chars", train).decode([0, 1]) == characters[1] + characters[0]
    (folder / "meta.pkl").unlink()
    raw(folder / "train.bin", [number[c] for c in text[:-1]])
    with pytest.raises(DataError, match=r"meta.pkl: is missing; leave out data.tokenizer=chars"):
        prepare(config(folder, tokenizer="chars"))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/gptexp-was-here"),))


@pytest.mark.parametrize(
    "content",
    [pickle.dumps(Evil()), b"", b"\x80\x04", pickle.dumps([1]), pickle.dumps({"vocab_size": 2, "itos": {0: "a"}}),
     pickle.dumps({"vocab_size": 1, "itos": {0: 7}})],
)  # fmt: skip
def test_a_table_of_characters_is_loaded_without_running_code(folder: Path, content: bytes) -> None:
    raw(folder / "train.bin", [0, 1] * 1000)
    (folder / "meta.pkl").write_bytes(content)
    with pytest.raises(DataError, match=r"meta.pkl: not nanoGPT's table of characters \(") as refused:
        prepare(config(folder, tokenizer="chars"))
    assert "\n" not in str(refused.value)
    assert not Path("/tmp/gptexp-was-here").exists()


def test_a_table_of_characters_takes_no_more_memory_than_it_has_content(folder: Path) -> None:
    raw(folder / "train.bin", [0, 1] * 1000)
    (folder / "meta.pkl").write_bytes(b"\x80\x02K\x01r" + (2**28).to_bytes(4, "little") + b".")  # memo 2^28
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"meta.pkl"):
        prepare(config(folder, tokenizer="chars"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def char_ids(path: Path, _: list[int]) -> None:
    raw(path, [i % 65 for i in range(20_000)])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 200001024\n" % (b"0" * 64)
NOISE = np.random.default_rng(0).integers(50257, size=40_000).tolist()

# What a wrong guess would read as ids -> writer, name, further keys, and the refusal.
WRONG: dict[str, tuple[Writer, str, dict[str, Any], str]] = {
    "32 bits as 16": (lambda p, ids: raw(p, ids, "<u4"), "train.bin", {}, "ids of 32 bits, read as 16.*format=raw32"),
    "16 bits as 32": (raw, "train.bin", {"format": "raw32"}, r"outside the 50,257 ids of data.tokenizer=gpt2"),
    "32 bits, asked for as 16": (lambda p, ids: raw(p, ids, "<u4"), "train.bin", {"format": "raw16"}, "ids of 32 bits"),
    "32 bits with padding": (lambda p, ids: raw(p, ids + [0] * (len(ids) // 2), "<u4"), "train.bin", {}, "ids of 32"),
    "64 bits with padding": (lambda p, ids: raw(p, ids + [0] * (len(ids) // 2), "<i8"), "train.bin", {}, "ids of 64"),
    "64 bits as 16": (lambda p, ids: raw(p, ids, "<i8"), "train.bin", {}, "ids of 64 bits, read as 16.*astype"),
    "64 bits as 32": (lambda p, ids: raw(p, ids, "<i8"), "train.bin", {"format": "raw32"}, "ids of 64 bits.*as 32"),
    "a pointer": (lambda p, _: p.write_bytes(POINTER), "train.bin", {}, "a git-lfs pointer.*run: git lfs pull"),
    "a pointer, asked for as ids": (
        lambda p, _: p.write_bytes(POINTER), "train.bin", {"format": "raw16"}, "a git-lfs pointer",
    ),
    "llm.c as raw": (llmc, "train.bin", {"format": "raw16"}, "header of the format llmc; leave out data.format=raw16"),
    "numpy as raw": (npy, "train.npy", {"format": "raw16"}, "header of the format npy; leave out data.format=raw16"),
    "characters as GPT-2's": (char_ids, "train.bin", {}, "its largest id is 64, too small for the 50,257 ids"),
    "another vocabulary": (lambda p, ids: raw(p, [i + 9000 for i in ids]), "train.bin", {}, "outside the 50,257 ids"),
    "GPT-2's ids as bytes": (raw, "train.bin", {"tokenizer": "bytes"}, "outside the 257 ids of data.tokenizer=bytes"),
    "padding": (lambda p, ids: raw(p, [*ids, *[END_OF_TEXT] * len(ids)]), "train.bin", {}, "are the end of a text"),
    "raw as llm.c": (raw, "train.bin", {"format": "llmc"}, "not llm.c's header of a stream of tokens"),
    "raw as numpy": (raw, "train.npy", {"format": "npy"}, "not numpy's format"),
    "an evaluation of llm.c": (lambda p, ids: llmc(p, ids, 20240522), "train.bin", {}, "llm.c's file of an evaluation"),
    "floats": (lambda p, ids: npy(p, ids, np.float32), "train.npy", {}, "must have one dimension and type"),
    "our own": (lambda p, _: p.write_bytes(b"gptexp\r\n" * 99), "train.bin", {}, "part of gptexp's own cache"),
    "parquet": (lambda p, _: p.write_bytes(b"PAR1" * 99), "train.bin", {}, "not a file of ids"),
    "an index": (lambda p, _: p.write_bytes(b"MMIDIDX\0\0" * 99), "train.bin", {}, "index; give the file of ids"),
    "litdata": (lambda p, _: p.with_name("index.json").touch(), "chunk-0.bin", {}, "so it is litdata.s or MosaicML.s"),
    "noise": (lambda p, _: raw(p, NOISE), "train.bin", {}, "its most frequent id has a share of 0.0.%, as in noise"),
    "only validation": (raw, "val.bin", {}, "no training file, only val.bin"),
}  # fmt: skip


@pytest.mark.parametrize("guess", WRONG)
def test_a_wrong_guess_is_refused_in_one_line(folder: Path, guess: str) -> None:
    write, name, keys, why = WRONG[guess]
    write(folder / name, IDS)
    with pytest.raises(UserError, match=why) as refused:
        prepare(config(folder, **keys))
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)
    assert not list((folder.parent / "cache").glob("*/"))


@pytest.mark.parametrize("write", [llmc, npy, megatron], ids=["llm.c", "numpy", "Megatron"])
def test_random_ids_with_a_header_are_read_as_one_makes_them_to_measure_speed(folder: Path, write: Writer) -> None:
    write(folder / "train.npy" if write is npy else folder / "train.bin", NOISE)
    assert stream_of(prepare(config(folder))[0]) == NOISE


@pytest.mark.parametrize("format", ["raw16", "raw32"])
def test_padding_with_zeros_is_not_another_width(folder: Path, format: str) -> None:
    padded = [*IDS, *[0] * len(IDS)]
    raw(folder / "train.bin", padded, "<u2" if format == "raw16" else "<u4")
    assert stream_of(prepare(config(folder, format=format))[0]) == padded


@pytest.mark.parametrize("keys", [{}, {"format": "raw16"}], ids=["found", "asked"])
def test_ids_of_16_bits_are_refused_beside_a_tokenizer_of_more(folder: Path, keys: dict[str, Any]) -> None:
    """Those above 65,535 have wrapped when they were saved."""
    vocab = {chr(0x10000 + i): i for i in range(70_000)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    raw(folder / "train.bin", [i * 7 % 70_000 % 65_536 for i in range(40_000)])
    with pytest.raises(UserError, match="ids of 16 bits, which cannot hold the 70,000 ids"):
        prepare(config(folder, tokenizer=str(folder / "tokenizer.json"), **keys))


def without_ends(path: Path, code: int, sentences: int) -> list[int]:
    """Write what Megatron-LM's preprocess_data.py --append-eod wrote until commit 788af6f7, and return the ids.

    Its `lengths` leave out the end of each document. Documents have 0 to `sentences` sentences.
    """
    draw, ids, lengths, ends = random.Random(code), list[int](), list[int](), [0]
    for _ in range(50):
        for _ in range(draw.randint(min(1, sentences - 1), sentences)):
            lengths.append(draw.randint(1, 700))
            ids += draw.choices(IDS[:-1], k=lengths[-1])
        if len(lengths) > ends[-1]:
            ids.append(END_OF_TEXT)
        ends.append(len(lengths))
    write_megatron(path, ids, lengths, code, ends)
    return ids


@pytest.mark.parametrize("code", [8, 4])
@pytest.mark.parametrize("sentences", [1, 3])
def test_an_index_that_leaves_out_the_ends_is_read(folder: Path, code: int, sentences: int) -> None:
    path = folder / "text.bin"
    ids = without_ends(path, code, sentences)
    assert stream_of(prepare(config(folder))[0]) == ids
    for damaged in (ids[:-1], [*ids, 5], [*ids[:-1], 5]):  # not as many more as there are documents; no end at an end
        raw(path, damaged, {8: "<u2", 4: "<i4"}[code])
        assert "text.bin" in str(refusal(config(folder)))


def test_the_index_of_a_multimodal_data_set_is_refused_as_such(folder: Path) -> None:
    megatron(folder / "text.bin", IDS)
    index = folder / "text.idx"
    sequences = len(IDS) // 1000 + 1
    index.write_bytes(index.read_bytes() + bytes(sequences))
    assert "multimodal" in str(refusal(config(folder)))


def test_files_of_two_kinds_are_refused(folder: Path) -> None:
    raw(folder / "train.bin", IDS)
    llmc(folder / "llm_train_000001.bin", IDS)
    assert refusal(config(folder)) == (
        f"{folder / 'train.bin'}: raw16 with ids of 16 bits, but {folder / 'llm_train_000001.bin'} is llmc with 16; "
        "give files of one kind"
    )


def test_only_the_files_for_training_and_validation_are_taken_from_a_folder(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("train.bin", "test.bin", "optimizer.bin", "Val.bin"):
        raw(folder / name, [*IDS, *range(ord(name[0]))])
    train, val = prepare(config(folder))
    assert stream_of(train) == [*IDS, *range(ord("t"))]
    assert val is not None
    assert stream_of(val) == [*IDS, *range(ord("V"))]
    assert "read 1 token file in place (train.bin): " in capfd.readouterr().err
    for name in ("train.bin", "Val.bin"):
        (folder / name).unlink()
    train, val = prepare(config(folder))  # no name says what is for training
    assert stream_of(train) == [*IDS, *range(ord("o"))]
    assert val is None


def refusal(data: DataConfig) -> str | None:
    try:
        prepare(data)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if not kind.startswith(("nanoGPT", "OLMo"))])
def test_damaged_files_are_refused_or_read_to_other_ids(folder: Path, kind: str) -> None:
    """Twenty damages of each format: cut, longer, or with changed bytes in the header, or in the index."""
    write, name, _, given = FORMATS[kind]
    draw, refused = random.Random(0), 0
    for number in range(20):
        path = folder / name
        write(path, IDS)
        broken = path.with_suffix(".idx") if kind.startswith("Megatron") and number % 2 else path
        content = bytearray(broken.read_bytes())
        damage = ("cut", "longer", "header", "header")[number // 2 % 4]
        if damage == "cut":
            del content[draw.choice([0, 1, 7, 40, 1000, len(content) - 1]) :]
        elif damage == "longer":
            content += bytes(draw.randint(1, 2000))
        else:
            content[draw.choice(range(12))] ^= 1 << draw.randint(0, 7)
        broken.write_bytes(content)
        error = refusal(config(folder, format=given))
        if error is None:
            assert damage == "header"  # a byte without a meaning, or that of an id
            continue
        refused += 1
        assert "\n" not in error
        assert str(folder) in error
    assert refused >= 10


def test_a_file_that_changes_later_is_noticed(folder: Path) -> None:
    raw(folder / "train.bin", IDS)
    train, _ = prepare(config(folder))
    raw(folder / "train.bin", IDS[:-1])
    with pytest.raises(DataError, match=r"train.bin: byte .* were written; restore the file"):
        verify(train)
    raw(folder / "train.bin", [*IDS[:-1], 7])
    with pytest.raises(DataError, match=r"train.bin: .*sha256 differs\); restore the file"):
        verify(train)
    assert json.loads((train / "manifest.json").read_text())["shards"][0]["path"] == str(folder / "train.bin")


def test_verifying_reads_the_files_again_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw(folder / "train.bin", IDS)
    raw(folder / "val.bin", SHORTER)
    train, val = prepare(config(folder))
    capsys.readouterr()
    compare(config(folder))
    assert capsys.readouterr().err.splitlines() == [
        f"{directory}: the files of its {len(ids):,} tokens have not changed since they were read"
        for directory, ids in ((train, IDS), (val, SHORTER))
    ]
