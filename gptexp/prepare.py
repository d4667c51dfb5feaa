"""`gptexp prepare [overrides]`: fill the token cache, nothing else."""

import argparse


def main(argv: list[str] | None = None) -> None:
    """`gptexp prepare [key=value …]`: tokenise the corpus of a config into the cache."""
    parser = argparse.ArgumentParser(prog="gptexp prepare", description=main.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for gptexp train, e.g. data=shakespeare")
    parser.add_argument("--config-dir", metavar="DIR", help="your own YAML files")
    args = parser.parse_intermixed_args(argv)

    from gptexp.compose import compose
    from gptexp.data.prepare import prepare

    for directory in prepare(compose(args.overrides, args.config_dir).data):
        if directory is not None:
            print(directory)


if __name__ == "__main__":
    from gptexp.cli import run_verb

    run_verb(main)
