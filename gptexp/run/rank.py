"""One rank of a run: prepare, decide, build, train, finish.

The config is the one saved in the run directory. Resumes from the newest checkpoint if there is one.
"""

import gc
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from gptexp.config.branching import Parent
from gptexp.config.parts import origin
from gptexp.config.schema import HELLASWAG, Config, parts_of, to_dict, with_parts
from gptexp.config.vocabulary import with_vocab_size
from gptexp.data.agreement import open_shared_dataset
from gptexp.data.cache import downloads_dir
from gptexp.data.downloads import downloaded
from gptexp.data.hellaswag import VALIDATION, Example, read_examples
from gptexp.data.loader import Dataset, build_dataset
from gptexp.data.tokenizer import load_tokenizer
from gptexp.distributed.group import (
    agree,
    barrier,
    connect,
    destroy_process_group,
    gather,
    init_process_group,
)
from gptexp.distributed.ranks import Rank, ending_rank, launcher_rank, requeues
from gptexp.loggers.run_log import RunLog
from gptexp.machine.cpu import flush_denormals
from gptexp.machine.device import device_name, pick_device
from gptexp.machine.effective import (
    apply,
    forward_context,
    load_effective,
    save_effective,
    step_context,
)
from gptexp.machine.resolve import resolve
from gptexp.model.generate import Sampling, complete, for_inference, matmul_precision
from gptexp.process.errors import (
    EXIT_DIVERGED,
    EXIT_FAILED,
    CheckpointError,
    DataError,
    DivergedError,
    MicroBatchError,
    UserError,
)
from gptexp.process.signals import EXIT_CODES, StopRequest, ignore_stops
from gptexp.process.terminal import say, warn
from gptexp.process.words import counted
from gptexp.run.build import (
    build_training,
    compile_in_turn,
    compiles,
    refuse_missing_compiler,
    replace_unusable_folders,
)
from gptexp.run.faults import explained
from gptexp.run.first_weights import choose_weights, refuse_other_ids
from gptexp.run.job import Decision, Job, Prepared
from gptexp.run.logs import measure_utilisation, open_log
from gptexp.run.nodes import check_places, leave_mark, place_of, warn_of_clocks
from gptexp.run.summary import Summary, end_line, end_lines, hashes_of_texts
from gptexp.run.trial import settle_micro_batch
from gptexp.storage import branch, checkpoint, init_from, run_dir
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.init_from import Source
from gptexp.training.loop import Training, fit
from gptexp.training.optimizer import weights_for_use


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
    flush_denormals()  # before the first operation with several threads, which inherit this
    gc.unfreeze()  # under torchrun one process trains all cells: make the last cell's objects collectable
    gc.disable()  # until the first step is done: importing creates a million objects that are never freed
    try:
        with run_dir.held(job.directory, run_dir.RANK_LOCK) if job.rank.is_main else nullcontext():
            return _run(job)
    finally:
        gc.enable()


def _run(job: Job) -> int:
    job = replace(job, cfg=with_parts(job.cfg))
    if job.rank.is_main:
        for group, section in parts_of(job.cfg):
            say(f"part            {origin(group, section)}")
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
    barrier(prepared.long_wait_group)
    destroy_process_group()
    return outcome.code


@dataclass(frozen=True)
class Built:
    """The training objects, and the logs."""

    training: Training
    log: RunLog
    summary: Summary


@dataclass(frozen=True)
class Outcome:
    status: str  # for summary.json
    code: int  # the exit code


def prepare(job: Job) -> Prepared:
    """Open the data and join the other ranks. *Collective.*"""
    for line in replace_unusable_folders():
        if job.rank.local_rank == 0:
            warn(line)
    store = None if job.rank.world_size == 1 else job.store or connect(job.rank)
    # Before the process group: a rank that waits for another to tokenise must not time out.
    dataset = build_dataset(job.cfg) if store is None else open_shared_dataset(job.cfg, job.rank, store)
    examples = _examples(job, dataset)
    device = pick_device(job.cfg.train.device, job.rank)
    if store is None:
        return Prepared(dataset, examples, device, None, None)
    world = job.cfg.world
    group = init_process_group(job.rank, store, device, world.backend, world.timeout_s)
    return Prepared(dataset, examples, device, store, group)


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
    decision, mark = agree(
        lambda: (_decide(job, prepared), leave_mark(job.directory)), job.rank, prepared.long_wait_group
    )
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
    earlier = run_dir.read_summary(directory)
    _refuse_changed_data(directory, earlier.get("data_hash"), dataset)
    _refuse_changed_texts(directory, earlier.get("validation_hashes", {}), dataset)
    latest = checkpoint.load_latest(checkpoints)
    parent = branch.find(cfg) if latest is None else None
    saved = directory if parent is None else parent.directory

    effective = resolve(cfg, prepared.device, job.rank, load_effective(saved), dataset.n_vocab)
    refuse_missing_compiler(effective, prepared.device)
    cfg = with_vocab_size(cfg, effective.vocab_size.value)
    # Before the micro-batch is settled, because on a GPU that builds the model.
    source = _first_weights(cfg, dataset) if cfg.init_from and latest is None and parent is None else None
    effective = settle_micro_batch(cfg, effective, prepared.device, job.rank.world_size)
    save_effective(directory, effective)
    run_dir.keep_tokenizer(directory, dataset.directory)
    run_dir.remove_leftovers(directory)
    checkpoint.remove_leftovers(checkpoints)
    if parent is not None:  # after saving its choices here: a run with a checkpoint loads its own choices
        latest = _adopt(parent, cfg, checkpoints, dataset)
    if latest is None and (times := requeues()) and (directory / run_dir.METRICS).exists():
        warn(
            f"SLURM has requeued this job (restart {times}), and {checkpoints} holds no checkpoint: training starts "
            "from step 0"
        )
    if latest is None:
        return Decision(effective, None, source, TrainState(), None)
    path, state = latest
    _refuse_changed_data(path, checkpoint.data_hash(path), dataset)
    if state.tokens != (planned := cfg.batch.step_sizes.tokens_after(state.step)):
        raise CheckpointError(
            f"{path}: {counted(state.tokens, 'token')} after {counted(state.step, 'step')}, and in this run they have "
            f"{planned:,} (batch.total_batch_size={cfg.batch.total_batch_size:,}); not a checkpoint of this run"
        )
    checkpoint.set_aside(checkpoints, state.step)
    return Decision(effective, path, None, state, checkpoint.about_run(path).get("branched_from"))


