"""A text that is removed after it was tokenised: commands go on with its tokens in the cache, and say so once."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BYTES, clean, summary
from real_runs import equal, newest

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def own(gptexp: Gptexp, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`gptexp …` with a token cache of its own."""
    env = clean(os.environ, tmp_path / "cache")
    return lambda *argv, **more: gptexp(*argv, env={**env, **more.get("env", {})})


@pytest.fixture
def texts(corpus: Path, tmp_path: Path) -> list[Path]:
    text = corpus.read_text()
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, part in zip(paths, (text[:40_000], text[40_000:50_000]), strict=True):
        path.write_text(part)
    return paths


SMALL = ["schedule=constant", "train.max_steps=4", "train.save_every=2", "train.keep_last=0"]
DATA = {
    "one text": [*BYTES, "data.path=a.txt"],
    "validation": ["data.tokenizer=chars", "data.path=a.txt", "data.val_path=b.txt"],
    "two texts": [*BYTES, "data.path=[a.txt,b.txt]"],
    "a glob": [*BYTES, "data.path='[ab].txt'"],
    "a mix": [*BYTES, "data.path=null", "data.mix={a.txt: 0.7, b.txt: 0.3}"],
}


def unfinished(run: Path) -> Path:
    """A copy of a run that was stopped after half of its steps."""
    half = shutil.copytree(run, run.with_name("half"))
    shutil.rmtree(newest(half))
    (half / "summary.json").write_text(json.dumps({**summary(half), "status": "failed"}))
    return half


@pytest.mark.e2e
@pytest.mark.parametrize("data", DATA)
def test_every_command_goes_on_with_the_cached_tokens(
    own: Gptexp, tiny: list[str], texts: list[Path], data: str, tmp_path: Path
) -> None:
    trained = own("train", *tiny, *DATA[data], *SMALL, "hydra.run.dir=run")
    assert trained.returncode == 0, trained.stderr
    before, planned = (own(*argv) for argv in (("evaluate", "run"), ("plan", "branch_from=run@2", "--json")))
    half = unfinished(tmp_path / "run")
    gone = [path for path in texts if path.name in " ".join(DATA[data])]
    for path in texts:
        path.unlink()

    done = own("resume", "half")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if str(tmp_path / "cache") in line]
    assert len(said) == (1 if data in ("one text", "two texts", "a glob") else len(gone))
    assert equal(half, tmp_path / "run")
    if data not in ("one text", "validation"):
        return
    assert own("evaluate", "run").stdout == before.stdout
    assert own("plan", "branch_from=run@2", "--json").stdout == planned.stdout
    for argv in (
        ("sharpness", "run", "--sequences", "2"),
        ("sample", "run", "--num-samples", "1", "--max-new-tokens", "2"),
        ("export", "run", "out"),
        ("train", "branch_from=run@2", "train.max_steps=3", "hydra.run.dir=branch"),
    ):
        done = own(*argv)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), (argv, done.stderr)
        assert sum(str(tmp_path / "cache") in line for line in done.stderr.splitlines()) <= len(gone)


@pytest.mark.e2e
def test_without_text_and_cache_there_is_one_line(
    own: Gptexp, tiny: list[str], texts: list[Path], tmp_path: Path
) -> None:
    assert own("train", *tiny, *DATA["one text"], *SMALL, "hydra.run.dir=run").returncode == 0
    unfinished(tmp_path / "run")
    texts[0].unlink()
    nowhere = {"GPTEXP_CACHE": str(tmp_path / "elsewhere")}
    for argv, code in ((("resume", "half"), 2), (("evaluate", "run"), 3), (("plan", "branch_from=run@2"), 2)):
        refused = own(*argv, env=nowhere)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (code, 1), refused.stderr
        assert str(texts[0]) in refused.stderr
    for more in (["data.tokenizer=chars"], ["data.text_column=other"]):  # not in the cache
        refused = own("prepare", "data=text", "data.path=a.txt", *BYTES[:1], *more)
        assert refused.returncode in (2, 3)
        assert "a.txt" in refused.stderr.splitlines()[-1]
    assert own("prepare", "data=text", "data.path=a.txt", *BYTES[:1], "--verify").returncode == 3
    shutil.rmtree(tmp_path / "cache")
    assert own("resume", "half").returncode == 2


@pytest.mark.e2e
@pytest.mark.parametrize("change", ["changed", "changed and removed", "partly removed"])
def test_a_text_that_has_changed_is_refused(
    own: Gptexp, tiny: list[str], texts: list[Path], change: str, tmp_path: Path
) -> None:
    assert own("train", *tiny, *DATA["two texts"], *SMALL, "hydra.run.dir=run").returncode == 0
    unfinished(tmp_path / "run")
    if change == "partly removed":
        texts[0].unlink()
    else:
        texts[0].write_text(texts[0].read_text()[1:])
    if change == "changed and removed":
        assert own("prepare", "data=text", "data.path=[a.txt,b.txt]", *BYTES[:1]).returncode == 0
        for path in texts:
            path.unlink()
    refused = own("resume", "half")
    assert refused.returncode == (2 if change == "partly removed" else 3)
    assert "a.txt" in refused.stderr or "trained on other data" in refused.stderr
