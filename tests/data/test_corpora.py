"""The files of a corpus."""

import hashlib
import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from gptexp.data import corpora
from gptexp.data.documents import next_cut
from gptexp.process.errors import DataError


def test_the_stdlib_corpus_excludes_packages_and_tests() -> None:
    files = corpora.stdlib().files
    root = Path(sysconfig.get_path("stdlib"))
    inside = {part for f in files for part in f.relative_to(root).parts}
    assert not inside & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert {"argparse.py", "asyncio", "json"} <= inside
    assert 5e6 < sum(file.stat().st_size for file in files) < 40e6


def test_globs_select_each_file_once_and_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = corpora.text([f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"]).files
    assert [f.name for f in found] == ["a.txt", "b.txt", "c.txt"]
    with pytest.raises(DataError, match="nowhere: no such file"):
        corpora.text([str(tmp_path / "nowhere")])
    with pytest.raises(
        DataError, match=rf"{tmp_path}/sub: a folder; give its files, for example {tmp_path}/sub/\*.txt"
    ):
        corpora.text([str(tmp_path / "sub")])


def test_the_next_place_to_cut_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a text has none for many parts: the search reads all of it."""
    found = []
    monkeypatch.setattr(corpora, "next_cut", lambda *given: found.append(next_cut(*given)) or found[-1])
    (tmp_path / "a.txt").write_text("x" * 1000 + " " + "y" * 1000)
    (part,) = corpora.parts(corpora.text([str(tmp_path / "a.txt")]), " ", 5000)
    assert [(span.start, span.end) for span in part] == [(0, None)]
    spans = [span for part in corpora.parts(corpora.text([str(tmp_path / "a.txt")]), " ", 10) for span in part]
    assert [(span.start, span.end) for span in spans] == [(0, 1000), (1000, 2001)]
    assert found == [1000, 2001]


def test_shakespeare_is_checked_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"To be, or not to be"
    source = tmp_path / "source.txt"
    source.write_bytes(body)
    file = replace(corpora.SHAKESPEARE, url=source.as_uri())
    monkeypatch.setattr(corpora, "SHAKESPEARE", file)
    with pytest.raises(
        DataError, match=r"source.txt: 19 bytes came, which are not tiny Shakespeare \(sha256 differs\)"
    ):
        corpora.shakespeare(tmp_path / "a")
    assert not (tmp_path / "a" / "tinyshakespeare.txt").exists()
    shutil.copy(source, tmp_path / "a" / "tinyshakespeare.txt")
    with pytest.raises(DataError, match=r"tinyshakespeare.txt: not tiny Shakespeare \(sha256 differs\); delete it"):
        corpora.shakespeare(tmp_path / "a")
    file = replace(file, sha256=hashlib.sha256(body).hexdigest())
    monkeypatch.setattr(corpora, "SHAKESPEARE", file)
    assert corpora.shakespeare(tmp_path / "b").files[0].read_bytes() == body
    monkeypatch.setattr(corpora, "SHAKESPEARE", replace(file, url=(tmp_path / "gone").as_uri()))
    assert corpora.shakespeare(tmp_path / "b").files[0].read_bytes() == body  # not downloaded again
    with pytest.raises(DataError, match="cannot be downloaded"):
        corpora.shakespeare(tmp_path / "c")


def test_a_file_name_with_glob_characters_selects_that_file(tmp_path: Path) -> None:
    (tmp_path / "d[1]").mkdir()
    for name in ("a[1].txt", "a1.txt"):
        (tmp_path / "d[1]" / name).write_text(name)
    assert [f.name for f in corpora.text([f"{tmp_path}/d[1]/a[1].txt"]).files] == ["a[1].txt"]


@pytest.mark.parametrize("name", [b"a\xff.txt", "é漢.txt".encode(), b"plain.txt"])
def test_the_key_of_a_corpus_hashes_the_bytes_of_its_files_names(tmp_path: Path, name: bytes) -> None:
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    file.write_text("some text")
    stat = file.stat()
    line = os.fsencode(tmp_path) + b"/" + name + b"\0%d\0%d\0%d\n" % (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    assert corpora.text([f"{tmp_path}/*.txt"]).key == hashlib.sha256(line).hexdigest()[:16]
