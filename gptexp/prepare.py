"""`gptexp prepare [overrides]`: fills the token cache."""

import argparse

from gptexp.config.compose import compose
from gptexp.data import prepare as data
from gptexp.process.terminal import run_verb


def main(argv: list[str] | None = None) -> None:
    """Tokenise the corpus of a config into the cache; print the directories of the tokens."""
    parser = argparse.ArgumentParser(prog="gptexp prepare", description=main.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for gptexp train, e.g. data=shakespeare")
    parser.add_argument("--config-dir", metavar="DIR", help="your own YAML files")
    args = parser.parse_intermixed_args(argv)

    for directory in data.prepare(compose(args.overrides, args.config_dir).data):
        if directory is not None:
            print(directory)


if __name__ == "__main__":
    run_verb(main)
