"""`gptexp plan`: tokens, memory, resolved `auto` values and time of a run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gptexp.command.critical import Verdict, judge_batch
from gptexp.command.prediction import Computing, Prediction, predict
from gptexp.config.blocks import in_words
from gptexp.config.fitted import fitted_warnings, other_text
from gptexp.config.parts import is_part
from gptexp.config.run_plan import RunPlan, plan_run
from gptexp.config.scaling import lr_in_words, scaled_optim
from gptexp.config.schema import Config, memory_key
from gptexp.config.vocabulary import ASSUMED_CHARACTERS, with_vocab_size
from gptexp.data.epoch import epoch_tokens
from gptexp.data.prepare import count_ids, has_own_validation, prepared_dir, tokens_hash
from gptexp.data.stream import TokenStream
from gptexp.distributed.ranks import Rank
from gptexp.machine.device import Device, pick_device
from gptexp.machine.effective import Effective, load_effective
from gptexp.machine.gpu_memory import excess, memory_by_sharding
from gptexp.machine.network import MOST_CROWDED, network_of
from gptexp.machine.resolve import estimate, resolve
from gptexp.model.allreduce import Alone
from gptexp.model.flops import flops_per_token
from gptexp.model.gpus import UNKNOWN_GPU, Gpu
from gptexp.model.memory import Memory
from gptexp.model.shapes import count_parameters
from gptexp.process.cores import count_cores
from gptexp.process.errors import ConfigError, DataError, UserError, first_line
from gptexp.process.fields import AUTO
from gptexp.process.terminal import warn
from gptexp.process.words import counted, duration, rounded, titled
from gptexp.run.calibrate import Duration, Pace, pace, sample, sample_alone
from gptexp.storage import run_dir

MOST_EPOCHS = 4  # up to so many, repeated text is nearly as good as new (Muennighoff et al. 2023, arXiv 2305.16264)
ASSUMED_MFU = 0.4  # Llama 3 trained at 38 to 43% (arXiv 2407.21783, table 4)
ASSUMPTION = f"not measured, at an assumed MFU of {ASSUMED_MFU:.0%} (arXiv 2407.21783 reports 38 to 43%)"
BACKWARD_RATIO = 2 / 3  # the backward pass's share of the multiplications of a micro-step


@dataclass(frozen=True)
class Request:
    """The options of `gptexp plan`, beside the config."""

    gpu: Gpu | None = None  # None: this machine
    network: str | None = None  # one of `NETWORKS`, between nodes
    ranks_per_node: int | None = None
    critical: Path | None = None  # a run or a sweep that has measured its critical batch size
    with_time: bool = False  # train a few steps
    as_json: bool = False


HERE = Request()


@dataclass
class Plan:
    """A run before its start."""

    config: Config  # as composed
    run: RunPlan
    effective: Effective
    memory: Memory
    memory_by_sharding: dict[str, int]  # sharding -> bytes at the peak; only for several ranks
    epoch_tokens: int | None  # training tokens of the corpus; None: it is not tokenised, 0: it is too short
    gpu: Gpu | None  # which this machine need not have; None: the plan is for this machine
    warnings: list[str]
    time: Duration | None = None
    prediction: Prediction | None = None
    unpredicted: str | None = None  # why there is no prediction
    critical: Verdict | None = None

    @cached_property
    def sized(self) -> Config:
        """The config with a number as its vocabulary."""
        return with_vocab_size(self.config, self.effective.vocab_size.value)

    @property
    def epochs(self) -> float | None:
        return self.run.tokens / self.epoch_tokens if self.epoch_tokens else None

    @property
    def left(self) -> float:
        """The share of the tokens that this run itself trains on; the run of `branch_from` trained on the others."""
        return 1 - self.run.first_tokens / self.run.tokens

    @property
    def flops(self) -> tuple[int, int]:
        """FLOPs of all steps, as (palm, causal)."""
        palm, causal = flops_per_token(self.sized.model, self.sized.seq_len)
        return palm * self.run.tokens, causal * self.run.tokens

    @property
    def peak_flops(self) -> float | None:
        """The published FLOP/s of the GPU in the run's dtype."""
        return self.gpu.peak_flops if self.gpu is not None and self.effective.dtype.value == "bfloat16" else None

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        palm, causal = self.flops
        values = {
            "parameters": count_parameters(self.sized.model),
            "memory_bytes": {**asdict(self.memory), "peak": self.memory.peak},
            "memory_by_sharding": self.memory_by_sharding,
            **self.run.to_dict(),
            "corpus_tokens": self.epoch_tokens,
            "epochs": self.epochs,
            "flops_palm": palm,
            "flops_causal": causal,
            "lr": self.config.optim.lr,
            "effective_lr": scaled_optim(self.config).lr,
            "effective": self.effective.to_dict(),
            "warnings": self.warnings,
        }
        if self.gpu is not None:
            figures = {"memory_bytes": self.gpu.memory_bytes, "peak_flops_per_s": self.peak_flops, "mfu": ASSUMED_MFU}
            values["assumed"] = figures
        if self.time is not None:
            values["time"] = asdict(self.time)
        if self.critical is not None:
            values["critical"] = self.critical.to_dict()
        if self.unpredicted is not None:
            values["unpredicted"] = self.unpredicted
        return values | (self.prediction.to_dict() if self.prediction is not None else {})

    def lines(self) -> list[tuple[str, str]]:
        """The plan in words: a title and a text for each line; "" for what the run does not have."""
        palm, causal = self.flops
        shardings = [f"{name} {size / 2**30:.2f} GiB" for name, size in self.memory_by_sharding.items()]
        # If the GPU is not here, the number of cores beside it is unknown.
        choices = [(name, text) for name, text in self.effective.described() if self.gpu is None or name != "threads"]
        return [
            ("parameters", f"{count_parameters(self.sized.model):,}"),
            ("block", in_words(self.sized.model)),
            ("memory", self._memory_in_words()),
            ("by sharding", f"{', '.join(shardings)} on each rank (world.sharding)" if shardings else ""),
            ("data", f"{self.epoch_tokens:,} training tokens per epoch" if self.epoch_tokens else ""),
            *self.run.lines(self.epoch_tokens),
            ("FLOPs", f"{palm:.4g} (PaLM's count), {causal:.4g} (causal)"),
            ("learning rate", lr_in_words(self.config.optim.lr, scaled_optim(self.config).lr)),
            ("device", self.device_in_words()),
            *choices,
            ("time", self.time_in_words()),
            ("ranks", self.unpredicted or ""),
            *(self.prediction.lines() if self.prediction is not None else []),
            ("critical size", self.critical.in_words() if self.critical is not None else ""),
        ]

    def _memory_in_words(self) -> str:
        gib = {part: size / 2**30 for part, size in asdict(self.memory).items()}
        state = gib["weights"] + gib["average"] + gib["optimizer"] + gib["gradients"]
        parts = "weights, their average, optimizer state" if gib["average"] else "weights, optimizer state"
        if is_part(self.config.model):
            return f"{state:.2f} GiB {parts} and gradients on each rank; that of activations is unknown"
        return (
            f"about {self.memory.peak / 2**30:.2f} GiB on each rank: {state:.2f} {parts} and gradients, "
            + (f"{gib['gathered']:.2f} whole parameters, " if gib["gathered"] else "")
            + f"{gib['activations']:.2f} activations, {gib['loss']:.2f} loss"
            + (f", {gib['fragmentation']:.2f} fragmentation" if gib["fragmentation"] else "")
        )

    def device_in_words(self) -> str:
        if self.gpu is None or self.gpu.memory_bytes is None:
            return self.effective.device_name
        return f"{self.gpu.name} with {self.gpu.memory_bytes / 1e9:.0f} GB, from its data sheet; nothing is measured"

    def time_in_words(self) -> str:
        if self.time is None:
            return "unknown; add --time" if self.gpu is None else "unknown: the published peak is that of bfloat16"
        ramp = f" of {self.run.batch.total_batch_size:,} tokens" if self.run.step_sizes.ramp_tokens else ""
        total, step = f"about {duration(self.time.total_s)}", f"{self.time.step_s:.3g} s per step{ramp}"
        if self.peak_flops is not None:
            after = " after compilation" if self.effective.compile.value else ""
            peak = f"the peak is {self.peak_flops / 1e12:,.0f} TFLOP/s on each rank"
            return f"{total}{after} ({step}): {ASSUMPTION}; {peak}{uncounted([self])}"
        if not isinstance(self.time, Pace):
            return f"{total} ({step}), as predicted; without start and validation"
        parts = f"{step}, {self.time.validation_s:.3g} s per validation, {self.time.start_s:.1f} s to start"
        return f"{total} ({parts}){uncounted([self])}"


