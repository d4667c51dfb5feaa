"""The tokenizers: known ids, the bytes that ids stand for, and the checks of their files."""

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public as published
from texts import blocks, decoded

from gptexp.config.vocabulary import VOCAB_SIZES, padded
from gptexp.data import encodings, tokenizer
from gptexp.data.characters import CharTokenizer, characters_of
from gptexp.data.documents import pieces
from gptexp.data.tokenizer import bytes_of_ids, document_start, load_tokenizer
from gptexp.data.tokenizer_json import transformers_files
from gptexp.process.errors import DataError

TEXT = "naïve 東京 🙂\r\n\tdef main():\n\n  return  x\n" * 3
END_OF_TEXT = 50256


def test_the_default_tokenizer_is_that_of_gpt2() -> None:
    """Ids from the examples in OpenAI's and Hugging Face's documentation."""
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.encode_ordinary("Hello world") == [15496, 995]
    assert gpt2.encode_ordinary("<|endoftext|>") != [END_OF_TEXT]
    assert gpt2.eot_token == document_start(gpt2) == END_OF_TEXT
    assert gpt2.n_vocab == VOCAB_SIZES["gpt2"] == 50257
    assert gpt2.decode(gpt2.encode_ordinary(TEXT)) == TEXT


def of_characters(tmp_path: Path) -> tokenizer.Tokenizer:
    CharTokenizer(characters_of([TEXT])).save(tmp_path / "tokenizer.json")
    return load_tokenizer("chars", tmp_path)


def from_library(tmp_path: Path, kind: str) -> Any:
    """A tokenizer that Hugging Face's package has trained on TEXT, and saved as tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers")
    pre, decoders, trainers = tokenizers.pre_tokenizers, tokenizers.decoders, tokenizers.trainers
    if kind == "bytes":
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer, library.decoder = pre.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre.ByteLevel.alphabet()
        )
    else:
        library = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
        library.pre_tokenizer = pre.Metaspace(prepend_scheme="never", split=False)
        library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=["a"], limit_alphabet=20)
    library.train_from_iterator([TEXT.split("東")[0]] * 9, trainer)
    content = json.loads(library.to_str())
    # A byte is no added token, as in the files of Llama.
    content["added_tokens"] = [one for one in content["added_tokens"] if not one["content"].startswith("<0x")]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("name", ["gpt2", "r50k_base", "bytes", "chars", "file of bytes", "file with byte fallback"])
def test_the_ids_of_a_text_stand_for_its_bytes(tmp_path: Path, name: str) -> None:
    if name.startswith("file"):
        from_library(tmp_path, name.split()[-1])
        loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    else:
        loaded = of_characters(tmp_path) if name == "chars" else load_tokenizer(name)
    ids = loaded.encode_ordinary(TEXT)
    lengths = bytes_of_ids(loaded)
    assert len(lengths) == loaded.n_vocab
    assert sum(lengths[i] for i in ids) == len(TEXT.encode())
    assert b"".join(loaded.decode_tokens_bytes(ids)) == TEXT.encode()
    assert loaded.decode(ids) == TEXT
    array = loaded.encode_array(TEXT)
    assert array.tolist() == ids
    assert array.dtype == np.uint16
    if loaded.eot_token is not None:
        assert lengths[loaded.eot_token] == 0


def test_the_ids_of_bytes_are_their_values() -> None:
    loaded = load_tokenizer("bytes")
    assert loaded.encode_ordinary(TEXT) == list(TEXT.encode())
    assert (loaded.n_vocab, loaded.eot_token) == (VOCAB_SIZES["bytes"], 256)
    assert loaded.decode([256, *"é".encode(), 0xFF, 256]) == "é\ufffd"


def test_the_ids_of_characters_are_those_of_nanogpt(tmp_path: Path) -> None:
    """Its data/shakespeare_char/prepare.py numbers the sorted set of all characters."""
    loaded = of_characters(tmp_path)
    number = {character: i for i, character in enumerate(sorted(set(TEXT)))}
    assert loaded.encode_ordinary(TEXT) == [number[character] for character in TEXT]
    assert (loaded.n_vocab, loaded.eot_token) == (len(number), None)
    assert loaded.decode([document_start(loaded)]) == min(TEXT)
    for text in ("a naive z", "\x00", "\U0010ffff"):
        unknown = next(character for character in text if character not in number)
        with pytest.raises(DataError, match=f"not among the {len(number)} characters") as error:
            loaded.encode_ordinary(text)
        assert f"character {unknown!r}" in str(error.value)


def test_a_vocabulary_of_characters_is_saved_whole(tmp_path: Path) -> None:
    """A new file replaces the old one, so that a kill leaves one of them, and no part of one."""
    path = tmp_path / "tokenizer.json"
    CharTokenizer("abc").save(path)
    content = path.read_text()
    with path.open() as before:
        CharTokenizer("xyz").save(path)
        assert before.read() == content
    assert load_tokenizer("chars", tmp_path).n_vocab == 3
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_a_tokenizer_json_gives_the_ids_of_the_library(tmp_path: Path, kind: str) -> None:
    library = from_library(tmp_path, kind)
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert loaded.encode_ordinary(TEXT) == library.encode(TEXT, add_special_tokens=False).ids
    assert loaded.n_vocab == library.get_vocab_size()
    assert loaded.eot_token == library.token_to_id("<|endoftext|>" if kind == "bytes" else "</s>")
    name = "<|endoftext|>" if kind == "bytes" else "</s>"
    assert loaded.eot_token not in loaded.encode_ordinary(f"a {name} in a text is text")
    assert load_tokenizer("chars", tmp_path).encode_ordinary(TEXT) == loaded.encode_ordinary(TEXT)


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_nothing_is_added_to_a_text_or_drawn(tmp_path: Path, kind: str) -> None:
    """Llama's file begins each text with <s>; dropout merges at random. An export encodes as training did."""
    library = from_library(tmp_path, kind)
    path = tmp_path / "tokenizer.json"
    content, expected = json.loads(path.read_text()), library.encode(TEXT, add_special_tokens=False).ids
    first = {"SpecialToken": {"id": "a", "type_id": 0}}
    special = {"a": {"id": "a", "ids": [expected[0]], "tokens": [library.id_to_token(expected[0])]}}
    sequence = [first, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": sequence, "pair": sequence, "special_tokens": special,
    }  # fmt: skip
    content["model"]["dropout"] = 0.5
    path.write_text(json.dumps(content))
    loaded = load_tokenizer(str(path))
    assert all(loaded.encode_ordinary(TEXT) == expected for _ in range(3))
    exported = transformers_files(loaded, 8)["tokenizer.json"]
    again = pytest.importorskip("tokenizers").Tokenizer.from_str(exported)
    assert all(again.encode(TEXT).ids == expected for _ in range(3))


