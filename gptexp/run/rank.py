"""One rank of a run: prepare, decide, build, train, finish.

The config is the one saved in the run directory. Resumes from the newest checkpoint if there is one.
"""

import gc
import json
import math
import platform
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from gptexp.config.branching import Parent, first_step
from gptexp.config.fitted import other_text
from gptexp.config.rules import needing_noise_scale, noise_half_life, why_unmeasured
from gptexp.config.run_plan import plan_run
from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import HELLASWAG, Config, to_dict
from gptexp.config.vocabulary import with_vocab_size
from gptexp.data.cache import downloads_dir
from gptexp.data.downloads import downloaded
from gptexp.data.hellaswag import VALIDATION, Example, read_examples
from gptexp.data.loader import Dataset, build_dataset, open_dataset, val_bytes_per_token
from gptexp.data.prepare import prepare as prepare_data
from gptexp.data.stream import manifest_state
from gptexp.data.tokenizer import load_tokenizer
from gptexp.distributed.group import (
    agree,
    barrier,
    connect,
    destroy_process_group,
    gather,
    init_process_group,
    wait_for,
)
from gptexp.distributed.ranks import Rank, ending_rank, launcher_rank, requeues
from gptexp.distributed.reduction import build_reduction
from gptexp.distributed.sharding import Parameters, WholeParameters
from gptexp.loggers.alerts import Alerts
from gptexp.loggers.console import build_console
from gptexp.loggers.jsonl import JsonlSink
from gptexp.loggers.run_log import RunLog, Sink
from gptexp.loggers.wandb import build_wandb
from gptexp.machine.ceilings import gemm_rates
from gptexp.machine.cpu import flush_denormals
from gptexp.machine.device import device_name, pick_device
from gptexp.machine.effective import (
    Effective,
    apply,
    forward_context,
    load_effective,
    save_effective,
    step_context,
)
from gptexp.machine.resolve import resolve
from gptexp.model.flops import Utilisation, count_parameters, utilisation
from gptexp.model.generate import Sampling, complete
from gptexp.model.gpt import GPT
from gptexp.process.errors import (
    EXIT_DIVERGED,
    EXIT_FAILED,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    MicroBatchError,
    UserError,
)
from gptexp.process.signals import EXIT_CODES, StopRequest, ignore_stops
from gptexp.process.terminal import emit, say, warn
from gptexp.process.words import counted
from gptexp.run.build import (
    build_gpt,
    build_split_gpt,
    compile_in_turn,
    compiles,
    refuse_missing_compiler,
    replace_unwritable_caches,
    wrap,
)
from gptexp.run.faults import explained
from gptexp.run.first_weights import choose_weights, load_first_weights
from gptexp.run.job import Job
from gptexp.run.nodes import check_places, leave_mark, place_of, warn_of_clocks
from gptexp.run.scoring import of_lm_eval
from gptexp.run.sharpness import measure_while_training
from gptexp.run.summary import Summary, about, end_line, end_lines, start_event, start_lines
from gptexp.run.tokenizers import refuse_other_ids
from gptexp.run.trial import settle_micro_batch
from gptexp.storage import branch, checkpoint, init_from, run_dir
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.init_from import Source
from gptexp.training.loop import Training, fit
from gptexp.training.optim import build_optimizer, weights_for_use
from gptexp.training.profiling import StepProfiler
from gptexp.training.snapshot import is_shared, load_checkpoint
from gptexp.training.step import TrainStep
from gptexp.training.weight_average import WeightAverage

WRITING = timedelta(hours=2)  # longest time for which a rank that has written its part waits for the others


def run_alone(cfg: Config, directory: Path, stop: StopRequest) -> int:
    """Train a run of one rank in this process. Restarts with a smaller micro-batch if `auto` chose one too large."""
    stop.limit(cfg.train.max_minutes)
    while True:
        try:
            return run(Job(cfg, directory, Rank(), stop))
        except MicroBatchError as error:
            warn(str(error))
        gc.unfreeze()
        gc.collect()  # frees the model and optimizer, which the error's traceback holds in reference cycles
        torch.cuda.empty_cache()


