"""Cells of a sweep on a Ray cluster, or on one of this machine that is started for the sweep.

Owns Ray: which resources a cell asks for, its processes on the nodes, and what happens when a node dies. Ray places
and queues the cells. A cell that fits one node is one actor, which runs `gptexp resume`; the ranks of a larger cell are
actors of a placement group. Ray ships no file: every node has gptexp installed and sees the sweep's directory.
"""

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import gptexp
from gptexp.config.schema import AUTO, Config
from gptexp.distributed.ranks import AT_ONCE, Rank, launcher_rank, rank_variables, without_launcher
from gptexp.process.errors import EXIT_FAILED, ConfigError, first_line
from gptexp.process.signals import HANDLED, start_a_run
from gptexp.process.terminal import say, warn
from gptexp.process.words import counted
from gptexp.run.pool import OUTPUT, Places, Process, resume_command
from gptexp.storage import run_dir
from gptexp.sweep.cells import PLUGINS, Cell
from gptexp.sweep.launchers import CellLauncher

ADDRESS = "RAY_ADDRESS"  # environment: Ray's own variable for the address of a cluster
POLL_S = 0.3  # s: between two looks at a cell
CONNECT_S = 5.0  # s: longest wait for an answer at the address of a cluster; Ray itself tries for two minutes
GRACE_S = 60.0  # s: from a rank's failure to the kill of ranks that do not end
OBJECT_STORE_BYTES = 80_000_000  # of a cluster of this machine: Ray's least is 75 MiB, and no object is stored
# Ray reads these when it is imported: send no usage statistics, print no message of the cluster on the terminal, and
# under `uv run` ship no working directory to the nodes.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# Options of `ray.remote` that are amounts for a rank; a cell that runs on one node asks for them once per rank.
AMOUNTS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}  # option -> Ray's name of the resource


