"""Cells of a sweep on a Ray cluster, or on one of this machine that is started for the sweep.

Owns a cell's processes on the nodes, and what happens when a node dies. Ray places and queues the cells. A cell that
fits one node is one actor, which runs `gptexp resume`; the ranks of a larger cell are actors of a placement group. Ray
ships no file: every node has gptexp installed and sees the sweep's directory.
"""

import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gptexp
from gptexp.config.schema import AUTO, Config
from gptexp.distributed.ranks import AT_ONCE, Rank, launcher_rank, rank_variables, without_launcher
from gptexp.process.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, UserError, first_line
from gptexp.process.signals import start_a_run
from gptexp.process.terminal import say, warn
from gptexp.process.words import counted
from gptexp.run.nodes import leave_mark
from gptexp.run.pool import OUTPUT, Places, Process, resume_command
from gptexp.storage import run_dir
from gptexp.sweep.cells import PLUGINS, Cell
from gptexp.sweep.launchers import CellLauncher
from gptexp.sweep.ray_cluster import KEY, RayCluster, alike, connect, quiet, read_settings

POLL_S = 0.3  # s: between two looks at a cell
LOOK_S = 5.0  # s: between two looks at the nodes for a cell that waits
GRACE_S = 60.0  # s: from a rank's failure to the kill of ranks that do not end


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
        settings = read_settings(self.given)
        self.ray = connect(settings)
        used_gpus = _has_used_gpus(Path(self.config.hydra.sweep.dir))
        self.cluster = cluster = RayCluster(self.ray, settings.address[0], settings.remote, used_gpus)
        for config in alike(configs):
            for ranks in (1, config.world.size or 1):
                try:
                    self.ray.remote(NodeProcess).options(**cluster.options(config, ranks))
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"{KEY}.remote: {first_line(error)}") from None
        cluster.refuse(configs)
        if not cluster.auto_is_gpu and any(config.train.device == AUTO for config in configs):
            say("--- train.device=auto: no node of the cluster has a GPU; the cells train on CPUs")
        self.room = self.places(configs)
        if configs[0].sweep.parallel == AUTO:  # Optuna's `configs` are a few examples
            self.room = Places(max(self.room.at_once, cluster.room(configs[0]) // (configs[0].world.size or 1)))

    def places(self, configs: Sequence[Config]) -> Places:
        """All cells, unless `sweep.parallel` sets a limit: Ray queues them, and follows the cluster as it changes."""
        parallel = configs[0].sweep.parallel
        return Places(parallel if isinstance(parallel, int) else max(1, len(configs)))

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
        return RayCell(self.cluster, cell)


def _has_used_gpus(sweep: Path) -> bool:
    """Whether a cell of the sweep in this directory has trained on a GPU."""
    for path in (sweep / run_dir.EFFECTIVE, *sweep.glob(f"*/{run_dir.EFFECTIVE}")):
        with suppress(ConfigError):  # a damaged file: the cell's own run reports it
            if run_dir.read_json(path).get("device") == "cuda":
                return True
    return False


class NodeProcess:
    """An actor on a node: runs a cell, or a rank of a cell, as a child process. Its answers need no class of gptexp."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.stopped: int | None = None  # the signal that came before the child was started
        self.starting = threading.Lock()

    def where(self, mark: str) -> dict[str, Any]:
        """Say where this actor runs, and whether that node sees the file `mark` in the cell's directory."""
        import ray

        # Bound until this process ends, so that nothing else takes the port before rank 0 of the run, which may.
        self.store = socket.socket()
        self.store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.store.bind(("", 0))
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "port": self.store.getsockname()[1],
            "gpus": [str(gpu) for gpu in context.get_accelerator_ids()["GPU"]],
            "sees": Path(mark).exists(),
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

    def __init__(self, cluster: RayCluster, cell: Cell) -> None:
        self.cluster, self.ray, self.cell = cluster, cluster.ray, cell
        self.code: int | None = None
        self.signals: list[int] = []  # to pass on; a handler of signals must not call Ray
        self.stopped: int | None = None  # the first of them
        self.losses = 0  # how often a node of the cell has died
        self.forgives = False  # whether an attempt may end because a process of a dead node uses the directory
        self.polled = -math.inf
        self._reset()

    def _reset(self) -> None:
        """Set the state of an attempt that has not asked for places yet."""
        self.actors: list[Any] = []  # one for the cell, or one for each rank
        self.group: Any = None
        self.mark: Path | None = None  # a file by which a node shows that it sees the cell's directory
        self.asked: dict[Any, int] = {}  # reference of an answer -> number of the actor that owes it
        self.answers: dict[int, Any] = {}  # number of an actor -> what it has answered, None if its node has died
        self.runs = False  # whether the actors have places and run the cell
        self.failure: int | None = None  # the exit code of the rank that failed first
        self.kill_at = math.inf  # s of the monotonic clock: when the other ranks are killed

    def poll(self) -> int | None:
        if self.code is None and time.monotonic() - self.polled >= POLL_S:
            self.polled = time.monotonic()
            try:
                self._advance()
            except UserError as error:
                self._fail(str(error))
            except Exception as error:  # Ray's own, of many types, is not the end of the other cells
                self._fail(f"Ray: {_cause(error)}")
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_S)
        return code

    def _advance(self) -> None:
        while self.signals:
            number = self.signals.pop(0)
            self.stopped = self.stopped or number
            self._signal(number)
        if self.stopped is not None and not self.runs:  # it waits for a place, so that nothing is to be saved
            self._end(128 + self.stopped)
            return
        if not self.actors:
            # A process of a dead node may still live for a moment, for example to save a checkpoint.
            if not run_dir.is_locked(self.cell.directory, (run_dir.LOCK, run_dir.RANK_LOCK)):
                self._begin()
            return
        self._collect()
        if None in self.answers.values() and not (self.runs and self.asked):
            self._start_again()
        elif self.asked:
            if time.monotonic() > self.kill_at:
                self.kill_at = math.inf
                self._signal(signal.SIGKILL)
            if not self.runs and time.monotonic() - self.looked > LOOK_S:
                self._look_at_nodes()
        elif not self.runs:
            self._run()
        elif self.failure == EXIT_CONFIG and self.forgives:
            self.forgives = False
            self._release()
        else:
            self._end(self.failure or 0)

    def _begin(self) -> None:
        """Ask Ray for places: one actor for the cell, or one for each rank if no node can hold them all."""
        config, size = self.cell.config, self.cell.world_size
        self.alone = self._needs_one_actor()
        self.mark = leave_mark(self.cell.directory)
        actor = self.ray.remote(NodeProcess)
        # One thread runs the child, another one passes signals on.
        options = {**self.cluster.options(config, size if self.alone else 1), "max_concurrency": 2}
        if self.alone:
            self.actors = [actor.options(**options).remote()]
        else:
            self.group = self.ray.util.placement_group([self.cluster.needs(config)] * size, strategy="PACK")
            in_group = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            for index in range(size):
                place = in_group(self.group, index)
                self.actors.append(actor.options(**options, scheduling_strategy=place).remote())
        self.looked = time.monotonic()
        self._ask([actor.where.remote(str(self.mark)) for actor in self.actors])

    def _ask(self, references: Sequence[Any]) -> None:
        self.answers = {}
        self.asked = dict(zip(references, range(len(references)), strict=True))

    def _look_at_nodes(self) -> None:
        """Ask for other places if the nodes have changed so that it needs them. Say once if none would do."""
        self.looked = time.monotonic()
        shortage = self.cluster.shortage(self.cell.config)
        if shortage is not None and shortage not in self.cluster.shortages:
            self.cluster.shortages.add(shortage)
            warn(f"{self.cell.name} waits: {shortage}")
        if shortage is None and self.alone != self._needs_one_actor():
            self._release()

    def _needs_one_actor(self) -> bool:
        """Whether one actor runs the cell: it has one rank, or a node can hold all of them."""
        return self.cell.world_size == 1 or self.cluster.fits_one_node(self.cell.config)

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
                self._fail(f"node {where} does not see this directory: outputs/ must be on a shared file system")
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
            at_once = self.cluster.cells_on(places[number]["node"], config, ranks)
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
        if self.stopped is not None:
            self._end(128 + self.stopped)
            return
        self.losses += 1
        most = self.cluster.remote.get("max_retries", -1)
        if 0 <= most < self.losses:
            self._fail(f"its node died {counted(self.losses, 'time')} ({KEY}.remote.max_retries={most})")
            return
        warn(f"{self.cell.name}: its node has died; starting again from its newest checkpoint")
        self.forgives = True

    def _fail(self, why: str) -> None:
        warn(f"{self.cell.directory}: {why}")
        self._end(EXIT_FAILED)

    def _end(self, code: int) -> None:
        self.code = code
        self._release()

    def _release(self) -> None:
        """Give the places back, if it has any: the cell is as before its first attempt."""
        with suppress(Exception):  # of Ray, which may have lost its head
            for actor in self.actors:
                self.ray.kill(actor)
            if self.group is not None:
                self.ray.util.remove_placement_group(self.group)
        if self.mark is not None:
            with suppress(OSError):
                self.mark.unlink()
        self._reset()


def _cause(error: Exception) -> str:
    """Return the last line of an error's text: of one on a node, the text is a traceback."""
    return [type(error).__name__, *filter(str.strip, str(error).splitlines())][-1].strip()