def run_launched(directory: Path, stop: StopRequest) -> NoReturn:
    """Train as a rank that gptexp's launcher has started, then end the process."""

    def body() -> int:
        cfg = run_dir.load_config(directory)
        stop.limit(cfg.train.max_minutes)
        rank = launcher_rank()
        assert rank is not None
        stop.announces = rank.is_main
        return run(Job(cfg, directory, rank, stop))

    with ending_rank(report=False):  # `record` writes the error to a file, and the parent prints it
        try:
            code = record(body)()
        except UserError as error:
            sys.exit(error.exit_code)
        ignore_stops()  # all ranks are past their last collective
        sys.exit(code)


def run(job: Job) -> int:
    """Train until the run is completed, stopped or diverged. Returns the exit code. *Collective.*

    Raises `UserError` for errors that a user can cause.
    """
    flush_denormals()  # before the first operation of several threads, which inherit it
    gc.unfreeze()  # under torchrun one process trains all cells: make the last cell's objects collectable
    gc.disable()  # until the first step is done: importing creates a million objects that are never freed
    try:
        with run_dir.held(job.directory, run_dir.RANK_LOCK) if job.rank.is_main else nullcontext():
            return _run(job)
    finally:
        gc.enable()


def _run(job: Job) -> int:
    prepared = prepare(job)
    decision = decide(job, prepared)
    job = replace(job, cfg=with_vocab_size(job.cfg, decision.effective.vocab_size.value))
    built = build(job, prepared, decision)
    outcome = Outcome("failed", EXIT_FAILED)
    try:
        outcome = train(job, prepared, decision, built)
    finally:
        finish(job, decision, built, outcome)
    # No rank ends before rank 0 has written everything: when one ends, launchers end the others.
    barrier(prepared.patient)
    destroy_process_group()
    return outcome.code


@dataclass(frozen=True)
class Prepared:
    """The data, the device and the process group of a rank."""

    dataset: Dataset
    examples: list[Example]  # of HellaSwag, if it is to be scored
    device: torch.device
    store: dist.Store | None  # None: one rank
    patient: dist.ProcessGroup | None  # for waiting while one rank decides or compiles


@dataclass(frozen=True)
class Decision:
    """The choices of rank 0 for all ranks. Nodes may differ in hardware, but one run needs one set of choices."""

    effective: Effective
    checkpoint: Path | None  # of this run, to continue from; None: it starts
    source: Source | None  # of `init_from`: the weights of a run that starts; None: random ones
    state: TrainState  # the counters to start from; training advances them
    branched_from: dict[str, Any] | None  # the checkpoint of another run that this run began with


@dataclass(frozen=True)
class Built:
    """The training objects, and the logs."""

    training: Training
    log: RunLog
    uploads_report: bool
    summary: Summary


@dataclass(frozen=True)
class Outcome:
    status: str  # for summary.json
    code: int  # the exit code


def prepare(job: Job) -> Prepared:
    """Open the data and join the other ranks. *Collective.*"""
    for line in replace_unwritable_caches():
        if job.rank.local_rank == 0:
            warn(line)
    store = None if job.rank.world_size == 1 else job.store or connect(job.rank)
    # Before the process group: a rank that waits for another to tokenise must not time out.
    dataset = build_dataset(job.cfg) if store is None else _dataset_of_run(job, store)
    examples = _examples(job, dataset)
    device = pick_device(job.cfg.train.device, job.rank)
    if store is None:
        return Prepared(dataset, examples, device, None, None)
    world = job.cfg.world
    group = init_process_group(job.rank, store, device, world.backend, world.timeout_s)
    return Prepared(dataset, examples, device, store, group)


def _dataset_of_run(job: Job, store: dist.Store) -> Dataset:
    """Open the data. Rank 0 finds, prepares and checks them, and tells the others where. Raises `DataError`.

    Every rank would otherwise list the folders of the corpus and open each file of tokens, on a file system that all
    nodes share. Of a node that does not see the files of rank 0, the first rank looks, and tells the others there; also
    with data=tokens, whose files lie outside of the cache and may be other ones on each node.
    """
    rank, of_node = job.rank, f"tokens of {platform.node()}"
    if rank.is_main:
        return _open(job, _prepared(job, store, ["tokens", of_node]), check_files=True)
    key = of_node if rank.local_rank else "tokens"
    wait_for(store, key)
    told = json.loads(text := store.get(key))
    must_look = job.cfg.data.name == "tokens" and not rank.local_rank
    is_known = "error" in told or (not must_look and _sees(told))
    if not is_known:  # the first rank of the node; or a later one, of two nodes with one name
        told = _prepared(job, store, [of_node])
    elif not rank.local_rank:
        store.set(of_node, text.decode())
    if error := told.get("error"):
        raise DataError(error)
    return _open(job, told, check_files=not is_known)