class RayLauncher(CellLauncher):
    """Runs each cell on a node of a Ray cluster, or its ranks on several; Ray queues the cells that have no room.

    A cell whose node dies starts again from its newest checkpoint on another. The arguments of `ray.init` and the
    options of `ray.remote` have the names of hydra-ray-launcher: `hydra.launcher.ray.init` and `.remote`.
    """

    __module__ = PLUGINS

    def __init__(self, ray: Any) -> None:
        self.given = ray

    def check(self, configs: Sequence[Config]) -> None:
        """Connect to the cluster. Raises `ConfigError` if it cannot be used, or can never hold one of the cells."""
        if launcher_rank() is not None:
            raise ConfigError("hydra/launcher=ray: starts the ranks itself; start it outside of torchrun and srun")
        self.init, self.remote = self._arguments("init"), self._arguments("remote")
        for key in (*AMOUNTS, "max_retries"):
            amount, least = self.remote.get(key), -1 if key == "max_retries" else 0
            if amount is not None and (not isinstance(amount, int | float) or amount < least):
                raise ConfigError(f"hydra.launcher.ray.remote.{key}={amount}: must be a number, {least} or above")
        self.address = self.init.get("address") or os.environ.get(ADDRESS) or "local"
        self.ray = connect(self.address, self.init)
        try:
            self.ray.remote(NodeProcess).options(**self.options(configs[0], 1))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"hydra.launcher.ray.remote: {first_line(error)}") from None
        for config in configs:
            self._refuse_too_large(config)
        self.room = self.places(configs)
        if configs[0].sweep.parallel == AUTO:  # Optuna's `configs` are a few examples
            at_once = sum(self._ranks_on(node, configs[0]) for node in self.nodes()) // (configs[0].world.size or 1)
            self.room = Places(max(self.room.at_once, at_once))

    def places(self, configs: Sequence[Config]) -> Places:
        """All cells, unless `sweep.parallel` sets a limit: Ray queues them, and follows the cluster as it changes."""
        parallel = configs[0].sweep.parallel
        return Places(parallel if isinstance(parallel, int) else max(1, len(configs)))

    def _arguments(self, part: str) -> dict[str, Any]:
        """Return the arguments in hydra.launcher.ray.PART."""
        given = OmegaConf.select(OmegaConf.create({"ray": self.given}), f"ray.{part}")
        found = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise ConfigError(f"hydra.launcher.ray.{part}={found}: must be a mapping, for example {{num_cpus: 4}}")
        return {str(name): value for name, value in found.items()}

    def run(self, cells: Any) -> int | None:
        try:
            return super().run(cells)
        finally:
            with quiet():
                self.ray.shutdown()  # also ends a cluster that was started for the sweep

    def begin(self, cell: Cell, gpus: Sequence[str]) -> None:
        self.cells.claim(cell)
        self.cells.begins(cell, " on Ray")

    def start(self, cell: Cell, gpus: Sequence[str], at_once: int) -> Process:
        return RayCell(self, cell)

    def nodes(self) -> list[dict[str, float]]:
        """Return the resources of each node that is alive."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def needs(self, config: Config) -> dict[str, float]:
        """Return the resources of one rank."""
        needs = {name: self.remote.get(option) for option, name in AMOUNTS.items()}
        if needs["GPU"] is None:
            device = config.train.device
            on_gpus = device == "cuda" or (device == "auto" and any(node.get("GPU") for node in self.nodes()))
            needs["GPU"] = int(on_gpus)
        found = {**needs, **(self.remote.get("resources") or {})}
        if (kind := self.remote.get("accelerator_type")) is not None:
            found[f"accelerator_type:{kind}"] = 0.001  # as Ray itself asks for it
        return {name: amount for name, amount in found.items() if amount}

    def options(self, config: Config, ranks: int) -> dict[str, Any]:
        """Return the options of an actor that holds the resources of so many ranks."""
        needs = self.needs(config)
        others = {k: v for k, v in self.remote.items() if k not in ("max_retries", "resources", *AMOUNTS)}
        amounts = {option: ranks * needs.get(name, 0) for option, name in AMOUNTS.items() if option != "memory"}
        if "memory" in needs:
            amounts["memory"] = ranks * needs["memory"]
        own = {name: ranks * amount for name, amount in (self.remote.get("resources") or {}).items()}
        return {**others, **amounts, "resources": own}

    def fits_one_node(self, cell: Cell) -> bool:
        return any(self._ranks_on(node, cell.config) >= cell.world_size for node in self.nodes())

    def cells_on(self, node_id: str, config: Config, ranks: int) -> int:
        """Return how many cells with so many ranks on this node it has room for."""
        [node] = [node["Resources"] for node in self.ray.nodes() if node["NodeID"] == node_id]
        return max(1, self._ranks_on(node, config) // ranks)

    def _ranks_on(self, node: Mapping[str, float], config: Config) -> int:
        """Return how many ranks of `config` fit a node that is otherwise free."""
        size = config.world.size or 1  # the answer if nothing is asked for
        return min((int(node.get(name, 0) / n + 1e-6) for name, n in self.needs(config).items()), default=size)

    def _refuse_too_large(self, config: Config) -> None:
        size, nodes = config.world.size or 1, self.nodes()
        room = sum(self._ranks_on(node, config) for node in nodes)
        if room < size:
            needs = ", ".join(f"{name} {size * amount:g}" for name, amount in self.needs(config).items())
            raise ConfigError(
                f"world.size={size}: a cell needs {needs} in all; the {counted(len(nodes), 'node')} of the cluster at "
                f"{self.address} have room for {counted(room, 'rank')}; add nodes, or lower world.size or "
                "hydra.launcher.ray.remote.num_cpus"
            )


def connect(address: str, arguments: Mapping[str, Any]) -> Any:
    """Connect to the cluster at `address`, or start one of this machine if it is "local". Returns the module `ray`.

    Raises `ConfigError` in one line if that fails.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"{ADDRESS}={address}: Ray Client is not supported; start the command on a node of the cluster, with "
            "auto or HOST:PORT"
        )
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise ConfigError("hydra/launcher=ray: not installed; pip install 'gptexp[ray]'") from None
    _refuse_silent(address)
    here = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES} if address == "local" else {}
    quietly = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    given = {name: value for name, value in arguments.items() if value is not None}
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        with quiet():
            ray.init(**{**here, **quietly, **given, "address": address})
    except Exception as error:  # each failure has its own type
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"Ray at {address}: {text}") from None
    finally:
        for number, handler in handlers.items():  # Ray sets its own
            signal.signal(number, handler)
    return ray


