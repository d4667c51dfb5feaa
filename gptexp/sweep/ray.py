"""Cells of a sweep on a Ray cluster, which may be one that is started on this machine for the sweep.

This file starts and watches a cell's processes on the nodes, and restarts a cell whose node dies. Ray places and queues
the cells. A cell that fits one node is one actor, which runs `gptexp resume`; the ranks of a larger cell are actors of
a placement group. Ray ships no file: every node has gptexp installed and sees the sweep's directory.
"""

import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptexp.config.schema import Config
from gptexp.distributed.ranks import AT_ONCE, Rank, rank_variables, without_launcher
from gptexp.process.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, UserError, first_line
from gptexp.process.fields import AUTO
from gptexp.process.signals import start_a_run
from gptexp.process.terminal import NOWHERE, output_to, say, warn
from gptexp.process.versions import VERSION
from gptexp.process.words import counted
from gptexp.run.nodes import leave_mark
from gptexp.run.own_process import resume_command
from gptexp.storage import run_dir
from gptexp.sweep.cells import PLUGINS, Cell, decisions
from gptexp.sweep.launchers import CellLauncher, Places, Process
from gptexp.sweep.ray_cluster import KEY, RayCluster, alike, connect, read_settings

POLL_S = 0.3  # s: between two looks at a cell
LOOK_S = 5.0  # s: between two looks at the nodes for a cell that waits
GRACE_S = 60.0  # s: from a rank's failure to the kill of ranks that do not end