def _prepared(job: Job, store: dist.Store, keys: list[str]) -> dict[str, Any]:
    """Prepare the data. Tells under `keys` where they are and the states of their manifests, or the error."""
    try:
        directories = [None if path is None else str(path) for path in prepare_data(job.cfg.data)]
    except DataError as refusal:
        for key in keys:
            store.set(key, json.dumps({"error": str(refusal)}))
        raise
    found = {"directories": directories, "states": [path and manifest_state(Path(path)) for path in directories]}
    for key in keys:
        store.set(key, json.dumps(found))
    return found


def _sees(told: dict[str, Any]) -> bool:
    """Whether this node has the same files: not others with the same name on a disk of its own."""
    here = [path and manifest_state(Path(path)) for path in told["directories"]]
    return bool(here == told["states"])


def _open(job: Job, told: dict[str, Any], check_files: bool) -> Dataset:
    cfg = job.cfg
    train, val = (None if path is None else Path(path) for path in told["directories"])
    assert train is not None
    vocab_size = cfg.model.vocab_size
    return open_dataset(cfg.data, train, val, cfg.seq_len, cfg.train.seed, vocab_size, check_files=check_files)


def _examples(job: Job, dataset: Dataset) -> list[Example]:
    """The examples of HellaSwag if they are to be scored. Raises `DataError`."""
    if HELLASWAG not in job.cfg.train.eval_tasks:
        return []
    file = downloaded(VALIDATION, downloads_dir(job.cfg.data))
    return read_examples(file, load_tokenizer(job.cfg.data.tokenizer, dataset.directory))


def decide(job: Job, prepared: Prepared) -> Decision:
    """Resolve every `auto` and choose the checkpoint, on rank 0 for all ranks. *Collective.*

    Raises `ConfigError` or `DataError` if the nodes of the ranks lack what one run needs.
    """
    decision: Decision
    decision, mark = agree(lambda: (_decide(job, prepared), leave_mark(job.directory)), job.rank, prepared.patient)
    places = gather(place_of(job.rank, device_name(prepared.device), prepared.dataset.hash, mark))
    if job.rank.is_main:
        mark.unlink(missing_ok=True)
        warn_of_clocks(places)
    check_places(places, job.directory)
    apply(decision.effective, job.cfg.train.deterministic)
    return decision


def _decide(job: Job, prepared: Prepared) -> Decision:
    cfg, directory, dataset = job.cfg, job.directory, prepared.dataset
    checkpoints = directory / run_dir.CHECKPOINTS
    _refuse_changed_data(directory, run_dir.read_summary(directory).get("data_hash"), dataset)
    found = checkpoint.load_latest(checkpoints)
    parent = branch.find(cfg.branch_from) if found is None else None
    saved = directory if parent is None else parent.directory

    effective = resolve(cfg, prepared.device, job.rank, load_effective(saved), dataset.n_vocab)
    refuse_missing_compiler(effective, prepared.device)
    cfg = with_vocab_size(cfg, effective.vocab_size.value)
    # Before the micro-batch is settled: on a GPU that builds the model.
    source = _first_weights(cfg, dataset) if cfg.init_from and found is None and parent is None else None
    effective = settle_micro_batch(cfg, effective, prepared.device, job.rank.world_size)
    save_effective(directory, effective)
    run_dir.keep_tokenizer(directory, dataset.directory)
    run_dir.remove_leftovers(directory)
    checkpoint.remove_leftovers(checkpoints)
    if parent is not None:  # once its choices are saved: a run with a checkpoint takes its own
        found = _adopt(parent, cfg, checkpoints, dataset)
    if found is None and (times := requeues()) and (directory / run_dir.METRICS).exists():
        warn(
            f"SLURM has requeued this job (restart {times}), and {checkpoints} holds no checkpoint: training starts "
            "from step 0"
        )
    if found is None:
        return Decision(effective, None, source, TrainState(), None)
    path, state = found
    _refuse_changed_data(path, checkpoint.data_hash(path), dataset)
    if state.tokens != (planned := cfg.batch.step_sizes.tokens_after(state.step)):
        raise CheckpointError(
            f"{path}: {counted(state.tokens, 'token')} after {counted(state.step, 'step')}, and in this run they have "
            f"{planned:,} (batch.total_batch_size={cfg.batch.total_batch_size:,}); not a checkpoint of this run"
        )
    checkpoint.set_aside(checkpoints, state.step)
    return Decision(effective, path, None, state, checkpoint.about_run(path).get("branched_from"))


