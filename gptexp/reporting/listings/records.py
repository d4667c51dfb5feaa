"""Runs as read from their directories: config, summary, metrics. It only reads.

A directory may belong to a run that is training, was killed or is damaged. Whatever can be read is used; whatever
cannot is named in `Run.problem`.
"""

import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from gptexp.config.branching import first_step, first_tokens
from gptexp.config.metrics import SHARPNESS, Metric, bits_metric, is_loss
from gptexp.config.noise_scale import Norms
from gptexp.config.scaling import lr_factor, scaled_optim
from gptexp.config.schedule import resolve_schedule
from gptexp.config.schema import Config, ScalingConfig, result_deciding
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import LAYOUT, printable
from gptexp.process.words import shown
from gptexp.storage import run_dir, sweep_record
from gptexp.storage.divergence import counts_as_diverged
from gptexp.storage.inventory import runs_together
from gptexp.storage.metrics_file import newest, scan
from gptexp.storage.missing_steps import described, missing_steps
from gptexp.storage.reader import parse_line

LR = "optim.lr"
AXES = {  # key -> its field in `Run`, and what people call it
    LR: ("lr", "learning rate"),
    "batch.total_batch_size": ("batch", "batch size"),
    "train.seed": ("seed", "seed"),
}
COMMIT_CHARS = 10
END = 1 << 18  # bytes of metrics.jsonl that tell how far a run is
OF_EVENTS = {"event", *(Metric.TIME, Metric.STEP, Metric.TOKENS, Metric.FLOPS)}  # what each event has
OF_VALIDATION = (Metric.VAL_LOSS, Metric.VAL_LOSS_EMA, Metric.VAL_PPL, Metric.VAL_BPB)
EVAL_EVENT = re.compile(rb'"event": "eval"')
OPTIONAL = (Metric.LR, Metric.GRAD_NORM, Metric.CLIP_FRACTION, Metric.MFU_PALM, Metric.GNS_TOKENS, Metric.GNS_COS)
WROTE_ITS_END = ("completed", "diverged", "interrupted")


@dataclass(slots=True)  # not frozen: a sweep has half a million of them, and each would take twice the time
class Point:
    """The state of a run after `step` updates, `tokens` tokens and `seconds` of training."""

    step: int
    tokens: int
    seconds: float
    loss: float | None  # nats per token; None if it was not finite


@dataclass(slots=True)
class Step(Point):
    """An optimizer update. A value is None if it was not finite, or not logged."""

    batch: int  # tokens of the step, over all ranks
    tokens_per_s: float
    norms: Norms | None  # what `noise_scale` is computed from
    lr: float | None  # this and the next ones are those of `OPTIONAL`
    grad_norm: float | None  # before clipping
    clip_fraction: float | None
    mfu: float | None
    noise_scale: float | None  # tokens; the run's moving average
    cosine: float | None  # between the gradients of two micro-batches


@dataclass(frozen=True)
class Sharpness:
    """The sharpness after `step` updates and `tokens` tokens. A value is None if it could not be measured."""

    step: int
    tokens: int
    hessian: float | None
    preconditioned: float | None  # also None for other optimizers than AdamW
    threshold: float | None  # of `preconditioned`
    sam: float | None


@dataclass(frozen=True)
class Note:
    """A text that a run logged."""

    kind: str  # "alert", "fault" or "sample"
    step: int  # number of completed steps
    text: str


