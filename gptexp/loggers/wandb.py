"""wandb, on rank 0; the only file that imports it for a run. It may fail or hang, training may not.

All that talks to wandb is done by a thread of its own, in order. Training waits for it twice: up to `INIT_TIMEOUT_S`
before the first step, so that what went wrong is said before a progress bar is drawn, and at the end. A step costs
training no more than putting its numbers into a queue.
"""

import math
import os
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptexp.checkpoint import TrainState
from gptexp.config import WandbConfig
from gptexp.errors import ConfigError, first_line
from gptexp.loss import perplexity
from gptexp.run_dir import read_json, write_json
from gptexp.signals import EXIT_CODES

INIT_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 20.0  # for what is left to upload at the end; SLURM gives 30 from SIGTERM on
UPLOAD_TIMEOUT_S = 600.0  # for a checkpoint, of a run that nobody hurries
HTTP_TIMEOUT_S = 5.0  # for an answer that something waits for
RETRIES = 2  # of a request; wandb's own 20, minutes apart, would hold up the end of a run whatever its timeout says
SPARE_S = 25.0  # more than all of that together: then wandb hangs
STOPPED_SPARE_S = 5.0  # the same for a run that was told to stop
MOST_WAITING = 10_000  # events, before wandb is given up as stuck
ID_FILE = "wandb.json"
MODE = "WANDB_MODE"  # and what it may say, in wandb's old words too
MODES = {
    "": "auto", "online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled",
}  # fmt: skip
LOSSES = ("train/loss", "val/loss", "val/ppl")
PREEMPTED = (EXIT_CODES["SIGUSR1"], EXIT_CODES["SIGTERM"])
SUMMARY = ("status", "final_val_loss", "best_val_loss", "train_s", "wall_s", "noise_scale_tokens")


@dataclass(frozen=True)
class Identity:
    """What wandb is to know of a run before it begins."""

    job_type: str
    name: str | None
    group: str | None
    config: dict[str, Any]


