"""The package's layout: the imports of each file, and which imports are allowed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gptexp
from gptexp.cli import VERBS
from gptexp.config.metrics import Metric

PACKAGE = Path(gptexp.__file__).parent

# From the top down. A folder may import from the folders after it, and not from those before it.
FOLDERS = (
    "command", "sweep", "run", "training", "machine", "loggers", "reporting", "model", "data", "storage",
    "distributed", "config", "optim", "process",
)  # fmt: skip
# The same inside `reporting`.
FLOORS = ("page", "charts", "words", "statistics", "listings")
TOP = ""  # the verbs, cli and the package itself; they stand above all folders

# Third-party packages that only these folders or files may import.
FENCES = {
    "hydra": {"command", "config", "sweep"},
    "omegaconf": {"command", "config", "sweep"},
    "optuna": {"sweep/study.py"},
    "submitit": {"sweep/jobs.py", "sweep/cell_job.py"},
    "ray": {"sweep/ray.py", "sweep/ray_cluster.py"},
    "wandb": {"loggers"},
    "tensorboard": {"loggers/tensorboard.py"},
    "wandb_workspaces": {"loggers/dashboard.py"},
    "tiktoken": {"data/encodings.py"},
    "tiktoken_ext": {"data/encodings.py"},
    "tokenizers": {"data/tokenizer_file.py"},
    "pyarrow": {"data/documents.py"},
    "datasets": {"data/hub.py"},
    "huggingface_hub": {"storage/hub.py"},
    "lm_eval": {"run/harness.py"},
    "pytorch_optimizer": {"optim"},
    "schedulefree": {"optim"},
    "argparse": {TOP, "command"},
    "rich": {
        "data/progress.py", "loggers/console.py", "reporting/listings/terminal_table.py",
        "reporting/page/write.py", "run/benchmark.py", "run/communication.py",
    },
    "orjson": {"storage/reader.py"},
    "scipy": {"reporting", "run/communication.py"},
    "pandas": {"reporting/listings/frames.py"},
    "vl_convert": {"reporting/charts/drawer.py"},
    "safetensors": {"storage/checkpoint.py", "storage/tensor_files.py", "run/export.py"},
}  # fmt: skip

METRICS_FILE = "config/metrics.py"
RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class File:
    """A file of the package and what it imports."""

    def __init__(self, path: Path) -> None:
        self.name = path.relative_to(PACKAGE).as_posix()
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        self.module = ".".join(("gptexp", *(parts[:-1] if parts[-1] == "__init__" else parts)))
        self.folder = parts[0] if len(parts) > 1 else TOP
        self.imports = list(imports(self.tree))
        self.imports_with_types = list(imports(self.tree, for_types=True))

    @property
    def floor(self) -> int:
        return FOLDERS.index(self.folder) if self.folder != TOP else -1

    def inside(self, places: set[str]) -> bool:
        return bool({self.name, self.folder} & places)


def imports(tree: ast.AST, for_types: bool = False, in_functions: bool = True) -> Iterator[str]:
    """Yield the dotted names imported anywhere in `tree`, also in functions unless `in_functions` is false.

    `for_types`: also those inside `if TYPE_CHECKING`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and not in_functions:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types:
            yield from (name for other in node.orelse for name in imports(other, False, in_functions))
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; name the package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node, for_types, in_functions)


FILES = {file.module: file for file in map(File, sorted(PACKAGE.rglob("*.py")))}


