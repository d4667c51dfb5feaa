"""`gptexp bench`: the rates that this machine reaches, and the share of them that a training step uses."""

import argparse
from datetime import datetime
from operator import attrgetter
from pathlib import Path

from gptexp.command.arguments import Parser
from gptexp.config.compose import compose, composition, hydra_engine
from gptexp.config.schema import Config
from gptexp.distributed.ranks import launcher_world_size
from gptexp.process.errors import ConfigError
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb
from gptexp.process.words import shown
from gptexp.run.workloads import CPU_WORKLOADS, GPU_WORKLOADS

COMM = "comm"
COUNTS = {"rounds": 3, "steps": 20}  # of --peers
# Keys and the values with which nanoGPT, in one process, trains as gptexp does. Its options have all other keys that
# shape a step.
OF_NANOGPT = {
    "world.size": 1,
    "batch.ramp_from_tokens": None,
    "optim.name": "adamw",
    "model.parametrisation": "standard",
}


def main(argv: list[str] | None = None) -> int:
    """Measure the speed of this machine, and the share of it that a training step uses."""
    parser = Parser("bench", main.__doc__)
    what = (
        "default: all workloads; overrides apply to each. comm: the all-reduce of world.size ranks, or of a launcher's"
    )
    parser.add_argument("what", nargs="*", metavar="WORKLOAD|key=value", help=what)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: outputs/bench/<date and time>")
    parser.add_argument(
        "--peers", type=Path, metavar="CHECKOUT",
        help="train the workloads, or without one the overrides, in turns with nanoGPT, of which CHECKOUT is a clone",
    )  # fmt: skip
    what = f"turns of each program of --peers; default: {COUNTS['rounds']}"
    parser.add_argument("--rounds", type=int, metavar="N", help=what)
    what = f"counted in a turn of --peers; default: {COUNTS['steps']}"
    parser.add_argument("--steps", type=int, metavar="N", help=what)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    args = parser.parse_intermixed_args(argv)

    overrides = [text for text in args.what if "=" in text]
    names = [text for text in args.what if "=" not in text]
    if COMM in names:
        return _communication([name for name in names if name != COMM], overrides, args)
    known = {**CPU_WORKLOADS, **GPU_WORKLOADS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{unknown[0]}: no such workload; use one of {', '.join([*known, COMM])}")
    alone = [()] if args.peers is not None else [known["nano"].overrides]
    for of_workload in [known[name].overrides for name in names] or alone:
        config = compose([*of_workload, *overrides], launcher_world_size=launcher_world_size())
        if args.peers is not None:
            _refuse_unlike_nanogpt(config)
    out: Path = (args.out or Path("outputs/bench") / datetime.now().strftime("%Y-%m-%d-%H-%M-%S")).absolute()
    if args.peers is None and (unused := _first_given(args, *COUNTS)):
        raise ConfigError(f"{unused}: only --peers counts them; leave it out, or give --peers CHECKOUT")
    rounds, steps = (default if (n := getattr(args, name)) is None else n for name, default in COUNTS.items())
    if rounds < 1 or steps < 2:
        raise ConfigError(f"--rounds={rounds} --steps={steps}: must be at least 1 and 2")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: exists and is not an empty directory; give a new one")

    with permanent():
        from gptexp.run.benchmark import bench, choose

    device, workloads = choose(names, args.device)
    overrides = [f"train.device={device.type}", *overrides]
    if args.peers is None:
        return bench(workloads, overrides, device, out, args.json)
    with permanent():
        from gptexp.run.peers import Turns, compare

    given = {name: workload.overrides for name, workload in workloads.items()} if names else {"run": ()}
    return compare(given, overrides, args.peers, Turns(rounds, steps, out), args.json)


def _first_given(args: argparse.Namespace, *options: str) -> str | None:
    """The first of the `options` that is given, as typed."""
    return next((f"--{name} {value}" for name in options if (value := getattr(args, name)) is not None), None)


def _refuse_unlike_nanogpt(config: Config) -> None:
    for key, wanted in OF_NANOGPT.items():
        if (value := attrgetter(key)(config)) != wanted:
            key = key.removesuffix(".name")
            rule = f"--peers measures {key}={shown(wanted)} only, because nanoGPT has nothing else"
            raise ConfigError(f"{key}={shown(value)}: {rule}; give {key}={shown(wanted)}", "not-in-nanogpt")


def _communication(others: list[str], overrides: list[str], args: argparse.Namespace) -> int:
    """Measure the all-reduce. Raises `ConfigError` for arguments without a meaning for it."""
    if others:
        raise ConfigError(f"{others[0]}: bench {COMM} measures no workload; give them in two commands")
    if unused := _first_given(args, "peers", *COUNTS):
        raise ConfigError(f"{unused}: bench {COMM} trains nothing; leave it out")
    if args.out is not None:
        raise ConfigError(
            f"--out {args.out}: bench {COMM} keeps its result in the cache, for gptexp plan; leave it out"
        )
    overrides = [f"train.device={args.device}", *overrides]
    with hydra_engine() as engine:
        composed = composition(engine, overrides, None, multirun=False)
    size = composed.world.size or launcher_world_size() or 1
    # Nothing is trained, so any number of ranks has a batch that fits.
    batch = ["batch.seq_len=8", "batch.micro_batch_size=1", f"batch.total_batch_size={8 * size}"]
    config = compose([*batch, *overrides], launcher_world_size=launcher_world_size())

    with permanent():
        from gptexp.run.communication import bench_communication

    return bench_communication(config, args.json)


if __name__ == "__main__":
    run_verb(main)
