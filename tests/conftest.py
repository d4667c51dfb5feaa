"""Fixtures: a clean environment, a token cache for the session, a small corpus, and real `gptexp` processes.

Tests lie in folders as the package does. pytest puts this folder on `sys.path`, so that the tests of all folders import
the helper modules that lie beside this file.
"""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pytest
from pages import leave_out_pictures

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from slurm_cluster import Cluster
    from torch.optim import Optimizer

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent

# A shell starts a job in the background with SIGINT ignored, and nohup ignores SIGHUP; the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Variables that a shell, a launcher or a CI system may have set. No test may depend on them.
_FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "SLURM_",
    "TORCHELASTIC_",
    "WANDB_",
    "GPTEXP_",
    "HYDRA_",
    "OMP_",
    "RAY_",
    "COLUMNS",
    "LINES",
)


def clean(environ: Mapping[str, str], cache: Path) -> dict[str, str]:
    """`environ` without the variables of a launcher, of wandb or of a terminal; tokens are cached in `cache`."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_FOREIGN)}
    # Two tests share the cores: a thread that spins would slow down the other test.
    return {**kept, "GPTEXP_CACHE": str(cache), "WANDB_SILENT": "true", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Give every test the environment that `clean` returns."""
    wanted = clean(os.environ, cache)
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name in ("GPTEXP_CACHE", "WANDB_SILENT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, wanted[name])


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Set torch to one thread in the process of the tests, because two tests share the cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 kB of learnable text: sentences over a small vocabulary, drawn from a fixed seed."""
    draw = random.Random(0)
    subjects, verbs, objects = ["The cat", "A dog", "My friend", "Nobody"], ["sees", "likes", "eats"], ["fish", "bread"]
    lines = [f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(objects)}." for _ in range(6000)]
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("\n".join(lines))
    return path


# A small model and a step of 128 tokens: a run takes little longer than the import of torch. The vocabulary keeps its
# 50,304 ids.
TINY = (
    "model=nano",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=16",
    "model.block_size=16",
    "batch.total_batch_size=128",
    "batch.micro_batch_size=2",
    "world.threads_per_rank=1",
    "data=text",
    "data.val_tokens=112",  # seven windows: the last micro-batch of an evaluation is short
    "optim.lr=6e-4",
    "train.max_steps=4",
    "train.device=cpu",  # this and the next two: the same on every machine; test_gpu.py sets others
    "train.dtype=float32",
    "train.matmul_precision=highest",
    "log=disabled",
    "log.progress=off",
    "log.sample_tokens=0",
)

# With so few ids, a step of `TINY` takes 9 ms and not 35: for runs of many steps.
BYTES = ("data.tokenizer=bytes", "model.vocab_size=320")


@pytest.fixture
def tiny(corpus: Path) -> list[str]:
    """Overrides of a run of a few seconds."""
    return [*TINY, f"data.path={corpus}"]


@pytest.fixture
def long_run(tiny: list[str]) -> list[str]:
    """Overrides of a run that is too long to complete within a test."""
    return [*tiny, "train.max_steps=100000", "train.save_every=100000", "train.eval_every=0", "hydra.run.dir=out"]


def e2e_then_slow(cases: Iterable[Any], e2e: int = 1) -> list[Any]:
    """The first `e2e` cases of a test that takes long in the tier e2e, the others in slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.e2e if n < e2e else pytest.mark.slow
        )
        for n, case in enumerate(cases)
    ]


class ForkServer:
    """tests/fork_server.py, running in a process."""

    def __init__(self, *argv: str, env: dict[str, str], prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__).with_name("fork_server.py")), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**env, "PYTHONIOENCODING": "utf-8"},
        )
        self.env = env

    def ask(self, argv: list[str], cwd: Path, env: dict[str, str] | None = None, timeout: float = 60) -> dict[str, Any]:
        """Run `gptexp ARGV` in `cwd`; its code, stdout, stderr, cpu_s, and whether it imported torch (`torch`)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"argv": argv, "cwd": str(cwd), "env": self.env if env is None else env, "timeout": timeout}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture(scope="session")
def torch_server() -> Iterator[ForkServer]:
    with ForkServer("torch", env=dict(os.environ)) as server:
        yield server


@pytest.fixture(scope="session")
def finished_run(torch_server: ForkServer, corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one completed run of `TINY`. All tests of the session share it: read it, never write to it."""
    folder = tmp_path_factory.mktemp("finished")
    argv = ["train", *TINY, f"data.path={corpus}", "hydra.run.dir=out"]
    done = torch_server.ask(argv, folder, clean(os.environ, cache), timeout=240)
    assert done["code"] == 0, done["stderr"]
    return folder / "out"


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose best learning rate grows with the root of the batch size; tests must not write into it."""
    from sweeps import write_sweep

    return write_sweep(tmp_path_factory.mktemp("sweeps") / "root")


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports whose PNGs are empty; drawing them takes most of the time."""
    leave_out_pictures(monkeypatch)


