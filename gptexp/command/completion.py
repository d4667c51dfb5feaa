"""Tab completion of verbs, their flags, and the directories of runs and sweeps. Hydra completes overrides."""

import re
from argparse import Action, ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from gptexp.command.arguments import module_of
from gptexp.config.paths import OUTPUTS
from gptexp.storage import run_dir

HYDRA_VERBS = ("train", "tune", "plan", "prepare", "coordcheck")  # all their arguments except flags are overrides
NOT_FOR_USERS = ("--config-path", "--experimental-rerun", "--shell-completion")  # Hydra's; two of them are refused


def candidates(line: str, verbs: Mapping[str, str]) -> list[str] | None:
    """The words that can complete a command line; None if these are overrides, which Hydra completes.

    `verbs` are the names of the verbs with their descriptions.
    """
    words = line.split()
    word = words.pop() if words and not line[-1].isspace() else ""
    if len(words) < 2:
        found = [*verbs, "--help", "--version"]
    elif words[1] == "plan" and word.startswith("dev"):  # Hydra does not know `device`
        from gptexp.model.gpus import GPUS

        found = [f"device={name}" for name in GPUS]
    elif words[1] in HYDRA_VERBS and not word.startswith("-"):
        return None
    elif words[1] in verbs:
        found = _of_verb(words[1], words[-1], word)
    else:
        found = []
    return sorted({text for text in found if text.startswith(word) and not re.search(r"\s", text)})


def line_for_hydra(line: str) -> str:
    """The line without its verb and flags: Hydra refuses a flag that it does not know."""
    program, _, *words = line.split()
    word = words.pop() if words and not line[-1].isspace() else ""
    return " ".join([program, *(text for text in words if "=" in text and not text.startswith("-")), word])


def _of_verb(verb: str, before: str, word: str) -> list[str]:
    """The flags of a verb, the choices of the flag `before`, or the values of arguments that are no flags.

    RUN_DIR stands for the directory of a run, DIR for that of a run or a sweep.
    """
    arguments = _arguments(verb)
    flags = {flag: argument for argument in arguments for flag in argument.option_strings}
    if word.startswith("-"):
        known = [flag for flag in flags if flag.startswith("--") and flag not in NOT_FOR_USERS]
        return [*known, "--dry-run"] if verb == "train" else known  # no parser has --dry-run: it turns train into plan
    if before in flags and flags[before].nargs != 0:
        return [*map(str, flags[before].choices or ())]
    positional = [argument for argument in arguments if not argument.option_strings]
    asked = {argument.metavar for argument in positional}
    found = [text for text, is_sweep in _directories(word) if "DIR" in asked or ("RUN_DIR" in asked and not is_sweep)]
    return [*(str(choice) for argument in positional for choice in argument.choices or ()), *found]


def _arguments(verb: str) -> list[Action]:
    """The arguments of a verb, as its parsers know them."""
    parsers = []
    if verb in ("train", "plan"):
        from gptexp.command.hydra_main import short_forms_parser, train_parser

        parsers.append(short_forms_parser())
    if verb == "train":
        parsers.append(train_parser())
    else:
        plain = ArgumentParser.print_help
        ArgumentParser.print_help = lambda parser, file=None: parsers.append(parser)  # type: ignore[assignment, method-assign]
        try:
            with suppress(SystemExit):
                module_of(verb).main(["--help"])
        finally:
            ArgumentParser.print_help = plain  # type: ignore[method-assign]
    return [argument for parser in parsers for argument in parser._actions]


def _directories(word: str) -> Iterator[tuple[str, bool]]:
    """Yield the runs and sweeps in outputs/ and beside the typed path, with whether each is a sweep."""
    for base in dict.fromkeys((f"{OUTPUTS}/", word[: word.rfind("/") + 1])):
        folder = Path(base or ".")
        for path in (*folder.glob("[!.]*/"), *folder.glob("[!.]*/[!.]*/")):
            is_sweep = (path / run_dir.SWEEP).is_file()
            if is_sweep or run_dir.is_run(path):
                yield base + path.relative_to(folder).as_posix(), is_sweep