def _refuse_silent(address: str) -> None:
    """Raise `ConfigError` if nothing answers at an address of the form HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and "local"; Ray refuses others at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{ADDRESS}={address}: no Ray cluster answers there ({first_line(error)}); start one with ray start "
            "--head, or leave the address out for one of this machine"
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Discard what is written to stdout and stderr meanwhile, also by Ray's C++ code."""
    _flush()
    kept = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile() as sink:
        for number in (1, 2):
            os.dup2(sink.fileno(), number)
    try:
        yield
    finally:
        _flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


class NodeProcess:
    """An actor on a node: runs a cell, or a rank of a cell, as a child process. Its answers need no class of gptexp."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.stopped: int | None = None  # the signal that came before the child was started
        self.starting = threading.Lock()

    def where(self, directory: str) -> dict[str, Any]:
        """Say where this actor runs, and whether that node can run the cell in `directory`."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "port": port,
            "gpus": [str(gpu) for gpu in context.get_accelerator_ids()["GPU"]],
            "sees": (Path(directory) / run_dir.CONFIG).is_file(),
            "version": gptexp.__version__,
        }

    def run(self, directory: str, variables: dict[str, str]) -> int:
        """Start or resume the run in `directory`, and wait for its end. Returns its exit code."""
        environment = {**without_launcher(os.environ), **variables}
        with self.starting:
            if self.stopped is not None:
                return 128 + self.stopped
            with (Path(directory) / OUTPUT).open("ab") as output:
                self.child = subprocess.Popen(
                    resume_command(Path(directory)),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=start_a_run,  # it ends with this process, so also with its node's raylet
                )
        return self.child.wait()

    def signal(self, number: int) -> None:
        """Pass a signal on to the child."""
        with self.starting:
            if self.child is None:
                self.stopped = number
            else:
                self.child.send_signal(number)


