"""A run completes without wandb's service."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import events, summary, wait_for
from real_runs import begun


@pytest.mark.e2e
def test_a_run_completes_after_wandbs_service_was_killed(
    start: Callable[..., subprocess.Popen[str]], tiny: list[str], tmp_path: Path
) -> None:
    options = [o for o in tiny if not o.startswith("log=")]
    process = start("train", *options, "log=offline", "log.progress=off", "train.max_steps=120", "train.save_every=0",
                    "train.eval_every=0", "log.sample_tokens=0", "hydra.run.dir=out")  # fmt: skip
    directory = tmp_path / "out"
    wait_for(begun(directory), process)
    services = [p for p in psutil.Process(process.pid).children(recursive=True) if "wandb-core" in p.name()]
    assert services
    for service in services:
        service.kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "gptexp: wandb: failed" in err
    assert summary(directory)["status"] == "completed"
    assert [e["step"] for e in events(directory, "step")] == list(range(120))
