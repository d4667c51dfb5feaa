"""Cells on Ray without a cluster: settings, what cells ask for, and attempts against a stand-in for Ray's answers."""

import functools
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import ROOT
from omegaconf import OmegaConf

import gptexp
from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir
from gptexp.sweep import ray as on_ray
from gptexp.sweep.cells import Cell
from gptexp.sweep.ray import NodeProcess, RayCell, RayLauncher
from gptexp.sweep.ray_cluster import RayCluster, Settings, connect, read_settings

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="no Ray; pip install 'gptexp[ray]'")
KEY = "hydra.launcher.ray"


# --- settings and connections ----------------------------------------------------------------------------------------
def test_ray_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of it fails
    with pytest.raises(ConfigError, match=r"hydra/launcher=ray: not installed; pip install 'gptexp\[ray\]'"):
        connect(Settings())


@pytest.fixture
def http(tmp_path: Path) -> Iterator[int]:
    """The port of a server of HTTP, such as Ray's dashboard."""
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", "-b", "127.0.0.1", "0"], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as server:  # fmt: skip
        assert server.stdout is not None
        found = re.search(r"port (\d+)", server.stdout.readline())
        assert found is not None
        yield int(found[1])
        server.kill()


@needs_ray
def test_an_address_without_a_cluster_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, http: int, tmp_path: Path
) -> None:
    from ray._private import services

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and it does not listen
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"RAY_ADDRESS={address}: no Ray cluster answers .*Connection refused"):
            connect(Settings({"address": "auto"}))  # Ray too prefers RAY_ADDRESS to it
    monkeypatch.delenv("RAY_ADDRESS")
    # Without a check, Ray tries such an address for more than a minute.
    with pytest.raises(ConfigError, match=f"{KEY}.init.address=127.0.0.1:{http}: no Ray cluster answers there"):
        connect(Settings({"address": f"127.0.0.1:{http}"}))
    with pytest.raises(ConfigError, match=r"init.address=ray://a:1: Ray Client is not supported; start the command on"):
        connect(Settings({"address": "ray://a:1"}))
    with pytest.raises(ConfigError, match="Ray at nonsense: Invalid address format: nonsense"):
        connect(Settings({"address": "nonsense"}))
    # Other tests have clusters on this machine.
    monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(lambda: set[str]()))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ConfigError, match="Ray at auto: Could not find any running Ray instance") as refused:
        connect(Settings({"address": "auto"}))
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (3, "=3: must be a mapping"),
        (None, "=null: must be a mapping"),
        ({"remot": {"num_cpus": 4}}, f".remot: unknown; use {KEY}.init or {KEY}.remote"),
        ({"init": None}, ".init=null: must be a mapping"),
        ({"remote": 4}, ".remote=4: must be a mapping"),
        ({"init": {"address": 6379}}, ".init.address=6379: must be HOST:PORT or auto"),
        ({"init": {"address": ["a:1"]}}, ".init.address=['a:1']: must be HOST:PORT or auto"),
        ({"remote": {"num_cpus": "many"}}, ".remote.num_cpus=many: must be a number, 0 or above"),
        ({"remote": {"num_cpus": True}}, ".remote.num_cpus=true: must be a number, 0 or above"),
        ({"remote": {"num_cpus": float("inf")}}, ".remote.num_cpus=inf: must be a number, 0 or above"),
        ({"remote": {"num_gpus": float("nan")}}, ".remote.num_gpus=nan: must be a number, 0 or above"),
        ({"remote": {"memory": -1}}, ".remote.memory=-1: must be a number, 0 or above"),
        ({"remote": {"resources": 3}}, ".remote.resources=3: must be a mapping"),
        ({"remote": {"resources": {"disk": "many"}}}, ".remote.resources.disk=many: must be a number, 0 or above"),
        ({"remote": {"resources": {"disk": None}}}, ".remote.resources.disk=null: must be a number, 0 or above"),
        ({"remote": {"max_retries": -2}}, ".remote.max_retries=-2: must be a whole number, -1 or above"),
        ({"remote": {"max_retries": 0.5}}, ".remote.max_retries=0.5: must be a whole number, -1 or above"),
        *[
            ({"remote": {option: 1}}, f".remote.{option}: cannot be set; the options are num_cpus, num_gpus, memory,")
            for option in ("max_concurrency", "lifetime", "name", "scheduling_strategy", "label_selector", "colour")
        ],
    ],
)
def test_wrong_settings_are_refused(given: object, problem: str) -> None:
    """In one line, without a cluster, and also those that the launcher would replace or not count."""
    with pytest.raises(ConfigError, match=f"^{re.escape(KEY + problem)}.*$"):
        RayLauncher(OmegaConf.create({"ray": given}).ray).check([config(device="auto")])


