"""Builds what a run trains with, as its effective choices say: loss, attention, compilation, DDP, optimizer."""

import atexit
import getpass
import hashlib
import inspect
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from gptexp.config.noise_scale import needing_noise_scale, noise_half_life, why_unmeasured
from gptexp.config.parts import is_part
from gptexp.config.run_plan import plan_run
from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import Config
from gptexp.config.vocabulary import with_vocab_size
from gptexp.data.tokenizer import masked_start
from gptexp.distributed.group import barrier
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import build_reduction
from gptexp.distributed.sharding import Parameters, SplitParameters, WholeParameters, split
from gptexp.machine.device import missing_compiler, why_uncompilable
from gptexp.machine.effective import Effective, forward_context
from gptexp.model import loss
from gptexp.model.attention import Context
from gptexp.model.compiler import compile_options
from gptexp.model.gpt import GPT
from gptexp.model.loss import LOSSES
from gptexp.model.own_model import Model, OwnModel
from gptexp.model.shapes import count_parameters
from gptexp.process.errors import ConfigError
from gptexp.run.evaluations import build_evaluations
from gptexp.run.first_weights import load_first_weights
from gptexp.run.job import Decision, Job, Prepared
from gptexp.run.own_evaluation import OwnMetrics
from gptexp.run.summary import about
from gptexp.storage import run_dir
from gptexp.storage.checkpoint import Keep, refuse_other_size
from gptexp.training.loop import Training
from gptexp.training.optimizer import build_optimizer
from gptexp.training.profiling import StepProfiler
from gptexp.training.saving import Checkpoints
from gptexp.training.snapshot import is_shared, load_checkpoint, load_weights
from gptexp.training.step import TrainStep
from gptexp.training.weight_average import WeightAverage

