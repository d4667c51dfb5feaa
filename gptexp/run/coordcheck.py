"""`gptexp coordcheck`: trains a model at several widths for a few steps, and measures its activations."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from gptexp.config.batch import legal_micro_batches
from gptexp.config.run_plan import plan_run
from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import Config, ModelConfig
from gptexp.data.loader import build_dataset, micro_batches
from gptexp.data.tokenizer import masked_start
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import MeanReduction
from gptexp.machine.device import pick_device
from gptexp.model.gpt import GPT
from gptexp.model.loss import chunked_cross_entropy
from gptexp.model.shapes import BLOCK_NORMS
from gptexp.process.errors import EXIT_FAILED
from gptexp.process.fields import AUTO
from gptexp.process.versions import git_commit, versions
from gptexp.reporting.charts.coordinates import LIMITS, Coordinates, picture
from gptexp.reporting.charts.pictures import Drawing
from gptexp.storage import run_dir
from gptexp.storage.init_from import choose_vocab_size
from gptexp.training.optimizer import build_optimizer
from gptexp.training.step import TrainStep

PICTURE, NUMBERS = "coordcheck.png", "coordcheck.json"
STEPS = 5
MEASURED_TOKENS = 1024  # on which activations are measured; few, as logits of a large vocabulary take memory
LARGEST_MICRO_BATCH = 8  # sequences, for batch.micro_batch_size=auto


def coordcheck(config: Config, models: list[ModelConfig], seeds: int, out: Path, as_json: bool) -> int:
    """Check `models`, which differ in their width, and write picture and numbers to `out`. Returns the exit code."""
    coordinates = measure(config, models, seeds)
    with run_dir.storage(out):
        out.mkdir(parents=True, exist_ok=True)
        with Drawing(at_once=1) as drawing:
            drawing.add(PICTURE, picture(coordinates))
            images = drawing.pngs()
        for name, image in images.items():
            (out / name).write_bytes(image)
    result = {
        "passes": not coordinates.failures,
        "failures": coordinates.failures,
        "parametrisation": coordinates.what,
        "lr": coordinates.lr,
        "widths": coordinates.widths,
        "limits": LIMITS,
        "slopes": {name: [asdict(slope) for slope in slopes] for name, slopes in coordinates.slopes.items()},
        "mean_abs": coordinates.sizes,
        "versions": versions(),
        "git_commit": git_commit(),
    }
    run_dir.write_json(out / NUMBERS, result)
    if as_json:
        print(json.dumps(run_dir.finite(result), indent=1))
    else:
        show(coordinates)
        print(*(f"{out}/{name}" for name in [*images, NUMBERS]), sep=", ")
    return EXIT_FAILED if coordinates.failures else 0


def measure(config: Config, models: list[ModelConfig], seeds: int) -> Coordinates:
    """Train each of `models` from `seeds` initial weights for a few steps; measure at the start and after each step.

    In float32, without compilation, on one device, at the constant learning rate `optim.lr`.
    """
    device, optim = pick_device(config.train.device, Rank()), scaled_optim(config)
    dataset = build_dataset(config)
    vocab_size = config.model.vocab_size
    if vocab_size == AUTO:
        vocab_size, _ = choose_vocab_size(config, dataset.n_vocab)
    total, t = config.batch.total_batch_size, config.seq_len
    size = config.batch.asked_micro_batch_size or next(
        size for size in legal_micro_batches(total, t, 1) if size <= LARGEST_MICRO_BATCH
    )
    steps = list(islice(plan_run(config, size).steps_from(0, 0), STEPS))
    samples = np.arange(max(1, MEASURED_TOKENS // t))
    rows = dataset.rows(dataset.train, dataset.order.train_starts(samples, t))
    x = torch.from_numpy(rows[:, :-1].astype(np.int64)).to(device)

    def course(model: ModelConfig, seed: int) -> list[dict[str, float]]:
        torch.manual_seed(seed)
        model = replace(model, vocab_size=vocab_size)
        gpt = GPT(model, chunked_cross_entropy, document_start=masked_start(config.data)).to(device)
        train = TrainStep(
            model=gpt,
            optimizer=build_optimizer(gpt, optim, fused=False),
            reduction=MeanReduction(None),
            grad_clip=optim.grad_clip,
            forward_context=nullcontext,
            dropout=model.dropout > 0,
        )
        batches = micro_batches(dataset, steps, 0, device)
        found = [activations(gpt, x)]
        for step in steps:
            train(batches, step.batch.grad_accum_steps, lr_factor=1.0)
            found.append(activations(gpt, x))
        return found

    sizes: dict[str, list[list[list[float]]]] = {name: [] for name in LIMITS}
    for model in models:
        print(f"width {model.n_embd} …", file=sys.stderr, flush=True)
        courses = [course(model, config.train.seed + number) for number in range(seeds)]
        for name, of_width in sizes.items():
            of_width.append([[at_step[name] for at_step in of_seed] for of_seed in courses])
    first = models[0]
    what = first.parametrisation + (f", base width {first.base_n_embd}" if first.base_n_embd is not None else "")
    return Coordinates(what, [model.n_embd for model in models], optim.lr, sizes)


@torch.no_grad()
def activations(gpt: GPT, x: Tensor) -> dict[str, float]:
    """Mean |activation| for the tokens `x` (B, T): of what attention and MLPs add to the stream, and logits."""
    means: dict[str, list[float]] = defaultdict(list)

    def kept(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda _module, _inputs, output: means[name].append(float(output.abs().mean()))

    # What a branch adds to the residual stream: its output, or that of the norm after it.
    _, after_attention, _, after_mlp = (None,) * 4 if gpt.cfg.is_gpt2 else BLOCK_NORMS[gpt.cfg.residual_norm]
    attention = after_attention or ("attn" if gpt.cfg.is_gpt2 else "self_attn")
    hooks = [
        block.get_submodule(part).register_forward_hook(kept(name))
        for block in gpt.blocks
        for name, part in (("attention", attention), ("mlp", after_mlp or "mlp"))
    ]
    gpt.eval()
    means["logits"].append(float(gpt(x).abs().mean()))
    gpt.train()
    for hook in hooks:
        hook.remove()
    return {name: fmean(sizes) for name, sizes in means.items()}


def show(found: Coordinates) -> None:
    """Print the slopes at each step, their limits and the verdict."""
    slopes = found.slopes
    print(f"{found.what}; widths {', '.join(map(str, found.widths))}; lr {found.lr:g}")
    print("slope of log mean |activation| against log width:")
    print(f"{'after steps':<12}" + "".join(f"{name:>15}" for name in LIMITS))
    for step in found.steps:
        print(f"{step:<12}" + "".join(f"{slopes[name][step]!s:>15}" for name in LIMITS))
    print(f"{'allowed':<12}" + "".join(f"{f'{low:g} to {high:g}':>15}" for low, high in LIMITS.values()))
    print(*([f"FAIL  {line}" for line in found.failures] or ["PASS  every slope is within its limits"]), sep="\n")
