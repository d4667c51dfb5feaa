"""`gptexp export`, judged by transformers: the same logits, the same ids, the same greedy text."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, e2e_then_slow
from judge import judge

import gptexp as package
from gptexp.data.characters import ByteTokenizer, CharTokenizer
from gptexp.data.encodings import Encoding
from gptexp.data.tokenizer import Tokenizer, load_tokenizer
from gptexp.data.tokenizer_json import for_oniguruma, merges, transformers_files
from gptexp.model.generate import Sampling, generate

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

# Every character that is no surrogate, between others, so that each regular expression meets each of them.
EVERY_CHARACTER = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
TEXT = "A dog sees"


def compare(found: dict[str, Any], directory: Path, text: str = TEXT) -> None:
    """What `judge` has found in an exported directory, with what the run in `directory` gives."""
    model, tokenizer, config = package.load_run(directory)
    ids = tokenizer.encode_ordinary(text)
    assert (found["ids"], found["text"]) == (ids, text)
    first = torch.arange(config.model.block_size)[None] % tokenizer.n_vocab
    with torch.no_grad():
        expected = model(first)[0, :, : tokenizer.n_vocab]
    torch.testing.assert_close(torch.tensor(found["logits"]), expected, rtol=0, atol=1e-5)
    how = Sampling(len(found["added"]), temperature=0.0)
    columns = list(generate(model, ids, tokenizer.n_vocab, tokenizer.eot_token, 1, how))
    assert columns, "the first token ends the text, so nothing would be compared"
    assert found["added"][: len(columns)] == [int(column[0]) for column in columns]


@pytest.mark.e2e
def test_transformers_computes_what_the_run_computes(finished_run: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    done = gptexp("export", str(finished_run), "hf/mine")
    assert done.returncode == 0, done.stderr
    assert "AutoModelForCausalLM.from_pretrained('hf/mine')" in done.stdout
    found = judge(str(tmp_path / "hf/mine"), "A", new_tokens=8)
    assert found["special"] == [50256, 50256]
    compare(found, finished_run, "A")
    assert sorted(path.name for path in (tmp_path / "hf/mine").iterdir()) == [
        "README.md", "config.json", "generation_config.json", "loss.png", "merges.txt", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "vocab.json",
    ]  # fmt: skip
    assert not list(tmp_path.glob("hf/.*"))


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["bytes", "chars"])
def test_a_model_without_biases_and_with_another_tokenizer(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, name: str
) -> None:
    run = [*tiny, f"data.tokenizer={name}", "model.bias=false", "optim.lr=1e-1", "hydra.run.dir=run"]
    assert gptexp("train", *run).returncode == 0
    done = gptexp("export", "run", "out")
    assert done.returncode == 0, done.stderr
    found = judge(str(tmp_path / "out"), TEXT, new_tokens=5)
    compare(found, tmp_path / "run")
    assert found["special"] == ([256, 256] if name == "bytes" else [None, None])
    card = (tmp_path / "out/README.md").read_text()
    assert "no biases" in card
    assert ("leaves out every other one" in card) == (name == "chars")


@pytest.mark.slow
def test_gpt2_124m_has_the_same_logits(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    kept = [text for text in tiny if not text.startswith(("model", "world.threads"))]
    one = [
        "model=gpt2",
        "batch.seq_len=64",
        "batch.total_batch_size=64",
        "batch.micro_batch_size=1",
        "train.max_steps=1",
    ]
    assert gptexp("train", *kept, *one, "data.val_tokens=64", "hydra.run.dir=run").returncode == 0
    assert gptexp("export", "run", "out").returncode == 0
    compare(judge(str(tmp_path / "out"), TEXT), tmp_path / "run")


@pytest.mark.slow
def test_transformers_4_57_agrees(finished_run: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """The last version before 5, from the package index, beside the packages that are installed."""
    pinned = ["transformers==4.57.6", "huggingface-hub==0.36.0", "tokenizers==0.22.1"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "packages", *pinned]
    subprocess.run(install, cwd=tmp_path, check=True)
    of_bytes = [*tiny, "data.tokenizer=bytes", "model.bias=false", "optim.lr=1e-1", "hydra.run.dir=bytes"]
    assert gptexp("train", *of_bytes).returncode == 0
    for run in (finished_run, tmp_path / "bytes"):
        out = tmp_path / f"of-{run.name}"
        assert gptexp("export", str(run), str(out)).returncode == 0
        command = [sys.executable, str(ROOT / "tests/judge.py"), str(out), "A"]
        env = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["version"] == "4.57.6"
        compare(found, run, "A")


@pytest.mark.e2e
def test_an_exported_model_trains_on_here(finished_run: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """There and back: the validation loss is that of the run."""
    assert gptexp("export", str(finished_run), "out").returncode == 0
    kept = [text for text in tiny if not text.startswith("model")]
    still = ["optim.lr=1e-30", "optim.weight_decay=0", "train.max_steps=1", "hydra.run.dir=again"]
    done = gptexp("train", *kept, "model=from_init", "init_from=out", *still)
    assert done.returncode == 0, done.stderr
    before, after = (json.loads((d / "summary.json").read_text()) for d in (finished_run, tmp_path / "again"))
    # The rows of the padding are gone: their share of the probability is what the losses may differ by.
    assert after["final_val_loss"] == pytest.approx(before["final_val_loss"], abs=2e-3)


# --- the card --------------------------------------------------------------------------------------------------------


def run_program(card: str, out: Path) -> None:
    """Run the card's program on the directory that it calls by its name."""
    [program] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert f'"{out.name}"' in program
    exec(program.replace(f'"{out.name}"', f'"{out}"'), {})


