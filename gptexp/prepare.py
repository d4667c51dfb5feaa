"""`gptexp prepare [overrides]`: fills the token cache."""

import sys

from gptexp.command.arguments import Parser
from gptexp.command.hydra_main import register_from_init
from gptexp.config.compose import compose
from gptexp.config.describe import answer_help
from gptexp.process.terminal import run_verb
from gptexp.storage import branch


def main(argv: list[str] | None = None) -> None:
    """Tokenise the corpus of a config into the cache; print the directories of the tokens."""
    if answer_help(sys.argv[1:] if argv is None else argv):
        return
    parser = Parser("prepare", main.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for gptexp train, e.g. data=shakespeare")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="your own YAML files")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="DIR/NAME.yaml, a config that includes gptexp's")
    parser.add_argument("--verify", action="store_true", help="tokenise it again, and compare the cache with that")
    args = parser.parse_intermixed_args(argv)

    register_from_init()
    config = compose(args.overrides, args.config_dir, args.config_name, find_parent=branch.find).data

    from gptexp.data.comparison import compare  # imports numpy
    from gptexp.data.prepare import prepare, prepare_texts

    for directory in (*prepare(config), *prepare_texts(config).values()):
        if directory is not None:
            print(directory)
    if args.verify:
        compare(config)


if __name__ == "__main__":
    run_verb(main)
