"""Paths in the configuration, and the folder of YAML files."""

from pathlib import Path

import pytest

from gptexp.config.compose import compose
from gptexp.config.paths import conf_dir, matching_files, packaged_conf, saved_dataset_files
from gptexp.process.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a text file. Its name has glob characters."""
    folder = tmp_path / "d[1]"
    folder.mkdir()
    (folder / "x.txt").write_text("text")
    monkeypatch.chdir(folder)
    return folder


def test_a_relative_path_becomes_absolute(folder: Path) -> None:
    assert compose(["data=text", "data.path=x.txt"]).data.path == str(folder / "x.txt")


def test_glob_characters_in_the_working_directory_are_literal(folder: Path) -> None:
    pattern = compose(["data=text", "data.path=*.txt"]).data.path
    assert isinstance(pattern, str)
    assert matching_files(pattern) == [folder / "x.txt"]


@pytest.mark.parametrize(
    "state", ["[" * 100_000, "[]", '{"_data_files": 1000000000}', '{"_data_files": [{"filename": 7}]}', "9" * 5000]
)
def test_a_damaged_saved_data_set_is_refused(folder: Path, state: str) -> None:
    """Also one that names a file which is not there."""
    (folder / "state.json").write_text(state)
    with pytest.raises(ConfigError, match=r"state\.json") as refused:
        saved_dataset_files(folder)
    assert (refused.value.code, len(refused.value.problems)) == ("data-set-damaged", 1)


def test_an_empty_gptexp_conf_selects_the_packaged_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTEXP_CONF", "")
    assert conf_dir() == packaged_conf()


def test_a_conf_folder_without_config_yaml_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPTEXP_CONF", str(tmp_path))
    with pytest.raises(ConfigError, match=r"contains no config\.yaml"):
        conf_dir()
