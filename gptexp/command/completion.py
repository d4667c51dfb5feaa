"""Tab completion of verbs, their flags, and the directories of runs and sweeps. Hydra completes overrides."""

import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path

from gptexp.storage import run_dir

TRAIN_FLAGS = ("--cfg", "--config-dir", "--dry-run", "--help", "--info", "--multirun", "--note", "--tag")
HYDRA_VERBS = ("train", "plan", "prepare")  # their other arguments are overrides
OUTPUTS = "outputs/"  # where runs are by default


def candidates(line: str, verbs: Mapping[str, str]) -> list[str] | None:
    """What can stand at the end of a command line; None if that are overrides, which Hydra completes.

    `verbs` are the names of the verbs with their descriptions.
    """
    words = line.split()
    word = words.pop() if words and not line[-1].isspace() else ""
    if len(words) < 2:
        found = [*verbs, "--help", "--version"]
    elif words[1] in HYDRA_VERBS and not word.startswith("-"):
        return None
    elif words[1] == "train":
        found = [*TRAIN_FLAGS]
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
    """The flags of a verb, the choices of the flag `before`, or the directories that its usage asks for.

    RUN_DIR is a run, DIR also a sweep.
    """
    with redirect_stdout(StringIO()) as out, suppress(SystemExit):
        import_module(f"gptexp.{verb}").main(["--help"])
    usage = out.getvalue().partition("\n\n")[0]
    if word.startswith("-"):
        return ["--help", *re.findall(r"--[\w-]+", usage)]
    if value := re.search(rf"{re.escape(before)} (\{{[^}}]+\}}|\w+)", usage) if before.startswith("--") else None:
        return value[1][1:-1].split(",") if value[1].startswith("{") else []
    positional = re.sub(r"\[-[^]]*\]|--[\w-]+ \S+", "", usage)
    if not (asked := re.search(r"\b(RUN_)?DIR\b", positional)):
        return []
    return [text for text, is_sweep in _directories(word) if not (asked[1] and is_sweep)]


def _directories(word: str) -> Iterator[tuple[str, bool]]:
    """Yield the runs and sweeps in outputs/ and beside the typed path, with whether each is a sweep."""
    for base in dict.fromkeys((OUTPUTS, word[: word.rfind("/") + 1])):
        folder = Path(base or ".")
        for path in (*folder.glob("[!.]*/"), *folder.glob("[!.]*/[!.]*/")):
            is_sweep = (path / run_dir.SWEEP).is_file()
            if is_sweep or run_dir.is_run(path):
                yield base + path.relative_to(folder).as_posix(), is_sweep
