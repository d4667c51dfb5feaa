"""Logging to wandb, on rank 0. A failure of wandb, or a wandb that hangs, does not stop the run.

One thread makes all calls to a run of wandb, in order; a step only puts its numbers into that thread's queue. Training
waits for the thread twice: before the first step, until wandb has changed the environment of this process, because
libraries of CUDA read it in threads of their own; and at the end.
"""

import math
import os
import queue
import secrets
import shlex
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptexp.config.metrics import Metric
from gptexp.config.schema import LogConfig
from gptexp.loggers.run_log import Sink
from gptexp.model.loss import perplexity
from gptexp.process.errors import ConfigError, first_line
from gptexp.process.signals import EXIT_CODES
from gptexp.process.terminal import warn
from gptexp.storage.run_dir import read_json, write_json

INIT_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 20.0  # for remaining uploads at the end of a run; SLURM kills a job 30 s after SIGTERM
UPLOAD_TIMEOUT_S = 600.0  # for a checkpoint, if the run was not stopped by a signal
FLUSH_S = 0.1  # between writes of wandb's own file; with its default of 15, a killed run loses rows of saved steps
HTTP_TIMEOUT_S = 5.0  # for the answer to one request
RETRIES = 2  # of a request; wandb's default of 20, minutes apart, would delay the end of a run beyond any timeout
SPARE_S = 25.0  # added to these timeouts before wandb counts as hanging
STOPPED_SPARE_S = 5.0  # the same for a run that was stopped by a signal
MOST_WAITING = 10_000  # queued events, beyond which wandb counts as stuck
ID_FILE = "wandb.json"
MODE = "WANDB_MODE"  # environment variable
MODES = {"": "auto", "run": "online", "dryrun": "offline"} | {m: m for m in ("online", "offline", "disabled")}
LOSSES = (Metric.TRAIN_LOSS, Metric.VAL_LOSS, Metric.VAL_LOSS_EMA, Metric.VAL_PPL, Metric.VAL_BPB)
PREEMPTED = (EXIT_CODES["SIGUSR1"], EXIT_CODES["SIGTERM"])
SUMMARY = (
    "status", "final_val_loss", "final_val_loss_ema", "best_val_loss", "train_s", "wall_s", "noise_scale_tokens",
)  # fmt: skip


