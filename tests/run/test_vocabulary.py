"""`data.tokenizer` and `model.vocab_size=auto` in real runs: what is saved, and what a run needs afterwards."""

import hashlib
import http.server
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiktoken_ext.openai_public as published
import yaml
from conftest import runs, summary

from gptexp.config.vocabulary import VOCAB_SIZES
from gptexp.data.stream import TokenStream, read_manifest
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tokenizer_json(tmp_path: Path, corpus: Path) -> Path:
    """A byte-level tokenizer of 270 ids, trained on the corpus, that writes no capitals."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.normalizer = tokenizers.normalizers.Lowercase()
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train([str(corpus)], trainer)
    path = tmp_path / "my tokenizer.json"
    library.save(str(path))
    return path


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "n_vocab", "vocab_size"), [("bytes", 257, 320), ("chars", None, 64), ("FILE", 270, 320)]
)
def test_a_run_keeps_its_vocabulary(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, corpus: Path, tokenizer_json: Path,
    name: str, n_vocab: int | None, vocab_size: int,
) -> None:  # fmt: skip
    given = tokenizer_json.name if name == "FILE" else name
    n_vocab = n_vocab or len(set(corpus.read_text()))
    assert gptexp("train", *tiny, f"data.tokenizer={given}", "hydra.run.dir=out").returncode == 0
    saved = run_dir.load_config(tmp_path / "out")
    assert saved.model.vocab_size == "auto"
    assert run_dir.load_resolved(tmp_path / "out").model.vocab_size == vocab_size
    chosen = json.loads((tmp_path / "out/effective.json").read_text())
    assert (chosen["n_vocab"], chosen["vocab_size"]) == (n_vocab, vocab_size)
    assert f"the {n_vocab} ids of data.tokenizer=" in chosen["reasons"]["vocab_size"]

    evaluation = gptexp("evaluate", "out")
    evaluated = json.loads(evaluation.stdout)
    assert evaluated["val/loss"] == pytest.approx(summary(tmp_path / "out")["final_val_loss"], rel=1e-6)
    if name != "FILE":  # every character of the corpus is one byte, and one id
        assert evaluated["val/bpb"] == pytest.approx(evaluated["val/loss"] / math.log(2))
    else:
        assert "val/bpb" not in evaluated
        assert "no bits per byte: the tokenizer loses or changes parts of a text" in evaluation.stderr
        assert gptexp("export", "out", "exported").returncode == 0
        assert "`<s>`" in (tmp_path / "exported/README.md").read_text()

    elsewhere = tmp_path / "text.txt"
    elsewhere.write_text("Nobody sees bread. " * 60)
    tokenizer_json.unlink()
    assert json.loads(gptexp("evaluate", "out").stdout) == evaluated
    assert gptexp("evaluate", "out", "--data", elsewhere.name, "--val-tokens", "160").returncode == 0
    text = gptexp("sample", "out", "--prompt", "A dog", "--num-samples", "1").stdout
    assert text.startswith("A dog")
    if name == "chars":
        assert set(text) <= set(corpus.read_text())
        refused = gptexp("sample", "out", "--prompt", "zebra?")
        assert (refused.returncode, refused.stderr) == (
            3, f"gptexp: character 'z': not among the {n_vocab} characters of the vocabulary; use only those of the "
            "corpus that it was made from, or data.tokenizer=bytes\n",
        )  # fmt: skip


@pytest.mark.e2e
def test_a_stopped_run_goes_on_without_its_tokenizers_file(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, tokenizer_json: Path
) -> None:
    """Also if its data are a mix."""
    weights = f"data.mix={{{tmp_path}/a.txt: 1, {tmp_path}/b.txt: 1}}"
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"Nobody sees bread. {name} " * 200)
    mixed = [*(o for o in tiny if "data.path" not in o), weights]
    for out, run in (("plain", tiny), ("mixed", mixed)):
        given = [*run, f"data.tokenizer={tokenizer_json.name}", "train.save_every=1", f"hydra.run.dir={out}"]
        assert gptexp("train", *given).returncode == 0
        shutil.rmtree(tmp_path / out / "checkpoints/step-00000004")
        (tmp_path / out / "summary.json").write_text('{"status": "interrupted"}')
    tokenizer_json.unlink()
    for out in ("plain", "mixed"):
        done = gptexp("resume", out)
        assert done.returncode == 0, done.stderr
        assert summary(tmp_path / out)["steps"] == 4
        assert gptexp("sample", out, "--num-samples", "1").returncode == 0


def test_the_size_of_the_vocabulary_comes_from_the_checkpoint_if_the_choices_are_lost(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    assert gptexp("train", *tiny, "data.tokenizer=chars", "hydra.run.dir=out").returncode == 0
    (tmp_path / "out/effective.json").unlink()
    assert gptexp("sample", "out", "--num-samples", "1").returncode == 0


@pytest.mark.slow
def test_auto_and_its_number_are_one_cell_and_one_run(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    small = [*tiny, "data.tokenizer=bytes"]
    swept = gptexp("train", "-m", *small, "model.vocab_size=auto,320,321", "sweep.name=s")
    assert swept.returncode == 0, swept.stderr
    assert len(runs(tmp_path / "outputs/s")) == 2
    assert gptexp("train", *small, "train.max_steps=2", "hydra.run.dir=out").returncode == 0
    for size, code in (("320", 0), ("auto", 0), ("384", 2)):
        again = gptexp("train", *small, "train.max_steps=2", f"model.vocab_size={size}", "hydra.run.dir=out")
        assert again.returncode == code, again.stderr
    assert "model.vocab_size was 320, now 384; start a new run" in again.stderr


def test_a_plan_says_that_the_vocabulary_of_an_unread_corpus_is_unknown(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    (tmp_path / "new.txt").write_text("some text of 13 characters " * 100)
    given = [*tiny, "data.path=new.txt", "data.tokenizer=chars"]
    unread = gptexp("plan", *given)
    assert "the number of ids is unknown until the corpus is tokenised; the plan is for 128" in unread.stderr
    assert gptexp("prepare", *given).returncode == 0
    read = gptexp("plan", "--json", *given)
    assert read.stderr == ""
    assert json.loads(read.stdout)["effective"]["n_vocab"] == len(set("some text of 13 characters "))


@pytest.fixture
def tiktokens_network(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process whose tiktoken downloads o200k_base from a server here.

    The file has the bytes and 199,998 - 256 invented tokens. Only its address and its hash differ from the published.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"The", b" cat", b" dog", *(b"#%d" % number for number in range(199_998 - 259))]
    body = b"".join(b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    served = tmp_path / "served"
    served.mkdir()
    (served / "o200k_base.tiktoken").write_bytes(body)
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: handler(*args, directory=str(served)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source = Path(published.__file__).read_text()
    theirs = source.split('"https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"')[1].split('"')[1]
    source = source.replace(
        "https://openaipublic.blob.core.windows.net/encodings", f"http://127.0.0.1:{server.server_port}"
    )
    (tmp_path / "packages/tiktoken_ext").mkdir(parents=True)
    (tmp_path / "packages/tiktoken_ext/openai_public.py").write_text(
        source.replace(theirs, hashlib.sha256(body).hexdigest())
    )
    yield {
        **os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path / "tiktoken"),
        "PYTHONPATH": f"{tmp_path / 'packages'}:{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    server.shutdown()


@pytest.mark.e2e
def test_an_encoding_with_more_ids_than_16_bits_is_downloaded_and_trained_on(
    tiny: list[str], tmp_path: Path, corpus: Path, tiktokens_network: dict[str, str]
) -> None:
    given = [*tiny, "data.tokenizer=o200k_base"]

    def gptexp(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gptexp", *argv]
        return subprocess.run(command, cwd=tmp_path, env=tiktokens_network, capture_output=True, text=True, check=False)

    trained = gptexp("train", *given, "hydra.run.dir=out")
    assert trained.returncode == 0, trained.stderr
    directory = Path(gptexp("prepare", *given).stdout.splitlines()[0])
    manifest = read_manifest(directory)
    assert (manifest.dtype, manifest.n_vocab) == (np.dtype("<u4"), VOCAB_SIZES["o200k_base"])
    stream = TokenStream(directory)
    ids = stream.read(0, len(stream))
    text = corpus.read_bytes()
    assert ids.dtype == np.uint32
    assert np.isin(ids, range(259)).all()
    assert (ids == 257).sum() == text.count(b" cat")
    config = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert config["model"]["vocab_size"] == "auto"
    assert run_dir.load_resolved(tmp_path / "out").model.vocab_size == 200_064
    assert gptexp("sample", "out", "--num-samples", "1").returncode == 0

    (tmp_path / "served/o200k_base.tiktoken").unlink()
    for file in (tmp_path / "tiktoken").iterdir():
        file.unlink()
    (tmp_path / "new.txt").write_text("another text, so that it is tokenised again " * 99)
    refused = gptexp("prepare", *given, "data.path=new.txt")
    assert refused.returncode == 3
    assert refused.stderr.startswith("gptexp: data.tokenizer=o200k_base: tiktoken cannot download it (404")
    assert len(refused.stderr.splitlines()) == 1