@pytest.mark.e2e
def test_the_card_says_what_the_run_says(finished_run: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    assert gptexp("export", str(finished_run), "out").returncode == 0
    card = (tmp_path / "out/README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    summary = json.loads((finished_run / "summary.json").read_text())
    [result] = head["model-index"][0]["results"]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values["loss"] == pytest.approx(summary["final_val_loss"], abs=1e-4)
    assert "# license: to be filled in" in card
    for said in ("| tokens | 512 in 4 steps |", "lr 0.0006", "| seed | 1337 |", summary["data_hash"], "gptexp train "):
        assert said in card, said
    assert "![Training and validation loss over tokens](loss.png)" in card
    assert "Evaluated after" not in card
    assert str(finished_run.parent) not in card, "a path of this machine"
    run_program(card, tmp_path / "out")


def test_the_card_of_a_stopped_run_is_about_the_checkpoint(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """The run goes on after its newest checkpoint, is evaluated once more, and is killed."""
    run = [*tiny, "data.tokenizer=chars", "train.eval_every_tokens=128", "train.save_every=2", "hydra.run.dir=run"]
    assert gptexp("train", *run, "train.max_steps=3").returncode == 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000003")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    (tmp_path / "run/summary.json").write_text(json.dumps({**summary, "status": "running"}))
    assert gptexp("export", "run", "out").returncode == 0
    card = (tmp_path / "out/README.md").read_text()
    of_checkpoint = json.loads(gptexp("evaluate", "run").stdout)
    assert of_checkpoint["step"] == 2
    assert "| tokens | 256 in 2 steps |" in card
    head = yaml.safe_load(card.split("---")[1])
    values = {metric["type"]: metric["value"] for metric in head["model-index"][0]["results"][0]["metrics"]}
    for kind, name in (("loss", "val/loss"), ("perplexity", "val/ppl"), ("bits_per_byte", "val/bpb")):
        assert values[kind] == pytest.approx(of_checkpoint[name], abs=1e-4), name
    assert of_checkpoint["val/loss"] != pytest.approx(summary["final_val_loss"], abs=1e-4)
    run_program(card, tmp_path / "out")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def theirs(tokenizer: Tokenizer, folder: Path) -> Any:
    from transformers import AutoTokenizer

    folder.mkdir()
    for name, content in transformers_files(tokenizer, 1024).items():
        (folder / name).write_text(content)
    return AutoTokenizer.from_pretrained(folder)


def test_gpt2s_files_are_those_of_openai() -> None:
    """sha256 of the published vocab.bpe and encoder.json."""
    files = transformers_files(load_tokenizer("gpt2"), 1024)
    digests = [hashlib.sha256(files[name].encode()).hexdigest() for name in ("merges.txt", "vocab.json")]
    assert digests == [
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ]


@pytest.mark.parametrize("name", ["gpt2", "bytes", "chars"])
@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_every_character_has_the_same_ids(name: str, stride: int, tmp_path: Path) -> None:
    every = EVERY_CHARACTER[::stride]
    tokenizer = CharTokenizer("".join(every)) if name == "chars" else load_tokenizer(name)
    library = theirs(tokenizer, tmp_path / "library")
    text = "".join(every) if name == "chars" else "".join(f"a{c} {c}1{c}{c}\n" for c in every)
    ids = tokenizer.encode_ordinary(text)
    assert library(text)["input_ids"] == ids
    assert library.decode(ids) == text


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base"])
def test_the_words_of_newer_encodings_are_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ranks cannot be downloaded here: GPT-2's, with the words into which these encodings split a text."""
    import tiktoken
    import tiktoken_ext.openai_public as published

    gpt2 = load_tokenizer("gpt2")
    assert isinstance(gpt2, Encoding)
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_, **__: gpt2.ranks)
    pattern = getattr(published, name)()["pat_str"]
    mixed = object.__new__(Encoding)
    mixed._encoding = tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=gpt2.ranks, special_tokens={"<|x|>": 50256}
    )
    library = theirs(mixed, tmp_path / "library")
    words = [
        "I'LL we'd 1234567 x",
        "  \n\n  a\r\n\r\nb ",
        "été Ünïcode ΑΒΓ日本",
        "end   ",
        "\n\t $%& a_b/c\n/",
        "²½٣٤٥٦",
    ]
    text = "".join(words) + "".join(f"a{c} {c}1{c}{c}\n" for c in EVERY_CHARACTER[::97])
    assert library(text)["input_ids"] == mixed.encode_ordinary(text)


def test_a_tokenizer_from_a_file_is_copied(tmp_path: Path) -> None:
    for name, content in transformers_files(ByteTokenizer(), 8).items():
        (tmp_path / name).write_text(content)
    again = transformers_files(load_tokenizer(str(tmp_path / "tokenizer.json")), 8)
    assert again["tokenizer.json"] == (tmp_path / "tokenizer.json").read_text()
    assert json.loads(again["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"


def test_a_merge_is_the_last_step_of_a_tokens_own_encoding() -> None:
    ranks = {b"a": 0, b"b": 1, b"ab": 2, b"aa": 3, b"aab": 4, b"xyz": 5}
    assert list(merges(ranks)) == [(b"a", b"b"), (b"a", b"a"), (b"a", b"ab")]
    assert for_oniguruma(r"\p{N}{1,3}+|\s++$") == r"\p{N}{1,3}|\s++\z"


# --- refused, and the hub --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["@RUN", "full"], 2, "full: exists and is not an empty directory; give another, or remove it"),
        (["@RUN", "full/file"], 2, "file: exists and is not an empty directory"),
        (["nowhere", "out"], 2, "nowhere: no such directory"),
        (["@RUN", "out", "--private"], 2, "--private: says how --push makes a model"),
        (["@RUN", "full/file/out"], 1, "out: cannot be written"),
        (["@RUN", "@RUN/hf"], 2, "hf: lies in the run @RUN, which keeps its own files alone; give another place"),
        (["@RUN", "out", "--push", "not a name!"], 2, "--push not a name!: no name of a model; give OWNER/NAME"),
        (["@RUN", "out", "--push", ""], 2, "no name of a model; give OWNER/NAME"),
    ],
)
def test_a_wrong_command_is_one_line_and_writes_nothing(
    finished_run: Path, gptexp: Gptexp, tmp_path: Path, argv: list[str], code: int, line: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    refused = gptexp("export", *(text.replace("@RUN", str(finished_run)) for text in argv))
    assert (refused.returncode, len(refused.stderr.splitlines())) == (code, 1), refused.stderr
    assert line.replace("@RUN", str(finished_run)) in refused.stderr
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["full", "full/file"]


@pytest.mark.e2e
@pytest.mark.parametrize("out", [".", "link"])
def test_an_empty_directory_is_filled_wherever_it_is(
    finished_run: Path, gptexp: Gptexp, tmp_path: Path, out: str
) -> None:
    if out == "link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "link").symlink_to("elsewhere")
    before = (tmp_path / out).stat().st_ino
    done = gptexp("export", str(finished_run), out)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / out).stat().st_ino == before
    assert {"model.safetensors", "README.md"} <= {path.name for path in (tmp_path / out).iterdir()}
    assert not list((tmp_path / out).glob(".*"))


@pytest.mark.parametrize("number", e2e_then_slow([signal.SIGTERM, signal.SIGINT]))
def test_a_stopped_export_leaves_nothing(
    finished_run: Path, start: Start, sabotage: Callable[[str, str], dict[str, str]], tmp_path: Path, number: int
) -> None:
    env = sabotage("gptexp.run.export", "m.save_file = lambda *_, **__: __import__('time').sleep(60)")
    process = start("export", str(finished_run), "out", env=env)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".export-*/complete/vocab.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert not list(tmp_path.glob(".export-*"))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """The environment in which a stand-in is the hub, and the folder with its files."""
    pytest.importorskip("huggingface_hub", reason="no huggingface_hub; pip install 'gptexp[hf]'")
    root = tmp_path / "hub"
    root.mkdir()
    command = [sys.executable, str(ROOT / "tests/hub_server.py"), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        yield {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_x"}, root
        process.kill()


@pytest.mark.e2e
def test_a_pushed_model_can_be_downloaded_and_trained(
    finished_run: Path, gptexp: Gptexp, tiny: list[str], hub: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    done = gptexp("export", str(finished_run), "out", "--push", "owner/name", env=hub[0])
    assert done.returncode == 0, done.stderr
    assert "uploaded: " in done.stdout
    assert {path.name: path.read_bytes() for path in hub[1].iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()
    }
    assert 'from_pretrained("owner/name")' in (tmp_path / "out/README.md").read_text()
    kept = [text for text in tiny if not text.startswith("model")]
    done = gptexp("train", *kept, "model=from_init", "init_from=owner/name", "hydra.run.dir=run", env=hub[0])
    assert done.returncode == 0, done.stderr


@pytest.mark.e2e
def test_without_the_hub_the_directory_stays(finished_run: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="no huggingface_hub; pip install 'gptexp[hf]'")
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    done = gptexp("export", str(finished_run), "out", "--push", "owner/name", env=nobody)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert "--push owner/name: not uploaded" in done.stderr
    assert "out is complete, to upload it later: hf auth login, then hf upload owner/name out" in done.stderr
    assert (tmp_path / "out/model.safetensors").is_file()
