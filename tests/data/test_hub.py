"""Data sets of the hub, from a stand-in for its server: real processes, the real package datasets."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from texts import ids_of, stream_of

pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow; pip install 'gptexp[hf]'")
pytest.importorskip("datasets", reason="no datasets; pip install 'gptexp[hf]'")

pytestmark = pytest.mark.e2e
TEXTS = [f"document {number}, of some length" for number in range(60)]
END_OF_TEXT = 50256

Prepare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    (tmp_path / "root/data").mkdir(parents=True)
    for number in range(3):
        table = pyarrow.table({"text": TEXTS[number * 20 : number * 20 + 20]})
        path = tmp_path / f"root/data/train-{number:05d}-of-00003.parquet"
        pyarrow.parquet.write_table(table, path)
    script = Path(__file__).parents[1] / "hub_server.py"
    command = [sys.executable, str(script), str(tmp_path / "root"), str(tmp_path / "asked")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.fixture
def prepare(server: tuple[subprocess.Popen[str], int], tmp_path: Path) -> Prepare:
    def run(*given: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server[1]}", "HF_HOME": str(tmp_path / "home"),
               "GPTEXP_CACHE": str(tmp_path / "cache")}  # fmt: skip
        command = [sys.executable, "-m", "gptexp", "prepare", "data=hf", "data.tokenizer=gpt2", *given]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)

    return run


def test_a_data_set_is_streamed_once(server: tuple[subprocess.Popen[str], int], prepare: Prepare) -> None:
    first = prepare("data.path=owner/name")
    assert first.returncode == 0, first.stderr
    assert stream_of(Path(first.stdout.strip())) == [i for text in TEXTS for i in (END_OF_TEXT, *ids_of(text))][1:]
    server[0].kill()
    server[0].wait()
    again = prepare("data.path=owner/name")
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")


def test_the_revision_is_asked_for_and_has_tokens_of_its_own(prepare: Prepare, tmp_path: Path) -> None:
    directories = []
    for revision in ("", "@v1.0", "@refs/pr/1"):
        done = prepare(f"data.path=owner/name{revision}")
        assert done.returncode == 0, done.stderr
        directories.append(done.stdout)
        asked = (tmp_path / "asked").read_text()
        (tmp_path / "asked").unlink()
        revisions = set(re.findall(r"^/api/datasets/owner/name/revision/([^/?\s]+)", asked, re.MULTILINE))
        assert {unquote(one) for one in revisions} <= {revision[1:] or "main", "0" * 40}
        assert (quote(revision[1:], safe="") in revisions) == bool(revision)
    assert len({*directories}) == 3


@pytest.mark.parametrize(("most", "texts"), [(50, 8), (200, 40)])
def test_no_more_files_are_read_than_max_tokens_needs(prepare: Prepare, tmp_path: Path, most: int, texts: int) -> None:
    """Of three files with 140 tokens each. Of the last one that is needed, no more than these tokens."""
    expected = [i for text in TEXTS[:texts] for i in (END_OF_TEXT, *ids_of(text))][1:]
    for workers in (1, 2):
        given = ["data.path=owner/name", f"data.max_tokens={most}", "data.val_tokens=0", "batch.seq_len=8"]
        done = prepare(*given, f"data.workers={workers}", f"data.cache_dir={workers}", "--verify")
        assert done.returncode == 0, done.stderr
        assert stream_of(tmp_path / done.stdout.strip()) == expected
        assert f"{texts} documents, {len(expected)} tokens" in done.stderr
        if workers == 1:
            read = {path.rpartition("/")[2] for path in (tmp_path / "asked").read_text().splitlines()}
            assert {f"train-0000{n}-of-00003.parquet" for n in range(3) if texts > 20 * n} == {
                name for name in read if name.endswith(".parquet")
            }


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["data.path=owner/name", "data.text_column=body"], "no column body, only text; set data.text_column"),
        (["data.path=owner/name", "data.split=test"], "Bad split: test. Available splits: ['train']"),
        (["data.path=owner/another"], "the data set cannot be read"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(prepare: Prepare, given: list[str], why: str) -> None:
    refused = prepare(*given)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (3, 1), refused.stderr
    assert why in refused.stderr


def test_a_folder_with_the_name_of_a_data_set_is_not_read(
    server: tuple[subprocess.Popen[str], int], prepare: Prepare, tmp_path: Path
) -> None:
    """The package datasets would read it. A data set that is prepared can be used beside it."""
    (tmp_path / "owner").symlink_to(tmp_path / "root")
    (tmp_path / "root/name").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["of this machine"]}), tmp_path / "root/name/a.parquet")
    refused = prepare("data.path=owner/name")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (3, 1), refused.stderr
    assert "data.path=owner/name: is a path here as well, which would be read in its place" in refused.stderr
    (tmp_path / "owner").unlink()
    (tmp_path / "root/name/a.parquet").unlink()
    assert prepare("data.path=owner/name").returncode == 0
    (tmp_path / "owner").symlink_to(tmp_path / "root")
    assert prepare("data.path=owner/name").returncode == 0


def test_without_the_hub_the_error_says_what_to_do(
    server: tuple[subprocess.Popen[str], int], prepare: Prepare, tmp_path: Path
) -> None:
    server[0].kill()
    server[0].wait()
    refused = prepare("data.path=owner/name")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (3, 1), refused.stderr
    assert "without the hub, copy its files here and use data=text data.path=FILES" in refused.stderr
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