class WandbSink(Sink):
    """Logs to one wandb run. The run directory keeps the run's id, so that a resumed run continues it.

    wandb cannot delete logged steps: after a rollback the curves jump back to fewer tokens.
    """

    def __init__(
        self, cfg: LogConfig, mode: str, directory: Path, config: dict[str, Any], sweep: str | None, kind: str
    ) -> None:
        self._log, self._cfg, self._mode = cfg, cfg.wandb, mode
        self._directory, self._config, self._sweep, self._kind = directory, config, sweep, kind
        self._folder = Path(os.environ.get("WANDB_DIR") or directory).absolute() / "wandb"  # has wandb's own files
        self._run_id = ""
        self._wandb: Any = None  # the module, imported by the thread
        self._run: Any = None
        self._checkpoint: Path | None = None  # the newest
        self._failed = False
        self._upload_error: str | None = None  # error of the first file whose upload failed
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)  # None: no call follows
        self._is_set_up, self._has_begun = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()
        self._is_set_up.wait(INIT_TIMEOUT_S)

    @property
    def takes_report(self) -> bool:
        """Whether the run has a page on wandb's server; a sweep has one report of all its cells."""
        if self._sweep is not None or not self._has_begun.wait(INIT_TIMEOUT_S):
            return False
        return self._mode == "online" and not self._failed

    def write(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("step", "eval", "sharpness"):
            values = {k: v for k, v in event.items() if k not in ("event", "time") and is_value(v)}
            self._put(lambda: self._run.log(values))
        elif kind == "sample":
            self._put(lambda: self._upload(lambda: self._log_sample(event)))
        elif kind == "alert":
            self._put(lambda: self._run.alert(event["text"].partition(":")[0], event["text"], level="WARN"))
        elif kind == "checkpoint":
            self._checkpoint = Path(event["path"])
        elif kind == "report":
            self._put(lambda: self._upload(lambda: self._log_report([*map(Path, event["paths"])])))

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        patience_s = FINISH_TIMEOUT_S + STOPPED_SPARE_S
        if exit_code <= 128:  # otherwise, after a signal, only seconds are left
            patience_s = FINISH_TIMEOUT_S + SPARE_S
            if self._cfg.artifacts and self._checkpoint is not None:
                path = self._checkpoint
                self._put(lambda: self._upload(lambda: self._log_artifact("model", [path], UPLOAD_TIMEOUT_S)))
                patience_s += UPLOAD_TIMEOUT_S
        self._put(lambda: self._finish({key: summary.get(key) for key in SUMMARY}, exit_code))
        if not self._failed:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                self._fail("does not respond")
        if self._failed:
            _end_service()

    def _begin(self) -> None:
        """Start or continue the run. If that fails online, prints the reason and continues offline."""
        import wandb  # takes a second, and may fail

        self._wandb = wandb
        os.environ.setdefault("WANDB_HTTP_TIMEOUT", f"{HTTP_TIMEOUT_S:g}")
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", f"{FLUSH_S:g}")
        wandb.setup(wandb.Settings(silent=True))
        self._is_set_up.set()
        try:
            if self._mode == "auto":
                self._mode = "online" if wandb.login(prompt=False) else "offline"
            self._run = self._init()
        except Exception as error:
            if self._mode == "offline":
                raise
            warn(f"wandb: {self._mode} failed ({type(error).__name__}: {first_line(error)}); logging offline instead")
            self._mode = "offline"
            wandb.teardown()  # the failed run still holds the run's id
            wandb.setup(wandb.Settings(silent=True))
            self._run = self._init()
        self._run.define_metric("tokens", hidden=True)
        self._run.define_metric("*", step_metric="tokens")
        for name in LOSSES:
            self._run.define_metric(name, step_metric="tokens", summary="min")
        self._has_begun.set()

    def _init(self) -> Any:
        return self._wandb.init(
            mode=self._mode,
            dir=self._folder.parent,
            id=self._id(),
            entity=self._cfg.entity,
            project=self._cfg.project,
            group=self._cfg.group or self._sweep,
            name=self._cfg.name,
            tags=list(dict.fromkeys([*self._log.tags, *self._cfg.tags])),
            notes=self._log.note,
            **{"resume": "allow", "job_type": self._kind, **self._cfg.init},
            config=self._config,
            settings=self._wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                finish_timeout_raises=True,
                x_graphql_retry_max=RETRIES,
                x_graphql_timeout_seconds=HTTP_TIMEOUT_S,
                reinit="create_new",  # under torchrun one process trains many cells
            ),
        )

    def _id(self) -> str:
        """Return the saved id, else the id that the agent of a wandb sweep sets, else a new one; saves it."""
        try:
            run_id = read_json(self._directory / ID_FILE).get("id")
        except ConfigError as error:
            warn(f"wandb: {error}; starting a new wandb run")
            run_id = None
        if self._sweep is None:  # the cells of a sweep must not share the agent's id
            run_id = run_id or os.environ.get("WANDB_RUN_ID")
        self._run_id = str(run_id or secrets.token_hex(4))
        write_json(self._directory / ID_FILE, {"id": self._run_id})
        return self._run_id

    @property
    def _how_to_upload(self) -> str:
        """A command that uploads all attempts of the run, in order.

        Each is one call of `wandb sync`: a killed attempt's file ends in the middle of a record, and after such a file
        wandb uploads none of the same call.
        """
        what, runs = ("", "offline-run-*") if self._mode == "offline" else ("--include-online ", "run-*")
        attempts = f"{shlex.quote(str(self._folder))}/{runs}{self._run_id}"
        return f'to upload: for run in {attempts}; do wandb sync {what}"$run"; done'

    def _upload(self, call: Callable[[], None]) -> None:
        """Make a call that waits for the server. After the first failure, makes no more such calls."""
        if self._upload_error is None:
            try:
                call()
            except Exception as error:
                self._upload_error = f"{type(error).__name__}: {first_line(error)}"

    def _log_sample(self, event: dict[str, Any]) -> None:
        table = self._wandb.Table(["step", "tokens", "text"], [[event["step"], event["tokens"], event["text"]]])
        self._run.log({"samples": table, "step": event["step"], "tokens": event["tokens"]})

    def _log_report(self, paths: Sequence[Path]) -> None:
        """Upload the files of a report, and show its page in a panel."""
        self._log_artifact("report", paths, 0)
        for path in paths:
            if path.suffix == ".html":
                self._run.log({"report": self._wandb.Html(str(path))})

    def _log_artifact(self, kind: str, paths: Iterable[Path], timeout_s: float) -> None:
        """Upload files and directories as a new version of the run's artifact `kind`; waits up to `timeout_s`."""
        artifact = self._wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
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
        best = summary.get("best_val_loss")  # over all attempts; wandb's own minimum is only over this attempt
        if best is not None:
            self._run.summary.update({Metric.VAL_LOSS: {"min": best}, Metric.VAL_PPL: {"min": perplexity(best)}})
        if exit_code in PREEMPTED:
            self._run.mark_preempting()
        try:
            self._run.finish(exit_code)
        except TimeoutError:
            warn(f"wandb: not everything was uploaded within {FINISH_TIMEOUT_S:g} s; {self._how_to_upload}")
            self._failed = True
        else:
            if self._mode == "offline":
                warn(f"wandb: logged offline; {self._how_to_upload}")
            elif self._upload_error is not None:
                warn(f"wandb: files were not uploaded ({self._upload_error}); {self._how_to_upload}")
        self._calls.put(None)

    def _put(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail("is too slow")

    def _work(self) -> None:
        """Begin the run, and make the queued calls in order until it is finished or a call fails; the thread's body."""
        try:
            self._begin()
            while not self._failed and (call := self._calls.get()):
                call()
        except Exception as error:
            self._fail(f"failed ({type(error).__name__}: {first_line(error)})")
        self._is_set_up.set()
        self._has_begun.set()

    def _fail(self, what: str) -> None:
        if not self._failed:
            warn(f"wandb: {what}; continuing without wandb, metrics.jsonl is complete; {self._how_to_upload}")
        self._failed = True


def is_value(value: Any) -> bool:
    """Whether to log a value: a NaN would stay the minimum of a loss in wandb's summary."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def build_wandb(
    cfg: LogConfig, directory: Path, config: dict[str, Any], sweep: str | None, kind: str = "train"
) -> WandbSink | None:
    """Start or continue a wandb run, for a cell in the group `sweep`. Returns None if wandb is disabled."""
    mode = _mode() if cfg.wandb.mode == "auto" else cfg.wandb.mode
    return None if mode == "disabled" else WandbSink(cfg, mode, directory, config, sweep, kind)


def log_report(cfg: LogConfig, directory: Path, sweep: str, paths: Sequence[Path]) -> None:
    """Log the report of a `sweep` as an artifact of its own wandb run, in the group of the sweep's runs."""
    named = replace(cfg, wandb=replace(cfg.wandb, name=f"{sweep}-report"))
    sink = build_wandb(named, directory, {}, sweep, "report")
    if sink is not None:
        sink.write({"event": "report", "paths": [str(path) for path in paths]})
        sink.close({"status": "completed"}, 0)


def _mode() -> str:
    """Return the mode that WANDB_MODE sets, else `auto`; rewrites the variable to a value that wandb accepts."""
    wanted = os.environ.pop(MODE, "")
    if wanted not in MODES:
        warn(f"wandb: {MODE}={wanted}: must be online, offline or disabled; the variable is ignored")
    mode = MODES.get(wanted, "auto")
    if mode != "auto":
        os.environ[MODE] = mode
    return mode


def _end_service() -> None:
    """Kill wandb's service process: the interpreter waits for it at exit, and it may wait for a server forever."""
    import psutil
    import wandb

    for child in psutil.Process().children():
        if "wandb-core" in child.name():
            child.kill()
    with suppress(Exception, SystemExit):  # teardown would exit with the exit code of the killed process
        wandb.teardown()