def uncounted(plans: Sequence[Plan], scale: float = 1) -> str:
    """What the time of `plans` lacks: measurements of the sharpness, whose time is not known."""
    measurements = round(scale * sum(plan.run.sharpness_measurements for plan in plans))
    return f"; {counted(measurements, 'measurement')} of the sharpness not counted" if measurements else ""


def print_plan(cfg: Config, request: Request = HERE) -> None:
    """Print the plan of a run, on a GPU if one is asked for, else on this machine."""
    planned = plan(cfg, gpu=request.gpu)
    planned.critical = critical = judge_batch(planned.sized, planned.run.batch, request.critical)
    if critical is not None and critical.other_keys:
        keys = ", ".join(critical.other_keys)
        planned.warnings.append(f"{critical.source} has measured its {critical.size.what} with other {keys}")
    if request.with_time and _can_start_ranks(planned):
        add_times([planned])
    add_prediction(planned, request)
    print(json.dumps(planned.to_dict(), indent=1) if request.as_json else "\n".join(titled(planned.lines())))
    for line in planned.warnings:
        warn(f"warning: {line}")


class Epoch(NamedTuple):
    """A pass over the training part of a corpus."""

    tokens: int | None = None  # None: the corpus is not in the cache
    text: str | None = None  # hash of the corpus, if the validation part is cut from it
    problems: Sequence[str] = ()


