"""The commands in the file of `gptexp run`: read, checked, and with a directory for each single run."""

import hashlib
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from gptexp.command.hydra_main import register_from_init, short_forms_parser, spelled_out, train_parser
from gptexp.command.search_arguments import as_train
from gptexp.config.branching import STARTS
from gptexp.config.compose import composition, hydra_engine, is_multirun, is_sweep, to_config
from gptexp.config.overrides import quoted
from gptexp.config.paths import OUTPUTS
from gptexp.process.errors import ConfigError, Problem
from gptexp.process.terminal import printable
from gptexp.process.words import shown
from gptexp.storage import branch, run_dir
from gptexp.storage.init_from import with_step
from gptexp.storage.inventory import LATEST, located
from gptexp.sweep.cells import READABLE_CHARS
from gptexp.sweep.grid import compose_cells
from gptexp.sweep.queue import Command

DIRECTORY = "hydra.run.dir="
OF_DIRECTORIES = ("resume", "report", "status", "evaluate", "sample", "compare", "export", "sharpness")


def read_commands(file: Path, verbs: Collection[str]) -> list[Command]:
    """The commands of a file. Raises `ConfigError` with a line for each that is wrong."""
    register_from_init()
    reader, problems = _Reader(file, verbs), list[Problem]()
    for number, text in _lines(file):
        try:
            if words := shlex.split(text, comments=True):
                reader.add(f"line {number}: {printable(' '.join(text.split()))}", words)
        except ConfigError as error:
            problems += (Problem(problem.code, f"{file}:{number}: {problem}") for problem in error.problems)
        except ValueError as error:  # a quote that does not end
            problems.append(Problem("usage", f"{file}:{number}: {shown(text)}: {error}"))
    if problems:
        raise ConfigError(problems)
    if not reader.commands:
        raise ConfigError(f"{file}: has no command; write one on each line, such as train optim.lr=1e-3", "no-command")
    return reader.commands


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


