"""The pages for readers: their links and files exist, and their tables agree with the code and the tests."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT

import gptexp
from gptexp.cli import VERBS
from gptexp.config.metrics import Metric
from gptexp.config.schema import fields_by_key

PACKAGE = ROOT / "gptexp"
TESTS = ROOT / "tests"
TIERS = ("default", "e2e", "slow", "gpu")  # the order in which tests/README.md lists them
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


def test_readme_is_short_and_names_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for verb in VERBS:
        assert re.search(rf"gptexp {verb}\b|`{verb}( DIR| RUN_DIR)?`", text), verb
    assert f"## {gptexp.__version__}\n" in (ROOT / ".github" / "CHANGELOG.md").read_text()


def test_the_marked_block_is_the_test_command() -> None:
    """.ci/run runs the lines between the marker and the end of its block."""
    assert "<!-- tests -->\n```sh\npip install -e '.[test]' && pytest\n```\n" in (ROOT / "README.md").read_text()


def test_the_table_of_metrics_is_current() -> None:
    text = (PACKAGE / "loggers" / "README.md").read_text()
    for metric in Metric:
        assert f"| `{metric}` | {metric.unit} | {metric.meaning} |" in text, metric


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
    for path in (PACKAGE / folder).rglob("*.py"):
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


def test_every_test_file_has_a_row_in_the_table_of_promises() -> None:
    named = {file for files, _ in _rows() for file in files}
    assert {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")} - named == set()


def test_the_files_named_in_the_tests_page_exist() -> None:
    """Names in this page are relative to tests/."""
    named = re.findall(r"`([\w/]+\.py)`", (TESTS / "README.md").read_text())
    assert "compare_nanogpt.py" in named
    for name in [*named, *(file for files, _ in _rows() for file in files)]:
        assert (TESTS / name).is_file(), name


def test_the_tiers_of_a_row_are_those_of_its_files() -> None:
    rows = _rows()
    assert rows
    for files, tiers in rows:
        found = set().union(*(_tiers(TESTS / file) for file in files if (TESTS / file).is_file()))
        assert tiers == ", ".join(tier for tier in TIERS if tier in found), files


def _rows() -> list[tuple[list[str], str]]:
    """The files and the tiers of each row in the table of promises of tests/README.md."""
    table = (TESTS / "README.md").read_text().partition("## Which promise is tested where\n")[2]
    rows = re.findall(r"^\| .* \| (`.*`) \| (.*) \|$", table, re.MULTILINE)
    return [(re.findall(r"`([^`]*)`", files), tiers) for files, tiers in rows]


def _marked(node: ast.AST) -> set[str]:
    """The tiers whose markers `node` contains."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr in TIERS]
    tiers = {n.attr for n in found if isinstance(n.value, ast.Attribute) and n.value.attr == "mark"}
    if any(isinstance(n, ast.Name) and n.id == "e2e_then_slow" for n in ast.walk(node)):
        tiers |= {"e2e", "slow"}
    return tiers


def _marks_all_cases(decorator: ast.expr) -> bool:
    """Whether a decorator marks every case of its test."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize":
        values = decorator.args[1]
        return all(map(_marked, values.elts)) if isinstance(values, ast.List) else bool(_marked(values))
    return bool(_marked(decorator))


def _tiers(path: Path) -> set[str]:
    """The tiers of the tests in a file, read from its markers."""
    text = path.read_text()
    if not re.search(rf"mark\.({'|'.join(TIERS)})|e2e_then_slow\(", text):  # most; parsing all would take a second
        return {"default"}
    tree = ast.parse(text)
    marked = _marked(tree)
    of_file = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    tests = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    if any(map(_marked, of_file)) or all(any(map(_marks_all_cases, test.decorator_list)) for test in tests):
        return marked
    return marked | {"default"}


def test_common_questions_are_found_by_one_word_and_what_they_name_exists() -> None:
    page = (ROOT / "gptexp/run/README.md").read_text()
    rows = re.findall(r"^\| ([a-z ]+) \| ([^|]+\?) \| (.+) \|$", page, re.MULTILINE)
    words = {word for word, _, _ in rows}
    asked = {"outputs", "optimizer", "texts", "epochs", "continue", "resume", "memory", "wandb", "queue", "notebook"}
    assert asked <= words
    for word, question, answer in rows:
        assert re.search(rf"(?m)^\| {word} ", page), question
        for key in re.findall(r"`([a-z_]+\.[a-z_.]+)", answer):
            assert key in fields_by_key() or key.startswith("gptexp."), key