def imported_files(file: File, for_types: bool = False) -> set[str]:
    """The modules of the package that `file` imports.

    The package itself, which Python imports before every other file, is left out.
    """
    found = set()
    for name in file.imports_with_types if for_types else file.imports:
        if name.split(".")[0] != "gptexp":
            continue
        module = name if name in FILES else name.rpartition(".")[0]
        assert module in FILES, f"{file.name}: {name}: no such module"
        found.add(module)
    return found - {"gptexp"}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node: sets of nodes that all reach one another."""

    def reached(start: str) -> set[str]:
        seen, left = set[str](), [start]
        while left:
            for target in arrows.get(left.pop(), set()) - seen:
                seen.add(target)
                left.append(target)
        return seen

    reach = {node: reached(node) for node in arrows}
    found = {
        frozenset(other for other in reach[node] if node in reach[other]) for node in arrows if node in reach[node]
    }
    return sorted(map(sorted, found))


def test_the_list_of_folders_is_complete() -> None:
    assert {file.folder for file in FILES.values()} == {TOP, *FOLDERS}


def test_folders_import_downwards_only() -> None:
    up = [
        f"{file.name} -> {module}"
        for file in FILES.values()
        for module in imported_files(file)
        if FILES[module].floor < file.floor
    ]
    assert sorted(up) == []


def test_types_are_imported_downwards_too() -> None:
    """Otherwise a folder could not be understood without those above it."""
    up = [
        f"{file.name} -> {module}"
        for file in FILES.values()
        for module in imported_files(file, for_types=True)
        if FILES[module].floor < file.floor
    ]
    assert sorted(up) == []


def test_the_floors_of_reporting_import_downwards_only() -> None:
    rooms = {module: file.name.split("/")[1] for module, file in FILES.items() if file.name.startswith("reporting/")}
    assert set(rooms.values()) == {*FLOORS, "__init__.py"}
    up = [
        f"{module} -> {other}"
        for module, room in rooms.items()
        for other in imported_files(FILES[module], for_types=True) & rooms.keys()
        if room in FLOORS and FLOORS.index(rooms[other]) < FLOORS.index(room)
    ]
    assert sorted(up) == []


def test_there_are_no_circular_imports() -> None:
    assert circles({file.module: imported_files(file) for file in FILES.values()}) == []


def test_a_circular_import_would_be_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("package", FENCES)
def test_a_third_party_package_is_imported_only_where_allowed(package: str) -> None:
    """Also for types."""
    users = {
        file.name
        for file in FILES.values()
        if package in {name.split(".")[0] for name in file.imports_with_types} and not file.inside(FENCES[package])
    }
    assert users == set()


def test_every_fenced_package_is_used() -> None:
    """A fence around a misspelt package would forbid nothing."""
    used = {name.split(".")[0] for file in FILES.values() for name in file.imports}
    assert FENCES.keys() <= used


def test_only_ranks_py_names_the_launchers_variables() -> None:
    for file in FILES.values():
        words = {n.value for n in ast.walk(file.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert file.name == "distributed/ranks.py" or not words & RANK_VARIABLES, file.name


def test_metrics_are_named_in_their_table_alone() -> None:
    """A literal of a name could be misspelt; a member of `Metric` cannot. `step`, `tokens` … are words too."""
    names = {str(metric) for metric in Metric if "/" in metric}
    beginnings = {f"{name.partition('/')[0]}/" for name in names}
    for file in FILES.values():
        literals = [n.value for n in ast.walk(file.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        parts = [n.values[0] for n in ast.walk(file.tree) if isinstance(n, ast.JoinedStr) and n.values]
        made = {part.value for part in parts if isinstance(part, ast.Constant)} & beginnings
        assert file.name == METRICS_FILE or not (made | (names & {*literals})), file.name


def test_no_file_instantiates_from_a_config_evaluates_text_or_unpickles() -> None:
    loads = 0
    for file in FILES.values():
        for name in file.imports:
            if name not in ("pickle.UnpicklingError", "pickle._Unpickler"):
                assert name.split(".")[0] not in {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, file.name
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef) and "Unpickler" in map(ast.unparse, node.bases):
                [find_class] = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "find_class"]
                assert [type(statement) for statement in find_class.body] == [ast.Raise], file.name
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called != "Unpickler", file.name  # only a class derived from it, which refuses all classes
            assert called not in {"eval", "exec", "compile", "__import__"}, (file.name, called)
            assert called.split(".")[-1] not in {"instantiate", "get_class", "get_object"}, (file.name, called)
            assert called not in {"yaml.unsafe_load", "yaml.full_load", "yaml.load_all"}, (file.name, called)
            if called == "yaml.load":
                assert ast.unparse(node.args[1]) in {"yaml.BaseLoader", *safe_loaders(file)}, file.name
            if called == "torch.load":
                loads += 1
                assert "weights_only=True" in ast.unparse(node), file.name
    assert loads  # otherwise torch is imported under another name, which this test does not find


def safe_loaders(file: File) -> set[str]:
    """The classes of a file that derive from YAML's SafeLoader."""
    classes = [node for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes if any("SafeLoader" in ast.unparse(base) for base in node.bases)}


