"""Cells on Ray without a cluster: settings, what cells ask for, and attempts against a stand-in for Ray's answers."""

import functools
import math
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
    """Ray tries a silent address for more than a minute."""
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(lambda: set[str]()))  # of other tests
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and it does not listen
        closed = f"127.0.0.1:{silent.getsockname()[1]}"
        for given, from_environment, start in (
            ("auto", closed, f"RAY_ADDRESS={closed}: "),  # Ray too prefers RAY_ADDRESS to it
            (f"127.0.0.1:{http}", None, f"{KEY}.init.address=127.0.0.1:{http}: "),
            ("ray://a:1", None, f"{KEY}.init.address=ray://a:1: "),
            ("nonsense", None, "Ray at nonsense: "),
            ("auto", None, "Ray at auto: "),
        ):
            monkeypatch.delenv("RAY_ADDRESS", raising=False)
            if from_environment is not None:
                monkeypatch.setenv("RAY_ADDRESS", from_environment)
            with pytest.raises(ConfigError, match=f"^{re.escape(start)}.*$") as refused:
                connect(Settings({"address": given}))
            assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (3, ""),
        (None, ""),
        ({"remot": {"num_cpus": 4}}, ".remot"),
        ({"init": None}, ".init"),
        ({"remote": 4}, ".remote"),
        *[({"init": {"address": wrong}}, ".init.address") for wrong in (6379, ["a:1"])],
        *[({"remote": {"num_cpus": wrong}}, ".remote.num_cpus") for wrong in ("many", True, math.inf)],
        ({"remote": {"num_gpus": math.nan}}, ".remote.num_gpus"),
        ({"remote": {"memory": -1}}, ".remote.memory"),
        ({"remote": {"resources": 3}}, ".remote.resources"),
        *[({"remote": {"resources": {"disk": wrong}}}, ".remote.resources.disk") for wrong in ("many", None)],
        *[({"remote": {"max_retries": wrong}}, ".remote.max_retries") for wrong in (-2, 0.5)],
        *[({"remote": {option: 1}}, f".remote.{option}") for option in ("max_concurrency", "lifetime", "colour")],
    ],
)
def test_wrong_settings_are_refused(given: object, key: str) -> None:
    """In one line, without a cluster, and also those that the launcher would replace or not count."""
    with pytest.raises(ConfigError, match=f"^{re.escape(KEY + key)}[:=].*$"):
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
    """An actor: `calls` are the names and arguments of its calls, `answers` the answers by name; an error is raised."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.given, self.calls, self.answers, self.killed = options, list[tuple[Any, ...]](), dict[str, Any](), False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple["Actor", str]:
            self.calls.append((name, *arguments))
            return self, name

        return SimpleNamespace(remote=call)


class Ray:
    """The part of the module `ray` that cells use. A test gives the answers of actors and the table of nodes."""

    exceptions = SimpleNamespace(RayActorError=ActorDiedError)

    def __init__(self, **nodes: dict[str, float]) -> None:
        self.table, self.actors, self.groups = nodes, list[Actor](), list[Any]()
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
        assert of is NodeProcess
        new = lambda given: SimpleNamespace(remote=lambda: self.actors.append(Actor(given)) or self.actors[-1])  # noqa: E731
        return SimpleNamespace(options=lambda **given: new(given))

    def wait(self, references: list[tuple[Actor, str]], **_: Any) -> tuple[list[Any], list[Any]]:
        return [(actor, name) for actor, name in references if name in actor.answers], []

    def get(self, reference: tuple[Actor, str]) -> object:
        actor, name = reference
        if isinstance(answer := actor.answers[name], Exception):
            raise answer
        return answer

    def kill(self, actor: Actor) -> None:
        actor.killed = True


def place(node: str = "a", **other: object) -> dict[str, object]:
    """What an actor on a node says of it."""
    at = {"node": node, "host": f"host-{node}", "address": f"10.0.0.{ord(node)}", "port": 1000 + ord(node)}
    return {**at, "gpus": [], "sees": True, "version": gptexp.__version__, **other}


def config(size: int = 1, device: str = "cpu") -> Config:
    composed = compose(["model=nano", f"train.device={device}"])
    composed.world.size = size
    return composed


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


def started(cell: RayCell, ray: Ray, *places: dict[str, object]) -> list[Actor]:
    """Give the cell its places, by default all on one node. Returns the actors that run it."""
    cell.poll()
    actors = [actor for actor in ray.actors if not actor.killed]
    for actor, where in zip(actors, places or [place()] * len(actors), strict=True):
        actor.answers["where"] = where
    cell.poll()
    return actors


# --- what cells ask for ----------------------------------------------------------------------------------------------
def test_what_a_cell_asks_for_and_how_many_share_a_node() -> None:
    """The ranks on a node are counted by the resource that is used up first."""
    ray = Ray(a={"CPU": 64.0, "GPU": 8.0, "disk": 5.0}, dead={})
    cluster = RayCluster(ray, "a:1", {"num_cpus": 4, "resources": {"disk": 1}})
    two = config(2, "auto")
    assert cluster.needs(two) == {"CPU": 4, "GPU": 1, "disk": 1}
    assert cluster.options(two, 2) == {"num_cpus": 8, "num_gpus": 2, "resources": {"disk": 2}}
    assert cluster.rooms(two) == {"a": 5}
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
    assert launcher.cluster is not None
    assert launcher.cluster.needs(auto) == {"CPU": 1}
    (tmp_path / "cell").mkdir()
    run_dir.write_json(tmp_path / "cell" / run_dir.EFFECTIVE, {"device": "cuda"})
    with pytest.raises(ConfigError, match=r"^world.size=1 needs CPU 1, GPU 1 in all; "):
        launcher.check([auto])


def test_cells_that_could_never_run_are_refused() -> None:
    cluster = RayCluster(Ray(a={"CPU": 1.0}), "a:1", {"num_cpus": 1})
    with pytest.raises(ConfigError, match=r"^world.size=2 needs CPU 2 in all; "):
        cluster.refuse([config(), config(2)])
    halves = RayCluster(Ray(a={"GPU": 4.0}), "a:1", {"num_gpus": 0.5})
    halves.refuse([config()])
    with pytest.raises(ConfigError, match=rf"^{KEY}.remote.num_gpus=0.5: "):
        halves.refuse([config(2)])


def test_a_model_that_is_too_large_for_the_cluster_is_refused() -> None:
    """By the kind of GPU that was asked for, else by the largest of the cluster; not if one of them is unknown."""
    large = compose(["model=gpt3_6700m", "batch.micro_batch_size=1"])
    nodes = {"a": {"GPU": 8.0, "accelerator_type:A100": 1.0}, "head": {"CPU": 4.0}}
    other = {**nodes, "b": {"GPU": 8.0, "accelerator_type:H200": 1.0}}
    for table, remote in ((nodes, {}), (other, {"accelerator_type": "A100"})):
        with pytest.raises(ConfigError, match=r"a rank needs about .* GiB, and the A100 has 74.5 GiB"):
            RayCluster(Ray(**table), "a:1", remote).refuse([large])
    RayCluster(Ray(**other), "a:1", {}).refuse([large])
    RayCluster(Ray(**nodes, b={"GPU": 8.0}), "a:1", {}).refuse([large])


# --- attempts --------------------------------------------------------------------------------------------------------
def test_the_ranks_of_a_node_follow_each_other_and_share_its_gpus(new_cell: NewCell) -> None:
    """Two ranks on one node and one on another, in the order in which Ray happens to place them."""
    ray = Ray(a={"CPU": 2.0, "GPU": 2.0}, b={"CPU": 2.0, "GPU": 2.0})
    cell = new_cell(ray, config(3, "auto"))
    actors = started(cell, ray, place("b", gpus=["5"]), place("a", gpus=["0"]), place("b", gpus=["3"]))
    assert [actor.given["scheduling_strategy"][1] for actor in actors] == [0, 1, 2]
    assert ray.groups == [["{'CPU': 1, 'GPU': 1}"] * 3]
    assert [actor.calls[-1][:2] for actor in actors] == [("run", str(cell.cell.directory))] * 3
    assert [tuple(actor.calls[-1][2].values()) for actor in actors] == [
        # cells on the node, its GPUs, rank, world size, local rank, local world size, address and port of rank 0's node
        ("1", "5,3", "1", "3", "0", "2", "10.0.0.97", "1097"),
        ("2", "0", "0", "3", "0", "1", "10.0.0.97", "1097"),
        ("1", "5,3", "2", "3", "1", "2", "10.0.0.97", "1097"),
    ]
    for actor in actors:
        actor.answers["run"] = 0
    assert cell.poll() == 0
    assert not ray.groups
    assert all(actor.killed for actor in actors)


@pytest.mark.parametrize("where", [{"sees": False}, {"version": "0.0.0"}])
def test_a_node_that_cannot_run_a_cell_is_named(
    where: dict[str, object], new_cell: NewCell, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = Ray(a={"CPU": 1.0})
    cell = new_cell(ray, config())
    [actor] = started(cell, ray, place(**where))
    assert cell.poll() == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gptexp: {cell.cell.directory}: node host-a (10.0.0.97) ")
    assert [call[0] for call in actor.calls] == ["where"]


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
    where = process.where(mark)
    assert (where["sees"], where["gpus"]) == (True, ["3"])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", where["port"]))
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's does
        store.bind(("", where["port"]))
        store.listen()
    [actor] = started(cell, ray, where)
    actor.answers["run"] = 0
    assert cell.poll() == 0
    assert not Path(mark).exists()


def test_a_cell_is_tried_again_as_often_as_max_retries_says(
    new_cell: NewCell, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = Ray(a={"CPU": 1.0})
    cell = new_cell(ray, config(), max_retries=2)
    for _ in range(3):
        assert cell.code is None
        [actor] = started(cell, ray)
        actor.answers["run"] = ActorDiedError("the node died")
        cell.poll()
    assert (cell.code, len(ray.actors)) == (1, 3)
    *again, last = capsys.readouterr().err.splitlines()
    assert again == ["gptexp: cell: its node has died; starting again from its newest checkpoint"] * 2
    assert "max_retries=2" in last


def test_an_attempt_waits_for_the_process_of_a_dead_node(new_cell: NewCell) -> None:
    """Also for one that takes the lock after the next attempt has begun. Without a death, such an end is the last."""
    ray = Ray(a={"CPU": 1.0})
    cell = new_cell(ray, config())
    [actor] = started(cell, ray)
    actor.answers["run"] = ActorDiedError()
    cell.poll()
    with run_dir.held(cell.cell.directory):
        for _ in range(3):
            cell.poll()
        assert len(ray.actors) == 1
    for code in (None, 2):
        [actor] = started(cell, ray)
        actor.answers["run"] = 2  # "another process uses it"
        assert cell.poll() == code


def test_a_signal_reaches_the_ranks_or_ends_the_wait_for_places(new_cell: NewCell) -> None:
    ray = Ray(a={"CPU": 1.0})
    waits, runs = new_cell(ray, config()), new_cell(ray, config())
    waits.poll()
    waits.send_signal(signal.SIGTERM)
    assert waits.poll() == 143
    [actor] = started(runs, ray)
    runs.send_signal(signal.SIGINT)
    assert actor.calls[2:] == [("signal", signal.SIGINT)]
    actor.answers["run"] = 130
    assert runs.poll() == 130


def test_ranks_that_do_not_end_are_killed(new_cell: NewCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure stops the others; its code is the cell's, or that of another rank which has failed with it."""
    monkeypatch.setattr(on_ray, "GRACE_S", 0.05)
    ray = Ray(a={"CPU": 1.0}, b={"CPU": 2.0})
    cell = new_cell(ray, config(3))
    first, stays, third = started(cell, ray)
    first.answers["run"] = 1  # it has lost its peer
    third.answers["run"] = 3
    cell.poll()
    assert stays.calls[2:] == [("signal", signal.SIGTERM)]
    time.sleep(0.1)
    cell.poll()
    cell.poll()
    assert stays.calls[2:] == [("signal", signal.SIGTERM), ("signal", signal.SIGKILL)]
    stays.answers["run"] = 137
    assert cell.poll() == 3


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        ("nodes", ConnectionError(), "ConnectionError"),
        ("remote", ValueError("GPU quantities >1 must be whole numbers"), "GPU quantities >1 must be whole numbers"),
        ("get", RuntimeError("Traceback\n  File a\nImportError: broken\n"), "ImportError: broken"),
        ("kill", RuntimeError("no head"), None),
    ],
)
def test_an_error_of_ray_fails_its_cell_alone(
    method: str, error: Exception, text: str | None, new_cell: NewCell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it comes, and also without a text."""
    ray = Ray(a={"CPU": 2.0})
    cell = new_cell(ray, config(2))

    def fails(*_: object) -> None:
        raise error

    setattr(ray, method, fails)
    for actor in started(cell, ray):
        actor.answers["run"] = 0
    cell.poll()
    assert cell.code == (0 if text is None else 1)
    assert capsys.readouterr().err == ("" if text is None else f"gptexp: {cell.cell.directory}: Ray: {text}\n")


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
