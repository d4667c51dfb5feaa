"""wandb, on rank 0; the only file that imports it for a run. It may fail or hang, training may not.

A run is made before the first step, within `INIT_TIMEOUT_S`; from then on a thread of its own talks to wandb, so that
a step costs training no more than putting its numbers into a queue.
"""

import math
import os
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptexp.checkpoint import TrainState
from gptexp.config import WandbConfig
from gptexp.errors import first_line
from gptexp.loss import perplexity
from gptexp.run_dir import read_json, write_json

INIT_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 20.0  # for what is left to upload at the end; SLURM gives 30 from SIGTERM on
UPLOAD_TIMEOUT_S = 600.0  # where checkpoints are uploaded too
HTTP_TIMEOUT_S = 5.0  # for an answer that something waits for
RETRIES = 2  # of a request; wandb's own 20, minutes apart, would hold up the end of a run whatever its timeout says
SPARE_S = 25.0  # more than all of that together: then wandb hangs
MOST_WAITING = 10_000  # events, before wandb is given up as stuck
ID_FILE = "wandb.json"
LOSSES = ("train/loss", "val/loss", "val/ppl")
PREEMPTED = (138, 143)  # exit codes of a run that SIGUSR1 or SIGTERM has stopped
SUMMARY = ("status", "final_val_loss", "best_val_loss", "train_s", "wall_s", "noise_scale_tokens")