def plan(
    cfg: Config, earlier: Effective | None = None, gpu: Gpu | None = None, epochs: dict[str, Epoch] | None = None
) -> Plan:
    """Return the arithmetic of a run and its resolved `auto` values.

    `earlier` are the values of an earlier cell of the sweep, and `epochs` the passes that earlier cells have counted,
    to which it adds its own. For a `gpu`, which this machine need not have, the plan's `time` follows from published
    figures. Raises `ConfigError` for a device that is missing.
    """
    world_size, device, n_vocab = cfg.world.size or 1, _device(cfg, gpu), count_ids(cfg.data)
    on_gpus_here = isinstance(device, torch.device) and device.type == "cuda"
    rank = Rank(0, world_size, 0, min(world_size, torch.cuda.device_count()) if on_gpus_here else world_size)
    if cfg.branch_from is not None:
        earlier = load_effective(Path(run_dir.run_and_checkpoint(cfg.branch_from)[0]))

    def resolved(config: Config) -> Effective:
        return resolve(config, device, rank, earlier, n_vocab or ASSUMED_CHARACTERS)

    effective = resolved(cfg)
    warnings = []
    if not n_vocab and cfg.model.vocab_size == AUTO:
        assumed = replace(effective.vocab_size, reason="an assumption, until the corpus is tokenised")
        effective = replace(effective, vocab_size=assumed)
        warnings.append(
            f"data.tokenizer={cfg.data.tokenizer}: the number of ids is unknown until the corpus is tokenised; the "
            f"plan is for {ASSUMED_CHARACTERS}; run gptexp prepare with the same arguments"
        )
    sized = with_vocab_size(cfg, effective.vocab_size.value)
    memory, run = estimate(sized, effective, world_size), plan_run(sized, effective.micro_batch_size.value)
    shardings = memory_by_sharding(sized, effective, world_size, resolved) if world_size > 1 else {}
    windows, epochs = repr((sized.data, sized.seq_len)), {} if epochs is None else epochs
    if windows not in epochs:
        epochs[windows] = _count_epoch(sized)
    epoch = epochs[windows]
    warnings = [*epoch.problems, *(other_text(sized, epoch.text) if epoch.text is not None else []), *warnings]
    planned = Plan(cfg, run, effective, memory, shardings, epoch.tokens, gpu, warnings)
    if planned.epochs is not None and planned.epochs > MOST_EPOCHS:
        planned.warnings.append(
            f"{rounded(planned.epochs)} epochs: text that is read more than {MOST_EPOCHS} times is worth clearly less "
            "than new text (arXiv 2305.16264); give more text, or train for fewer tokens"
        )
    planned.warnings += fitted_warnings(sized)
    if gpu is not None and gpu.memory_bytes is not None and memory.peak > gpu.memory_bytes:
        planned.warnings.append(excess(sized, memory.peak, gpu, shardings))
    if planned.peak_flops is not None:
        whole_s = planned.flops[0] / (planned.peak_flops * world_size * ASSUMED_MFU)
        planned.time = Duration(whole_s * run.batch.total_batch_size / run.tokens, whole_s * planned.left)
    return planned


def _device(cfg: Config, gpu: Gpu | None) -> Device:
    """The device of a plan: `gpu`, or one of this machine; an unknown GPU if the config asks for a GPU it lacks."""
    if gpu is not None and cfg.train.device not in ("auto", "cuda"):
        raise ConfigError(f"train.device={cfg.train.device}: the plan is for the GPU {gpu.name}; leave out one of them")
    if gpu is None and (cfg.train.device != "cuda" or torch.cuda.is_available()):
        return pick_device(cfg.train.device, Rank())
    return gpu or UNKNOWN_GPU


