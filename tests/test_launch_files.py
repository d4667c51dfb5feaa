"""The files in launch/: each fits its tool's schema, runs here as its tool would run it, and leaves time to save."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY, summary, wait_for
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from real_runs import begun
from torch.distributed.run import config_from_args, parse_args

from gptexp.run.launch import GRACE_S

LAUNCH = ROOT / "launch"
SKYPILOT = "skypilot==0.14.1"

# What a user replaces by his own. Everything else in the files describes machines.
OF_A_RUN = {"experiment", "data.path", "hydra.run.dir"}

# What Kubeflow Trainer sets itself. It refuses a TrainJob that sets one of them.
INJECTED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((LAUNCH / name).read_text())
    return content


def pod_patch() -> dict[str, Any]:
    """What kubeflow.yaml changes of the runtime's pods."""
    [patch] = read("kubeflow.yaml")["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    spec: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return spec


def trainer_env() -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in read("kubeflow.yaml")["spec"]["trainer"]["env"]}


# --- schemas ---------------------------------------------------------------------------------------------------------


def test_kubeflow_yaml_is_a_train_job_that_trainer_accepts() -> None:
    reason = "no kubeflow_trainer_api; pip install 'gptexp[test]'"
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)
    job = read("kubeflow.yaml")
    # A key that the schema does not have is lost on the way.
    assert json.loads(models.TrainerV1alpha1TrainJob.from_dict(job).to_json()) == job
    # What its webhooks refuse beyond the schema.
    assert not trainer_env().keys() & INJECTED
    [patch] = job["spec"]["runtimePatches"]
    assert re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9/_.-]+", patch["manager"])
    [container] = pod_patch()["containers"]
    assert container["name"] == "node"  # the container of the runtime torch-distributed
    assert "env" not in container