class _Reader:
    """The commands so far, and where their runs and sweeps will be."""

    def __init__(self, file: Path, verbs: Collection[str]) -> None:
        self.file, self.verbs = file, [verb for verb in verbs if verb != "run"]
        self.commands: list[Command] = []
        self.places: dict[Path, Command] = {}

    def add(self, title: str, words: Sequence[str]) -> None:
        """Add the command of these words, checked as far as it can be without doing anything. Raises `ConfigError`."""
        verb, *arguments = words[1:] if words[0] == "gptexp" and len(words) > 1 else words
        if verb not in self.verbs:
            raise ConfigError(f"{verb}: no such command; use one of {', '.join(self.verbs)}", "usage")
        digest = hashlib.sha256("\0".join([verb, *arguments]).encode()).hexdigest()[:8]
        parts = [text.rpartition("=") for text in arguments]
        short = ",".join(f"{key.rpartition('.')[2]}{equals}{value}" for key, equals, value in parts)
        readable = re.sub(r"[^A-Za-z0-9._=,-]+", "_", short or verb)[:READABLE_CHARS].strip("_-")
        name = f"{readable}-{digest}"
        log = OUTPUTS / self.file.stem / f"{name}.log"
        if verb in ("train", "tune"):
            command, place = self._of_training(title, verb, arguments, name, log)
        else:
            command, place = self._of_directory(title, verb, arguments, log), None
        twice = next((other for other in self.commands if other.arguments == command.arguments), None)
        twice = twice or (self.places.get(place) if place is not None and command.directory is not None else None)
        if twice is not None:
            rule = f"the same command, or the same directory, as {twice.title.partition(':')[0]}"
            raise ConfigError(f"{verb}: {rule}; leave one out, or give another train.seed", "command-given-twice")
        self.commands.append(command)
        if place is not None:
            self.places.setdefault(place, command)

    def _of_training(
        self, title: str, verb: str, arguments: list[str], name: str, log: Path
    ) -> tuple[Command, Path | None]:
        """The command of a run, a sweep or a search, and its directory if that is known yet."""
        short, _ = short_forms_parser().parse_known_args(arguments)
        later = short.like is not None and self._comes_later(short.like)
        typed = as_train(arguments) if verb == "tune" else arguments
        if later:  # the run that it is like is not there yet
            typed = [text for text in typed if text not in ("--like", short.like, f"--like={short.like}")]
        args = train_parser().parse_intermixed_args(spelled_out(typed))
        values = {key: value for key, _, value in (text.partition("=") for text in args.overrides)}
        begins_with = [values[key].strip("'\"") for key in (*STARTS, "init_from") if key in values]
        named = [*begins_with, *([short.like] if short.like is not None else [])]
        own_files = [args.config_dir] if args.config_dir is not None and self._line_of(args.config_dir) else []
        later = later or any(map(self._comes_later, [*begins_with, *own_files]))
        multirun = args.multirun or is_multirun(args.overrides)
        needs = next(filter(None, map(self._line_of, [*named, *own_files])), None)
        waits = bool(named or own_files)
        if own_files:  # the files of an earlier command are not there yet
            cfg, outputs = None, values.get("paths.outputs", str(OUTPUTS))
        else:
            cfg = _checked(args, multirun, later)
            outputs = cfg.paths.outputs or str(OUTPUTS)
        if verb == "tune":
            arguments = [*arguments, *([] if "--yes" in arguments else ["--yes"])]  # nobody answers a question
        if verb == "tune" or multirun or (cfg is not None and is_sweep(cfg)):
            place = None if cfg is None else Path(os.path.abspath(cfg.hydra.sweep.dir))  # noqa: PTH100
            return Command(title, [verb, *arguments], log, None, waits, needs), place
        is_given = DIRECTORY[:-1] in values
        directory = Path(values[DIRECTORY[:-1]].strip("'\"")) if is_given else Path(outputs) / self.file.stem / name
        arguments = [*arguments, *([] if is_given else [f"{DIRECTORY}{quoted(str(directory))}"])]
        command = Command(title, [verb, *arguments], log, directory, waits, needs, not is_given)
        return command, Path(os.path.abspath(directory))  # noqa: PTH100

    def _of_directory(self, title: str, verb: str, arguments: list[str], log: Path) -> Command:
        """The command of another verb. Raises `ConfigError` for the directory of a run that no line makes."""
        given = arguments[0] if verb in OF_DIRECTORIES and arguments and not arguments[0].startswith("-") else None
        if given is None:
            return Command(title, [verb, *arguments], log, waits=True)
        if not (self._comes_later(given) or os.path.lexists(run_dir.run_and_checkpoint(located(given))[0])):
            rule = "no such directory, and no line before makes it"
            raise ConfigError(f"{verb} {shown(given)}: {rule}; give that of a run or a sweep", "no-such-folder")
        return Command(title, [verb, *arguments], log, waits=True, needs=self._line_of(given))

    def _line_of(self, given: str) -> Command | None:
        """The earlier command whose run or sweep is, or contains, what `given` names."""
        path = Path(os.path.abspath(run_dir.run_and_checkpoint(given)[0]))  # noqa: PTH100
        found = [command for place, command in self.places.items() if place in (path, *path.parents)]
        return found[-1] if found else None

    def _comes_later(self, given: str) -> bool:
        """Whether an earlier command decides what `given` names."""
        is_newest = given.partition("@")[0] in ("", LATEST) and bool(self.commands)
        return is_newest or self._line_of(given) is not None


def _checked(args: Any, multirun: bool, later: bool) -> Any:
    """The composition of `gptexp train`. Unless `later`, its run or its cells are checked. Raises `ConfigError`."""
    with hydra_engine(args.config_dir) as engine:
        cfg = composition(engine, args.overrides, args.config_dir, multirun, args.config_name)
        if later:
            return cfg
        if not is_sweep(cfg):
            with_step(to_config(cfg, args.overrides, None, branch.find(cfg)))
            return cfg
        drafts = compose_cells(engine, cfg).drafts
        if all(draft.problems for draft in drafts):
            raise ConfigError(drafts[0].problems)
        return cfg