class RayCell:
    """A cell on Ray with the interface of a process, for `run_all`. It outlives the death of its nodes."""

    def __init__(self, launcher: RayLauncher, cell: Cell) -> None:
        self.launcher, self.ray, self.cell = launcher, launcher.ray, cell
        self.code: int | None = None
        self.signals: list[int] = []  # to pass on; a handler of signals must not call Ray
        self.stopped: int | None = None  # the first of them
        self.losses = 0  # how often a node of the cell has died
        self.polled = -math.inf
        self._begin()

    def poll(self) -> int | None:
        if self.code is None and time.monotonic() - self.polled >= POLL_S:
            self.polled = time.monotonic()
            self._advance()
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_S)
        return code

    def _begin(self) -> None:
        """Ask Ray for places: one actor for the cell, or one for each rank if no node can hold them all."""
        launcher, config, size = self.launcher, self.cell.config, self.cell.world_size
        self.alone = size == 1 or launcher.fits_one_node(self.cell)
        actor = self.ray.remote(NodeProcess)
        # One thread runs the child, another one passes signals on.
        options = {**launcher.options(config, size if self.alone else 1), "max_concurrency": 2}
        self.group: Any = None
        if self.alone:
            self.actors = [actor.options(**options).remote()]
        else:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            self.group = self.ray.util.placement_group([launcher.needs(config)] * size, strategy="PACK")
            places = [PlacementGroupSchedulingStrategy(self.group, index) for index in range(size)]
            self.actors = [actor.options(**{**options, "scheduling_strategy": place}).remote() for place in places]
        self.runs = False  # whether the actors have places and run the cell
        self.free_again = False  # whether the cell waits for the end of an attempt whose node has died
        self.answers: dict[int, Any] = {}  # number of an actor -> what it has answered, None if its node has died
        self.failure: int | None = None  # the exit code of the rank that failed first
        self.kill_at = math.inf  # s of the monotonic clock: when the other ranks are killed
        self._ask([actor.where.remote(str(self.cell.directory)) for actor in self.actors])

    def _ask(self, references: Sequence[Any]) -> None:
        self.answers.clear()
        self.asked = dict(zip(references, range(len(references)), strict=True))

    def _advance(self) -> None:
        while self.signals:
            number = self.signals.pop(0)
            self.stopped = self.stopped or number
            if self.runs:
                self._signal(number)
        if self.stopped is not None and not self.runs:  # it waits for a place, so that nothing is to be saved
            self._end(128 + self.stopped)
            return
        if self.free_again:
            # A process of a dead node may still live for a moment, for example to save a checkpoint.
            if not run_dir.is_locked(self.cell.directory, (run_dir.LOCK, run_dir.RANK_LOCK)):
                self._begin()
            return
        try:
            self._collect()
        except Exception as error:  # an actor cannot be made or fails: no death of a node, so no second attempt
            self._fail(f"Ray: {str(error).strip().splitlines()[-1]}")  # the last line of its traceback
            return
        if None in self.answers.values() and not (self.runs and self.asked):
            self._start_again()
        elif self.asked:
            if time.monotonic() > self.kill_at:
                self.kill_at = math.inf
                self._signal(signal.SIGKILL)
        elif self.runs:
            self._end(self.failure or 0)
        else:
            self._run()

    def _collect(self) -> None:
        """Take the answers that have come. If a rank has failed, stop the others."""
        ready, _ = self.ray.wait([*self.asked], num_returns=len(self.asked), timeout=0)
        new = {}
        for reference in ready:
            number = self.asked.pop(reference)
            try:
                new[number] = self.ray.get(reference)
            except self.ray.exceptions.RayActorError as error:
                if "creation task" in str(error):  # gptexp cannot be imported there
                    raise
                new[number] = None
        self.answers |= new
        if None in new.values():
            self._signal(signal.SIGKILL)  # the others cannot go on, and those in a collective would not end
        elif self.runs and self.failure is None and any(new.values()):
            # Ranks that lose a peer fail too, with 1: another code is the cause.
            self.failure = max((code for code in new.values() if code), key=lambda code: code != EXIT_FAILED)
            self._signal(signal.SIGTERM)
            self.kill_at = time.monotonic() + GRACE_S

    def _signal(self, number: int) -> None:
        """Pass a signal on to the processes that have not ended. Does not wait, and not for a dead node either."""
        if self.runs:
            for actor in self.asked.values():
                self.actors[actor].signal.remote(int(number))

    def _run(self) -> None:
        """Start the run: every actor has its place."""
        places, config = self.answers, self.cell.config
        for place in places.values():
            where = f"{place['host']} ({place['address']})"
            if not place["sees"]:
                self._fail(f"node {where} does not see {self.cell.directory}: outputs/ must be on a shared file system")
                return
            if place["version"] != gptexp.__version__:
                self._fail(f"node {where} has gptexp {place['version']}, not {gptexp.__version__}; install the same")
                return
        order = sorted(places, key=lambda number: (places[number]["node"], number))  # ranks of a node in a row
        nodes: dict[str, list[int]] = {}
        for number in order:
            nodes.setdefault(places[number]["node"], []).append(number)
        say(f"--- {self.cell.name}: runs on {', '.join(places[numbers[0]]['host'] for numbers in nodes.values())}")
        first = places[order[0]]
        references = []
        for number, actor in enumerate(self.actors):
            local = nodes[places[number]["node"]]
            gpus = [gpu for member in local for gpu in places[member]["gpus"]]
            ranks = self.cell.world_size if self.alone else len(local)
            at_once = self.launcher.cells_on(places[number]["node"], config, ranks)
            variables = {AT_ONCE: str(at_once), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
            if not self.alone:
                rank = Rank(order.index(number), len(order), local.index(number), len(local))
                variables |= rank_variables(rank, first["address"], first["port"])
            references.append(actor.run.remote(str(self.cell.directory), variables))
        self.runs = True
        self._ask(references)

    def _start_again(self) -> None:
        """A node has died, or its connection: start again once no process of this attempt is left."""
        self._release()
        self.runs = False
        if self.stopped is not None:
            self._end(128 + self.stopped)
            return
        self.losses += 1
        most = self.launcher.remote.get("max_retries", -1)
        if 0 <= most < self.losses:
            self._fail(f"its node died {counted(self.losses, 'time')} (hydra.launcher.ray.remote.max_retries={most})")
            return
        warn(f"{self.cell.name}: its node has died; starting again from its newest checkpoint")
        self.free_again = True

    def _fail(self, why: str) -> None:
        warn(f"{self.cell.directory}: {why}")
        self._end(EXIT_FAILED)

    def _end(self, code: int) -> None:
        self._release()
        self.code = code

    def _release(self) -> None:
        """Give the places back."""
        for actor in self.actors:
            self.ray.kill(actor)
        if self.group is not None:
            self.ray.util.remove_placement_group(self.group)
        self.actors, self.group, self.asked = [], None, {}
