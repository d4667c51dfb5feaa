"""`gptexp bench --peers CHECKOUT` with the arguments by which the check on a GPU calls it."""

import argparse
import sys

from gptexp.bench import main

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkout", help="a clone of github.com/karpathy/nanoGPT")
parser.add_argument("overrides", nargs="+")
parser.add_argument("--dtype", default="auto")
parser.add_argument("--device", default="auto")
parser.add_argument("--rounds", default="3")
parser.add_argument("--steps", default="10")
parser.add_argument("--only", help="has no meaning any more")
if __name__ == "__main__":
    args = parser.parse_args()
    options = ["--peers", args.checkout, "--device", args.device, "--rounds", args.rounds, "--steps", args.steps]
    sys.exit(main([*args.overrides, f"train.dtype={args.dtype}", *options]))
