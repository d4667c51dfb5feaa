"""`gptexp bench`: the rates that this machine reaches, and the share of them that a training step uses."""

import argparse
from datetime import datetime
from pathlib import Path

from gptexp.command.arguments import Parser
from gptexp.config.compose import compose, composition, hydra_engine
from gptexp.distributed.ranks import launcher_world_size
from gptexp.process.errors import ConfigError
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb
from gptexp.run.workloads import CPU_WORKLOADS, GPU_WORKLOADS

COMM = "comm"


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
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="turns of each program; default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="counted in a turn; default: %(default)s")
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
        compose([*of_workload, *overrides])  # raises for illegal overrides
    out: Path = (args.out or Path("outputs/bench") / datetime.now().strftime("%Y-%m-%d-%H-%M-%S")).absolute()
    if args.rounds < 1 or args.steps < 2:
        raise ConfigError(f"--rounds={args.rounds} --steps={args.steps}: must be at least 1 and 2")
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
    return compare(given, overrides, args.peers, Turns(args.rounds, args.steps, out), args.json)


def _communication(others: list[str], overrides: list[str], args: argparse.Namespace) -> int:
    """Measure the all-reduce. Raises `ConfigError` for arguments without a meaning for it."""
    if others:
        raise ConfigError(f"{others[0]}: bench {COMM} measures no workload; give them in two commands")
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