def test_the_settings_of_the_option_file_are_legal() -> None:
    given = yaml.safe_load((ROOT / "conf/hydra/launcher/ray.yaml").read_text())["ray"]
    assert read_settings(given) == Settings({}, {"num_cpus": 1, "max_retries": 10})


def test_ranks_of_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="hydra/launcher=ray: starts the ranks itself; start it outside of torchrun"):
        RayLauncher({}).check([config(device="auto")])


# --- a stand-in for Ray ----------------------------------------------------------------------------------------------
class ActorDiedError(Exception):
    """Ray's error for a call of an actor whose node has died."""


class Actor:
    """An actor: its calls get references. `calls` are the names and arguments."""

    def __init__(self, ray: "Ray", options: dict[str, Any]) -> None:
        self.ray, self.given, self.calls, self.killed = ray, options, list[tuple[Any, ...]](), False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            reference = next(self.ray.numbers)
            self.ray.owed[reference] = self, name
            return reference

        return SimpleNamespace(remote=call)

    def answer(self, name: str, value: object) -> None:
        """Answer its newest call of a method; an exception is raised."""
        reference = max(number for number, (actor, called) in self.ray.owed.items() if (actor, called) == (self, name))
        self.ray.answers[reference] = value


class Ray:
    """The part of the module `ray` that cells use. A test gives the answers and the table of nodes."""

    exceptions = SimpleNamespace(RayActorError=ActorDiedError)

    def __init__(self, **nodes: dict[str, float]) -> None:
        self.table, self.numbers = nodes, itertools.count()
        self.actors: list[Actor] = []
        self.owed: dict[int, tuple[Actor, str]] = {}
        self.answers: dict[int, object] = {}
        self.groups: list[Any] = []
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, index: (tuple(group), index))
        self.util = SimpleNamespace(
            scheduling_strategies=strategies, placement_group=self.group, remove_placement_group=self.groups.remove
        )

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": bool(has), "Resources": has} for name, has in self.table.items()]

    def group(self, bundles: list[dict[str, float]], strategy: str) -> list[str]:
        self.groups.append([str(bundle) for bundle in bundles])
        return self.groups[-1]

    def remote(self, of: type) -> Any:
        def options(**given: Any) -> Any:
            return SimpleNamespace(remote=lambda: self.actors.append(Actor(self, given)) or self.actors[-1])

        assert of is NodeProcess
        return SimpleNamespace(options=options)

    def wait(self, references: list[int], **_: Any) -> tuple[list[int], list[int]]:
        ready = [reference for reference in references if reference in self.answers]
        return ready, [reference for reference in references if reference not in ready]

    def get(self, reference: int) -> object:
        if isinstance(value := self.answers[reference], Exception):
            raise value
        return value

    def kill(self, actor: Actor) -> None:
        actor.killed = True


def place(node: str = "a", **other: object) -> dict[str, object]:
    """What an actor on a node says of it."""
    at = {"node": node, "host": f"host-{node}", "address": f"10.0.0.{ord(node)}", "port": 1000 + ord(node)}
    return {**at, "gpus": [], "sees": True, "version": gptexp.__version__, **other}