class RayLauncher(CellLauncher):
    """Runs each cell on a node of a Ray cluster, or its ranks on several; Ray queues the cells that have no room.

    A cell whose node dies starts again from its newest checkpoint on another. The arguments of `ray.init` and the
    options of `ray.remote` have the names of hydra-ray-launcher: `hydra.launcher.ray.init` and `.remote`.
    """

    __module__ = PLUGINS
    where = " on Ray"
    shares_machine = False
    cluster: RayCluster | None = None

    def __init__(self, ray: Any) -> None:
        self.settings = ray

    def check(self, configs: Sequence[Config]) -> None:
        """Connect to the cluster. Raises `ConfigError` if it cannot be used, or can never hold one of the cells."""
        self.refuse_ranks("ray")
        settings = read_settings(self.settings)
        ray = connect(settings)
        used_gpus = any(values.get("device") == "cuda" for values in decisions(Path(self.config.hydra.sweep.dir)))
        self.cluster = RayCluster(ray, settings.address[0], settings.remote, used_gpus)
        for config in alike(configs):
            for ranks in (1, config.world.size or 1):
                try:
                    ray.remote(NodeProcess).options(**self.cluster.options(config, ranks))
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"{KEY}.remote: {first_line(error)}") from None
        self.cluster.refuse(configs)
        if not self.cluster.auto_is_gpu and any(config.train.device == AUTO for config in configs):
            say("--- train.device=auto: no node of the cluster has a GPU; the cells train on CPUs")

    def places(self, configs: Sequence[Config]) -> Places:
        """Places for all cells, or `sweep.parallel` places. Ray queues cells, and follows changes of the cluster."""
        if isinstance(parallel := configs[0].sweep.parallel, int):
            return Places(parallel)
        ranks = sum(self.cluster.rooms(configs[0]).values()) if self.cluster is not None else 0
        return Places(max(1, len(configs), ranks // (configs[0].world.size or 1)))  # Optuna's `configs` are examples

    def start(self, cell: Cell, gpus: Sequence[str], at_once: int) -> Process:
        assert self.cluster is not None
        return RayCell(self.cluster, cell)

    def close(self) -> None:
        """Leave the cluster; one that was started for the sweep ends."""
        if self.cluster is not None:
            with output_to(NOWHERE):
                self.cluster.ray.shutdown()


class NodeProcess:
    """An actor on a node: runs a cell, or a rank of a cell, as a child process. Its answers need no class of gptexp."""

    child: subprocess.Popen[bytes] | None = None

    def where(self, mark: str) -> dict[str, Any]:
        """Say where this actor runs, and whether that node sees the file `mark` in the cell's directory."""
        import ray

        # Bound until this process ends, so that only rank 0 of the run, which may reuse the address, takes the port.
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
            "version": VERSION,
        }

    def run(self, directory: str, variables: dict[str, str]) -> int:
        """Start or resume the run in `directory`, and wait for its end. Returns its exit code."""
        with (Path(directory) / run_dir.OUTPUT).open("ab") as output:
            self.child = subprocess.Popen(
                resume_command(Path(directory)),
                env={**without_launcher(os.environ), **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=start_a_run,  # it ends with this process, so also with its node's raylet
            )
        return self.child.wait()

    def signal(self, number: int) -> None:
        """Pass a signal on to the child, which another thread of this actor may be about to start."""
        while self.child is None:
            time.sleep(POLL_S)
        self.child.send_signal(number)


class RayCell:
    """A cell on Ray with the interface of a process. It outlives the death of its nodes."""

    def __init__(self, cluster: RayCluster, cell: Cell) -> None:
        self.cluster, self.ray, self.cell = cluster, cluster.ray, cell
        self.code: int | None = None
        self.stopped: int | None = None  # the first signal
        self.polled = -math.inf
        self.life = self._run()
        # Of the current attempt:
        self.actors: list[Any] = []  # one for the cell, or one for each rank
        self.group: Any = None
        self.mark: Path | None = None  # a file by which a node shows that it sees the cell's directory
        self.owed: dict[Any, int] = {}  # reference of an answer -> number of the actor that owes it
        self.runs = False  # whether the actors have places and run the cell

    def poll(self) -> int | None:
        if self.code is None and time.monotonic() - self.polled >= POLL_S:
            self.polled = time.monotonic()
            try:
                next(self.life)
            except StopIteration as end:
                self.code = end.value
            except Exception as error:  # Ray's own, of many types, is not the end of the other cells
                warn(f"{self.cell.directory}: {error if isinstance(error, UserError) else f'Ray: {_cause(error)}'}")
                self.code = EXIT_FAILED
        return self.code

    def send_signal(self, number: int) -> None:
        self.stopped = self.stopped or number
        self._signal(number)

    def _run(self) -> Generator[None, None, int]:
        """Try until the cell ends by itself, and yield while it waits or runs. Returns its exit code."""
        losses, most, after_loss = 0, self.cluster.remote.get("max_retries", -1), False
        while True:
            try:
                # A process of a dead node may still live for a moment, for example to save a checkpoint.
                while self.stopped is None and run_dir.is_locked(self.cell.directory):
                    yield
                code = yield from self._attempt()
            finally:
                self._release()
            if code == EXIT_CONFIG and after_loss:  # such a process took the lock after the check above
                after_loss = False
                continue
            if code is not None:
                return code
            if self.stopped is not None:
                return 128 + self.stopped
            losses, after_loss = losses + 1, True
            if 0 <= most < losses:
                raise UserError(f"its node died {counted(losses, 'time')} ({KEY}.remote.max_retries={most})")
            warn(f"{self.cell.name}: its node has died; starting again from its newest checkpoint")
            yield

    def _attempt(self) -> Generator[None, None, int | None]:
        """Run the cell once. Returns its exit code; None if a node has died, or a signal came before the start."""
        while self.stopped is None:
            alone = self.cluster.fits_one_node(self.cell.config)
            self._ask_for_places(alone)
            places = yield from self._places(alone)
            if places is not None:
                if None in places.values():
                    return None
                self._start(places, alone)
                return (yield from self._exit_code())
            self._release()
        return None

    def _ask_for_places(self, alone: bool) -> None:
        """Ask Ray for one actor that holds all ranks of the cell (`alone`), or for one for each rank."""
        config, size = self.cell.config, self.cell.world_size
        self.mark = leave_mark(self.cell.directory)
        actor = self.ray.remote(NodeProcess)
        # One thread runs the child, another one passes signals on.
        options = {**self.cluster.options(config, size if alone else 1), "max_concurrency": 2}
        if alone:
            self.actors = [actor.options(**options).remote()]
        else:
            self.group = self.ray.util.placement_group([self.cluster.needs(config)] * size, strategy="PACK")
            in_group = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            for index in range(size):
                self.actors.append(actor.options(**options, scheduling_strategy=in_group(self.group, index)).remote())
        self._ask([actor.where.remote(str(self.mark)) for actor in self.actors])

    def _places(self, alone: bool) -> Generator[None, None, dict[int, Any] | None]:
        """Wait for the places. Returns actor number -> what the actor says of its place; None if its node has died.

        Returns None for all if a signal has come, or if the nodes have changed so that the cell needs other places.
        Warns once if the remaining nodes could never hold the cell.
        """
        places, looked = dict[int, Any](), time.monotonic()
        while self.owed and None not in places.values():
            yield
            if self.stopped is not None:
                return None
            places |= self._answers()
            if self.owed and time.monotonic() - looked > LOOK_S:
                looked, shortage = time.monotonic(), self.cluster.shortage(self.cell.config)
                if shortage is not None and shortage not in self.cluster.shortages:
                    self.cluster.shortages.add(shortage)
                    warn(f"{self.cell.name} waits: {shortage}")
                if shortage is None and alone != self.cluster.fits_one_node(self.cell.config):
                    return None
        return places

    def _start(self, places: dict[int, Any], alone: bool) -> None:
        """Start the run on its places. Raises `UserError` for a node that cannot run it."""
        for place in places.values():
            where = f"node {place['host']} ({place['address']})"
            if not place["sees"]:
                raise UserError(f"{where} does not see this directory: outputs/ must be on a shared file system")
            if place["version"] != VERSION:
                raise UserError(f"{where} has gptexp {place['version']}, not {VERSION}; install the same")
        order = sorted(places, key=lambda number: (places[number]["node"], number))  # ranks of a node are consecutive
        on_node: dict[str, list[int]] = {}
        for number in order:
            on_node.setdefault(places[number]["node"], []).append(number)
        say(f"--- {self.cell.name}: runs on {', '.join(places[numbers[0]]['host'] for numbers in on_node.values())}")
        first, references = places[order[0]], []
        for number, actor in enumerate(self.actors):
            node = places[number]["node"]
            local = on_node[node]
            room = self.cluster.rooms(self.cell.config).get(node, 0)
            at_once = max(1, room // (self.cell.world_size if alone else len(local)))
            gpus = [gpu for member in local for gpu in places[member]["gpus"]]
            variables = {AT_ONCE: str(at_once), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
            if not alone:
                rank = Rank(order.index(number), len(order), local.index(number), len(local))
                variables |= rank_variables(rank, first["address"], first["port"])
            references.append(actor.run.remote(str(self.cell.directory), variables))
        self._ask(references)
        self.runs = True

    def _exit_code(self) -> Generator[None, None, int | None]:
        """Wait for all ranks, and stop the others when one fails. Returns the exit code, None if a node has died."""
        code, has_lost_node, kill_at = 0, False, math.inf
        while self.owed:
            yield
            answers = self._answers()
            if None in answers.values():
                has_lost_node = True
                self._signal(signal.SIGKILL)  # the others cannot go on, and those in a collective would not end
            elif code == 0 and any(answers.values()):
                # Ranks that lose a peer fail too, with code 1. Another code shows the cause.
                code = max(filter(None, answers.values()), key=lambda code: code != EXIT_FAILED)
                self._signal(signal.SIGTERM)
                kill_at = time.monotonic() + GRACE_S
            elif time.monotonic() > kill_at:
                kill_at = math.inf
                self._signal(signal.SIGKILL)
        return None if has_lost_node else code

    def _ask(self, references: Sequence[Any]) -> None:
        self.owed = {reference: number for number, reference in enumerate(references)}

    def _answers(self) -> dict[int, Any]:
        """Take the answers that have come, by the numbers of their actors; None from one whose node has died."""
        answers: dict[int, Any] = {}
        for reference in self.ray.wait([*self.owed], num_returns=len(self.owed), timeout=0)[0]:
            number = self.owed.pop(reference)
            try:
                answers[number] = self.ray.get(reference)
            except self.ray.exceptions.RayActorError as error:
                if "creation task" in str(error):  # gptexp cannot be imported there
                    raise
                answers[number] = None
        return answers

    def _signal(self, number: int) -> None:
        """Pass a signal on to the processes that have not ended. Does not wait, not even for a dead node."""
        for actor in self.owed.values() if self.runs else ():
            self.actors[actor].signal.remote(int(number))

    def _release(self) -> None:
        """Give the places back, if it has any: the cell is as before its first attempt."""
        with suppress(Exception):  # Ray's: it may have lost its head node
            for actor in self.actors:
                self.ray.kill(actor)
            if self.group is not None:
                self.ray.util.remove_placement_group(self.group)
        if self.mark is not None:
            with suppress(OSError):
                self.mark.unlink()
        self.actors, self.group, self.mark, self.owed, self.runs = [], None, None, {}, False


def _cause(error: Exception) -> str:
    """Return the last line of an error's text. The text of an error on a node is a traceback."""
    return [type(error).__name__, *filter(str.strip, str(error).splitlines())][-1].strip()