def _adopt(parent: Parent, cfg: Config, checkpoints: Path, dataset: Dataset) -> tuple[Path, TrainState]:
    """Make the checkpoint of `branch_from` this run's first one, so that it needs the other run no longer."""
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
        training = build_training(job, prepared, decision)
        used = measure_utilisation(job, prepared, decision.effective)
        log = open_log(job, decision, training, used)
        barrier(prepared.long_wait_group)  # rank 0 may wait for downloads; a step must not time out because of that
    summary = Summary(job.directory, training, decision.state, used)
    summary.write("running")
    return Built(training, log, summary)


def train(job: Job, prepared: Prepared, decision: Decision, built: Built) -> Outcome:
    """Train to the end, then log a sample. *Collective.*"""
    state = decision.state
    gc.freeze()  # neither a collection nor the interpreter's exit then visits the imported objects
    try:
        with explained(job, prepared.store, decision.effective, state), step_context(decision.effective):
            # The ranks of a split model compute together, so they compile in the first step.
            if compiles(decision.effective) and not built.training.step.parameters.split:
                compile_in_turn(built.training, prepared.long_wait_group)
            reason = fit(built.training, state, job.stop, built.log)
    except DivergedError as error:
        if job.rank.is_main:
            warn(str(error))
        return Outcome("diverged", EXIT_DIVERGED)
    if reason is not None:
        return Outcome("interrupted", EXIT_CODES[reason])
    # The ranks of a split model sample together, all the same text.
    if job.cfg.log.sample_tokens and (job.rank.is_main or built.training.step.parameters.split):
        with weights_for_use(built.training.step.optimizer):
            _sample(job, decision, built, state)
    return Outcome("completed", 0)


def finish(job: Job, decision: Decision, built: Built, outcome: Outcome) -> None:
    """Write the summary, upload the report to wandb, close the logs and print the outcome. Runs after a failure too."""
    cfg = job.cfg
    written = built.summary.write(outcome.status)
    if outcome.status in run_dir.DONE and built.log.takes_report:
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


def _refuse_changed_data(path: Path, before: str | None, dataset: Dataset) -> None:
    """Raise `DataError` if a run directory or a checkpoint was trained on other tokens."""
    if before not in (None, dataset.hash):
        raise DataError(
            f"{path}: trained on other data (token hash {before}, now {dataset.hash}); restore the old "
            "text, or start a new run"
        )


def _refuse_changed_texts(path: Path, before: Mapping[str, str], dataset: Dataset) -> None:
    """Raise `DataError` if a text of data.validation is another one than in earlier attempts of the run."""
    for loss, text in hashes_of_texts(dataset).items():
        if before.get(loss, text) != text:
            name = loss.removeprefix("val/").removesuffix("/loss")
            rule = f"was another text before (hash {before[loss]}, now {text}), so {loss} would be no one curve"
            raise DataError(f"{path}: data.validation.{name}: {rule}; restore it, or give it another name")


def _sample(job: Job, decision: Decision, built: Built, state: TrainState) -> None:
    """Log a generated text. An error is only printed: the run is completed and saved."""
    how, tokenizer, problem = Sampling(job.cfg.log.sample_tokens, seed=job.cfg.train.seed), None, None
    gpt, split, effective = built.training.gpt, built.training.step.parameters.split, decision.effective
    try:
        tokenizer = load_tokenizer(job.cfg.data.tokenizer, job.directory)
    except Exception as error:
        problem = error
    # If one of several ranks that sample together cannot, none tries: the others would wait for it.
    if not all(gather(problem is None) if split else [problem is None]):
        tokenizer = None
    try:
        if tokenizer is not None:
            dtype, precision = getattr(torch, effective.dtype.value), effective.matmul_precision.value
            model = gpt if split else for_inference(gpt, dtype, precision)
            with forward_context(effective)() if split else matmul_precision("highest"):
                [text] = complete(model, tokenizer, "", 1, how)
            built.log.sample(state, text)
    except Exception as error:
        problem = error
    if problem is not None:
        warn(f"sampling failed: {type(problem).__name__}: {problem}")