def test_every_volume_of_kubeflow_yaml_is_mounted() -> None:
    [container] = pod_patch()["containers"]
    volumes = {volume["name"]: volume for volume in pod_patch()["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert sorted(volumes) == sorted(mounts.values())
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert "persistentVolumeClaim" in volumes[mounts["/runs"]]


def test_ray_yaml_is_a_cluster_of_ray_up() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no ray; pip install 'gptexp[ray]'")
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(read("ray.yaml"))
    validate_config(config)
    workers = read("ray.yaml")["provider"]["worker_ips"]
    assert config["available_node_types"]["local.cluster.node"]["min_workers"] == len(workers)


@pytest.mark.slow
def test_skypilot_reads_sky_yaml(tmp_path: Path) -> None:
    """In an environment of its own: SkyPilot needs an older click than wandb."""
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env/bin/python")
    subprocess.run([python, "-m", "pip", "install", "-q", SKYPILOT], check=True, timeout=600)
    code = f"import sky; task = sky.Task.from_yaml({str(LAUNCH / 'sky.yaml')!r}); print(task.num_nodes, task.resources)"
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([python, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ")
    assert "{'H100': 8}" in done.stdout


# --- what the files say ----------------------------------------------------------------------------------------------


def test_the_files_set_no_hyperparameter() -> None:
    script = read("sky.yaml")["run"]
    command = shlex.split(script[script.index("launch/torchrun.sh") :])[1:]
    for overrides in (command, read("kubeflow.yaml")["spec"]["trainer"]["args"]):
        assert {override.partition("=")[0] for override in overrides} == OF_A_RUN


def stand_in(folder: Path) -> Path:
    """A folder with a `torchrun` that prints its parent's process id, its arguments and its PET_ variables, as JSON."""
    folder.mkdir()
    (folder / "torchrun").write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "variables = {k: v for k, v in os.environ.items() if k.startswith('PET_')}\n"
        "print(json.dumps([os.getppid(), sys.argv[1:], variables]))\n"
    )
    (folder / "torchrun").chmod(0o755)
    return folder


def torchrun_sh(tmp_path: Path, **env: str) -> tuple[list[str], dict[str, str]]:
    """The arguments and the PET_ variables that launch/torchrun.sh gives to torchrun."""
    path = os.pathsep.join([str(stand_in(tmp_path / "bin")), os.environ["PATH"]])
    done = subprocess.run(
        [LAUNCH / "torchrun.sh", "optim.lr=1"], env={**os.environ, "NPROC": "1", **env, "PATH": path},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    parent, argv, variables = json.loads(done.stdout)
    assert parent == os.getpid()  # no shell is between that would receive the signals in torchrun's place
    return argv, variables


def grace_s(argv: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """How long torchrun waits for its ranks after a signal. torch 2.11 has no such setting."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config, _, _ = config_from_args(parse_args(argv))
    return int(getattr(config, "shutdown_timeout", variables["PET_SHUTDOWN_TIMEOUT"]))


def test_torchrun_sh_passes_signals_on_and_leaves_time_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv, variables = torchrun_sh(tmp_path)
    assert grace_s(argv, variables, monkeypatch) >= 5 * GRACE_S
    handled = config_from_args(parse_args(argv))[0].signals_to_handle.split(",")
    assert {"SIGTERM", "SIGINT", "SIGUSR1"} <= {*handled}
    assert argv[-3:] == ["-m", "gptexp.train", "optim.lr=1"]


def test_the_time_that_torchrun_sh_leaves_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grace_s(*torchrun_sh(tmp_path, PET_SHUTDOWN_TIMEOUT="7"), monkeypatch) == 7


def test_kubernetes_waits_longer_than_torchrun_does(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = read("kubeflow.yaml")["spec"]["trainer"]
    command = [*trainer["command"], *trainer["args"]]
    assert command[0] == "torchrun"
    waits = grace_s(command[1:], {**trainer_env(), "PET_NPROC_PER_NODE": "1"}, monkeypatch)
    assert waits >= 5 * GRACE_S
    assert pod_patch()["terminationGracePeriodSeconds"] >= waits + 20


# --- Containerfile ---------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile: name and arguments, continued lines joined."""
    text = re.sub(r"\\\n", " ", (LAUNCH / "Containerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def installed() -> list[str]:
    """What the Containerfile's pip commands install."""
    commands = [shlex.split(rest) for name, rest in instructions() if name == "RUN" and "pip install" in rest]
    assert all(command[:3] == ["pip", "install", "--no-cache-dir"] for command in commands), commands
    return [requirement for command in commands for requirement in command[3:]]


def copied() -> list[str]:
    """What the Containerfile copies from the checkout."""
    return [source for name, rest in instructions() if name == "COPY" for source in rest.split()[:-1]]


def test_the_container_has_versions_that_pyproject_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [base] = [rest for name, rest in instructions() if name == "FROM"]
    version = re.fullmatch(r"docker\.io/library/python:(\d+\.\d+\.\d+)-slim-\w+", base)
    assert version is not None
    assert version[1] in SpecifierSet(project["requires-python"])
    ranges = {
        r.name: r.specifier
        for r in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["ray"]])
    }
    pinned = [Requirement(what) for what in installed() if "==" in what]
    assert [requirement.name for requirement in pinned] == ["torch", "ray"]
    for requirement in pinned:
        assert str(requirement.specifier).removeprefix("==") in ranges[requirement.name]
    assert f"pip install '{pinned[1]}' && ray up" in (LAUNCH / "README.md").read_text()  # both ends need the same
    [own] = [what for what in installed() if what.startswith("/opt/gptexp")]
    assert {*own.removeprefix("/opt/gptexp[").rstrip("]").split(",")} <= project["optional-dependencies"].keys()


def test_the_user_of_the_container_owns_what_it_writes_to() -> None:
    steps = instructions()
    [user] = [rest for name, rest in steps if name == "USER"]
    assert user == "1000"  # a number: Kubernetes cannot check of a name that it is not root's
    [made] = [rest for name, rest in steps if name == "RUN" and "useradd" in rest]
    assert f"--uid {user} " in made
    assert pod_patch()["securityContext"]["fsGroup"] == int(user)
    [folder] = [rest for name, rest in steps if name == "WORKDIR"]
    assert f"mkdir {folder} && chown gptexp {folder}" in made
    assert f"--volume={folder}:{folder}" in read("ray.yaml")["docker"]["run_options"]
    assert folder in {mount["mountPath"] for mount in pod_patch()["containers"][0]["volumeMounts"]}
    assert read("ray.yaml")["docker"]["image"] == read("kubeflow.yaml")["spec"]["trainer"]["image"]


@pytest.mark.e2e
def test_what_the_container_copies_suffices_to_install(tmp_path: Path) -> None:
    for source in copied():
        target, own = tmp_path / "opt" / source, ROOT / source
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(own, target) if own.is_dir() else shutil.copy(own, target)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(tmp_path / "opt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert "gptexp/conf/config.yaml" in zipfile.ZipFile(wheel).namelist()


def test_sky_yaml_installs_what_the_readme_does_in_a_python_that_pyproject_allows() -> None:
    made, installs = read("sky.yaml")["setup"].splitlines()[1:]
    found = re.fullmatch(r"\[ -d (\S+) \] \|\| uv venv --python (\S+) \1", made)
    assert found is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found[2] in SpecifierSet(project["requires-python"])
    [what] = re.findall(rf"uv pip install --python {found[1]} (.+)", installs)
    assert f"pip install {what} && gptexp train" in (ROOT / "README.md").read_text()
    assert f"export PATH={found[1].replace('~', '$HOME')}/bin:$PATH" in read("sky.yaml")["run"]


# --- real processes --------------------------------------------------------------------------------------------------

# The small model of the other tests; the files' own data, and the run directory, are the test's.
SMALL = [override for override in TINY if not override.startswith("data=")] + ["schedule.warmup_tokens=null"]


Nodes = Callable[..., list[subprocess.Popen[str]]]
Sabotage = Callable[[str, str], dict[str, str]]


@pytest.fixture
def nodes(tmp_path: Path, corpus: Path) -> Iterator[Nodes]:
    """Start one command for each of several environments, as on one node each. /runs in the command is `tmp_path`."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").symlink_to(corpus)
    started: list[subprocess.Popen[str]] = []

    def start(command: list[str], *envs: dict[str, str]) -> list[subprocess.Popen[str]]:
        here = [word.replace("/runs", str(tmp_path)) for word in command]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        processes = [
            subprocess.Popen(
                here, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **env},
            )
            for env in envs
        ]  # fmt: skip
        started.extend(processes)
        return processes

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # a script and its agent; the ranks end with their agent
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, stderr) of each process."""
    errors = [process.communicate(timeout=240)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


# In every process: a checkpoint takes four seconds.
SLOW_SAVE = """
import time
begin_to_save = m.begin_to_save
def slow(*args):
    time.sleep(4)
    return begin_to_save(*args)
m.begin_to_save = slow
"""
# What torchrun waits without a setting of its own, in place of 30 seconds.
SHORT_DEFAULT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}


@pytest.mark.e2e
def test_the_script_of_sky_yaml_trains_one_run_on_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    script = read("sky.yaml")["run"].rstrip().replace("29500", str(free_port())) + f" {shlex.join(SMALL)}"
    common = {
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
    }  # fmt: skip
    done = ends(nodes(["bash", "-c", script], common, common))
    assert [code for code, _ in done] == [0, 0], done
    assert (summary(tmp_path / "a")["world_size"], summary(tmp_path / "a")["status"]) == (2, "completed")
    assert (tmp_path / "cache").is_dir()


@pytest.mark.e2e
def test_a_train_job_saves_when_a_pod_is_evicted_and_continues(
    nodes: Nodes, tmp_path: Path, sabotage: Sabotage
) -> None:
    trainer = read("kubeflow.yaml")["spec"]["trainer"]
    command = [*trainer["command"], *trainer["args"], *SMALL, "train.max_steps=100000", "train.save_every=0"]
    injected = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()), **trainer_env(),
    }  # fmt: skip
    ranks = [{**injected, "PET_NODE_RANK": str(rank)} for rank in range(2)]
    slow = {**SHORT_DEFAULT, **sabotage("gptexp.storage.checkpoint", SLOW_SAVE)}
    pods = nodes(command, *({**slow, **rank} for rank in ranks))
    wait_for(begun(tmp_path / "a"), pods[0])
    pods[0].send_signal(signal.SIGTERM)  # what the kubelet sends; rank 0, which saves, runs there
    done = ends(pods)
    assert all(code != 0 for code, _ in done), done  # so Kubernetes starts both containers again
    stopped = summary(tmp_path / "a")
    assert (stopped["status"], stopped["world_size"]) == ("interrupted", 2), done
    assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == [f"step-{stopped['steps']:08}"], done

    again = ends(nodes([*command, f"train.max_minutes={1 / 600}"], *ranks))
    assert [code for code, _ in again] == [0, 0], again
    assert summary(tmp_path / "a")["steps"] > stopped["steps"]


@pytest.mark.slow
def test_torchrun_sh_waits_for_a_checkpoint_that_takes_longer_than_torchs_default(
    nodes: Nodes, tmp_path: Path, sabotage: Sabotage
) -> None:
    options = ["data=text", "data.path=/runs/text/*.txt", "hydra.run.dir=/runs/a", *TINY, "train.max_steps=100000"]
    env = {**SHORT_DEFAULT, **sabotage("gptexp.storage.checkpoint", SLOW_SAVE), "NPROC": "2"}
    [agent] = nodes([str(LAUNCH / "torchrun.sh"), *options, "train.save_every=0"], env)
    wait_for(begun(tmp_path / "a"), agent)
    agent.send_signal(signal.SIGUSR1)
    [(code, err)] = ends([agent])
    assert code == 1, err  # torchrun's, whatever its ranks return
    stopped = summary(tmp_path / "a")
    assert stopped["status"] == "interrupted", err
    assert (tmp_path / "a/checkpoints" / f"step-{stopped['steps']:08}").is_dir(), err
