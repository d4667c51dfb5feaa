"""`gptexp tune [overrides]`: find the best learning rate of each batch size, within a stated budget."""

import sys

from gptexp.command.search_arguments import as_train
from gptexp.config.describe import answer_help
from gptexp.process.terminal import run_verb
from gptexp.train import main as train


def main(argv: list[str] | None = None) -> None:
    """Find the best learning rate of each batch size: runs of full length, chosen one by one from the results so far.

    It is `gptexp train -m hydra/sweeper=tune`, and takes the same overrides, such as batch.total_batch_size=1k,4k,16k
    and arms such as optim=adamw,muon.
    """
    given = sys.argv[1:] if argv is None else argv
    if not answer_help(given):
        train(as_train(given, main.__doc__))


if __name__ == "__main__":
    run_verb(main)
