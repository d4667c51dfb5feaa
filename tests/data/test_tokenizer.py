"""GPT-2's tokenizer: known ids, and the check of its file."""

from pathlib import Path

import pytest

from gptexp.config.schema import VOCAB_SIZES
from gptexp.data.tokenizer import END_OF_TEXT, bytes_of_ids, load_tokenizer


def test_the_tokenizer_is_that_of_gpt2() -> None:
    """Ids from the examples in OpenAI's and Hugging Face's documentation."""
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.encode_ordinary("Hello world") == [15496, 995]
    assert tokenizer.encode_ordinary("<|endoftext|>") != [END_OF_TEXT]
    assert tokenizer.eot_token == END_OF_TEXT
    assert tokenizer.n_vocab == VOCAB_SIZES["gpt2"] == 50257
    assert tokenizer.decode(tokenizer.encode_ordinary("naïve 漢字 🙂\r\n\tx")) == "naïve 漢字 🙂\r\n\tx"


def test_the_ids_of_a_text_stand_for_its_bytes() -> None:
    tokenizer = load_tokenizer("gpt2")
    lengths = bytes_of_ids(tokenizer)
    text = "naïve 東京 🙂\n\tdef main():\n" * 3
    assert sum(lengths[i] for i in tokenizer.encode_ordinary(text)) == len(text.encode())
    assert lengths[tokenizer.eot_token] == 0


def test_a_damaged_vocabulary_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptexp.data import tokenizer

    damaged = tmp_path / "gpt2.tiktoken"
    damaged.write_bytes(tokenizer._RANKS.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(tokenizer, "_RANKS", damaged)
    load_tokenizer.cache_clear()
    with pytest.raises(ValueError, match=r"[Hh]ash"):
        load_tokenizer("gpt2")
    load_tokenizer.cache_clear()
