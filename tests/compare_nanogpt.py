"""`gptexp bench --peers CHECKOUT` with the arguments by which the check on a GPU calls it."""

import argparse

from gptexp import bench
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import run_verb


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", help="a clone of github.com/karpathy/nanoGPT")
    parser.add_argument("overrides", nargs="+")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", default="3")
    parser.add_argument("--steps", default="10")
    parser.add_argument("--only", help="stock: nanoGPT as it is, which is always measured")
    args = parser.parse_args(argv)
    if args.only not in (None, "stock"):
        raise ConfigError(f"--only={args.only}: bench --peers leaves out no other program; leave --only out")
    options = ["--peers", args.checkout, "--device", args.device, "--rounds", args.rounds, "--steps", args.steps]
    return bench.main([*args.overrides, f"train.dtype={args.dtype}", *options])


if __name__ == "__main__":
    run_verb(main)  # as `gptexp bench` does, because it sets the environment of the threads
