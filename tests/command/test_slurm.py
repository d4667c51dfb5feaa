"""Runs on a real SLURM of two nodes: launch/slurm.sbatch, and the ranks that srun starts."""

import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import ROOT, events, runs, sabotaged, summary
from real_runs import begun

from gptexp.config.schema import DataConfig
from gptexp.data.prepare import find_corpus, prepare, tokens_dir

if TYPE_CHECKING:
    from slurm_cluster import Cluster

OF_A_CPU_CLUSTER = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1")
SCRIPT = str(ROOT / "launch" / "slurm.sbatch")
LONG = ("train.max_steps=80", "train.save_every=0", "train.eval_every=0")


def submit(slurm: "Cluster", folder: Path, overrides: list[str]) -> tuple[str, Path]:
    """Submit launch/slurm.sbatch on two nodes; the number of the job, and its run directory."""
    number = slurm("sbatch", "--parsable", f"--chdir={folder}", *OF_A_CPU_CLUSTER, SCRIPT, *overrides)
    return number, folder / "outputs" / f"slurm-{number}"


def srun(slurm: "Cluster", folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as two tasks, one on each node; the exit code is the largest of the tasks'."""
    step = ["srun", "--nodes=2", "--ntasks-per-node=1", f"--chdir={folder}", *command]
    return subprocess.run(step, env=slurm.env(), capture_output=True, text=True, timeout=120)


@pytest.mark.e2e
def test_a_job_is_requeued_at_its_time_limit_and_when_it_loses_a_node_and_continues(
    slurm: "Cluster", tiny: list[str], tmp_path: Path
) -> None:
    number, directory = submit(slurm, tmp_path, [*tiny, *LONG, "train.save_every=10"])
    slurm.wait_for(begun(directory))
    assert summary(directory)["world_size"] == 2
    ranks = {p.environ()["SLURMD_NODENAME"] for p in slurm.steps("n1", "n2") if "gptexp.train" in p.cmdline()}
    assert ranks == {"n1", "n2"}

    slurm("scancel", "--signal=USR1", number)  # as SLURM does before the time limit
    slurm.wait_for(lambda: slurm.job(number)["Restarts"] == "1")
    assert summary(directory)["status"] == "interrupted"
    stopped_at = summary(directory)["steps"]
    slurm.wait_for(begun(directory, stopped_at + 12))  # past a checkpoint

    slurm.kill_node("n2")
    slurm.wait_for(lambda: slurm.job(number)["Restarts"] == "2")
    slurm.start_node("n2")
    slurm.wait_for(lambda: slurm.job(number)["JobState"] == "COMPLETED")
    assert summary(directory)["status"] == "completed"
    assert [event["step"] for event in events(directory, "step")] == list(range(80))
    output = (tmp_path / f"slurm-{number}.out").read_text()
    assert "Exited with exit code 138" in output
    assert output.count("interrupted after") == 1
    assert "no checkpoint" not in output


@pytest.mark.e2e
def test_a_cancelled_job_saves_and_its_run_is_resumed_by_srun(
    slurm: "Cluster", tiny: list[str], tmp_path: Path
) -> None:
    number, directory = submit(slurm, tmp_path, [*tiny, *LONG])
    slurm.wait_for(begun(directory))
    slurm("scancel", number)
    slurm.wait_for(slurm.is_idle)
    assert slurm.job(number)["JobState"] == "CANCELLED"
    assert summary(directory)["status"] == "interrupted"
    stopped_at = summary(directory)["steps"]
    assert [path.name for path in (directory / "checkpoints").iterdir()] == [f"step-{stopped_at:08d}"]
    assert 4 <= stopped_at < 80

    wrong = srun(slurm, tmp_path, "python", "-m", "gptexp", "resume", str(directory), "--world-size", "4")
    assert wrong.returncode == 2
    assert "world.size=4: the launcher started 2 ranks; start 4, or add --world-size 2" in wrong.stderr
    done = srun(slurm, tmp_path, "python", "-m", "gptexp", "resume", str(directory))
    assert done.returncode == 0, done.stderr
    assert summary(directory)["status"] == "completed"
    assert [event["step"] for event in events(directory, "step")] == list(range(80))
    again = srun(slurm, tmp_path, "python", "-m", "gptexp", "resume", str(directory))
    assert (again.returncode, again.stdout.count("nothing to do")) == (0, 1)


@pytest.mark.slow
def test_a_process_outside_of_a_job_step_trains_on_one_rank(slurm: "Cluster", tiny: list[str], tmp_path: Path) -> None:
    """And one that is requeued before its first checkpoint says that it starts again, if it had begun before."""
    script, directory = tmp_path / "script", tmp_path / "alone"
    script.write_text(f"#!/bin/bash\nexec python -m gptexp train {' '.join([*tiny, *LONG])} hydra.run.dir=alone\n")
    number = slurm("sbatch", "--parsable", "--requeue", "--open-mode=append", f"--chdir={tmp_path}",
                   *OF_A_CPU_CLUSTER, str(script))  # fmt: skip
    slurm.wait_for(begun(directory))
    [process] = [p for p in slurm.steps("n1", "n2") if "hydra.run.dir=alone" in p.cmdline()]
    process.kill()
    slurm.wait_for(lambda: slurm.job(number)["JobState"] == "FAILED")
    slurm("scontrol", "requeue", number)
    slurm.wait_for(lambda: slurm.job(number)["JobState"] == "COMPLETED")
    assert summary(directory)["world_size"] == 1
    said = (tmp_path / f"slurm-{number}.out").read_text()
    assert said.count("SLURM has requeued this job (restart 1), and ") == 1
    assert f"{directory}/checkpoints holds no checkpoint: training starts from step 0\n" in said


@pytest.mark.e2e
def test_a_run_that_first_begins_in_a_requeued_job_says_nothing_of_it(
    gptexp: Callable[..., subprocess.CompletedProcess[str]], tiny: list[str]
) -> None:
    done = gptexp("train", *tiny, "hydra.run.dir=out", env={"SLURM_RESTART_COUNT": "1"})
    assert done.returncode == 0
    assert "requeued" not in done.stderr


@pytest.mark.e2e
def test_a_job_that_never_saves_is_not_requeued_for_ever(slurm: "Cluster", tmp_path: Path) -> None:
    """A program in the place of gptexp ends as at a time limit, and in the first two attempts saves a checkpoint."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/bash\nattempt=${SLURM_RESTART_COUNT:-0}\n"
        "[ $attempt -lt 2 ] && mkdir -p outputs/slurm-$SLURM_JOB_ID/checkpoints/step-0000000$attempt\nexit 138\n"
    )
    program.chmod(0o755)
    path = f"--export=ALL,PATH={program.parent}:{slurm.env()['PATH']}"
    number = slurm("sbatch", "--parsable", f"--chdir={tmp_path}", *OF_A_CPU_CLUSTER, "--nodes=1", path, SCRIPT)
    slurm.wait_for(lambda: slurm.job(number)["JobState"] == "FAILED")
    assert slurm.job(number)["Restarts"] == "2"
    said = (tmp_path / f"slurm-{number}.out").read_text()
    assert said.count(f"outputs/slurm-{number}: no checkpoint was saved since the job was requeued, so it is not") == 1


@pytest.mark.e2e
def test_ranks_whose_port_is_in_use_say_so(slurm: "Cluster", tiny: list[str], tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        shell = ["bash", "-c", f'export MASTER_PORT={port}; exec python -m gptexp train "$@"', "-"]
        refused = srun(slurm, tmp_path, "--kill-on-bad-exit=1", *shell, *tiny, "hydra.run.dir=out")
    assert f"gptexp: tcp://n1:{port}: the ranks cannot meet at this address (address already in use)" in refused.stderr
    assert "; set MASTER_PORT to a free port\n" in refused.stderr
    assert refused.returncode != 0


@pytest.mark.e2e
def test_nodes_that_lack_what_one_run_needs_are_refused(
    slurm: "Cluster", tiny: list[str], tmp_path: Path, corpus: Path
) -> None:
    """First the caches of n2 hold the tokens of another text. Then n2 has another file system, and a wrong clock."""
    text, caches = tmp_path / "text.txt", [tmp_path / "cache0", tmp_path / "cache1"]
    text.write_text(corpus.read_text())
    data = DataConfig(name="text", path=[str(text)], cache_dir=str(caches[1]))
    stale, _ = prepare(data)
    text.write_text(corpus.read_text().replace("cat", "cow"))
    stale.rename(tokens_dir(find_corpus(data), data))
    caches[0].mkdir()
    train = "[ $SLURM_PROCID = 0 ] || mount -t tmpfs none cache0; export GPTEXP_CACHE=$0/cache$SLURM_PROCID; "
    shell = ["unshare", "--mount", "bash", "-c", f'{train} exec python -m gptexp train "$@"', str(tmp_path)]
    other_data = srun(slurm, tmp_path, *shell, *tiny, f"data.path={text}", "hydra.run.dir=out")
    assert other_data.returncode == 3
    differs = rf"rank 1 on {socket.gethostname()}: its data differs from that of rank 0"
    assert other_data.stderr.count(differs) == 2  # one line for each node

    code = """
    import os, time, types
    if os.environ["SLURM_PROCID"] == "1":
        m.time = types.SimpleNamespace(time=lambda: time.time() + 3600)
    """
    environ = sabotaged(tmp_path / "late", "gptexp.run.nodes", code)
    train = 'export PYTHONPATH=$0; [ $SLURM_PROCID = 0 ] || mount -t tmpfs none out; exec python -m gptexp train "$@"'
    shell = ["unshare", "--mount", "bash", "-c", train, environ["PYTHONPATH"]]
    apart = srun(slurm, tmp_path, *shell, *tiny, f"data.path={text}", "hydra.run.dir=out")
    assert apart.returncode == 2, apart.stderr
    host = re.search(r"rank 1 on (\S+)", apart.stderr)
    assert host is not None
    refused = f"{tmp_path}/out: rank 1 on {host[1]} does not see what rank 0 on {host[1]} writes there; put the run"
    assert apart.stderr.count(refused) == 2
    late = re.findall(r"warning: the clock of rank 1 on \S+ is ([\d,]+) s ahead of that of rank 0", apart.stderr)
    assert len(late) == 1
    assert abs(int(late[0].replace(",", "")) - 3600) < 60
    assert runs(tmp_path) == []
    assert not list((tmp_path / "out").glob(".mark-*"))
