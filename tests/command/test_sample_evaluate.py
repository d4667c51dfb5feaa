"""`gptexp sample` and `gptexp evaluate`: their output, and the arguments and runs that they refuse."""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ForkServer, summary
from real_runs import Finished, finished_run

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path, torch_server: ForkServer) -> Path:
    run: Finished = finished_run(tmp_path_factory, corpus, torch_server)
    return run.directory


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may damage."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_evaluate_prints_the_runs_own_loss_as_json(finished: Path, gptexp: Gptexp) -> None:
    own = json.loads(gptexp("evaluate", str(finished)).stdout)
    assert own["val/loss"] == pytest.approx(summary(finished)["final_val_loss"], rel=1e-6)
    assert (own["step"], own["tokens"]) == (40, 112)
    assert own["directory"] == str(finished)


def test_evaluate_with_a_tokenizer_that_lacks_ids_has_the_loss_alone(copied: Path, gptexp: Gptexp) -> None:
    (copied / "tokenizer.json").write_text('{"characters": "x"}')
    done = gptexp("evaluate", str(copied))
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert "val/loss" in found
    assert "val/bpb" not in found


def test_evaluate_accepts_another_text(finished: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Completely different words, never seen in training. " * 40)
    other = json.loads(gptexp("evaluate", str(finished), "--data", "other.txt", "--val-tokens", "96").stdout)
    assert other["tokens"] == 96
    assert other["val/loss"] > summary(finished)["final_val_loss"] + 1


@pytest.mark.e2e
def test_evaluate_prints_a_line_for_each_file_of_each_data(finished: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    files = {"texts/b.txt": "Nobody eats bread.\n", "texts/a.txt": "1234567890 ", "texts/[c].txt": "xyz "}
    for name, text in files.items():
        (tmp_path / name).write_text(text * 200)
    several = ("--data", "texts/b.txt", "--data", "texts/*.txt", "--data", str(tmp_path / "texts/[c].txt"))
    rows = [
        json.loads(line)
        for line in gptexp("evaluate", str(finished), *several, "--val-tokens", "48").stdout.splitlines()
    ]
    names = ["texts/b.txt", "texts/[c].txt", "texts/a.txt", str(tmp_path / "texts/[c].txt")]
    assert [row["data"] for row in rows] == names
    for name, row in zip(names, rows, strict=True):
        alone = gptexp("evaluate", str(finished), "--data", name, "--val-tokens", "48")
        assert json.loads(alone.stdout) == row
    assert len({row["val/loss"] for row in rows}) == 3
    assert {row["tokens"] for row in rows} == {48}
    missing = gptexp("evaluate", str(finished), "--data", "texts/a.txt", "--data", "texts/*.md")
    assert (missing.returncode, missing.stdout, len(missing.stderr.splitlines())) == (3, "", 1)
    assert "texts/*.md" in missing.stderr
    (tmp_path / "texts/short.txt").write_text("xyz")
    partly = gptexp("evaluate", str(finished), "--data", "texts/short.txt", *several, "--val-tokens", "48")
    assert (partly.returncode, list(map(json.loads, partly.stdout.splitlines()))) == (3, rows)
    errors = [line for line in partly.stderr.splitlines() if line.startswith("gptexp: ")]
    assert ["texts/short.txt" in line for line in errors] == [True]


@pytest.mark.e2e
def test_evaluate_reads_the_encoding_that_it_is_given(finished: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    text = "Le garçon a mangé près de la forêt. " * 30
    for name, encoding in (("utf.txt", "utf-8"), ("latin.txt", "latin-1")):
        (tmp_path / name).write_bytes(text.encode(encoding))

    def loss(*more: str) -> float:
        done = gptexp("evaluate", str(finished), *more, "--val-tokens", "48")
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout)["val/loss"])

    assert loss("--data", "latin.txt", "--encoding", "latin-1") == loss("--data", "utf.txt")
    for more in (["--data", "latin.txt"], ["--data", "utf.txt", "--encoding", "nonsense"], ["--encoding", "gbk"]):
        refused = gptexp("evaluate", str(finished), *more, "--val-tokens", "48")
        assert refused.returncode in (2, 3), more
        assert len(refused.stderr.splitlines()) == 1


def test_evaluate_refuses_more_tokens_than_were_held_out(finished: Path, gptexp: Gptexp) -> None:
    more = gptexp("evaluate", str(finished), "--val-tokens", "128")
    assert (more.returncode, "the run has 112; use fewer, or give --data FILE" in more.stderr) == (
        2,
        True,
    )


@pytest.mark.e2e
def test_evaluate_reads_what_a_share_at_the_end_holds_out(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    held_out = ["data.max_tokens=4001", "data.val_ratio=0.1", "data.val_split=tail"]
    assert gptexp("train", *tiny, *held_out, "data.offset=per_epoch", "hydra.run.dir=run").returncode == 0
    planned = json.loads(gptexp("plan", *tiny, *held_out, "--json").stdout)
    assert planned["corpus_tokens"] == (3600 - 1) // 16 * 16
    own = json.loads(gptexp("evaluate", "run").stdout)
    assert own["val/loss"] == pytest.approx(summary(tmp_path / "run")["final_val_loss"], rel=1e-6)
    assert own["tokens"] == (401 - 1) // 16 * 16
    assert json.loads(gptexp("evaluate", "run", "--val-tokens", "64").stdout)["tokens"] == 64
    more = gptexp("evaluate", "run", "--val-tokens", "416")
    assert (more.returncode, "--val-tokens=416: the run has 400; use fewer" in more.stderr) == (2, True), more.stderr
    (tmp_path / "other.txt").write_text("Completely different words. " * 40)
    other = gptexp("evaluate", "run", "--data", "other.txt")
    assert (other.returncode, "no number of tokens; give --val-tokens N" in other.stderr) == (2, True), other.stderr
    assert json.loads(gptexp("evaluate", "run", "--data", "other.txt", "--val-tokens", "96").stdout)["tokens"] == 96


def test_evaluate_refuses_a_run_without_validation_tokens(copied: Path, gptexp: Gptexp) -> None:
    config = copied / "config.yaml"
    assert "val_tokens: 112" in config.read_text()
    config.write_text(config.read_text().replace("val_tokens: 112", "val_tokens: 0"))
    nothing = gptexp("evaluate", str(copied))
    assert (nothing.returncode, "has no validation tokens; give --data FILE" in nothing.stderr) == (2, True)


@pytest.mark.parametrize("verb", ["sample", "evaluate"])
@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("n_head: 2", "n_head: 4", "model.n_head=4, and the weights were trained with 2; restore that value"),
        ("n_layer: 1", "n_layer: 10000", "model.n_layer=10000, and the weights were trained with 1"),
        ("tokenizer: gpt2", "tokenizer: r50k_base", "data.tokenizer=r50k_base, and the weights were trained with gpt2"),
    ],
)
def test_another_model_than_was_trained_is_refused(
    copied: Path, gptexp: Gptexp, verb: str, before: str, after: str, why: str
) -> None:
    """Also with weights of the same shapes, which would load."""
    config = copied / "config.yaml"
    assert before in config.read_text()
    config.write_text(config.read_text().replace(before, after))
    refused = gptexp(verb, str(copied))
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert why in refused.stderr