def _adopt(parent: Parent, cfg: Config, checkpoints: Path, dataset: Dataset) -> tuple[Path, TrainState]:
    """Make the checkpoint of `branch_from` the first one of this run, which needs the other run no longer."""
    source = parent.directory / run_dir.CHECKPOINTS / checkpoint.name_of(parent.step)
    before = checkpoint.about_run(source)
    _refuse_changed_data(source, before.get("data_hash"), dataset)
    branched_from = {
        "run": str(parent.directory), "step": parent.step, "tokens": parent.tokens, "checkpoint": parent.identity,
    }  # fmt: skip
    return checkpoint.adopt(source, checkpoints, {**before, "config": to_dict(cfg), "branched_from": branched_from})


def _first_weights(cfg: Config, dataset: Dataset) -> Source:
    """Find the weights of `init_from`. Raises `ConfigError` or `CheckpointError` if they are for another model."""
    assert cfg.init_from is not None
    source = init_from.of_config(cfg.init_from, weights=True)
    refuse_other_ids(source, cfg.data.tokenizer, load_tokenizer(cfg.data.tokenizer, dataset.directory))
    return choose_weights(source, cfg.model)


def build(job: Job, prepared: Prepared, decision: Decision) -> Built:
    """Build model, optimizer and logs. *Collective.*"""
    with explained(job, prepared.store, decision.effective, decision.state):
        training = _build_training(job, prepared, decision)
        used = _utilisation(job, prepared, decision)
        log, uploads_report = _open_log(job, decision, training, used)
        barrier(prepared.patient)  # rank 0 may wait for wandb; a step must not time out because of that
    summary = Summary(job.directory, training, decision.state, used)
    summary.write("running")
    return Built(training, log, uploads_report, summary)


def train(job: Job, prepared: Prepared, decision: Decision, built: Built) -> Outcome:
    """Train to the end, then log a sample. *Collective.*"""
    state = decision.state
    gc.freeze()  # neither a collection nor the interpreter's exit then visits the imported objects
    try:
        with explained(job, prepared.store, decision.effective, state), step_context(decision.effective):
            # The ranks of a split model compute together, so they compile in the first step.
            if compiles(decision.effective) and not built.training.step.parameters.split:
                compile_in_turn(built.training, prepared.patient)
            reason = fit(built.training, state, job.stop, built.log, job.directory / run_dir.CHECKPOINTS)
    except DivergedError as error:
        if job.rank.is_main:
            warn(str(error))
        return Outcome("diverged", EXIT_DIVERGED)
    if reason is not None:
        return Outcome("interrupted", EXIT_CODES[reason])
    # The ranks of a split model sample together, all the same text.
    if job.cfg.log.sample_tokens and (job.rank.is_main or built.training.step.parameters.split):
        with weights_for_use(built.training.step.optimizer):
            _sample(job, built, state)
    return Outcome("completed", 0)


def finish(job: Job, decision: Decision, built: Built, outcome: Outcome) -> None:
    """Write the summary, upload the report to wandb, close the logs and print the outcome. Runs after a failure too."""
    cfg = job.cfg
    written = built.summary.write(outcome.status)
    if built.uploads_report and outcome.status in run_dir.DONE:
        from gptexp.reporting.page.write import report_or_warning  # imports scipy, which nothing else here needs

        _, files = report_or_warning(job.directory) or (None, [])
        built.log.report(decision.state, files)
    built.log.close(written, outcome.code)
    if not job.rank.is_main or cfg.log.progress == "json":
        return
    if cfg.log.progress == "off":
        say(end_line(written, job.directory))
    else:
        say(*end_lines(written, job.directory, built.training))


