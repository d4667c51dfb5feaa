"""The pages for readers: what they link to exists, and what they say of the code is so."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT

import gptexp
from gptexp.cli import VERBS
from gptexp.loggers.run_log import METRICS

PACKAGE = ROOT / "gptexp"
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md"))
    if "outputs" not in path.parts
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:gptexp|conf|tests|launch)/[\w./]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in LINK.findall(text):
        name, _, anchor = target.partition("#")
        if name.startswith(("http", "../../actions/")):  # the badge is GitHub's own page
            continue
        path = (page.parent / name) if name else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings], (
                target
            )
    for name in FILE.findall(text):
        assert (ROOT / name).exists() or "NAME" in name, name


def test_readme_is_short_names_every_command_and_the_version() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for verb in VERBS:
        assert re.search(rf"gptexp {verb}\b|`{verb}( DIR| RUN_DIR)?`", text), verb
    assert f"version = {{{gptexp.__version__}}}" in text
    assert f"## {gptexp.__version__}\n" in (ROOT / ".github" / "CHANGELOG.md").read_text()


def test_the_marked_block_is_the_test_command() -> None:
    """.ci/run runs what stands between the marker and the end of its block."""
    assert "<!-- tests -->\n```sh\npip install -e '.[test]' && pytest\n```\n" in (ROOT / "README.md").read_text()


def test_the_table_of_metrics_is_current() -> None:
    text = (PACKAGE / "loggers" / "README.md").read_text()
    for name, (unit, meaning) in METRICS.items():
        assert f"| `{name}` | {unit} | {meaning} |" in text, name


def test_the_list_of_imports_is_current() -> None:
    text = (PACKAGE / "README.md").read_text()
    said = {line.split("->")[0].strip(): {*line.split("->")[1].split()} for line in text.splitlines() if " ->" in line}
    said = {folder: imports for folder, imports in said.items() if (PACKAGE / folder).is_dir()}
    folders = list(said)
    assert {*folders} == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for number, folder in enumerate(folders):
        assert said[folder] == _imported(folder), folder
        assert said[folder] <= {*folders[number + 1 :]}, folder


def _imported(folder: str) -> set[str]:
    """The other folders that the files of `folder` import from, type checking included."""
    found = set()
    for path in (PACKAGE / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            found |= {name.split(".")[1] for name in names if name.startswith("gptexp.")}
    return {name for name in found if (PACKAGE / name).is_dir()} - {folder}


def test_the_table_of_folders_names_files_that_exist() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\([^)]*\) \|.*\| (.*) \|$", (PACKAGE / "README.md").read_text(), re.MULTILINE)
    assert {folder for folder, _ in rows} == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for folder, names in rows:
        for name in re.findall(r"`(\w+\.py)`", names):
            assert (PACKAGE / folder / name).is_file(), (folder, name)