def _count_epoch(cfg: Config) -> Epoch:
    """Count the tokens of an epoch. They depend on the windows alone."""
    directory = prepared_dir(cfg.data)
    if directory is None:
        return Epoch()
    try:
        own = has_own_validation(cfg.data)
        return Epoch(
            epoch_tokens(cfg, directory), None if own else tokens_hash(TokenStream(directory, cfg.data.max_tokens))
        )
    except DataError as error:
        return Epoch(0, problems=[str(error)])


def add_times(plans: Sequence[Plan]) -> None:
    """Add `time` to every plan. Times a few steps of one run for all runs that differ only in batch size or length."""
    alike: dict[str, list[Plan]] = {}
    for planned in plans:
        cfg = planned.config
        one = replace(cfg, batch=cfg.batch.of_one_size(1, planned.run.batch.micro_batch_size))
        alike.setdefault(memory_key(one), []).append(planned)
    for members in alike.values():
        longest = max(members, key=lambda planned: planned.run.batch.grad_accum_steps)
        try:
            seen = sample(longest.config, longest.run, longest.effective)
        except UserError as error:
            warn(f"warning: the time cannot be estimated: {first_line(error)}")
            continue
        for planned in members:
            planned.time = pace(seen, planned.config, planned.run)


def _can_start_ranks(planned: Plan) -> bool:
    """Whether this machine can start the run's ranks, to time them."""
    on_gpus = planned.effective.device == "cuda"
    return planned.run.batch.world_size <= (torch.cuda.device_count() if on_gpus else MOST_CROWDED * count_cores())


def add_prediction(planned: Plan, request: Request) -> None:
    """Predict the steps of several ranks, from published figures or from steps of one rank on this machine.

    If `time` follows from published figures, the waiting is added to it; if there is no `time`, it is set.
    """
    cfg, batch, effective = planned.sized, planned.run.batch, planned.effective
    if batch.world_size == 1:
        return
    if request.gpu is None and not request.with_time:
        planned.unpredicted = "add --time to predict the waiting, or device=GPU for GPUs that are not here"
        return
    if request.gpu is not None and planned.peak_flops is None:
        return
    network = network_of(cfg, batch.world_size, request.gpu, request.network, request.ranks_per_node)
    if cfg.train.reduction == "tree":
        planned.unpredicted = "not predicted for train.reduction=tree, which sends all gradients at the end of a step"
    elif network.nodes > 1 and network.between is None:
        planned.unpredicted = (
            f"the network between {network.nodes} nodes is unknown; give --network, or measure it there: "
            "torchrun --nnodes=2 … -m gptexp.bench comm"
        )
    elif None in network.crossed:
        planned.unpredicted = f"the network is unknown; gptexp bench comm world.size={batch.world_size} measures it"
    if planned.unpredicted is not None:
        return

    def effective_at(ranks: int) -> Effective:
        """With an automatic micro-batch, each number of ranks has the size of its own plan."""
        if ranks == batch.world_size or cfg.batch.asked_micro_batch_size is not None:
            return effective
        other = replace(planned.config, world=replace(cfg.world, size=ranks))
        own = plan(other, gpu=request.gpu).effective
        return replace(effective, micro_batch_size=own.micro_batch_size, reduce_every=own.reduce_every)

    try:
        planned.prediction = predict(cfg, batch, network, _measure_computing(planned), effective_at)
    except UserError as error:
        warn(f"warning: the steps of other ranks cannot be predicted: {first_line(error)}")
        return
    own = planned.prediction.own
    if planned.time is None:
        planned.time = Duration(own.step_s, planned.left * planned.run.tokens / batch.total_batch_size * own.step_s)
    elif planned.gpu is not None:
        slower = own.step_s / (own.step_s - own.waiting_s)
        planned.time = Duration(slower * planned.time.step_s, slower * planned.time.total_s)


def _measure_computing(planned: Plan) -> Computing:
    """The times of one rank: for a GPU that is not here, from the assumed MFU; else measured."""
    cfg, run, effective = planned.config, planned.run, planned.effective
    if planned.peak_flops is not None:
        palm, _ = flops_per_token(planned.sized.model, cfg.seq_len)
        micro_s = palm * run.batch.micro_batch_size * cfg.seq_len / (planned.peak_flops * ASSUMED_MFU)
        alone = Alone(micro_s, BACKWARD_RATIO * micro_s, 0.0)
        return Computing(alone, alone)
    at_once = 1
    if effective.device == "cpu":
        at_once = max(1, min(run.batch.world_size, count_cores() // effective.threads_per_rank.value))
    single = sample_alone(cfg, run, effective, 1)
    return Computing(sample_alone(cfg, run, effective, at_once) if at_once > 1 else single, single)