def _build_training(job: Job, prepared: Prepared, decision: Decision) -> Training:
    """Build model and optimizer, and load the checkpoint into them. *Collective.*"""
    cfg, rank, device = job.cfg, job.rank, prepared.device
    effective, path, state = decision.effective, decision.checkpoint, decision.state
    if path is not None:
        checkpoint.refuse_other_size(path, count_parameters(cfg.model))
    optim = scaled_optim(cfg)
    sharding = cfg.world.sharding if rank.world_size > 1 else "none"  # one rank's part is everything
    parameters: Parameters
    if sharding == "full":
        gpt, parameters = build_split_gpt(cfg, effective, device, path is None and decision.source is None)
    else:
        gpt = build_gpt(cfg, effective, device)
        parameters = WholeParameters(gpt)
    optimizer = build_optimizer(gpt, optim, effective.fused.value, parameters.named, sharding == "optimizer")
    if path is None and decision.source is not None and (rank.is_main or parameters.split):
        load_first_weights(decision.source, parameters)  # if they are whole, `wrap` sends them to the other ranks
    model = gpt if parameters.split else wrap(gpt, effective, cfg.train.reduction, rank, device, cfg.world.comm)
    average = None
    if cfg.train.ema_half_life_tokens is not None:
        average = WeightAverage(parameters, cfg.train.ema_half_life_tokens)
    if path is not None:
        load_checkpoint(path, parameters, optimizer, average)
    plan = plan_run(cfg, effective.micro_batch_size.value)
    unmeasured = why_unmeasured(cfg, effective.micro_batch_size.value, rank.world_size)
    if unmeasured and (given := needing_noise_scale(cfg)):
        raise ConfigError(f"{given}: {unmeasured}")
    profiler = None
    if cfg.train.profile:
        profiler = StepProfiler(job.directory / run_dir.PROFILE, rank, device, state.step, plan.steps)
    return Training(
        cfg=cfg.train,
        optim=optim,
        plan=plan,
        step=TrainStep(
            model=model,
            optimizer=optimizer,
            reduction=build_reduction(cfg.train.reduction, model, rank, effective.reduce_every == "micro_step"),
            grad_clip=cfg.optim.grad_clip,
            forward_context=forward_context(effective),
            dropout=cfg.model.dropout > 0,
            split=parameters,
        ),
        average=average,
        gpt=gpt,
        dataset=prepared.dataset,
        examples=prepared.examples,
        other_scores=partial(_other_scores, job, prepared, gpt),
        sharpness=partial(_sharpness, job, prepared),
        rank=rank,
        device=device,
        timeout_s=cfg.world.timeout_s if rank.world_size > 1 else math.inf,
        noise_half_life_tokens=None if unmeasured else noise_half_life(cfg, cfg.run_length[1]),
        profiler=profiler,
        saving_group=dist.new_group(backend="gloo", timeout=WRITING) if is_shared(parameters, optimizer) else None,
        about=about(cfg, effective, prepared.dataset, rank.world_size, decision.branched_from) if rank.is_main else {},
    )


def _other_scores(job: Job, prepared: Prepared, gpt: GPT) -> dict[str, float]:
    """The scores of `train.eval_tasks` that lm_eval computes for rank 0; the other ranks wait. *Collective.*"""
    tasks = of_lm_eval(job.cfg.train.eval_tasks)
    if not tasks:
        return {}
    from gptexp.run.tasks import score_while_training  # imports scipy, which nothing else here needs

    tokenizer = partial(load_tokenizer, job.cfg.data.tokenizer, prepared.dataset.directory)
    score = partial(score_while_training, gpt, tokenizer, tasks, prepared.device, job.stop)
    found: dict[str, float] = agree(score, job.rank, prepared.patient)
    return found


def _sharpness(job: Job, prepared: Prepared, step: int) -> tuple[dict[str, float | None], str | None]:
    """What `measure_while_training` finds at the checkpoint of `step` for rank 0; the others wait. *Collective.*"""
    measured = partial(measure_while_training, job.directory, step, prepared.device, job.stop)
    found: tuple[dict[str, float | None], str | None] = agree(measured, job.rank, prepared.patient)
    return found


def _refuse_changed_data(path: Path, before: str | None, dataset: Dataset) -> None:
    """Raise `DataError` if a run directory or a checkpoint was trained on other tokens."""
    if before not in (None, dataset.hash):
        raise DataError(
            f"{path}: trained on other data (token hash {before}, now {dataset.hash}); restore the old "
            "text, or start a new run"
        )


def _utilisation(job: Job, prepared: Prepared, decision: Decision) -> Utilisation:
    """Return the FLOPs and the peak rate from which MFU is computed. *Collective.*"""
    cfg, effective, world_size = job.cfg, decision.effective, job.rank.world_size
    measured = None
    if cfg.log.mfu_peak == "measured":
        measured = world_size * _peak_flops_per_rank(job, prepared, effective)
    return utilisation(cfg.model, cfg.seq_len, effective.device_name, effective.dtype.value, world_size, measured)


