"""A real SLURM with two nodes, n1 and n2, on this machine: munged, slurmctld and one slurmd for each node.

It needs root and Debian's packages slurm-wlm and munge. It adds the names n1 and n2 to /etc/hosts if they are missing.
Each process of pytest that tests with SLURM starts a cluster, which takes two seconds: a test may then lose a node
without disturbing another. Files, ports and keys of a cluster are its own.
"""

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, flock
from pathlib import Path

import psutil
from conftest import ROOT

from gptexp.process.signals import at_parents_death

NODES = ("n1", "n2")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")  # SLURM wants one for each GPU, and does not use it
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A requeued job waits for as long as a credential is valid: by default 120 s, at least 5.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
# As on clusters where each job must ask for it (sbatch --requeue).
JobRequeue=0
KillWait=30
# A lost node is noticed after this, by default after 300 s.
SlurmdTimeout=6
MinJobAge=300
# The nodes have more CPUs than this machine.
SlurmdParameters=config_overrides
# srun derives the port of the ranks' store from the job's number: two clusters must not count from one number.
FirstJobId={first_job}
# n2 has GPUs in name only.
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=1000 Gres=gpu:h100:4
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=small Nodes=n1 MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no SLURM can be started here; None if it can."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {absent[0]}; apt-get install slurm-wlm munge" if absent else None


class Cluster:
    """The running daemons, and SLURM's commands for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge.key").chmod(0o400)
        first_job = random.randrange(1, 20_000_000)
        (self.folder / "slurm.conf").write_text(
            CONF.format(folder=self.folder, host=socket.gethostname(), ports=_free_ports(3), first_job=first_job)
        )
        (self.folder / "gres.conf").write_text(
            "".join(f"NodeName=n2 Name=gpu Type=h100 File={device}\n" for device in DEVICES)
        )
        _name_the_nodes()
        names = {"socket": "socket", "key": "key-file", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
        files = [f"--{option}={self.folder / f'munge.{name}'}" for name, option in names.items()]
        self._daemon("munged", "munged", "--foreground", "--force", *files)
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until all nodes wait for jobs. Starts those that a test has killed."""
        for node in NODES:
            if node not in self.daemons:
                self.start_node(node)
        self.wait_for(self.is_idle)

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._daemon(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once, as when its power fails."""
        self.daemons.pop(node).kill()
        for process in self.steps(node):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def steps(self, *nodes: str) -> list[psutil.Process]:
        """The processes that job steps run on these nodes, each after the slurmstepd that started it."""
        found = []
        for process in psutil.process_iter(["environ"]):
            environ = process.info["environ"] or {}
            if environ.get("SLURM_CONF") == self.env()["SLURM_CONF"] and environ.get("SLURMD_NODENAME") in nodes:
                with suppress(psutil.NoSuchProcess):
                    parent = process.parent()
                    found += [*([parent] if parent is not None and parent.name() == "slurmstepd" else []), process]
        return found

    def stop(self) -> None:
        """Kill the jobs, then the daemons."""
        for process in self.steps(*NODES):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in self.daemons.values():
            daemon.kill()
        for daemon in self.daemons.values():
            daemon.wait()

    def __call__(self, *command: str) -> str:
        """Run a command of SLURM; what it prints."""
        done = subprocess.run(command, env=self.env(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def env(self) -> dict[str, str]:
        """The environment of a command for this cluster. Jobs inherit it, and find this Python and this gptexp."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def job(self, number: str) -> dict[str, str]:
        """What SLURM says of a job, such as its JobState and its Restarts."""
        return dict(word.split("=", 1) for word in self("scontrol", "show", "job", number).split() if "=" in word)

    def is_idle(self) -> bool:
        """Whether all nodes wait for jobs. False until the controller answers."""
        command = ["sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T"]
        done = subprocess.run(command, env=self.env(), capture_output=True, text=True, timeout=120)
        return done.stdout.split() == ["idle"] * len(NODES)

    def wait_for(self, condition: Callable[[], object], seconds: float = 120) -> None:
        """Poll until `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, [self("sinfo"), self("squeue", "--long")]
            time.sleep(0.1)

    def _daemon(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("ab")
        self.daemons[name] = subprocess.Popen(
            command,
            env=self.env(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: at_parents_death(signal.SIGKILL),  # slurmd would wait for its job steps
        )


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _name_the_nodes() -> None:
    """srun's ranks meet at the first node's name, which must have an address."""
    with Path("/etc/hosts").open("a+") as hosts:
        flock(hosts, LOCK_EX)
        hosts.seek(0)
        known = hosts.read().split()
        if wanted := [node for node in NODES if node not in known]:
            hosts.write(f"127.0.0.1 {' '.join(wanted)}\n")


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    running = Cluster(folder)
    try:
        running.start()
        yield running
    finally:
        running.stop()
