"""The commands in the file of `gptexp run`: read, checked, and with a directory for each single run."""

import hashlib
import re
import shlex
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from gptexp.command.hydra_main import register_from_init, spelled_out, train_parser
from gptexp.command.search_arguments import as_train
from gptexp.config.compose import composition, hydra_engine, is_multirun, is_sweep, to_config
from gptexp.config.overrides import quoted
from gptexp.config.paths import OUTPUTS
from gptexp.process.errors import ConfigError, Problem
from gptexp.process.terminal import printable
from gptexp.process.words import shown
from gptexp.storage import branch
from gptexp.storage.init_from import with_step
from gptexp.sweep.cells import READABLE_CHARS
from gptexp.sweep.grid import compose_cells
from gptexp.sweep.queue import Command

DIRECTORY = "hydra.run.dir="
LATER = ("not-a-run", "no-run-yet", "no-such-folder")  # problems that an earlier command of the file may solve


def read_commands(file: Path, verbs: Collection[str]) -> list[Command]:
    """The commands of a file. Raises `ConfigError` with a line for each that is wrong."""
    register_from_init()
    commands: dict[tuple[str, ...], Command] = {}
    problems = list[Problem]()
    for number, text in _lines(file):
        try:
            words = shlex.split(text, comments=True)
            if not words:
                continue
            command = _command(f"line {number}: {printable(' '.join(text.split()))}", words, OUTPUTS / file.stem, verbs)
        except ConfigError as error:
            problems += (Problem(problem.code, f"{file}:{number}: {problem}") for problem in error.problems)
        except ValueError as error:  # a quote that does not end
            problems.append(Problem("usage", f"{file}:{number}: {shown(text)}: {error}"))
        else:
            if (first := commands.setdefault(tuple(command.arguments), command)) is not command:
                rule = f"the same command as {first.title.partition(':')[0]}; leave one out, or give another train.seed"
                problems.append(Problem("command-given-twice", f"{file}:{number}: {rule}"))
    if problems:
        raise ConfigError(problems)
    if not commands:
        raise ConfigError(f"{file}: has no command; write one on each line, such as train optim.lr=1e-3", "no-command")
    return [*commands.values()]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The number and the text of each command. One that ends with a backslash goes on in the next line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); give a file of commands", "unreadable-file") from None
    text, first = "", 1
    for number, line in enumerate([*lines, ""], 1):
        text += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield first, text
            text, first = "", number + 1


def _command(title: str, words: Sequence[str], folder: Path, verbs: Collection[str]) -> Command:
    """The command of these words, checked as far as it can be without doing anything. Raises `ConfigError`."""
    verb, *arguments = words[1:] if words[0] == "gptexp" and len(words) > 1 else words
    if verb not in verbs or verb == "run":
        others = ", ".join(name for name in verbs if name != "run")
        raise ConfigError(f"{verb}: no such command; use one of {others}", "usage")
    digest = hashlib.sha256("\0".join([verb, *arguments]).encode()).hexdigest()[:8]
    parts = [text.rpartition("=") for text in arguments]
    short = ",".join(f"{key.rpartition('.')[2]}{equals}{value}" for key, equals, value in parts)
    readable = re.sub(r"[^A-Za-z0-9._=,-]+", "_", short or verb)[:READABLE_CHARS].strip("_-")
    name, directory, waits = f"{readable}-{digest}", None, verb not in ("train", "tune", "resume")
    if verb in ("train", "tune"):
        as_typed = as_train(arguments) if verb == "tune" else spelled_out(arguments)
        args = train_parser().parse_intermixed_args(as_typed)
        try:
            _check(args)
        except ConfigError as error:
            if error.code not in LATER:
                raise
            waits = True
        if verb == "tune":
            arguments = [*arguments, *([] if "--yes" in arguments else ["--yes"])]  # nobody answers a question
        elif not (args.multirun or is_multirun(args.overrides)):
            given = [text.removeprefix(DIRECTORY) for text in args.overrides if text.startswith(DIRECTORY)]
            directory = Path(given[-1].strip("'\"")) if given else folder / name
            arguments = [*arguments, *([] if given else [f"{DIRECTORY}{quoted(str(directory))}"])]
    return Command(title, [verb, *arguments], folder / f"{name}.log", directory, waits)


def _check(args: Namespace) -> None:
    """Compose the config of a run, or of a sweep's cells, as `gptexp train` would. Raises `ConfigError`."""
    with hydra_engine(args.config_dir) as engine:
        multirun = args.multirun or is_multirun(args.overrides)
        cfg = composition(engine, args.overrides, args.config_dir, multirun, args.config_name)
        if not is_sweep(cfg):
            with_step(to_config(cfg, args.overrides, None, branch.find(cfg)))
            return
        drafts = compose_cells(engine, cfg).drafts
        if all(draft.problems for draft in drafts):
            raise ConfigError(drafts[0].problems)