# Modules that run before torch is imported: whole folders, and single files.
TORCH_FREE = {
    TOP, "command", "sweep", "reporting", "data", "storage", "config", "optim", "process",
    "distributed/ranks.py", "loggers/alerts.py", "model/flops.py", "run/__main__.py", "run/observe.py",
    "run/own_process.py", "run/requirements.py", "run/workloads.py",
}  # fmt: skip
WITH_TORCH = {
    "command/fitting.py",
    "command/leader.py",
    "command/planning.py",
    "command/prediction.py",
    "command/search_planning.py",
    "command/sweep_planning.py",
    "data/agreement.py",
    "data/loader.py",
    "optim/torch_optimizers.py",
    "storage/checkpoint.py",
    "storage/unneeded.py",
    "storage/tensor_files.py",
    "storage/weight_files.py",
}  # exceptions in those folders


def importing(package: str) -> set[str]:
    """`package`, and the modules whose import imports it."""
    loaded = {file.module: set(imports(file.tree, in_functions=False)) for file in FILES.values()}
    found: set[str] = set()
    more = {package}
    while more - found:
        found |= more
        more = {module for module, names in loaded.items() if any(is_of(name, found) for name in names)}
    return found


def is_of(name: str, modules: set[str]) -> bool:
    """Whether the dotted `name` is one of the modules, or something in one."""
    return bool({name, name.rpartition(".")[0], name.partition(".")[0]} & modules)


WITH_TORCH_ALREADY = {"optim", "process"}  # their functions that import torch are called after it is imported


def test_who_imports_torch_late_imports_it_permanently() -> None:
    """Otherwise collections of garbage, during the import and at the end of the process, take a third of its time."""
    with_torch, late = importing("torch"), 0
    for file in FILES.values():
        nodes = [*ast.walk(file.tree)]
        later = {name for node in nodes if isinstance(node, ast.FunctionDef) for name in imports(node)}
        blocks = [node for node in nodes if isinstance(node, ast.With) and "permanent()" in ast.unparse(node.items[0])]
        permanent = {name for block in blocks for name in imports(block)}
        if file.module not in with_torch and not file.inside(WITH_TORCH_ALREADY):
            slow = {name for name in later if is_of(name, with_torch)}
            assert slow <= permanent, file.name
            late += len(slow)
    assert late > 20


def test_modules_that_run_before_training_import_neither_torch_nor_wandb() -> None:
    modules = [
        file.module
        for file in FILES.values()
        if file.inside(TORCH_FREE) and file.name not in WITH_TORCH and file.name != "__main__.py"  # which runs the CLI
    ]
    assert len(modules) > 50
    script = (
        f"import sys, importlib\nfor name in {modules}:\n    importlib.import_module(name)\n"
        "    assert not {'torch', 'wandb'} & sys.modules.keys(), name"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


HEAVY = {"torch", "numpy", "scipy", "pandas", "rich", "wandb", "tiktoken"}  # torch takes a second, each a tenth or more
PRINTS_TABLES = {"ls", "rm"}  # with rich
SCRIPT = """
import sys
from gptexp.cli import main
for argv in {command_lines}:
    sys.argv = ["gptexp", *argv]
    try:
        main()
    except SystemExit as end:
        assert (end.code or 0) == {code}, (argv, end.code)
    assert not {heavy} & sys.modules.keys(), argv
"""
ANSWERED = [["train", "--cfg", "job"], *([verb, "--help"] for verb in VERBS if verb not in PRINTS_TABLES)]
REFUSED = [
    ["train", "optim.lr=-1"],
    *([verb, "lr=1"] for verb in ("plan", "prepare", "coordcheck", "bench")),
    *([verb, "nodir"] for verb in ("resume", "sample", "evaluate", "sharpness", "report", "compare", "status")),
]


@pytest.mark.parametrize(("command_lines", "code"), [(ANSWERED, 0), (REFUSED, 2)], ids=["answered", "refused"])
def test_help_and_refusals_import_no_heavy_package(command_lines: list[list[str]], code: int, tmp_path: Path) -> None:
    script = SCRIPT.format(command_lines=command_lines, code=code, heavy=HEAVY)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
