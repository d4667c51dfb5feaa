"""Compares dtypes, compilation, losses and attention kernels on a CPU by timed micro-batches, in a long enough run.

A trial takes at most a thousandth of the run's estimated time; shorter runs, GPUs, `train.reduction=tree` and
`train.deterministic` follow the rules of `machine.resolve`. What is compared depends on the config alone and not on the
ranks, and the result is kept (`machine.measured`). The trial is a process of its own (`python -m gptexp.run.timing
RUN_DIR EARLIER N_VOCAB ROUNDS TRIED`), whose memory, compiled graphs and failures do not affect the run.

The keys are compared one after the other, each with the values found before it. dtype, loss and attention are compared
without compiling; a compiled model has the loss and the attention of the rules.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gptexp.config.batch import legal_micro_batches
from gptexp.config.schema import Config
from gptexp.config.vocabulary import with_vocab_size
from gptexp.distributed.ranks import Rank, cores_per_rank
from gptexp.machine.cpu import flush_denormals
from gptexp.machine.device import Device, has_native_bfloat16, missing_compiler
from gptexp.machine.effective import Choice, Effective, apply, forward_context, load_effective, step_context
from gptexp.machine.measured import (
    NOTHING,
    Comparison,
    Measured,
    Times,
    compared,
    in_config,
    measure_once,
    recall,
    shape_of,
)
from gptexp.machine.resolve import COMPILE_PART_S, COMPILE_S, EAGER_FLOPS, eager_s, resolve
from gptexp.model.attention import attention_function
from gptexp.model.flops import flops_per_token
from gptexp.model.gpt import GPT, CausalSelfAttention
from gptexp.model.loss import LOSSES
from gptexp.process.errors import UserError
from gptexp.process.signals import StopRequest
from gptexp.process.terminal import run_verb, warn
from gptexp.run.build import build_gpt
from gptexp.run.own_process import ask, die_with_asker
from gptexp.storage import run_dir

# Maximum share of a run for the micro-batches of a trial, and for all else that it does.
SHARE = 1 / 2000
START_S = 2.0  # seconds until the process of a trial has imported torch
ROUNDS, MOST_ROUNDS, LEAST_ROUNDS = (
    8,
    50,
    3,
)  # for which a run must be long enough; at most; at least. The first warms up
ENOUGH_S = 1.0  # for each value; after this long, there are no further rounds than the least
LONG_S = 1.0  # estimated duration of a micro-batch, which has fewer sequences in the trial if it takes longer
USUAL_TOKENS = 8192  # of a micro-batch, if its size is not known before the memory is
MOST_LOGITS = 2**26  # in a micro-batch; for more, which take 0.8 GB, the plain loss is not tried

Tried = dict[str, list[str]]  # key -> the values to compare, as in a config, that of the rule first


def resolve_with_trial(
    cfg: Config,
    device: Device,
    rank: Rank,
    earlier: Effective | None,
    n_vocab: int,
    measure: Callable[[Tried, int], Measured | None] | None,
) -> Effective:
    """The values of every `auto`: those of `resolve`, and of a trial if the run is long enough for one.

    `measure(tried, rounds)` makes the trial, if none is kept for this shape. Without it, as for a plan, the reasons say
    what a trial at the start may change.
    """
    alone = resolve(cfg, device, Rank(), earlier, n_vocab)
    tried, rounds = to_try(cfg, device, alone)
    if not tried:
        return alone if rank == Rank() else resolve(cfg, device, rank, earlier, n_vocab)
    known = with_vocab_size(cfg, alone.vocab_size.value)
    rules = {key: in_config(choice.value) for key, choice in alone.choices.items() if hasattr(cfg.train, key)}
    shape = shape_of(known, sequences(known), tried, rules)
    if measure is not None:
        measured = measure_once(cfg, shape, lambda: measure(tried, rounds))
        return resolve(cfg, device, rank, earlier, n_vocab, measured)
    kept = recall(cfg, shape)
    effective = resolve(cfg, device, rank, earlier, n_vocab, kept or NOTHING)
    return effective if kept else _open(effective, tried)


def _open(effective: Effective, tried: Tried) -> Effective:
    open_choices: dict[str, Any] = {}
    for key, (_, *others) in tried.items():
        choice = effective.choices[key]
        reason = f"{choice.reason}; unless the run finds {' or '.join(others)} faster in a trial"
        open_choices[key] = replace(choice, reason=reason)
    return replace(effective, **open_choices)


def to_try(cfg: Config, device: Device, effective: Effective) -> tuple[Tried, int]:
    """The values that a trial compares, in its order, and the number of rounds; `effective` has the values of one rank.

    If a compiled model is asked for, nothing is compared: each value would be a graph of its own.
    """
    train = cfg.train
    if device.type != "cpu" or train.reduction == "tree" or train.deterministic or train.compile == "on":
        return {}, 0
    cfg = with_vocab_size(cfg, effective.vocab_size.value)
    tokens = sequences(cfg) * cfg.seq_len
    compiles = not missing_compiler(device)
    costs_s = {  # of a value, beside its micro-batches; infinite if it cannot be tried
        "dtype": {"float32": 0.0, "bfloat16": 0.0 if has_native_bfloat16(device) else math.inf},
        "compile": {"off": 0.0, "on": COMPILE_S if compiles else math.inf},
        "loss": {
            "plain": 0.0 if tokens * cfg.model.resolved_vocab_size <= MOST_LOGITS else math.inf,
            "chunked": 0.0,
            "fused": COMPILE_PART_S if compiles else math.inf,
        },
        # With dropout, all kernels of a CPU are the math kernel.
        "attention": {
            "flash": 0.0,
            "math": math.inf if cfg.model.dropout else 0.0,
            "blocked": math.inf if cfg.model.dropout or not compiles else COMPILE_PART_S,
        },
    }
    steps, _ = cfg.run_length
    planned_s = min(eager_s(cfg, Rank()), 60 * (train.max_minutes or math.inf) * cfg.sweep.cells)
    left_s = SHARE * planned_s - START_S
    micro_batches = left = int(SHARE * cfg.sweep.cells * cfg.batch.step_sizes.tokens_after(steps) // tokens)
    tried: Tried = {}
    for key, seconds in costs_s.items():
        of_rule = in_config(effective.choices[key].value)
        if effective.choices[key].source != "decided" or seconds[of_rule] > left_s:
            continue
        left_s -= seconds[of_rule]
        values = [of_rule]
        for value in seconds:
            if value != of_rule and seconds[value] <= left_s:
                left_s -= seconds[value]
                values.append(value)
        if len(values) > 1 and ROUNDS * len(values) <= left:
            tried[key] = values
            left -= ROUNDS * len(values)
    rounds = micro_batches // sum(map(len, tried.values())) if tried else 0
    return tried, min(rounds, MOST_ROUNDS)


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


def trial(
    directory: Path, earlier: Path, n_vocab: int, stop: StopRequest, tried: Tried, rounds: int
) -> Measured | None:
    """Make a trial for the run in `directory`, whose saved choices are in the directory `earlier`.

    None if the run must stop meanwhile. If the trial fails, prints a line; the rules then decide.
    """
    arguments = [str(directory), str(earlier), str(n_vocab), str(rounds), json.dumps(tried)]
    try:
        answer = ask(["gptexp.run.timing", *arguments], "train.*=auto", "the trial", lambda: any(stop.flags()))
    except UserError as error:
        warn(f"{error}; the rules choose {', '.join(tried)}")
        return NOTHING
    return None if answer is None else Measured(json.loads(answer))


def measure(
    cfg: Config, device: torch.device, earlier: Effective | None, n_vocab: int, rounds: int, tried: Tried
) -> Times:
    """Compare the values of each key in `tried`."""
    times: Times = {}
    for key, (of_rule, *others) in tried.items():
        variants = {}
        for value in (of_rule, *others):
            compiles = value if key == "compile" else "off"
            one = replace(cfg, train=replace(cfg.train, compile=compiles))
            found = resolve(one, device, Rank(), earlier, n_vocab, Measured(times))
            change: dict[str, Any] = {} if key == "compile" else {key: Choice(value, "decided", "")}
            variants[value] = replace(found, **change)
        times[key] = _compared(cfg, device, of_rule, variants, rounds)
    return times


def _compared(
    cfg: Config, device: torch.device, of_rule: str, variants: dict[str, Effective], rounds: int
) -> Comparison:
    """Time a micro-batch, forward and backward, of each of `variants`, which take turns."""
    first = variants[of_rule]
    apply(replace(first, threads_per_rank=Choice(cores_per_rank(Rank()), "decided", "")))
    cfg = with_vocab_size(cfg, first.vocab_size.value)
    generator = torch.Generator().manual_seed(0)
    size = sequences(cfg), cfg.seq_len
    x, y = (torch.randint(first.vocab_size.value, size, generator=generator) for _ in range(2))
    # One model for all: the trial then needs no more memory than the run.
    model = build_gpt(cfg, next((v for v in variants.values() if v.compile.value), first), device)
    ms: dict[str, list[float]] = {value: [] for value in variants}
    counted_s = 0.0
    for number in range(rounds):
        if number >= LEAST_ROUNDS and counted_s > ENOUGH_S * len(variants):
            break
        for value, variant in variants.items():
            started = time.perf_counter()
            _micro_batch(model, variant, x, y)
            seconds = time.perf_counter() - started
            if number:  # the first round compiles, and touches memory for the first time
                ms[value].append(1e3 * seconds)
                counted_s += seconds
    return compared(of_rule, ms)


def _micro_batch(model: GPT, effective: Effective, x: torch.Tensor, y: torch.Tensor) -> None:
    model.loss, attention = LOSSES[effective.loss.value], attention_function(effective.attention.value)
    for layer in model.modules():
        if isinstance(layer, CausalSelfAttention):
            layer.attention = attention
    forward = model if effective.compile.value else model.forward
    with step_context(effective):
        with forward_context(effective)():
            loss = forward(x, y)
        loss.backward()
    model.zero_grad()


def main(argv: list[str] | None = None) -> None:
    """Print the comparisons as JSON."""
    die_with_asker()
    directory, earlier, n_vocab, rounds, tried = sys.argv[1:] if argv is None else argv
    flush_denormals()
    cfg, saved = run_dir.load_config(Path(directory)), load_effective(Path(earlier))
    print(json.dumps(measure(cfg, torch.device("cpu"), saved, int(n_vocab), int(rounds), json.loads(tried))))


if __name__ == "__main__":
    run_verb(main)