def config(size: int = 1, device: str = "cpu") -> Config:
    found = compose(["model=nano", f"train.device={device}"])
    found.world.size = size
    return found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a cell or at the nodes follows the last one without a pause."""
    monkeypatch.setattr(on_ray, "POLL_S", 0.0)
    monkeypatch.setattr(on_ray, "LOOK_S", -1.0)


NewCell = Callable[..., RayCell]


@pytest.fixture
def new_cell(tmp_path: Path) -> NewCell:
    def make(ray: Ray, cfg: Config, **remote: Any) -> RayCell:
        (tmp_path / "cell").mkdir(exist_ok=True)
        cluster = RayCluster(ray, "a:1", {"num_cpus": 1, **remote})
        return RayCell(cluster, Cell(OmegaConf.create({}), cfg, tmp_path / "cell", {}))

    return make


# --- what cells ask for ----------------------------------------------------------------------------------------------
def test_what_a_cell_asks_for_and_how_many_share_a_node() -> None:
    """The cells of a node are counted by the resource that is used up first."""
    ray = Ray(a={"CPU": 64.0, "GPU": 8.0, "disk": 5.0}, dead={})
    cluster = RayCluster(ray, "a:1", {"num_cpus": 4, "resources": {"disk": 1}})
    two = config(2, "auto")
    assert cluster.needs(two) == {"CPU": 4, "GPU": 1, "disk": 1}
    assert cluster.options(two, 2) == {"num_cpus": 8, "num_gpus": 2, "resources": {"disk": 2}}
    assert cluster.cells_on("a", two, 2) == 2  # of five disks; for one rank on the node it is five
    assert cluster.cells_on("a", two, 1) == 5
    assert cluster.cells_on("dead", two, 1) == 1
    assert cluster.needs(config(2)) == {"CPU": 4, "disk": 1}


def test_a_lost_gpu_makes_no_cell_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither during a sweep, nor in the next command, which reads what cells have trained on."""
    auto = config(device="auto")
    ray = Ray(head={"CPU": 4.0}, worker={"CPU": 4.0, "GPU": 1.0})
    cluster = RayCluster(ray, "a:1", {})
    before = cluster.needs(auto)
    ray.table["worker"] = {}
    assert cluster.needs(auto) == before == {"GPU": 1}

    monkeypatch.setattr(on_ray, "connect", lambda settings: ray)
    launcher = RayLauncher({"remote": {"num_cpus": 1}})
    launcher.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    launcher.check([auto])
    assert launcher.cluster.needs(auto) == {"CPU": 1}
    (tmp_path / "cell").mkdir()
    run_dir.write_json(tmp_path / "cell" / run_dir.EFFECTIVE, {"device": "cuda"})
    with pytest.raises(
        ConfigError, match=r"world.size=1 needs CPU 1, GPU 1 in all; .* has room for 0 ranks; add nodes"
    ):
        launcher.check([auto])


def test_cells_that_could_never_run_are_refused() -> None:
    two = config(2)
    cluster = RayCluster(Ray(a={"CPU": 1.0}), "a:1", {"num_cpus": 1})
    with pytest.raises(ConfigError, match=r"world.size=2 needs CPU 2 in all; the cluster at a:1 \(1 node\) has room"):
        cluster.refuse([config(), two])
    halves = RayCluster(Ray(a={"GPU": 4.0}), "a:1", {"num_gpus": 0.5})
    halves.refuse([config()])
    with pytest.raises(ConfigError, match=r"num_gpus=0.5: each of the 2 ranks of a cell needs a GPU of its own; use a"):
        halves.refuse([two])


def test_a_model_that_is_too_large_for_the_cluster_is_refused() -> None:
    """By the kind of GPU that was asked for, else by the largest of the cluster; not if one of them is unknown."""
    large = compose(["model=gpt3_6700m", "batch.micro_batch_size=1"])
    nodes = {"a": {"GPU": 8.0, "accelerator_type:A100": 1.0}, "head": {"CPU": 4.0}}
    with pytest.raises(ConfigError, match=r"a rank needs about .* GiB, and the A100 has 74.5 GiB"):
        RayCluster(Ray(**nodes), "a:1", {}).refuse([large])
    other = {**nodes, "b": {"GPU": 8.0, "accelerator_type:H200": 1.0}}
    RayCluster(Ray(**other), "a:1", {}).refuse([large])
    with pytest.raises(ConfigError, match="the A100 has"):
        RayCluster(Ray(**other), "a:1", {"accelerator_type": "A100"}).refuse([large])
    RayCluster(Ray(**nodes, b={"GPU": 8.0}), "a:1", {}).refuse([large])