@dataclass
class Run:
    """One run directory. Losses in nats per token."""

    name: str
    directory: Path
    status: str  # of summary.json; "running" while a process holds the lock, "damaged" if it cannot be read
    config: dict[str, Any]  # dotted key -> value, of the keys that decide the result; empty if it cannot be read
    batch: int = 0  # tokens per step, over all ranks; with a ramp, at its end
    lr: float = 0.0  # peak learning rate, as scaled with the batch size
    optim: dict[str, Any] = field(default_factory=dict)  # the optimizer's keys as scaled with the batch size
    seed: int = 0
    loss: float | None = None  # final validation loss of a completed run
    summary: dict[str, Any] = field(default_factory=dict)
    seq_len: int = 1  # tokens
    of_tokens: int = 0  # length of the whole run; 0 if its config cannot be read
    branch: str | None = None  # RUN@STEP, the checkpoint of another run that it continues
    first_tokens: int = 0  # the part of `of_tokens` that lies before that checkpoint
    warmup_tokens: int = 0
    started: datetime | None = None  # local time of the first event
    train: list[Step] = field(default_factory=list)  # thinned, see `metrics_file.scan`
    val: list[Point] = field(default_factory=list)
    val_ema: list[Point] = field(default_factory=list)  # of the averaged weights, if train.ema_half_life_tokens is set
    bits_per_byte: float | None = None  # of the newest evaluation
    objective: str = Metric.VAL_LOSS  # the metric that `loss` and `val` are, see `toward`
    curves: dict[str, list[Point]] = field(default_factory=dict)  # each metric of evaluations, and own/NAME: its `loss`
    sharpness: list[Sharpness] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)  # tokens -> hash of all data read so far, as logged
    tokens_per_s: float | None = None  # median over the kept steps
    mfu: float | None = None  # median of perf/mfu_palm; None on a device of unknown peak
    tags: list[str] = field(default_factory=list)  # log.tags
    note: str | None = None  # log.note
    problem: str | None = None  # one line: what could not be read
    gaps: list[range] = field(default_factory=list)  # steps that should have been logged and are missing

    @property
    def share(self) -> float:
        """The share of the tokens trained so far; of a branch, those after its checkpoint. 0 if there is no config."""
        if self.status == "completed":
            return 1.0
        trained = self.summary.get("tokens", self.first_tokens) - self.first_tokens
        return float(trained / (self.of_tokens - self.first_tokens)) if self.of_tokens else 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of each metric that has no field of its own."""
        own = {*OF_VALIDATION} - ({Metric.VAL_LOSS} if self.objective != Metric.VAL_LOSS else set()) | {self.objective}
        newest = {name: curve[-1].loss for name, curve in self.curves.items() if name not in own}
        return {name: value for name, value in newest.items() if value is not None}

    @property
    def best_loss(self) -> float | None:
        """The lowest validation loss of all evaluations."""
        return min((point.loss for point in self.val if point.loss is not None), default=None)


def read_run(directory: Path, last_bytes: int | None = None) -> Run:
    """Read a run's files, of metrics.jsonl all or only the last bytes. A damaged file sets `Run.problem`.

    Of a part, `Run` has the last steps, the newest evaluation, and gaps and times from there on.
    """
    name = printable(directory.name)
    try:
        config = run_dir.load_resolved(directory)
        values = run_dir.read_summary(directory)
        summary = {key: printable(value) if isinstance(value, str) else value for key, value in values.items()}
    except ConfigError as error:
        return Run(name, directory, "damaged", {}, problem=printable(str(error)))
    status = run_dir.present_status(directory, summary)
    _, of_tokens = config.run_length
    optim = scaled_optim(config)
    run = Run(
        name,
        directory,
        status,
        result_deciding(config),
        batch=config.batch.total_batch_size,
        lr=optim.lr,
        optim=vars(optim),
        seed=config.train.seed,
        summary=summary,
        seq_len=config.seq_len,
        of_tokens=of_tokens,
        branch=printable(Path(config.branch_from).name) if config.branch_from else None,
        first_tokens=first_tokens(config),
        warmup_tokens=resolve_schedule(config, of_tokens).warmup_ends,
        tags=list(map(printable, config.log.tags)),
        note=printable(config.log.note, LAYOUT) if config.log.note else None,
    )
    if status == "completed":
        if "final_val_loss" in summary:
            run.loss = float(summary["final_val_loss"])
        elif config.data.validates:
            run.status, run.problem = "damaged", printable(f"{directory / run_dir.SUMMARY}: final_val_loss is missing")
    try:
        _read_metrics(run, config, last_bytes)
    except OSError as error:
        run.problem = printable(f"{directory / run_dir.METRICS}: cannot be read ({error.strerror})")
    return toward(run, config.sweep.objective)


def toward(run: Run, objective: str) -> Run:
    """The run with the validation loss `objective` as its loss. The final loss is None if the run has not logged it."""
    if objective == run.objective:
        return run
    curve, bits = run.curves.get(objective, []), run.curves.get(bits_metric(objective), [])
    return replace(
        run,
        objective=objective,
        loss=curve[-1].loss if curve and run.loss is not None else None,
        val=curve,
        val_ema=run.curves.get(Metric.VAL_LOSS_EMA, []) if objective == Metric.VAL_LOSS else [],
        bits_per_byte=bits[-1].loss if bits else None,
    )


def refuse_unlogged(runs: Sequence[Run], asked: str) -> None:
    """Raise `ConfigError` if no run has logged the loss that --objective asks for."""
    losses = sorted({name for run in runs for name in run.curves if is_loss(name)})
    if asked not in losses:
        rule = (
            f"no run here has logged this loss; give {' or '.join(losses)}" if losses else "no run has been evaluated"
        )
        raise ConfigError(f"--objective {shown(asked)}: {rule}", "no-such-loss")


def read_end(directory: Path) -> Run:
    """`read_run` with the end of metrics.jsonl alone: how far a run is, in equal time for any length."""
    return read_run(directory, last_bytes=END)


def along(run: Run, key: str) -> Run:
    """The run with its value of `key` as its learning rate, which is then a key of arms like any other.

    So an analysis of such runs finds the best value of `key`. Raises `ConfigError` unless that is a number above 0.
    """
    if key == LR or not run.config:
        return run
    return replace(run, lr=positive_value(run.config, key), config=config_along(run.config, key))


def config_along(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The config of `along`."""
    if key == LR:
        return {**config}
    others = {other: value for other, value in config.items() if other != key}
    return {**others, "peak lr": config[LR], LR: positive_value(config, key)}