# DDP splits a compiled graph wherever a gradient bucket is full. With gradient accumulation the buckets help in one
# micro-step only, but the splits cost time in each. DDP's default of 25 MiB splits GPT-2 124M into 14 graphs.
BUCKETS = 5
LEAST_BUCKET_MIB = 25.0
FIRST_BUCKET_MIB = 1.0  # DDP's first bucket, unless a size is given (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
SAVE_TIMEOUT = timedelta(hours=2)  # longest wait for the other ranks, once a rank has written its part of a checkpoint
INDUCTOR_CACHE, TRITON_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def replace_unusable_folders() -> list[str]:
    """Replace the folders in the environment that the compiler cannot use. Returns a line for each.

    Must run before the compiler is imported: the import creates the cache's folder, or fails.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a user id that has no name
        user = ""
    if not user or why_uncompilable(user):  # torch has the name in the names of folders
        user = os.environ["LOGNAME"] = str(os.getuid())
    lines, temporary = [], tempfile.gettempdir()
    if why := why_uncompilable(temporary):  # the compiler puts headers there
        os.environ["TMPDIR"], tempfile.tempdir = "/tmp", None
        lines.append(f"TMPDIR={temporary}: {why}; {tempfile.gettempdir()} is used")
    # torch's own default (torch._inductor.runtime.cache_dir_utils, which cannot be used: it imports the compiler).
    os.environ.setdefault(INDUCTOR_CACHE, f"{tempfile.gettempdir()}/torchinductor_{user}")
    for name in (INDUCTOR_CACHE, TRITON_CACHE):
        folder = os.environ.get(name)
        if folder is not None and (why := _why_no_cache(name, folder)):
            os.environ[name] = tempfile.mkdtemp(prefix="gptexp-compiled-")
            atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
            lines.append(f"{name}={folder}: {why}; a temporary cache is used")
    return lines


def _why_no_cache(name: str, folder: str) -> str | None:
    """The reason why `folder` cannot be the compile cache that the variable `name` sets."""
    if name == INDUCTOR_CACHE and (why := why_uncompilable(str(Path(folder).absolute()))):
        return why
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"something")
            file.flush()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return None


def compiles(effective: Effective) -> bool:
    """Whether a step compiles anything: the model, or functions of its loss."""
    return bool(_compiled_parts(effective))


def _compiled_parts(effective: Effective) -> list[tuple[str, str]]:
    """The settings that compile something, each with an alternative that needs no compiler."""
    parts = {
        ("train.compile=on", "train.compile=off"): effective.compile.value,
        ("train.loss=fused", "train.loss=chunked"): effective.loss.value == "fused",
    }
    return [settings for settings, is_used in parts.items() if is_used]


def refuse_missing_compiler(effective: Effective, device: torch.device) -> None:
    """Raise `ConfigError` if the model or the loss is to be compiled, and no compiler works here."""
    missing = (
        missing_compiler(device) if device.type in ("cpu", "cuda") else f"torch.compile is incomplete for {device}"
    )
    if missing and (parts := _compiled_parts(effective)):
        asked, others = (" ".join(settings) for settings in zip(*parts, strict=True))
        raise ConfigError(f"{asked}: {missing}; use {others}")


def build_gpt(cfg: Config, effective: Effective, device: torch.device) -> Model:
    """Build the seeded model on `device`. If `effective` says so, the first step compiles it."""
    torch.manual_seed(cfg.train.seed)
    gpt = _unseeded(cfg, effective).to(device)
    if isinstance(gpt, OwnModel):
        gpt.refuse_wrong_dependence(cfg.world.size or 1)
    if effective.compile.value:
        # `fullgraph`: one graph that includes the loss, or an error.
        gpt.compile(fullgraph=isinstance(gpt, GPT), dynamic=False, options=compile_options())
    return gpt


def build_split_gpt(
    cfg: Config, effective: Effective, device: torch.device, drawn: bool = True
) -> tuple[GPT, SplitParameters]:
    """Build the same model, split over the ranks; no rank ever holds it whole. *Collective.*

    Its weights are random if `drawn`, else undefined. If `effective` says so, the first step compiles each block by
    itself, because FSDP2 works between the blocks.
    """
    with torch.device("meta"):
        gpt = _unseeded(cfg, effective)
    assert isinstance(gpt, GPT), "rules.py refuses to split others"
    if effective.compile.value:
        for block in gpt.blocks:  # only `forward`: the block itself would include FSDP2's hooks
            compiled = torch.compile(block.forward, fullgraph=True, dynamic=False, options=compile_options())
            block.forward = partial(_forward, block.forward, compiled)
    dtypes = getattr(torch, effective.dtype.value), getattr(torch, cfg.world.comm)
    parameters = split(gpt, list(gpt.blocks), ("logits",), device, *dtypes)
    if drawn:
        torch.manual_seed(cfg.train.seed)
        load_weights(gpt.initial_weights(), parameters)
    return gpt, parameters


def _forward(plain: Callable[..., Tensor], compiled: Callable[..., Tensor], x: Tensor, context: Context) -> Tensor:
    """The forward pass of a block: compiled, except to generate text, where shapes change with every token."""
    return (compiled if context.cache is None else plain)(x, context)


def _unseeded(cfg: Config, effective: Effective) -> Model:
    model = with_vocab_size(cfg, effective.vocab_size.value).model
    if compiles(effective):
        torch.compiler.config.cache_key_tag = _cache_key(cfg, effective)
    if effective.compile.value:
        torch.compiler.reset()  # under a launcher one process trains many cells; drop the last cell's graphs
    if is_part(model):
        return OwnModel(model, cfg.train.z_loss)
    of_step = partial(LOSSES[effective.loss.value], z_loss=cfg.train.z_loss)
    flex = effective.attention.value == "flex"
    return GPT(model, of_step, cfg.train.recomputed_every, masked_start(cfg.data), flex)


def _cache_key(cfg: Config, effective: Effective) -> str:
    """What torch's own key of the compile cache lacks.

    That is: the allowed attention kernels; the backward pass of our custom operation; before torch 2.13, the number of
    threads; and sizes, because even a function for all sizes is made parallel, or not, by the sizes of its first call.
    """
    only = "only" if effective.attention.source == "asked" else "first"
    operations = hashlib.sha256(Path(inspect.getfile(loss)).read_bytes()).hexdigest()[:16]
    sizes = (
        effective.micro_batch_size.value,
        cfg.seq_len,
        cfg.model.n_head,
        cfg.model.n_embd,
        effective.vocab_size.value,
    )
    threads = effective.threads_per_rank.value
    return f"{effective.attention.value} {only}, operations {operations}, sizes {sizes}, {threads} threads"


def wrap(
    gpt: Model, effective: Effective, reduction: str, rank: Rank, device: torch.device, comm: str = "float32"
) -> nn.Module:
    """Wrap the model in DDP if several ranks average gradients with DDP, sending them as `comm`. *Collective.*"""
    if rank.world_size == 1:
        return gpt
    if reduction == "tree":
        for parameter in gpt.parameters():
            dist.broadcast(parameter.data, src=0)  # as DDP does: all ranks start with rank 0's weights
        return gpt
    gradients_mib = sum(p.numel() * p.element_size() for p in gpt.parameters()) / 2**20
    known = inspect.signature(DistributedDataParallel).parameters
    synced = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # its name until 2.12
    unsynced: dict[str, Any] = {synced: False}
    ddp = DistributedDataParallel(
        gpt,
        device_ids=[device] if device.type == "cuda" else None,
        **unsynced,
        gradient_as_bucket_view=True,
        bucket_cap_mb=max(LEAST_BUCKET_MIB, gradients_mib / BUCKETS) if effective.compile.value else None,
    )
    if comm == "bfloat16":
        ddp.register_comm_hook(None, _sent_as_bfloat16)
    return ddp


def _sent_as_bfloat16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook: average the gradients of all ranks; each rank's share and each partial sum is rounded to bfloat16.

    It has another name here, because without NCCL, DDP refuses torch's hook by its name, though gloo sums bfloat16 too.
    """
    return bf16_compress_hook(group, bucket)