class WandbSink:
    """Logs to one wandb run, whose id is kept in the run directory so that a resumed run goes on in it."""

    def __init__(self, cfg: WandbConfig, mode: str, directory: Path, identity: Identity) -> None:
        self._cfg, self._mode, self._directory, self._identity = cfg, mode, directory, identity
        self._run: Any = None
        self._checkpoint: Path | None = None  # the newest
        self._failed = self._finished = False
        self._not_uploaded: str | None = None  # what went wrong with the first file that could not be
        self._waiting: queue.Queue[Callable[[], None]] = queue.Queue(MOST_WAITING)
        self._begun = threading.Event()
        self._put(self._begin)
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()
        self._begun.wait(INIT_TIMEOUT_S)

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
            self._put(lambda: self._upload(lambda: self._log_artifact("report", map(Path, event["paths"]), 0)))

    def rewind(self, state: TrainState) -> None:
        pass  # its history only grows; tokens, the x axis, show that training went back

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        patience_s = FINISH_TIMEOUT_S + STOPPED_SPARE_S
        if exit_code <= 128:  # else whoever stopped it gives it seconds
            patience_s = FINISH_TIMEOUT_S + SPARE_S
            if self._cfg.artifacts and self._checkpoint is not None:
                path = self._checkpoint
                self._put(lambda: self._upload(lambda: self._log_artifact("model", [path], UPLOAD_TIMEOUT_S)))
                patience_s += UPLOAD_TIMEOUT_S
        self._put(lambda: self._finish({key: summary.get(key) for key in SUMMARY}, exit_code))
        if not self._failed:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                self._fail("hangs")
        if self._failed:
            _end_service()

    def _begin(self) -> None:
        """Start the run or go on with it; offline, with a line that says why, where online does not work."""
        import wandb

        os.environ.setdefault("WANDB_HTTP_TIMEOUT", f"{HTTP_TIMEOUT_S:g}")
        wandb.setup(wandb.Settings(silent=True))
        try:
            if self._mode == "auto":
                self._mode = "online" if wandb.login(prompt=False) else "offline"
            self._run = self._init()
        except Exception as error:
            if self._mode == "offline":
                raise
            _say(f"{self._mode} failed ({type(error).__name__}: {first_line(error)}); logging offline instead")
            self._mode = "offline"
            wandb.teardown()  # what has failed holds the run's id
            wandb.setup(wandb.Settings(silent=True))
            self._run = self._init()
        self._run.define_metric("tokens", hidden=True)
        self._run.define_metric("*", step_metric="tokens")
        for name in LOSSES:
            self._run.define_metric(name, step_metric="tokens", summary="min")
        self._begun.set()

    def _init(self) -> Any:
        import wandb

        return wandb.init(
            mode=self._mode,  # type: ignore[arg-type]
            dir=self._directory,
            id=self._id(),
            resume="allow",
            project=self._cfg.project,
            group=self._cfg.group or self._identity.group,
            name=self._identity.name,
            tags=self._cfg.tags,
            job_type=self._identity.job_type,
            config=self._identity.config,
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                finish_timeout_raises=True,
                x_graphql_retry_max=RETRIES,
                x_graphql_timeout_seconds=HTTP_TIMEOUT_S,
                reinit="create_new",  # under a launcher one process trains many cells
            ),
        )

    def _id(self) -> str:
        """The run's own, the one that the agent of a wandb sweep has for it, or a new one; kept."""
        try:
            known = read_json(self._directory / ID_FILE).get("id")
        except ConfigError as error:
            _say(f"{error}; beginning a new run there")
            known = None
        of_agent = os.environ.get("WANDB_RUN_ID") if self._identity.group is None else None  # not for every cell
        run_id = str(known or of_agent or secrets.token_hex(4))
        write_json(self._directory / ID_FILE, {"id": run_id})
        return run_id

    @property
    def _how(self) -> str:
        what = "" if self._mode == "offline" else "--include-online "
        runs = "offline-run-*" if self._mode == "offline" else "run-*"
        return f"to upload: wandb sync {what}{self._directory}/wandb/{runs}"

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

    def _log_artifact(self, kind: str, paths: Iterable[Path], timeout_s: float) -> None:
        """Upload files and directories as the newest version of the run's `kind`; waits for it up to `timeout_s`."""
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
        for path in paths:
            if path.is_dir():
                artifact.add_dir(str(path), name=path.name)
            else:
                artifact.add_file(str(path))
        logged = self._run.log_artifact(artifact)
        if timeout_s and self._mode != "offline":
            logged.wait(round(timeout_s))

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
            _say(f"not all was uploaded within {FINISH_TIMEOUT_S:g} s; {self._how}")
            self._failed = True
        else:
            if self._mode == "offline":
                _say(f"logged offline; {self._how}")
            elif self._not_uploaded is not None:
                _say(f"files were not uploaded ({self._not_uploaded}); {self._how}")
        self._finished = True

    def _put(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            self._fail("is stuck")

    def _work(self) -> None:
        """The thread: do one thing after another until the run is finished, or one fails."""
        while not self._failed and not self._finished:
            try:
                self._waiting.get()()
            except Exception as error:
                self._fail(f"failed ({type(error).__name__}: {first_line(error)})")
        self._begun.set()

    def _fail(self, what: str) -> None:
        if not self._failed:
            _say(f"{what}; going on without it, metrics.jsonl is complete; {self._how}")
        self._failed = True


def is_value(value: Any) -> bool:
    """Whether wandb can do something with it: one NaN would be the minimum of a loss for good."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def build_wandb(cfg: WandbConfig, directory: Path, config: dict[str, Any], sweep: str | None) -> WandbSink | None:
    """Start or continue the run's wandb run, a cell's in the group of its `sweep`; None if disabled."""
    return _build(cfg, directory, Identity("train", cfg.name, sweep, config))


def log_report(cfg: WandbConfig, directory: Path, sweep: str, paths: Sequence[Path]) -> None:
    """Log the report of a `sweep` as an artifact of a wandb run of its own, in the group of the sweep's runs."""
    sink = _build(cfg, directory, Identity("report", f"{sweep}-report", sweep, {}))
    if sink is not None:
        sink.write({"event": "report", "paths": [str(path) for path in paths]})
        sink.close({"status": "completed"}, 0)


def _build(cfg: WandbConfig, directory: Path, identity: Identity) -> WandbSink | None:
    mode = _mode() if cfg.mode == "auto" else cfg.mode
    return None if mode == "disabled" else WandbSink(cfg, mode, directory, identity)


def _mode() -> str:
    """What the variable says, `auto` where it says nothing; leaves wandb only what that understands."""
    wanted = os.environ.get(MODE, "")
    if wanted not in MODES:
        _say(f"{MODE}={wanted}: must be online, offline or disabled; going on as if it were not set")
    mode = MODES.get(wanted, "auto")
    os.environ.pop(MODE, None)
    if mode != "auto":
        os.environ[MODE] = mode
    return mode


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