def of_arm(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys in which all runs of an arm agree. The size of a vocabulary is `auto` before a run has begun."""
    return {key: value for key, value in config.items() if key not in (*AXES, "model.vocab_size")}


def positive_value(config: Mapping[str, Any], key: str) -> float:
    """The value of a key that is searched. Raises `ConfigError` unless it is a number above 0."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(
            f"{key}={shown(value)}: a search needs a key whose value is a number above 0", "not-searchable"
        )
    return float(value)


def find_runs(directory: Path, read: Callable[[Path], Run] = read_run, objective: str | None = None) -> list[Run]:
    """The run in `directory`, or else the cells of a sweep or of a folder of runs, sorted by name.

    Their loss is `objective`, else that of the sweep (`sweep.objective`). Raises `ConfigError` if `directory` is none
    of these, or if no run has logged the objective.
    """
    run_dir.require_directory(directory, "a run or a sweep")
    runs = [read(path) for path in ([directory] if run_dir.is_run(directory) else runs_together(directory))]
    if objective is not None:
        refuse_unlogged(runs, objective)
    else:
        with suppress(ConfigError):  # a damaged sweep.json
            sweep = sweep_record.load(directory)
            objective = sweep.objective if sweep is not None else None
    return runs if objective is None else [toward(run, objective) for run in runs]


def lr_scaling(config: Mapping[str, Any], batch: int) -> float:
    """Factor of `optim.lr` at a batch size in tokens, by the rules in `config`: dotted key -> value, also as text."""
    rules = {key.removeprefix("scaling."): value for key, value in config.items() if key.startswith("scaling.")}
    for key in ("exponent", "noise_scale_tokens", "reference_tokens"):
        if rules.get(key) is not None:
            rules[key] = float(rules[key])
    scaling = ScalingConfig(**rules)
    return lr_factor(scaling, batch / scaling.reference_tokens) if scaling.reference_tokens is not None else 1.0


def scaled_keys(runs: Sequence[Run]) -> list[str]:
    """The optimizer's keys whose value in use differs from the config's in any of `runs`."""
    in_use = [(key, value, run.config.get(f"optim.{key}", value)) for run in runs for key, value in run.optim.items()]
    return list(dict.fromkeys(key for key, value, given in in_use if value != given))


def has_diverged(run: Run) -> bool:
    """Whether a run counts as diverged: also if it completed with a loss far above that of a uniform guess."""
    return counts_as_diverged(run.status, run.loss, run.config)


def short_commit(commit: str) -> str:
    """A commit as a summary names it, for people."""
    return commit.removesuffix("-dirty")[:COMMIT_CHARS] + (" with changes" if commit.endswith("-dirty") else "")


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """The config's keys, except for `AXES`, in which `runs` differ. Runs without a readable config do not count."""
    configs = [run.config for run in runs if run.config]
    keys = {key for one in configs for key in one}  # optimizers have different ones
    return sorted({key for key in keys if any(one.get(key) != configs[0].get(key) for one in configs)} - {*AXES})


def _number(value: Any) -> float | None:
    """A number as JSON holds it: null if it was not finite."""
    return None if value is None else float(value)