def build_training(job: Job, prepared: Prepared, decision: Decision) -> Training:
    """Build what the rank trains with, and load the checkpoint or the first weights into it. *Collective.*"""
    cfg, rank, effective, path = job.cfg, job.rank, decision.effective, decision.checkpoint
    gpt, step = _build_step(job, prepared, decision)
    half_life_tokens = cfg.train.ema_half_life_tokens
    average = WeightAverage(step.parameters, half_life_tokens) if half_life_tokens is not None else None
    if path is not None:
        load_checkpoint(path, step.parameters, step.optimizer, average)
    plan = plan_run(cfg, effective.micro_batch_size.value)
    unmeasured = why_unmeasured(cfg, effective.micro_batch_size.value, rank.world_size)
    if unmeasured and (given := needing_noise_scale(cfg)):
        raise ConfigError(f"{given}: {unmeasured}")
    profiler = None
    if cfg.train.profile:
        folder = job.directory / run_dir.PROFILE
        profiler = StepProfiler(folder, rank, prepared.device, decision.state.step, plan.steps)
    is_split = is_shared(step.parameters, step.optimizer)
    checkpoints = Checkpoints(
        directory=job.directory / run_dir.CHECKPOINTS,
        step=step,
        average=average,
        keep=Keep(cfg.train.keep_last, plan.keep_every_tokens, cfg.train.keep_best),
        rank=rank,
        group=dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT) if is_split else None,
        about=about(cfg, effective, prepared.dataset, rank.world_size, decision.branched_from) if rank.is_main else {},
    )
    return Training(
        cfg=cfg.train,
        optim=scaled_optim(cfg),
        plan=plan,
        step=step,
        average=average,
        gpt=gpt,
        dataset=prepared.dataset,
        rank=rank,
        device=prepared.device,
        timeout_s=cfg.world.timeout_s if rank.world_size > 1 else math.inf,
        evaluations=build_evaluations(job, prepared, plan, gpt, step, average),
        noise_half_life_tokens=None if unmeasured else noise_half_life(cfg, cfg.run_length[1]),
        profiler=profiler,
        checkpoints=checkpoints,
        own_metrics=OwnMetrics(cfg.log.metrics if rank.is_main else (), gpt, prepared.device),
    )


def _build_step(job: Job, prepared: Prepared, decision: Decision) -> tuple[Model, TrainStep]:
    """Build the model with its first weights, and the step that trains it. *Collective.*"""
    cfg, rank, device = job.cfg, job.rank, prepared.device
    effective, path, source = decision.effective, decision.checkpoint, decision.source
    if path is not None:
        refuse_other_size(path, count_parameters(cfg.model))
    sharding = cfg.world.sharding if rank.world_size > 1 else "none"  # one rank's part is everything
    parameters: Parameters
    gpt: Model
    if sharding == "full":
        gpt, parameters = build_split_gpt(cfg, effective, device, path is None and source is None)
    else:
        gpt = build_gpt(cfg, effective, device)
        parameters = WholeParameters(gpt)
    split_state = sharding == "optimizer"
    optimizer = build_optimizer(gpt, scaled_optim(cfg), effective.fused.value, parameters.named, split_state)
    if path is None and source is not None and (rank.is_main or parameters.split):
        load_first_weights(source, parameters)  # if they are whole, `wrap` sends them to the other ranks
    model = gpt if parameters.split else wrap(gpt, effective, cfg.train.reduction, rank, device, cfg.world.comm)
    step = TrainStep(
        model=model,
        optimizer=optimizer,
        reduction=build_reduction(cfg.train.reduction, model, rank, effective.reduce_every == "micro_step"),
        grad_clip=cfg.optim.grad_clip,
        forward_context=forward_context(effective),
        dropout=cfg.model.dropout > 0 or is_part(cfg.model),  # which may draw random numbers
        parameters=parameters,
        may_spoil=cfg.train.nonfinite != "skip" and cfg.optim.takes_nonfinite,
        stop=job.stop,
    )
    return gpt, step


def compile_in_turn(t: Training, long_wait_group: dist.ProcessGroup | None) -> None:
    """Compile on the first rank of every node, then on the others, which use the first one's cache. *Collective.*

    Runs one micro-step on padding, and a validation batch if the run validates; leaves no gradients.
    """
    if t.rank.world_size == 1:
        return
    model, batch = t.step.model, t.plan.batch
    unreduced = model.no_sync if isinstance(model, DistributedDataParallel) else nullcontext
    x = torch.zeros((batch.micro_batch_size, batch.seq_len), dtype=torch.int64, device=t.device)
    y = x.clone()  # torch.compile would specialise on one tensor passed twice
    for first in (True, False):
        if (t.rank.local_rank == 0) == first:
            with unreduced():
                with t.step.forward_context():
                    loss = model(x, y)
                loss.backward()
            t.step.optimizer.zero_grad()
            if len(t.dataset.val_starts):
                t.gpt.eval()
                with torch.no_grad(), t.step.forward_context():
                    t.gpt(x, y)
                t.gpt.train()
        barrier(long_wait_group)
