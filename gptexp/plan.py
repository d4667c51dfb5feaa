"""`gptexp plan [overrides]`: what a run would be on this machine, without starting it."""

import argparse
import json
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gptexp import flops
from gptexp.batch import count_val_windows, count_windows, interval_tokens, plan_batch, run_length
from gptexp.schedule import resolve_schedule

if TYPE_CHECKING:
    from gptexp.config import Config
    from gptexp.effective import Effective
    from gptexp.memory import Memory


def plan(cfg: "Config", with_time: bool = False) -> dict[str, Any]:
    """The arithmetic of a run, and what every `auto` would come to; `epochs` is None until its corpus is tokenised.

    `with_time` trains a few steps to say how long it would take.
    """
    t, world_size, total = cfg.seq_len, cfg.world.size or 1, cfg.batch.total_batch_size
    effective, memory = _on_this_machine(cfg, world_size)
    batch = plan_batch(total, effective.micro_batch_size, t, world_size)
    steps, run_tokens = run_length(cfg.train.max_tokens, cfg.train.max_steps, total)
    schedule = resolve_schedule(cfg, run_tokens)
    palm, causal = flops.flops_per_token(cfg.model, t)
    corpus_tokens = _prepared_tokens(cfg)
    planned = {
        "parameters": flops.count_parameters(cfg.model),
        "memory_bytes": {**asdict(memory), "peak": memory.peak},
        "tokens": steps * total,
        "steps": steps,
        "total_batch_size": total,
        "micro_batch_size": batch.micro_batch_size,
        "seq_len": t,
        "world_size": world_size,
        "grad_accum_steps": batch.grad_accum_steps,
        "corpus_tokens": corpus_tokens,
        "epochs": steps * total / corpus_tokens if corpus_tokens else None,
        "flops_palm": palm * steps * total,
        "flops_causal": causal * steps * total,
        "lr": cfg.optim.lr,
        "warmup_tokens": schedule.warmup_tokens,
        "decay_tokens": schedule.decay_tokens,
        "eval_every_tokens": interval_tokens(
            cfg.train.eval_every, cfg.train.eval_every_tokens, run_tokens, total
        ),
        "save_every_tokens": interval_tokens(
            cfg.train.save_every, cfg.train.save_every_tokens, run_tokens, total
        ),
        "effective": effective.to_dict(),
    }  # fmt: skip
    if with_time:
        from gptexp.calibrate import calibrate

        planned["time"] = asdict(calibrate(cfg, batch, effective.to_dict()))
    return planned


def _on_this_machine(cfg: "Config", world_size: int) -> "tuple[Effective, Memory]":
    """What a run here would decide. A GPU that is not here is planned for all the same."""
    import torch

    from gptexp.distributed import Rank, pick_device
    from gptexp.effective import estimate, resolve

    wanted = cfg.train.device
    device = torch.device("cuda") if wanted == "cuda" else pick_device(wanted, Rank())
    local = min(world_size, torch.cuda.device_count() or world_size) if device.type == "cuda" else world_size
    effective = resolve(cfg, device, Rank(0, world_size, 0, local))
    return effective, estimate(cfg, effective, world_size)


def _prepared_tokens(cfg: "Config") -> int | None:
    """Training tokens of an epoch, if the corpus is in the cache."""
    from gptexp.data.corpora import SHAKESPEARE_FILE
    from gptexp.data.prepare import downloads_dir, find_corpus, tokens_dir
    from gptexp.data.shards import MANIFEST

    if cfg.data.name == "shakespeare" and not (downloads_dir(cfg.data) / SHAKESPEARE_FILE).exists():
        return None
    manifest = tokens_dir(find_corpus(cfg.data), cfg.data) / MANIFEST
    if not manifest.exists():
        return None
    tokens: int = json.loads(manifest.read_text())["tokens"]
    windows = count_windows(min(tokens, cfg.data.max_tokens or tokens), cfg.seq_len)
    held_out = 0 if cfg.data.val_path else count_val_windows(cfg.data.val_tokens, cfg.seq_len)
    return max(0, windows - held_out) * cfg.seq_len


def show(p: dict[str, Any]) -> None:
    """Print a plan, a line a subject."""
    from gptexp.effective import Effective

    epochs = f"{p['epochs']:.2f} of {p['corpus_tokens']:,} tokens" if p["epochs"] else "unknown; see `gptexp prepare`"
    for name, value in (
        ("parameters", f"{p['parameters']:,}"),
        ("memory", _memory_line(p["memory_bytes"])),
        ("tokens", f"{p['tokens']:,} in {p['steps']:,} steps of {p['total_batch_size']:,}"),
        (
            "batch",
            f"{p['micro_batch_size']} sequences × {p['seq_len']} tokens × {p['world_size']} ranks × "
            f"{p['grad_accum_steps']} micro-steps",
        ),
        ("epochs", epochs),
        ("FLOPs", f"{p['flops_palm']:.4g} (PaLM's count), {p['flops_causal']:.4g} (causal)"),
        (
            "learning rate",
            f"{p['lr']:g}, warm-up over {p['warmup_tokens']:,} tokens, decay until {p['decay_tokens']:,}",
        ),
        ("validation", f"every {p['eval_every_tokens']:,} tokens" if p["eval_every_tokens"] else "at the end"),
        ("checkpoint", f"every {p['save_every_tokens']:,} tokens" if p["save_every_tokens"] else "at the end"),
        ("device", p["effective"]["device_name"]),
        *Effective(**p["effective"]).described(),
        ("time", _time_line(p["time"]) if "time" in p else "see --time"),
    ):
        print(f"{name:<15}{value}")


def _memory_line(memory: dict[str, int]) -> str:
    gib = {part: size / 2**30 for part, size in memory.items()}
    state = gib["weights"] + gib["optimizer"] + gib["gradients"]
    return (
        f"about {gib['peak']:.2f} GiB on each rank: {state:.2f} weights, optimizer state and gradients, "
        f"{gib['activations']:.2f} activations, {gib['loss']:.2f} loss"
        + (f", {gib['fragmentation']:.2f} fragmentation" if gib["fragmentation"] else "")
    )


def _time_line(time_s: dict[str, float]) -> str:
    return (
        f"about {timedelta(seconds=round(time_s['total_s']))} ({time_s['step_s']:.3g} s a step, "
        f"{time_s['validation_s']:.3g} s a validation, {time_s['start_s']:.1f} s to start)"
    )


def main(argv: list[str] | None = None) -> None:
    """`gptexp plan [key=value …]`: what a run would be: length, batch, memory, every `auto`, with --time how long."""
    parser = argparse.ArgumentParser(prog="gptexp plan", description=main.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for gptexp train")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--time", action="store_true", help="train a few steps to say how long the run would take")
    parser.add_argument("--config-dir", metavar="DIR", help="your own YAML files")
    args = parser.parse_intermixed_args(argv)

    from gptexp.compose import compose

    result = plan(compose(args.overrides, args.config_dir), args.time)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    from gptexp.cli import run_verb

    run_verb(main)