@pytest.mark.parametrize(("key", "size"), [("n_layer", 10_000), ("n_embd", 1_000_000)])
def test_a_strangers_huge_model_is_refused_before_it_is_built(
    copied: Path, gptexp: Gptexp, key: str, size: int
) -> None:
    """The checkpoint, too, claims that it was trained so."""
    state = copied / "checkpoints/step-00000040/state.json"
    for path, form in ((copied / "config.yaml", f"{key}: "), (state, f'"{key}": ')):
        path.write_text(re.sub(rf"{form}\d+", f"{form}{size}", path.read_text()))
    manifest = state.with_name("manifest.json")
    files = json.loads(manifest.read_text())
    text = state.read_bytes()
    manifest.write_text(json.dumps({**files, "state.json": [len(text), hashlib.sha256(text).hexdigest()]}))
    for verb in ("sample", "evaluate", "resume"):
        if verb == "resume":
            (copied / "summary.json").unlink()
        refused = gptexp(verb, str(copied), timeout=60)
        [line] = [line for line in refused.stderr.splitlines() if line.startswith("gptexp: ")]
        assert refused.returncode == 4, line
        assert "model.safetensors: does not fit the model (it has" in line


def test_evaluate_refuses_another_text_without_a_summary_too(copied: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    """The checkpoint holds the hash of the data as well."""
    (copied / "summary.json").unlink()
    assert gptexp("evaluate", str(copied)).returncode == 0
    (tmp_path / "now.txt").write_text("Another text. " * 500)
    config = yaml.safe_load((copied / "config.yaml").read_text())
    config["data"]["path"] = str(tmp_path / "now.txt")
    (copied / "config.yaml").write_text(yaml.safe_dump(config))
    refused = gptexp("evaluate", str(copied))
    assert (refused.returncode, "trained on other tokens" in refused.stderr) == (3, True), refused.stderr


def test_evaluate_refuses_a_text_that_has_changed(copied: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    (tmp_path / "now.txt").write_text("Another text. " * 500)
    config = copied / "config.yaml"
    text, replaced = re.subn(r"path: .*text\.txt", f"path: {tmp_path}/now.txt", config.read_text())
    assert replaced == 1
    config.write_text(text)
    changed = gptexp("evaluate", str(copied))
    assert (changed.returncode, "trained on other tokens" in changed.stderr) == (3, True)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            "config.yaml",
            "optim: {lr: 6e-4}",
            "lr=6e-4 in a saved AdamWConfig: wrong type; in YAML 6e-4 is text, write 6.0e-4",
        ),
        ("config.yaml", "[1, 2]", "a saved Config must be a mapping of keys to values"),
        ("effective.json", "", "effective.json: not JSON"),
        ("summary.json", "[]", "summary.json: not a JSON object"),
    ],
)
def test_a_damaged_run_directory_is_refused_without_a_traceback(
    copied: Path, gptexp: Gptexp, file: str, content: str, said: str
) -> None:
    (copied / file).write_text(content)
    done = gptexp("evaluate", str(copied))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_sample_prints_the_requested_samples_reproducibly(finished: Path, gptexp: Gptexp) -> None:
    args = ("--prompt", "The cat", "--num-samples", "3", "--max-new-tokens", "8")
    done = gptexp("sample", str(finished), *args)
    samples = done.stdout.rstrip("\n").split("\n---\n")
    assert done.returncode == 0, done.stderr
    assert len(samples) == 3
    assert all(s.startswith("The cat") for s in samples)
    assert gptexp("sample", str(finished), *args).stdout == done.stdout