def test_half_of_a_surrogate_pair_is_a_replacement_character() -> None:
    gpt2 = load_tokenizer("gpt2")
    for encode in (gpt2.encode_ordinary, lambda text: gpt2.encode_array(text).tolist()):
        assert encode("a \ud83d b") == gpt2.encode_ordinary("a \ufffd b")


@pytest.mark.e2e
@pytest.mark.parametrize("text", ["a" + " " * 1_500_000 + "b", "\n" * 1_500_000, " " * 700_000 + "\t" * 700_000 + "x"])
def test_a_million_blanks_have_the_ids_of_fewer(text: str) -> None:
    """tiktoken's regular expression overflows its stack at this length."""
    gpt2 = load_tokenizer("gpt2")
    few = text.replace(" " * 1000, " ").replace("\n" * 1000, "\n").replace("\t" * 1000, "\t")
    ids, of_few = gpt2.encode_array(text).tolist(), gpt2.encode_ordinary(few)
    assert gpt2.decode(ids) == text
    assert {*ids} == {*of_few}


ADDED = ["  ", "    ", "東京", "éé", "<0x41>"]


def changed(path: Path, **parts: Any) -> tokenizer.Tokenizer:
    """The tokenizer in `path` with other parts."""
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return load_tokenizer(str(path))


def test_an_added_token_stands_for_its_own_text(tmp_path: Path) -> None:
    """As GPT-NeoX and Pythia add runs of blanks to a vocabulary of bytes, which writes a blank as another character."""
    library = from_library(tmp_path, "bytes")
    assert library.add_tokens(ADDED) == len(ADDED)
    loaded = changed(tmp_path / "tokenizer.json", **json.loads(library.to_str()))
    text = "<0x41>".join([TEXT, *ADDED])
    ids = loaded.encode_ordinary(text)
    assert {library.token_to_id(token) for token in ADDED} <= {*ids}
    assert b"".join(loaded.decode_tokens_bytes(ids)) == text.encode()
    assert sum(bytes_of_ids(loaded)[id] for id in ids) == len(text.encode())


NORMALIZERS = {
    "bytes": [{"type": "Lowercase"}, {"type": "NFKC"}, {"type": "Prepend", "prepend": " "},
              {"type": "Strip", "strip_left": False, "strip_right": True},
              {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}],
    "fallback": [{"type": "Prepend", "prepend": "▁"}, {"type": "Nmt"}],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "normalizer"), [(kind, one) for kind, some in NORMALIZERS.items() for one in some])
def test_a_tokenizer_that_changes_a_text_counts_no_bytes(tmp_path: Path, kind: str, normalizer: Any) -> None:
    from_library(tmp_path, kind)
    assert bytes_of_ids(changed(tmp_path / "tokenizer.json", normalizer={"type": "NFC"}))
    loaded = changed(tmp_path / "tokenizer.json", normalizer=normalizer)
    with pytest.raises(DataError, match="its ids do not stand for the text's bytes"):
        bytes_of_ids(loaded)