@pytest.fixture(scope="session")
def light_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server whose children exit when they import torch."""
    home = tmp_path_factory.mktemp("home")
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    with ForkServer(env={**kept, "HOME": str(home), "GPTEXP_CACHE": str(home / "cache")}) as server:
        yield server


@pytest.fixture
def gptexp(tmp_path: Path, torch_server: ForkServer) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `gptexp …` in `tmp_path` to its end, in a fork of a process that has imported torch."""

    def run(*argv: str, env: dict[str, str] | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        done = torch_server.ask(list(argv), tmp_path, {**os.environ, **(env or {})}, timeout)
        return subprocess.CompletedProcess(argv, done["code"], done["stdout"], done["stderr"])

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `python -m gptexp …` in `tmp_path` without waiting. A process that still runs after the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def popen(*argv: str, **kwargs: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gptexp", *argv]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
        )
        started.append(process)
        return process

    yield popen
    for process in started:
        process.kill()
        process.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests on clusters: they wait most of their time, while other workers' tests use the cores."""
    items.sort(key=lambda item: not {"slurm", "ray_nodes"} & {*getattr(item, "fixturenames", ())})


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Cluster"]:
    from slurm_cluster import cluster, missing

    if (why := missing()) is not None:
        pytest.skip(why)
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def slurm(two_nodes: "Cluster", monkeypatch: pytest.MonkeyPatch) -> Iterator["Cluster"]:
    """A real SLURM of two idle nodes, which the commands of this process use. Jobs end with the test."""
    for name in ("PATH", "PYTHONPATH", "SLURM_CONF"):
        monkeypatch.setenv(name, two_nodes.env()[name])
    yield two_nodes
    two_nodes("scancel", "--user=root")
    two_nodes.wait_until_idle()


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    from pages import CHROMIUM
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no Chromium; apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def sabotaged(folder: Path, module: str, code: str) -> dict[str, str]:
    """An environment in which every Python process runs `code` once it has imported `module` (`m` in the code)."""
    folder.mkdir()
    (folder / "code.py").write_text(textwrap.dedent(code))
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
        import importlib.util, sys

        class Finder:
            def find_spec(self, name, path, target=None):
                if name != {module!r}:
                    return None
                sys.meta_path.remove(self)
                spec = importlib.util.find_spec(name)
                load = spec.loader.exec_module
                def exec_module(module):
                    load(module)
                    exec(open({str(folder / "code.py")!r}).read(), {{"m": module}})
                spec.loader.exec_module = exec_module
                return spec

        sys.meta_path.insert(0, Finder())
        """)
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.fixture
def sabotage(tmp_path: Path) -> Callable[[str, str], dict[str, str]]:
    return lambda module, code: sabotaged(tmp_path / "sabotage", module, code)


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in a run's metrics.jsonl; the text after its last newline is still being written."""
    lines = (directory / "metrics.jsonl").read_text().split("\n")[:-1]
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def summary(directory: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return value


def runs(root: Path) -> list[Path]:
    """Every run directory below `root`, also while a run deletes folders there."""
    return sorted(Path(folder) for folder, _, files in os.walk(root) if "summary.json" in files)


def wait_for(condition: Callable[[], T], process: subprocess.Popen[str], seconds: float = 120) -> T:
    """Poll until `condition` holds, and return its value; fails if the process ends or the time passes first."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def processes_of(directory: Path) -> list[int]:
    """Process ids of the ranks that train in `directory`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if {b"gptexp.run", b"gptexp.resume"} & {*argv} and str(directory).encode() in argv:
            found.append(int(path.parent.name))
    return found


def signal_rank(directory: Path, rank: int, number: signal.Signals) -> None:
    """Send a signal to one of the ranks that train in `directory`."""
    mine = f"\0RANK={rank}\0".encode()
    [process] = [p for p in processes_of(directory) if mine in Path(f"/proc/{p}/environ").read_bytes()]
    os.kill(process, number)


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> "list[Optimizer]":
    """Those that the runs in this process build."""
    from gptexp.training.optimizer import build_optimizer

    built: list[Optimizer] = []

    def build(*args: Any) -> "Optimizer":
        built.append(build_optimizer(*args))
        return built[-1]

    monkeypatch.setattr("gptexp.run.build.build_optimizer", build)
    return built