def _peak_flops_per_rank(job: Job, prepared: Prepared, effective: Effective) -> float:
    """Return the FLOP/s of a rank's matrix products, measured once per run and saved. *Collective.*"""
    if effective.peak_flops_per_rank is not None:
        return effective.peak_flops_per_rank
    tokens = effective.micro_batch_size.value * job.cfg.seq_len
    dtype = getattr(torch, effective.dtype.value)
    # All ranks measure at once, as in a step: ranks on one CPU share its cores.
    rates = gather(gemm_rates(job.cfg.model, tokens, prepared.device, dtype)["model"])
    peak: float = sum(rates) / job.rank.world_size
    if job.rank.is_main:
        save_effective(job.directory, replace(effective, peak_flops_per_rank=peak))
    return peak


def _open_log(job: Job, decision: Decision, training: Training, used: Utilisation) -> tuple[RunLog, bool]:
    """Open the log, without sinks on ranks other than 0. Also returns whether the run uploads a report of itself."""
    cfg, directory, effective, state = job.cfg, job.directory, decision.effective, decision.state
    plan, schedule = training.plan, training.plan.schedule
    if not job.rank.is_main:
        return RunLog([], used, Alerts(schedule.warmup_tokens, cfg.optim.grad_clip)), False
    metadata = {**training.about, "effective": effective.to_dict(), "mfu": used.to_dict()}
    for_wandb = {**training.about["config"], **{key: value for key, value in metadata.items() if key != "config"}}
    for line in other_text(cfg, training.dataset.hash):
        warn(f"warning: {line}")
    if cfg.log.progress == "json":
        emit(start_event(directory, training, state, metadata))
    elif cfg.log.progress != "off":
        say(*start_lines(cfg, directory, effective, training, state))
    metrics = JsonlSink(directory, state, cfg.train.log_every, first_step(cfg.branch_from))
    sinks: list[Sink] = [metrics]
    wandb = build_wandb(cfg.log, directory, for_wandb, cfg.sweep.name)
    if wandb is not None:
        sinks.append(wandb)
    if cfg.log.tensorboard:
        from gptexp.loggers.tensorboard import TensorBoardSink  # imports tensorboard, which may not be installed

        sinks.append(TensorBoardSink(cfg, directory, state))
    # Built last, so that no line is printed into the bar; first in the list, so that it prints at once.
    if console := build_console(cfg.log.progress, plan.steps, plan.tokens, state):
        sinks.insert(0, console)
    alerts = Alerts(schedule.warmup_tokens, cfg.optim.grad_clip, job.stop.deadline, metrics.alerts_before)
    bytes_per_token = _val_bytes_per_token(cfg.data.tokenizer, training.dataset)
    alone = cfg.sweep.name is None  # a sweep has one report of all its cells
    log = RunLog(sinks, used, alerts, bytes_per_token, metrics.sharpness_steps)
    return log, alone and wandb is not None and wandb.online


def _val_bytes_per_token(tokenizer: str, dataset: Dataset) -> float | None:
    """`val_bytes_per_token`; None without validation, or if a resumed run cannot download its tokenizer."""
    if not len(dataset.val_starts):
        return None
    try:
        return val_bytes_per_token(dataset, load_tokenizer(tokenizer, dataset.directory))
    except DataError as error:
        warn(f"val/bpb is not logged: {error}")
        return None


def _sample(job: Job, built: Built, state: TrainState) -> None:
    """Log a generated text. An error is only printed: the run is completed and saved."""
    how, tokenizer, problem = Sampling(job.cfg.log.sample_tokens, seed=job.cfg.train.seed), None, None
    try:
        tokenizer = load_tokenizer(job.cfg.data.tokenizer, job.directory)
    except Exception as error:
        problem = error
    # Ranks that sample together all can, or none tries: the others would wait for one that cannot.
    if not all(gather(problem is None) if built.training.step.parameters.split else [problem is None]):
        tokenizer = None
    try:
        if tokenizer is not None:
            [text] = complete(built.training.gpt, tokenizer, "", 1, how)
            built.log.sample(state, text)
    except Exception as error:
        problem = error
    if problem is not None:
        warn(f"sampling failed: {type(problem).__name__}: {problem}")
