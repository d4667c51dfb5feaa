"""Data sets of the hub, from a stand-in for its server: real processes, the real package datasets."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from conftest import e2e_then_slow
from texts import ids_of, stream_of

pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow; pip install 'gptexp[hf]'")
pytest.importorskip("datasets", reason="no datasets; pip install 'gptexp[hf]'")

TEXTS = [f"document {number}, of some length" for number in range(60)]
END_OF_TEXT = 50256

Start = Callable[..., subprocess.Popen[str]]
Prepare = Callable[..., subprocess.CompletedProcess[str]]

SUBSETS = """\
---
configs:
- config_name: default
  data_files: [{split: train, path: data/*}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/*}]
---
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    (tmp_path / "root/data").mkdir(parents=True)
    for number in range(3):
        path = tmp_path / f"root/data/train-{number:05d}-of-00003.parquet"
        write_rows(path, TEXTS[number * 20 : number * 20 + 20])
    script = Path(__file__).parents[1] / "hub_server.py"
    command = [sys.executable, str(script), str(tmp_path / "root"), str(tmp_path / "asked")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.fixture
def start_preparation(server: tuple[subprocess.Popen[str], int], tmp_path: Path) -> Start:
    def begin(*given: str, data: str = "hf") -> subprocess.Popen[str]:
        env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server[1]}", "HF_HOME": str(tmp_path / "home"),
               "GPTEXP_CACHE": str(tmp_path / "cache")}  # fmt: skip
        command = [sys.executable, "-m", "gptexp", "prepare", f"data={data}", "data.tokenizer=gpt2", *given]
        return subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return begin


@pytest.fixture
def prepare(start_preparation: Start) -> Prepare:
    def run(*given: str, data: str = "hf") -> subprocess.CompletedProcess[str]:
        process = start_preparation(*given, data=data)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


@pytest.mark.e2e
def test_a_data_set_is_streamed_once(server: tuple[subprocess.Popen[str], int], prepare: Prepare) -> None:
    first = prepare("data.path=owner/name")
    assert first.returncode == 0, first.stderr
    assert stream_of(Path(first.stdout.strip())) == [i for text in TEXTS for i in (END_OF_TEXT, *ids_of(text))][1:]
    server[0].kill()
    server[0].wait()
    again = prepare("data.path=owner/name")
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")


def write_rows(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)


@pytest.mark.parametrize(
    ("data", "repository", "folder"),
    e2e_then_slow(
        [
            ("fineweb_edu", "HuggingFaceFW/fineweb-edu", "sample"),
            ("tinystories", "roneneldan/TinyStories", "data"),
            ("openwebtext", "Skylion007/openwebtext", "data"),
        ]
    ),
)
def test_a_named_data_set_is_the_training_split_of_its_repository(
    prepare: Prepare, tmp_path: Path, data: str, repository: str, folder: str
) -> None:
    """Not the validation split, and of fineweb_edu the subset sample-10BT."""
    if data == "fineweb_edu":
        write_rows(tmp_path / "root/sample/000_00000.parquet", TEXTS[:2])
        (tmp_path / "root/README.md").write_text(SUBSETS)
    else:
        write_rows(tmp_path / "root/data/validation-00000-of-00001.parquet", ["held out"])
    done = prepare(data=data)
    assert done.returncode == 0, done.stderr
    texts = TEXTS[:2] if folder == "sample" else TEXTS
    assert stream_of(Path(done.stdout.strip())) == [i for text in texts for i in (END_OF_TEXT, *ids_of(text))][1:]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {"/".join(path.split("/")[3:5]) for path in asked if path.startswith("/api/datasets/")} == {repository}
    read = [path for path in asked if path.endswith(".parquet")]
    assert read
    assert all(path.startswith(f"/datasets/{repository}/resolve/{'0' * 40}/{folder}/") for path in read)


@pytest.mark.slow
def test_a_killed_preparation_goes_on_with_the_next_file(start_preparation: Start, tmp_path: Path) -> None:
    """Killed after its first and after its third file of six."""
    (tmp_path / "root/data").rename(tmp_path / "small")
    texts = [f"{text} {number} " + "of many words " * 100 for number, text in enumerate(TEXTS * 50)]
    for number in range(6):
        path = tmp_path / f"root/data/train-{number:05d}-of-00006.parquet"
        write_rows(path, texts[number * 500 : (number + 1) * 500])
    given = ["data.path=owner/name", "data.workers=1"]

    def complete() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.tmp/parts/part-*.ids")}

    before: dict[Path, int] = {}
    for files in (1, 3):
        process = start_preparation(*given)
        while len(complete()) < files:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.002)
        process.kill()
        process.communicate(timeout=30)
        assert before.items() <= complete().items()
        before = complete()
        assert len(before) < 6
    process = start_preparation(*given)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert stream_of(Path(out.strip())) == [i for text in texts for i in (END_OF_TEXT, *ids_of(text))][1:]


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("workers", "most", "texts"),
    [
        pytest.param(2, 200, 40, marks=pytest.mark.e2e),
        *(pytest.param(n, *of, marks=pytest.mark.slow) for n in (1, 2, 3) for of in ((50, 8), (200, 40)) if n != 2),
        pytest.param(2, 50, 8, marks=pytest.mark.slow),
    ],
)
def test_no_more_files_are_begun_than_max_tokens_and_the_workers_need(
    prepare: Prepare, tmp_path: Path, most: int, texts: int, workers: int
) -> None:
    """Of nine files with 140 tokens each. Of the last one that is needed, no more than these tokens."""
    for number in range(3, 9):
        write_rows(tmp_path / f"root/data/train-{number:05d}-of-00003.parquet", TEXTS[:20])
    expected = [i for text in TEXTS[:texts] for i in (END_OF_TEXT, *ids_of(text))][1:]
    given = ["data.path=owner/name", f"data.max_tokens={most}", "data.val_tokens=0", "batch.seq_len=8"]
    done = prepare(*given, f"data.workers={workers}", "--verify")
    assert done.returncode == 0, done.stderr
    assert stream_of(Path(done.stdout.strip())) == expected
    assert f"{texts} documents, {len(expected)} tokens" in done.stderr
    assert not list((tmp_path / "cache").glob("*.tmp"))
    asked = (tmp_path / "asked").read_text()
    begun = {int(number) for number in re.findall(r"train-(\d+)-of-00003.parquet$", asked, re.MULTILINE)}
    needed = -(-texts // 20)
    assert {*range(needed)} <= begun <= {*range(needed + workers - 1)}


@pytest.mark.e2e
def test_a_source_of_a_mix_is_read_as_far_as_its_share_needs(prepare: Prepare, tmp_path: Path) -> None:
    """Of three files with 140 tokens each, 150 tokens of one data set and 50 of the other."""
    mix = "data.mix={owner/name: 3, roneneldan/TinyStories: 1}"
    done = prepare(mix, "data.max_tokens=200", "data.val_tokens=0", "batch.seq_len=8", "data.workers=1", "--verify")
    assert done.returncode == 0, done.stderr
    ids = [i for text in TEXTS for i in (END_OF_TEXT, *ids_of(text))][1:]
    assert stream_of(Path(done.stdout.strip())) == ids[:150] + ids[:50]
    asked = (tmp_path / "asked").read_text()
    read = set(re.findall(r"^/datasets/(.+)/resolve/.*/train-(\d+)-of-00003.parquet$", asked, re.MULTILINE))
    assert read == {("owner/name", "00000"), ("owner/name", "00001"), ("roneneldan/TinyStories", "00000")}


@pytest.mark.e2e
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


@pytest.mark.e2e
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


@pytest.mark.e2e
def test_without_the_hub_the_error_says_what_to_do(
    server: tuple[subprocess.Popen[str], int], prepare: Prepare, tmp_path: Path
) -> None:
    server[0].kill()
    server[0].wait()
    refused = prepare("data.path=owner/name")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (3, 1), refused.stderr
    assert "without the hub, copy its files here and use data=text data.path=FILES" in refused.stderr
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
