"""The `gptexp` command: `gptexp VERB …` is `python -m gptexp.VERB …`."""

import itertools
import os
import re
import sys
from importlib import import_module
from pathlib import Path

from gptexp.process.errors import ConfigError
from gptexp.process.terminal import report_errors, run_verb
from gptexp.process.versions import VERSION

VERBS = {
    "train": "train a model, or a sweep of them (-m)",
    "tune": "find the best learning rate of each batch size, within a budget",
    "plan": "describe a run or a sweep without training it",
    "prepare": "tokenise a corpus into the cache",
    "resume": "continue an unfinished run",
    "run": "run the commands of a file in turn, or several at once",
    "sample": "print text from a checkpoint of a run, or of a sweep's best run",
    "evaluate": "print a checkpoint's validation loss as JSON",
    "export": "write a checkpoint as a directory that Hugging Face's transformers loads",
    "coordcheck": "check that activations keep their size when a model gets wider",
    "sharpness": "print the curvature of the loss at a checkpoint's weights as JSON",
    "report": "report the results of a sweep or a run: optima, law, noise, pictures",
    "compare": "show what differs between runs, and whether their losses differ by more than seeds cause",
    "status": "show the progress of a sweep's cells",
    "ls": "list runs and sweeps",
    "rm": "remove runs and sweeps, or checkpoints that no command reads",
    "watch": "show a run or a sweep as a live page on this machine",
    "dashboard": "build the project's dashboard on wandb",
    "verify": "check on this machine that gradients do not depend on the ranks, and that resuming is exact",
    "bench": "measure the speed of this machine and of the training step",
}


def main() -> None:
    with report_errors():
        _main()


def _main() -> None:
    if {"-sc", "--shell-completion"} & {*sys.argv[1:3]}:
        _complete()
        return
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-V", "--version"):
        print(f"gptexp {VERSION}")
        return
    if verb in ("-h", "--help", "help"):
        print("usage: gptexp VERB …\n")
        print(*(f"  {name:<11}{what}" for name, what in VERBS.items()), sep="\n")
        print("\n`gptexp VERB --help` shows the options of a verb.")
        return
    if verb == "gc":
        raise ConfigError("gc: is `gptexp rm --unneeded-checkpoints` now; its --all is --newest-only")
    if verb not in VERBS:
        print(f"gptexp: {verb}: no such verb; use one of {', '.join(VERBS)}", file=sys.stderr)
        sys.exit(2)
    sys.argv[:2] = [f"{sys.argv[0]} {verb}"]
    from gptexp.command.arguments import module_of

    run_verb(module_of(verb).main)


def _complete() -> None:
    """Print what can complete the line in $COMP_LINE, because the shell asks; or install the completion."""
    from gptexp.config.paths import FILE_FLAGS

    line = os.environ.get("COMP_LINE", "")
    if sys.argv[-1].startswith("query="):
        from gptexp.command.completion import candidates, line_for_hydra

        found = candidates(line, VERBS)
        if found is not None:
            print("\n".join(found) if sys.argv[-1] == "query=fish" else " ".join(found))
            return
        os.environ["COMP_LINE"] = line_for_hydra(line)
    # Hydra reads the flags that name the user's files from its own arguments.
    given = itertools.chain(*re.findall(rf"\s({'|'.join(FILE_FLAGS)})[\s=]\s*(\S+)(?=\s)", line))
    sys.argv[1:] = [*(str(Path(text).expanduser()) for text in given), *sys.argv[-2:]]
    run_verb(import_module("gptexp.train").main)


if __name__ == "__main__":
    main()
