"""The house: which part may import which, read from the imports themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import gptexp

PACKAGE = Path(gptexp.__file__).parent

# From the ground up; a module imports from its own floor or below, `config` and `errors` nothing of ours.
FLOORS = [
    {"errors", "config", "terminal"},
    {
        "batch",
        "schedule",
        "flops",
        "divergence",
        "noise_scale",
        "alerts",
        "signals",
        "versions",
        "loss",
        "phases",
        "machine",
        "data",
    },
    {"model", "memory", "distributed", "run_dir", "attention", "small_gradients"},
    {"optim", "checkpoint", "check", "overrides", "ceilings", "profiling"},
    {"effective", "evaluate", "loggers", "step_report"},
    {"trainer", "load", "sample"},
    {"summary", "build", "faults", "report"},
    {"trial"},
    {"run"},
    {"launch", "compose", "sweep", "calibrate", "pool"},
    {"train", "plan", "prepare", "resume", "bench", "verify", "status", "dashboard"},
    {"watch"},
    {"cli", "__main__"},
]
FLOOR = {module: number for number, floor in enumerate(FLOORS) for module in floor}

# Third-party packages that only these modules may import.
FENCES = {
    "hydra": {"compose", "overrides", "sweep", "train"},
    "omegaconf": {"compose", "overrides", "sweep"},
    "optuna": {"sweep.study"},
    "submitit": {"sweep.launchers"},
    "wandb": {"loggers.wandb", "dashboard"},
    "wandb_workspaces": {"dashboard"},
    "tiktoken": {"data.tokenizer"},
    "argparse": {
        "plan",
        "prepare",
        "resume",
        "sample",
        "evaluate",
        "bench",
        "verify",
        "report.__init__",
        "status",
        "watch",
        "dashboard",
    },
    "rich": {"loggers.console", "data.prepare", "bench", "plan", "report.__init__"},
    "scipy": {"report.noise", "report.critical"},
    "vl_convert": {"report.pictures"},
}

# Composed, checked and answered before torch is loaded.
TORCH_FREE = {
    "__init__", "__main__", "alerts", "batch", "bench", "calibrate", "check", "cli", "compose", "config", "dashboard",
    "data.__init__", "data.corpora", "data.order", "data.prepare", "data.shards", "data.tokenizer", "distributed",
    "divergence", "errors", "evaluate", "flops", "launch", "noise_scale", "overrides", "plan", "pool", "prepare",
    "report.__init__", "report.__main__", "report.analysis", "report.courses", "report.critical", "report.curves",
    "report.figures", "report.fitted", "report.law", "report.noise", "report.noise_scale", "report.page",
    "report.pictures", "report.proposals", "report.records", "report.spec", "report.verdict", "resume", "run",
    "run_dir", "sample", "schedule", "signals", "status", "sweep.__init__", "sweep.cells", "sweep.launchers",
    "sweep.space", "sweep.study", "sweep.sweepers", "terminal", "train", "verify", "versions", "watch",
}  # fmt: skip


def modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }


def imports(tree: ast.AST) -> list[str]:
    """Dotted names of everything imported anywhere in `tree`, `if TYPE_CHECKING` left out."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        found += imports(node)
    return found


def top_level_imports(tree: ast.Module) -> list[str]:
    """Those that are paid for when the module is imported."""
    body = [n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
    guards = [n for n in body if isinstance(n, ast.If) and "__name__" in ast.unparse(n.test)]
    return imports(ast.Module([n for n in body if n not in guards], []))


def test_every_module_has_a_floor() -> None:
    parts = {name.split(".")[0] for name in modules()} - {"__init__"}
    assert parts == FLOOR.keys()


def test_arrows_point_down() -> None:
    up = []
    for name, tree in modules().items():
        part = name.split(".")[0]
        if part == "__init__":
            continue
        body = ast.Module([n for n in tree.body if not isinstance(n, ast.If)], [])  # `if __name__ == ...` runs the CLI
        for imported in imports(body):
            package, _, rest = imported.partition(".")
            target = rest.split(".")[0]
            if package == "gptexp" and target in FLOOR and FLOOR[target] > FLOOR[part]:
                up.append(f"{name} -> {target}")
    assert sorted(up) == ALLOWED_UP


# `evaluate` is a verb too: its `main` loads a run.
ALLOWED_UP = ["evaluate -> load"]


def test_ground_floor_imports_nothing_of_ours() -> None:
    for name in ("config", "errors"):
        assert not [i for i in imports(modules()[name]) if i.startswith("gptexp")]


def test_fences() -> None:
    for name, tree in modules().items():
        for imported in imports(tree):
            package = imported.split(".")[0].replace("tiktoken_ext", "tiktoken")
            allowed = FENCES.get(package, {name})
            assert {name, name.split(".")[0]} & allowed, f"{name} imports {imported}"


def test_torch_is_not_loaded_before_it_is_needed() -> None:
    for name, tree in modules().items():
        loads = [i for i in top_level_imports(tree) if i.split(".")[0] in ("torch", "wandb", "safetensors")]
        assert not loads or name not in TORCH_FREE, f"{name} imports {loads}"
    assert modules().keys() >= TORCH_FREE


def test_only_distributed_knows_the_rank_variables() -> None:
    for name, tree in modules().items():
        words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert name == "distributed" or not words & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"}, name


def test_nothing_instantiates_from_config_or_unpickles() -> None:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec"}, (name, called)
                assert called.split(".")[-1] not in {"instantiate", "get_class"}, (name, called)
                assert not called.startswith("pickle"), name
                if called == "torch.load":
                    assert "weights_only=True" in ast.unparse(node), name


def test_help_and_refusals_load_nothing_heavy() -> None:
    """torch costs two seconds, numpy and rich a tenth each: an answer in half a second has room for none."""
    for argv, code in ((["--help"], 0), (["--cfg", "job"], 0), (["optim.lr=-1"], 2)):
        script = (
            f"import sys; sys.argv = ['gptexp', *{argv}]\n"
            "from gptexp.train import main\n"
            "try: main()\n"
            "except SystemExit as leaving: assert (leaving.code or 0) == " + str(code) + "\n"
            "print(sorted({'torch', 'numpy', 'rich', 'wandb', 'tiktoken'} & sys.modules.keys()), file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == "[]"