@pytest.fixture
def sweep(finished: Path, tmp_path: Path) -> Path:
    """A sweep of the finished run, a diverged one, and a better one that did not complete."""
    root = tmp_path / "sweep"
    for name, changes in {
        "lr=0.01": {},
        "lr=0.02": {"status": "diverged", "final_val_loss": 0.1},
        "lr=0.03": {"status": "interrupted", "final_val_loss": 0.2},
    }.items():
        shutil.copytree(finished, root / name)
        (root / name / "summary.json").write_text(json.dumps({**summary(finished), **changes}))
    return root


@pytest.mark.e2e
def test_evaluate_and_sample_take_the_best_run_of_a_sweep(sweep: Path, finished: Path, gptexp: Gptexp) -> None:
    said = f"gptexp: {sweep}: its best run is lr=0.01, with a validation loss of "
    evaluated = gptexp("evaluate", str(sweep))
    assert (evaluated.returncode, len(evaluated.stderr.splitlines())) == (0, 1), evaluated.stderr
    assert evaluated.stderr.startswith(said)
    alone = json.loads(gptexp("evaluate", str(finished)).stdout)
    assert json.loads(evaluated.stdout) == {**alone, "directory": str(sweep / "lr=0.01")}
    few = ("--num-samples", "1", "--max-new-tokens", "4")
    sampled = gptexp("sample", str(sweep), *few)
    assert sampled.stderr == evaluated.stderr
    assert sampled.stdout == gptexp("sample", str(finished), *few).stdout


@pytest.mark.parametrize("verb", ["sample", "evaluate"])
def test_a_sweep_without_a_completed_run_exits_with_4(sweep: Path, gptexp: Gptexp, verb: str) -> None:
    shutil.rmtree(sweep / "lr=0.01")
    done = gptexp(verb, str(sweep))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (4, "", 1)
    assert f"{sweep}: of its 2 runs, none has completed with a validation loss that counts" in done.stderr


def test_sample_refuses_a_negative_top_k(finished: Path, gptexp: Gptexp) -> None:
    bad = gptexp("sample", str(finished), "--top-k", "-1")
    assert (bad.returncode, bad.stderr) == (2, "gptexp: config error: --top-k=-1: must be 0 or above\n")


@pytest.mark.parametrize(
    ("verb", "why"),
    [
        ("sample", "contains no run; give the directory of a run or a sweep"),
        ("evaluate", "contains no run; give the directory of a run or a sweep"),
        ("resume", "not a run directory"),
    ],
)
def test_verbs_refuse_a_directory_without_a_run(gptexp: Gptexp, tmp_path: Path, verb: str, why: str) -> None:
    done = gptexp(verb, str(tmp_path))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert why in done.stderr


def test_a_run_with_only_damaged_checkpoints_exits_with_4(copied: Path, gptexp: Gptexp) -> None:
    damaged = list(copied.glob("checkpoints/*/model.safetensors"))
    assert len(damaged) == 2
    for file in damaged:
        file.write_bytes(file.read_bytes()[:-1])
    done = gptexp("sample", str(copied))
    assert done.returncode == 4
    assert done.stderr.count("damaged checkpoint skipped: ") == 2
    assert "no intact checkpoint can be used" in done.stderr


def test_a_run_without_checkpoints_exits_with_4(copied: Path, gptexp: Gptexp) -> None:
    shutil.rmtree(copied / "checkpoints")
    done = gptexp("evaluate", str(copied))
    assert (done.returncode, "no checkpoint has been saved yet" in done.stderr) == (4, True)