@pytest.mark.parametrize("model", ["WordLevel", "WordPiece"])
def test_a_tokenizer_of_words_counts_no_bytes(tmp_path: Path, model: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(getattr(tokenizers.models, model)(unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = getattr(tokenizers.trainers, f"{model}Trainer")(vocab_size=200, special_tokens=["[UNK]"])
    library.train_from_iterator([TEXT], trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="its ids do not stand for the text's bytes"):
        bytes_of_ids(load_tokenizer(str(tmp_path / "tokenizer.json")))


@pytest.mark.parametrize("content", ["", "no JSON", "[]", "{}", '{"characters": ""}', '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_json_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer.json \(") as error:
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("largest", [10**6, 10**9, 2**32 - 1])
def test_a_tokenizer_whose_ids_have_large_gaps_is_refused(tmp_path: Path, largest: int) -> None:
    """Each id below the largest one would take memory."""
    pytest.importorskip("tokenizers")
    vocab = {"a": 0, "b": 1, "far": largest}
    content = {"added_tokens": [], "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"{largest:,}") as refused:
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert "tokenizer.json" in str(refused.value)


def test_a_damaged_vocabulary_of_gpt2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "gpt2.tiktoken"
    damaged.write_bytes(encodings._RANKS.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(encodings, "_RANKS", damaged)
    tokenizer._named.cache_clear()
    with pytest.raises(ValueError, match=r"[Hh]ash"):
        load_tokenizer("gpt2")
    tokenizer._named.cache_clear()


def test_an_encoding_that_cannot_be_downloaded_is_one_short_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at the proxy: the error of the system, and not the chain of those of three packages."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    tokenizer._named.cache_clear()
    with pytest.raises(DataError) as refused:
        load_tokenizer("p50k_base")
    assert str(refused.value) == (
        "data.tokenizer=p50k_base: tiktoken cannot download it (Connection refused); use gpt2, which needs no network, "
        "or set TIKTOKEN_CACHE_DIR to a folder that has it"
    )


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """tiktoken with its own patterns and special tokens, and few ranks: its files lie in the network."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for pair in (b"\n\n", b";\n", b"/\n", b"\n/", b"  ", b" \n", b"\r\n", b"!\n", b"a\n", b"'s", b"\t\t", b"\n "):
        ranks[pair] = len(ranks)
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_, **__: dict(ranks))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    tokenizer._named.cache_clear()
    yield
    tokenizer._named.cache_clear()


@pytest.mark.usefixtures("standing_in")
@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base", "o200k_harmony"])
def test_a_text_read_in_pieces_has_the_same_ids(name: str) -> None:
    """Random text with each class of characters that the patterns distinguish, in pieces of random sizes."""
    alphabet = ["a", "Bc", "1", "2345", " ", "  ", "\n", "\n\n", "\r\n", "\t", "'s", "'LL", "!", ";", "/", "é"]
    loaded, draw, cuts = load_tokenizer(name), random.Random(0), 0
    for _ in range(300):
        text = "".join(draw.choices(alphabet, k=draw.randint(0, 60)))
        parts = list(pieces(decoded(blocks(text, draw)), loaded.cut_before))
        assert "".join(parts) == text
        assert [i for part in parts for i in loaded.encode_ordinary(part)] == loaded.encode_ordinary(text)
        cuts += max(0, len(parts) - 1)
    assert cuts > 300


@pytest.mark.usefixtures("standing_in")
@pytest.mark.parametrize("name", ["p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony"])
def test_the_table_of_sizes_agrees_with_tiktoken(name: str) -> None:
    """An encoding has as many ids as its largest special token says; ids in gaps stand for no text."""
    loaded = load_tokenizer(name)
    assert loaded.n_vocab == VOCAB_SIZES[name]
    assert loaded.eot_token == {"p50k_edit": 50256, "cl100k_base": 100257}.get(name, 199999)
    assert loaded.decode([97, loaded.n_vocab - 2, 98]).startswith("a")
    assert loaded.encode_array("a").dtype == (np.uint32 if loaded.n_vocab > 65536 else np.uint16)


def test_the_table_has_the_size_that_tiktoken_expects_of_p50k_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its largest id is not a special token, so the ranks decide."""
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_, **__: {})
    assert VOCAB_SIZES["p50k_base"] == published.p50k_base()["explicit_n_vocab"]


def test_a_vocabulary_is_padded_to_the_next_multiple() -> None:
    sizes = [padded(n) for n in range(1, 3000)]
    for n, size in enumerate(sizes, 1):
        assert size % (128 if n >= 1024 else 64) == 0
        assert n <= size < n + (128 if n >= 1024 else 64)
    assert all(low <= high for low, high in pairwise(sizes))
    assert (padded(50257), padded(257), padded(65)) == (50304, 320, 128)