def _read_metrics(run: Run, config: Config, last_bytes: int | None) -> None:
    """Read the curves, notes and fingerprints from metrics.jsonl."""
    path, first = run.directory / run_dir.METRICS, first_step(config.branch_from)
    if not os.path.lexists(path) and not run.summary.get("steps"):
        return
    found = scan(path, last_bytes)
    lines = found.lines
    end = found.logged[-1] + 1 if found.logged else first
    if run.status in WROTE_ITS_END:  # a process that was killed has not written its number of steps
        end = run.summary.get("steps", first)
    if not found.is_whole:
        first = found.logged[0] if found.logged else end
        if not any(EVAL_EVENT.search(line) for _, line in lines) and (last_eval := newest(path, EVAL_EVENT)):
            lines = [(0, last_eval.string), *lines]
    run.gaps = missing_steps(found.logged, end, config.train.log_every, first)
    if run.gaps:
        run.problem = printable(f"{path}: {described(run.gaps)}")
    for number, line in lines:
        try:
            _add(run, parse_line(line), first)
        except (ValueError, KeyError, TypeError, OverflowError, OSError):
            if line.endswith(b"\n"):  # a line without an end is still being written
                where = f"line {number}" if found.is_whole else "one of the last lines"
                run.problem = printable(f"{path}: {where} is not a valid event")
    run.val, run.val_ema = (run.curves.get(name, []) for name in (Metric.VAL_LOSS, Metric.VAL_LOSS_EMA))
    if run.train:
        if run.status not in run_dir.DONE:  # summary.json is only written when a run starts or stops
            last = run.train[-1]
            run.summary |= {"steps": last.step, "tokens": last.tokens}
            if found.is_whole:
                run.summary["train_s"] = last.seconds
        run.tokens_per_s = statistics.median(step.tokens_per_s for step in run.train)
    if mfus := [step.mfu for step in run.train if step.mfu is not None]:
        run.mfu = statistics.median(mfus)


def _add(run: Run, event: dict[str, Any], first: int) -> None:
    """Add an event to the curves and notes of a run. Raises an error if one of its values is missing or wrong."""
    step, tokens = int(event["step"]) + 1, int(event["tokens"])
    last_step, seconds = (run.train[-1].step, run.train[-1].seconds) if run.train else (first, 0.0)
    if run.started is None and "time" in event:
        run.started = datetime.fromtimestamp(event["time"])
    if event["event"] == "step":
        seconds += (step - last_step) * float(event[Metric.STEP_MS]) / 1e3
        run.train.append(_step(event, step, tokens, seconds, run))
        for name in event:
            if name.startswith("own/"):
                run.curves.setdefault(name, []).append(Point(step, tokens, seconds, _number(event[name])))
        run.fingerprints[tokens] = str(event[Metric.DATA_FINGERPRINT])
    elif event["event"] == "eval":
        event[Metric.VAL_LOSS]  # every evaluation has it
        for name, value in event.items():
            if name not in OF_EVENTS:
                run.curves.setdefault(name, []).append(Point(step, tokens, seconds, _number(value)))
        run.bits_per_byte = _number(event.get(Metric.VAL_BPB))
    elif event["event"] == "sharpness":
        values = (_number(event.get(name)) for name in SHARPNESS)
        run.sharpness.append(Sharpness(step, tokens, *values))
    else:
        run.notes.append(Note(event["event"], step, printable(str(event["text"]), LAYOUT)))


def _step(event: dict[str, Any], step: int, tokens: int, seconds: float, run: Run) -> Step:
    value = event.get
    batch, norms = int(value(Metric.BATCH_TOKENS, run.batch)), None
    small, big = value(Metric.GNS_SMALL_SQ_NORM), value(Metric.GNS_BIG_SQ_NORM)
    if small is not None and big is not None:
        norms = Norms(float(small), float(big), int(event[Metric.GNS_SMALL_SEQUENCES]), batch // run.seq_len)
        if not 0 < norms.small_sequences < norms.big_sequences:
            raise ValueError("a part is smaller than the whole")
    loss, tokens_per_s = _number(event[Metric.TRAIN_LOSS]), float(event[Metric.TOKENS_PER_S])
    return Step(step, tokens, seconds, loss, batch, tokens_per_s, norms, *map(_number, map(value, OPTIONAL)))


def tokenizers(runs: Sequence[Run]) -> set[str]:
    """The tokenizers of the runs whose config can be read: their names, of which two may stand for equal files.

    Runs that have not started have only their swept keys.
    """
    known = [run for run in runs if "data.tokenizer" in run.config]
    names = {run.config["data.tokenizer"]: run.directory / run_dir.TOKENIZER for run in known}
    if len(names) < 2:
        return {*names}
    return {*{_content(file) or name: name for name, file in names.items()}.values()}


def _content(tokenizer: Path) -> bytes | None:
    try:
        return tokenizer.read_bytes()
    except OSError:  # it is one of those that gptexp knows by name
        return None
