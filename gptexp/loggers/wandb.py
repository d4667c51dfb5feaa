"""wandb, on rank 0; the only file that imports it. It may fail, training may not."""

import os
import secrets
import sys
from pathlib import Path
from typing import Any

from gptexp.checkpoint import TrainState
from gptexp.config import WandbConfig
from gptexp.errors import first_line
from gptexp.run_dir import read_json, write_json

INIT_TIMEOUT_S = 10.0
ID_FILE = "wandb.json"


class WandbSink:
    """Logs to one wandb run, whose id is kept in the run directory so that a resumed run goes on in it."""

    def __init__(self, run: Any, directory: Path, offline: bool) -> None:
        self._run = run
        self._offline = offline
        self._directory = directory
        run.define_metric("tokens", hidden=True)
        run.define_metric("*", step_metric="tokens")

    def write(self, event: dict[str, Any]) -> None:
        values = {k: v for k, v in event.items() if k not in ("event", "time") and v is not None}
        if event["event"] in ("step", "eval"):
            self._guarded(lambda: self._run.log(values))

    def rewind(self, state: TrainState) -> None:
        pass  # its history only grows; tokens, the x axis, show that training went back

    def close(self, summary: dict[str, Any]) -> None:
        self._guarded(lambda: self._run.summary.update({"status": summary["status"]}))
        fine = summary["status"] in ("completed", "interrupted")
        self._guarded(lambda: self._run.finish(exit_code=0 if fine else 1))
        if self._offline and self._run is not None:
            _say(f"logged offline; to upload: wandb sync {self._directory}/wandb/offline-run-*")

    def _guarded(self, call: Any) -> None:
        """wandb's own failures end wandb, not the run."""
        if self._run is None:
            return
        try:
            call()
        except Exception as error:
            _say(
                f"failed ({type(error).__name__}: {first_line(error)}); going on without it, metrics.jsonl is complete"
            )
            self._run = None


def build_wandb(cfg: WandbConfig, directory: Path, config: dict[str, Any], group: str | None) -> WandbSink | None:
    """Start or continue the run's wandb run; falls back to offline with a line that says why. None if disabled."""
    mode = os.environ.get("WANDB_MODE", cfg.mode) if cfg.mode == "auto" else cfg.mode
    if mode == "disabled":
        return None
    saved = read_json(directory / ID_FILE)
    run_id = saved.get("id") or secrets.token_hex(4)
    write_json(directory / ID_FILE, {"id": run_id})

    def init(mode: str) -> WandbSink:
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=directory,
            id=run_id,
            resume="allow",
            project=cfg.project,
            group=cfg.group or group,
            name=cfg.name,
            tags=cfg.tags,
            job_type="train",
            config=config,
            settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT_S),
        )
        return WandbSink(run, directory, offline=mode == "offline")

    # Whatever a logging service throws, it may not stop the run.
    try:
        import wandb

        if mode == "auto":
            mode = "online" if wandb.login(prompt=False) else "offline"
        return init(mode)
    except Exception as error:
        _say(f"{mode} failed ({type(error).__name__}: {first_line(error)}); logging offline instead")
    try:
        return init("offline")
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        _say(f"offline failed too ({said}); going on without it, metrics.jsonl is complete")
        return None


def _say(line: str) -> None:
    print(f"gptexp: wandb: {line}", file=sys.stderr)
