"""`gptexp plan [overrides]`: describes a run, or with -m each cell of a sweep, without training it."""

import argparse

from gptexp.config.compose import composition, hydra_engine, is_multirun, is_sweep, to_config
from gptexp.distributed.ranks import launcher_world_size
from gptexp.process.terminal import run_verb


def main(argv: list[str] | None = None) -> None:
    """Describe a run or a sweep without training it: length, batch, memory, the value of every `auto`."""
    parser = argparse.ArgumentParser(prog="gptexp plan", description=main.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for gptexp train")
    parser.add_argument("-m", "--multirun", action="store_true", help="plan every cell of a sweep")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--time", action="store_true", help="also train a few steps, and estimate the duration")
    parser.add_argument("--config-dir", metavar="DIR", help="your own YAML files")
    args = parser.parse_intermixed_args(argv)

    with hydra_engine() as engine:
        multirun = args.multirun or is_multirun(args.overrides)
        composed = composition(engine, args.overrides, args.config_dir, multirun)
        if is_sweep(composed):
            from gptexp.sweep.grid import compose_cells  # imports numpy, which a refusal does not need

            grid = compose_cells(engine, composed)
        else:
            config = to_config(composed, args.overrides, launcher_world_size())

    from gptexp.command.planning import print_plan, print_sweep  # imports torch

    if is_sweep(composed):
        print_sweep(grid, args.time, args.json)
    else:
        print_plan(config, args.time, args.json)


if __name__ == "__main__":
    run_verb(main)
