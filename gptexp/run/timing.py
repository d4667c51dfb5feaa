"""Chooses dtype, compilation, loss and attention on a CPU by timed micro-batches, if the run is long enough.

A trial may take a thousandth of the run's estimated time; shorter runs, GPUs, `train.reduction=tree` and
`train.deterministic` follow the rules of `machine.resolve`. What is tried depends on the config alone and not on the
ranks, and the times are kept (`machine.measured`): the same command chooses alike every time.
"""

import gc
import math
import statistics
import time
from dataclasses import replace

import torch

from gptexp.config.batch import legal_micro_batches
from gptexp.config.schema import AUTO, Config
from gptexp.config.vocabulary import with_vocab_size
from gptexp.distributed.ranks import Rank, cores_per_rank
from gptexp.machine.device import Device, has_native_bfloat16, missing_compiler
from gptexp.machine.effective import Choice, Effective, apply, forward_context, step_context
from gptexp.machine.measured import NOTHING, Measured, Times, measure_once, recall, shape, text
from gptexp.machine.resolve import CACHED_S, COMPILE_LOSS_S, COMPILE_S, EAGER_FLOPS, eager_s, resolve
from gptexp.model.flops import flops_per_token
from gptexp.model.gpt import GPT
from gptexp.run.build import build_gpt

SHARE = 1 / 1000  # maximum share of a run that a trial may take
ROUNDS, LEAST_ROUNDS = 7, 3  # of which the first is not counted
ENOUGH_S = 3.0  # after this long, the values of a key take no more than the least rounds
LONG_S = 1.0  # estimated duration of a micro-batch, which has fewer sequences in the trial if it takes longer
USUAL_TOKENS = 8192  # of a micro-batch, if its size is not known before the memory is
MOST_LOGITS = 2**28  # in a micro-batch; for more, the plain loss is not tried

Values = dict[str, list[str]]  # key -> the values to try, as in a config


def settle(
    cfg: Config, device: Device, rank: Rank, earlier: Effective | None, n_vocab: int, measures: bool = True
) -> Effective:
    """`resolve`, with what a trial measures. Without `measures` only what an earlier one has measured is used."""
    alone = resolve(cfg, device, Rank(), earlier, n_vocab)
    tried = to_try(cfg, device, alone)
    if not tried:
        return resolve(cfg, device, rank, earlier, n_vocab)
    assert isinstance(device, torch.device)
    known = with_vocab_size(cfg, alone.vocab_size.value)
    what = shape(known, sequences(known), tried)
    if measures:
        measured = measure_once(cfg, what, lambda: _measure(cfg, device, earlier, n_vocab, tried))
    else:
        measured = recall(cfg, what) or NOTHING
    return resolve(cfg, device, rank, earlier, n_vocab, measured)


def to_try(cfg: Config, device: Device, effective: Effective) -> Values:
    """The values that a trial compares, in the order in which it does. `effective` has those of one rank."""
    if device.type != "cpu" or cfg.train.reduction == "tree" or cfg.train.deterministic:
        return {}
    cfg = with_vocab_size(cfg, effective.vocab_size.value)
    tokens = sequences(cfg) * cfg.seq_len
    may_take_s = SHARE * eager_s(cfg, Rank())
    compiles = not missing_compiler(device)
    # A run that compiles anyway only loads again what the trial has compiled.
    compile_s = CACHED_S if effective.compile.value else COMPILE_S
    # If a compiled model is asked for, each value is a graph of its own.
    graph_s = COMPILE_S if cfg.train.compile == "on" else 0.0
    costs_s = {
        "dtype": {"float32": graph_s, "bfloat16": graph_s if has_native_bfloat16(device) else math.inf},
        "compile": {"off": 0.0, "on": compile_s if compiles else math.inf},
        "loss": {
            "plain": graph_s if tokens * cfg.model.resolved_vocab_size <= MOST_LOGITS else math.inf,
            "chunked": graph_s,
            "fused": graph_s + COMPILE_LOSS_S if compiles else math.inf,
        },
        "attention": {"flash": graph_s, "math": graph_s},
    }
    steps, _ = cfg.run_length
    micro_batches = SHARE * cfg.sweep.cells * cfg.batch.step_sizes.tokens_after(steps) // tokens
    tried: Values = {}
    for key, seconds in costs_s.items():
        of_rule = text(effective.choices[key].value)
        values = [of_rule, *(v for v in seconds if v != of_rule and seconds[of_rule] + seconds[v] <= may_take_s)]
        cost = ROUNDS * len(values)
        if len(values) > 1 and effective.choices[key].source == "decided" and cost <= micro_batches:
            tried[key] = values
            micro_batches -= cost
    return tried


