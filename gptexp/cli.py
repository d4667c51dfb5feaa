"""The `gptexp` command: `gptexp VERB …` is `python -m gptexp.VERB …`."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

VERBS = {
    "train": "train a model, or a sweep of them (-m); takes Hydra overrides",
    "plan": "say what a run would be, without starting it; takes Hydra overrides",
    "prepare": "tokenise a corpus into the cache; takes Hydra overrides",
    "resume": "continue an unfinished run",
    "sample": "print text from a run's newest checkpoint",
    "status": "say how far the cells of a sweep are",
    "report": "say what the runs of a sweep show: optima, law, noise, pictures",
    "watch": "show a run or a sweep as a live page on this machine",
    "dashboard": "build the project's dashboard on wandb",
    "evaluate": "print a checkpoint's validation loss as JSON",
    "verify": "prove on this machine that runs are exact, whatever the cut and whatever happens",
    "bench": "measure this machine and the training step on it",
}


def main() -> None:
    """Entry of the console script."""
    if "_ARGCOMPLETE" in os.environ or "COMP_LINE" in os.environ:
        # Hydra completes what follows the program's name: it must not see the verb.
        for verb in VERBS:
            os.environ["COMP_LINE"] = os.environ.get("COMP_LINE", "").replace(f" {verb} ", " ", 1)
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-sc", "--shell-completion"):
        verb = "train"
        sys.argv.insert(1, verb)
    if verb in ("-V", "--version"):
        from gptexp import __version__

        print(f"gptexp {__version__}")
        return
    if verb in ("-h", "--help", "help"):
        print("usage: gptexp VERB …\n")
        print(*(f"  {name:<10}{what}" for name, what in VERBS.items()), sep="\n")
        print("\nEach verb answers --help.")
        return
    if verb not in VERBS:
        print(f"gptexp: {verb}: no such verb; there are {', '.join(VERBS)}", file=sys.stderr)
        sys.exit(2)
    sys.argv[:2] = [f"{sys.argv[0]} {verb}"]
    module = import_module(f"gptexp.{verb}")
    if verb == "train":
        module.main()
    else:
        run_verb(module.main)


def run_verb(verb: Callable[[list[str]], Any]) -> None:
    """Run a verb's `main` on the command line; what a user can cause prints as one line, under its exit code."""
    from gptexp.compose import report_errors

    with report_errors():
        code = verb(sys.argv[1:])
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