class WandbSink:
    """Logs to one wandb run, whose id is kept in the run directory so that a resumed run goes on in it."""

    def __init__(self, run: Any, directory: Path, offline: bool, artifacts: bool, finish_timeout_s: float) -> None:
        self._run = run
        self._offline, self._artifacts, self._finish_timeout_s = offline, artifacts, finish_timeout_s
        runs = "offline-run-*" if offline else "run-*"
        self._how = f"to upload: wandb sync {'' if offline else '--include-online '}{directory}/wandb/{runs}"
        self._checkpoint: Path | None = None  # the newest
        self._failed = False
        self._not_uploaded: str | None = None  # what went wrong with the first file that could not be
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        run.define_metric("tokens", hidden=True)
        run.define_metric("*", step_metric="tokens")
        for name in LOSSES:
            run.define_metric(name, step_metric="tokens", summary="min")
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("step", "eval"):
            values = {k: v for k, v in event.items() if k not in ("event", "time") and is_value(v)}
            self._put(lambda: self._run.log(values))
        elif kind == "sample":
            self._put(lambda: self._upload(lambda: self._log_sample(event)))
        elif kind == "alert":
            self._put(lambda: self._run.alert(event["text"].partition(":")[0], event["text"], level="WARN"))
        elif kind == "checkpoint":
            self._checkpoint = Path(event["path"])
        elif kind == "report":
            self._put(lambda: self._upload(lambda: self._log_artifact("report", map(Path, event["paths"]))))

    def rewind(self, state: TrainState) -> None:
        pass  # its history only grows; tokens, the x axis, show that training went back

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        if self._artifacts and self._checkpoint is not None:
            path = self._checkpoint
            self._put(lambda: self._upload(lambda: self._log_artifact("model", [path])))
        self._put(lambda: self._finish({key: summary.get(key) for key in SUMMARY}, exit_code))
        if not self._failed:
            self._waiting.put(None)
            self._thread.join(self._finish_timeout_s + SPARE_S)
            if self._thread.is_alive():
                self._fail("hangs")
        if self._failed:
            _end_service()

    def _upload(self, call: Callable[[], None]) -> None:
        """Log something for which wandb asks the server at once. One that does not answer is asked no more."""
        if self._not_uploaded is None:
            try:
                call()
            except Exception as error:
                self._not_uploaded = f"{type(error).__name__}: {first_line(error)}"

    def _log_sample(self, event: dict[str, Any]) -> None:
        import wandb

        table = wandb.Table(["step", "tokens", "text"], [[event["step"], event["tokens"], event["text"]]])
        self._run.log({"samples": table, "step": event["step"], "tokens": event["tokens"]})

    def _log_artifact(self, kind: str, paths: Iterable[Path]) -> None:
        """Upload files and directories as the newest version of the run's `kind`."""
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
        for path in paths:
            if path.is_dir():
                artifact.add_dir(str(path), name=path.name)
            else:
                artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def _finish(self, summary: dict[str, Any], exit_code: int) -> None:
        self._run.summary.update({key: value for key, value in summary.items() if is_value(value)})
        best = summary.get("best_val_loss")  # of all attempts; wandb's own minimum is this one's
        if best is not None:
            self._run.summary.update({"val/loss": {"min": best}, "val/ppl": {"min": perplexity(best)}})
        if exit_code in PREEMPTED:
            self._run.mark_preempting()
        try:
            self._run.finish(exit_code)
        except TimeoutError:
            _say(f"not all was uploaded within {self._finish_timeout_s:g} s; {self._how}")
            self._failed = True
            return
        if self._offline:
            _say(f"logged offline; {self._how}")
        elif self._not_uploaded is not None:
            _say(f"files were not uploaded ({self._not_uploaded}); {self._how}")

    def _put(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            self._fail("is stuck")

    def _work(self) -> None:
        """The thread: do one thing after another until there are no more, or one fails."""
        while (call := self._waiting.get()) is not None and not self._failed:
            try:
                call()
            except Exception as error:
                self._fail(f"failed ({type(error).__name__}: {first_line(error)})")

    def _fail(self, what: str) -> None:
        self._failed = True
        _say(f"{what}; going on without it, metrics.jsonl is complete; {self._how}")


def is_value(value: Any) -> bool:
    """Whether wandb can do something with it: one NaN would be the minimum of a loss for good."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def build_wandb(cfg: WandbConfig, directory: Path, config: dict[str, Any], group: str | None) -> WandbSink | None:
    """Start or continue the run's wandb run; falls back to offline with a line that says why. None if disabled."""
    timeout_s = UPLOAD_TIMEOUT_S if cfg.artifacts else FINISH_TIMEOUT_S
    found = _init(cfg, directory, "train", cfg.name, config, group, timeout_s)
    return found and WandbSink(*found, cfg.artifacts, timeout_s)


def log_report(cfg: WandbConfig, directory: Path, sweep: str, paths: Sequence[Path]) -> None:
    """Log the report of a `sweep` as an artifact of a wandb run of its own, in the group of the sweep's runs."""
    found = _init(cfg, directory, "report", f"{sweep}-report", {}, sweep, FINISH_TIMEOUT_S)
    if found:
        sink = WandbSink(*found, artifacts=False, finish_timeout_s=FINISH_TIMEOUT_S)
        sink.write({"event": "report", "paths": [str(path) for path in paths]})
        sink.close({"status": "completed"}, 0)


def _init(
    cfg: WandbConfig,
    directory: Path,
    job_type: str,
    name: str | None,
    config: dict[str, Any],
    group: str | None,
    finish_timeout_s: float,
) -> tuple[Any, Path, bool] | None:
    """A run, where it keeps its files, and whether it is offline."""
    mode = os.environ.get("WANDB_MODE", cfg.mode) if cfg.mode == "auto" else cfg.mode
    if mode == "disabled":
        return None
    saved = read_json(directory / ID_FILE)
    run_id = saved.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)  # the agent of a sweep has one
    write_json(directory / ID_FILE, {"id": run_id})

    def init(mode: str) -> tuple[Any, Path, bool]:
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=directory,
            id=run_id,
            resume="allow",
            project=cfg.project,
            group=cfg.group or group,
            name=name,
            tags=cfg.tags,
            job_type=job_type,
            config=config,
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=finish_timeout_s,
                finish_timeout_raises=True,
                x_graphql_retry_max=RETRIES,
                x_graphql_timeout_seconds=HTTP_TIMEOUT_S,
                reinit="create_new",  # under a launcher one process trains many cells
            ),
        )
        return run, directory, mode == "offline"

    os.environ.setdefault("WANDB_HTTP_TIMEOUT", f"{HTTP_TIMEOUT_S:g}")
    # Whatever a logging service throws, it may not stop the run.
    try:
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        if mode == "auto":
            mode = "online" if wandb.login(prompt=False) else "offline"
        return init(mode)
    except Exception as error:
        _say(f"{mode} failed ({type(error).__name__}: {first_line(error)}); logging offline instead")
    try:
        wandb.teardown()  # what has failed holds the run's id
        wandb.setup(wandb.Settings(silent=True))
        return init("offline")
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        _say(f"offline failed too ({said}); going on without it, metrics.jsonl is complete")
        return None


def _end_service() -> None:
    """End wandb's own process, which the interpreter would wait for at its end: it may wait for a server for ever."""
    import psutil
    import wandb

    for child in psutil.Process().children():
        if "wandb-core" in child.name():
            child.kill()
    with suppress(Exception, SystemExit):  # it finds its process gone, and would leave with that one's exit code
        wandb.teardown()


def _say(line: str) -> None:
    print(f"gptexp: wandb: {line}", file=sys.stderr)