def sequences(cfg: Config) -> int:
    """Sequences in a micro-batch of the trial: those that are asked for, else a usual number; fewer if they take long.

    `cfg` has the number of ids.
    """
    size = cfg.batch.asked_micro_batch_size
    if size is None:
        sizes = legal_micro_batches(cfg.batch.step_sizes.quantum, cfg.seq_len, 1)
        size = next((size for size in sizes if size * cfg.seq_len <= USUAL_TOKENS), 1)
    each_s = cfg.seq_len * flops_per_token(cfg.model, cfg.seq_len)[0] / (cores_per_rank(Rank()) * EAGER_FLOPS)
    return min(size, max(1, int(LONG_S / each_s)))


def _measure(cfg: Config, device: torch.device, earlier: Effective | None, n_vocab: int, tried: Values) -> Measured:
    """Try the values of one key after the other, each with the values found for those before it."""
    times: Times = {}
    for key, among in tried.items():
        found = resolve(cfg, device, Rank(), earlier, n_vocab, Measured(times))
        if key in ("loss", "attention") and found.compile.value and cfg.train.compile != "on":
            continue  # each value would be a graph of its own, which takes long to compile
        of_rule = text(found.choices[key].value)
        values = [of_rule, *(value for value in among if value != of_rule)]
        variants = []
        for value in values:
            train = replace(cfg.train)
            if train.compile == AUTO:
                train.compile = "off"
            setattr(train, key, value)
            variant = replace(cfg, train=train)
            variants.append(resolve(variant, device, Rank(), earlier, n_vocab, Measured(times)))
        times[key] = dict(zip(values, _micro_batch_ms(cfg, device, variants), strict=True))
    return Measured(times)


def _micro_batch_ms(cfg: Config, device: torch.device, variants: list[Effective]) -> list[float]:
    """Median milliseconds of a micro-batch, forward and backward, of each of `variants`, which take turns."""
    apply(replace(variants[0], threads_per_rank=Choice(cores_per_rank(Rank()), "decided", "")))
    generator = torch.Generator().manual_seed(0)
    size = sequences(with_vocab_size(cfg, variants[0].vocab_size.value)), cfg.seq_len
    x, y = (torch.randint(variants[0].vocab_size.value, size, generator=generator) for _ in range(2))
    models = [build_gpt(cfg, variant, device) for variant in variants]
    ms: list[list[float]] = [[] for _ in variants]
    begun = time.perf_counter()
    while len(ms[0]) < (LEAST_ROUNDS if time.perf_counter() - begun > ENOUGH_S else ROUNDS):
        for model, variant, times in zip(models, variants, ms, strict=True):
            started = time.perf_counter()
            _micro_batch(model, variant, x, y)
            times.append(1e3 * (time.perf_counter() - started))
    del models, model
    gc.collect()
    return [statistics.median(times[1:]) for times in ms]


def _micro_batch(model: GPT, effective: Effective, x: torch.Tensor, y: torch.Tensor) -> None:
    with step_context(effective):
        with forward_context(effective)():
            loss = model(x, y)
        loss.backward()
    model.zero_grad()