# --- attempts --------------------------------------------------------------------------------------------------------
def test_the_ranks_of_a_node_follow_each_other_and_share_its_gpus(new_cell: NewCell) -> None:
    """Two ranks on one node and one on another, in the order in which Ray happens to place them."""
    ray = Ray(a={"CPU": 2.0, "GPU": 2.0}, b={"CPU": 2.0, "GPU": 2.0})
    cell = new_cell(ray, config(3, "auto"))
    cell.poll()
    assert [actor.given["scheduling_strategy"][1] for actor in ray.actors] == [0, 1, 2]
    assert ray.groups == [["{'CPU': 1, 'GPU': 1}"] * 3]
    for actor, where in zip(
        ray.actors, (place("b", gpus=["5"]), place("a", gpus=["0"]), place("b", gpus=["3"])), strict=True
    ):
        actor.answer("where", where)
    cell.poll()
    got = [actor.calls[-1][2] for actor in ray.actors]
    assert [actor.calls[-1][:2] for actor in ray.actors] == [("run", str(cell.cell.directory))] * 3
    assert [environment["RANK"] for environment in got] == ["1", "0", "2"]
    assert [(environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) for environment in got] == [
        ("0", "2"), ("0", "1"), ("1", "2"),
    ]  # fmt: skip
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in got] == ["5,3", "0", "5,3"]
    assert {environment["MASTER_PORT"] for environment in got} == {f"{1000 + ord('a')}"}  # of the node of rank 0
    for actor in ray.actors:
        actor.answer("run", 0)
    assert cell.poll() == 0
    assert not ray.groups
    assert all(actor.killed for actor in ray.actors)


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        (
            {"sees": False},
            "node host-a (10.0.0.97) does not see this directory: outputs/ must be on a shared file system",
        ),
        ({"version": "0.0.0"}, f"node host-a (10.0.0.97) has gptexp 0.0.0, not {gptexp.__version__}; install the same"),
    ],
)
def test_a_node_that_cannot_run_a_cell_is_named(
    where: dict[str, object], problem: str, new_cell: NewCell, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = Ray(a={"CPU": 1.0})
    cell = new_cell(ray, config())
    cell.poll()
    ray.actors[0].answer("where", place(**where))
    assert cell.poll() == 1
    assert capsys.readouterr().err == f"gptexp: {cell.cell.directory}: {problem}\n"
    assert [call[0] for call in ray.actors[0].calls] == ["where"]


def test_a_node_must_see_what_the_command_writes(
    new_cell: NewCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of an earlier sweep on the node's own disk does not count. The port is kept for the run's store."""
    context = SimpleNamespace(get_node_id=lambda: "a", get_accelerator_ids=lambda: {"GPU": [3]})
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))
    ray = Ray(a={"CPU": 1.0})
    cell = new_cell(ray, config())
    cell.poll()
    [(_, mark)] = ray.actors[0].calls
    (tmp_path / "stale").mkdir()
    (tmp_path / "stale" / "config.yaml").touch()
    process = NodeProcess()
    assert not process.where(str(tmp_path / "stale" / Path(mark).name))["sees"]
    found = process.where(mark)
    assert found["sees"]
    assert found["gpus"] == ["3"]
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", found["port"]))
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's does
        store.bind(("", found["port"]))
        store.listen()
    ray.actors[0].answer("where", found)
    cell.poll()
    ray.actors[0].answer("run", 0)
    assert cell.poll() == 0
    assert not Path(mark).exists()


def starts(cell: RayCell, ray: Ray) -> None:
    """Give the cell its places: its newest actors are all on one node, and run it."""
    cell.poll()
    for actor in ray.actors:
        if not actor.killed:
            actor.answer("where", place())
    cell.poll()


def test_a_cell_is_tried_again_as_often_as_max_retries_says(
    new_cell: NewCell, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = Ray(a={"CPU": 1.0})
    cell = new_cell(ray, config(), max_retries=2)
    for _ in range(3):
        assert cell.code is None
        starts(cell, ray)
        ray.actors[-1].answer("run", ActorDiedError("the node died"))
        cell.poll()
    assert cell.code == 1
    again = "gptexp: cell: its node has died; starting again from its newest checkpoint"
    last = f"gptexp: {cell.cell.directory}: its node died 3 times (hydra.launcher.ray.remote.max_retries=2)"
    assert capsys.readouterr().err.splitlines() == [again, again, last]
    assert len(ray.actors) == 3


def test_an_attempt_waits_for_the_process_of_a_dead_node(new_cell: NewCell) -> None:
    """Also for one that takes the lock after the next attempt has begun. Without a death, such an end is the last."""
    ray = Ray(a={"CPU": 1.0})
    cell = new_cell(ray, config())
    starts(cell, ray)
    ray.actors[0].answer("run", ActorDiedError())
    cell.poll()
    with run_dir.held(cell.cell.directory):
        for _ in range(3):
            cell.poll()
        assert len(ray.actors) == 1
    starts(cell, ray)
    ray.actors[1].answer("run", 2)  # "another process uses it"
    assert cell.poll() is None
    starts(cell, ray)
    ray.actors[2].answer("run", 2)
    assert cell.poll() == 2


def test_ranks_that_do_not_end_are_killed(new_cell: NewCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure stops the others; its code is the cell's, or that of another rank which has failed with it."""
    monkeypatch.setattr(on_ray, "GRACE_S", 0.05)
    ray = Ray(a={"CPU": 1.0}, b={"CPU": 2.0})
    cell = new_cell(ray, config(3))
    starts(cell, ray)
    ray.actors[0].answer("run", 1)  # it has lost its peer
    ray.actors[2].answer("run", 3)
    cell.poll()
    assert ray.actors[1].calls[2:] == [("signal", signal.SIGTERM)]
    time.sleep(0.1)
    cell.poll()
    cell.poll()
    assert ray.actors[1].calls[2:] == [("signal", signal.SIGTERM), ("signal", signal.SIGKILL)]
    ray.actors[1].answer("run", 137)
    assert cell.poll() == 3


def test_an_error_of_ray_fails_its_cell_alone(new_cell: NewCell, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it comes, and also without a text."""
    for method, error, text in (
        ("nodes", ConnectionError(), "ConnectionError"),
        ("remote", ValueError("GPU quantities >1 must be whole numbers"), "GPU quantities >1 must be whole numbers"),
        ("get", RuntimeError("Traceback\n  File a\nImportError: broken\n"), "ImportError: broken"),
        ("kill", RuntimeError("no head"), None),
    ):
        ray = Ray(a={"CPU": 2.0})
        cell = new_cell(ray, config(2))

        def fails(*_: object, error: Exception = error) -> None:
            raise error

        setattr(ray, method, fails)
        starts_or_ends(cell, ray)
        assert cell.code == (0 if text is None else 1), method
        assert capsys.readouterr().err == ("" if text is None else f"gptexp: {cell.cell.directory}: Ray: {text}\n")


def starts_or_ends(cell: RayCell, ray: Ray) -> None:
    """Give the cell its places, and let it complete, unless it ends by itself."""
    starts(cell, ray)
    for actor in ray.actors if cell.code is None else ():
        actor.answer("run", 0)
    cell.poll()


def test_a_cell_that_waits_follows_the_nodes(new_cell: NewCell, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell that one node could hold when it was queued is spread over others when that node is lost."""
    ray = Ray(a={"GPU": 16.0}, b={"GPU": 8.0}, c={"GPU": 4.0})
    cell = new_cell(ray, config(16, "auto"), num_cpus=0)
    cell.poll()
    cell.poll()
    assert [actor.given["num_gpus"] for actor in ray.actors] == [16]
    ray.table["a"] = {}
    for _ in range(3):
        cell.poll()
    assert capsys.readouterr().err == (
        "gptexp: cell waits: world.size=16 needs GPU 16 in all; the cluster at a:1 (2 nodes) has room for 12 ranks\n"
    )
    ray.table["d"] = {"GPU": 8.0}
    cell.poll()
    cell.poll()
    assert [actor.killed for actor in ray.actors] == [True, *[False] * 16]
    assert [actor.given["num_gpus"] for actor in ray.actors[1:]] == [1] * 16
