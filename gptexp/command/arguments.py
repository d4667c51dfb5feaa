"""Arguments of verbs: an option is given once, and counts and the checkpoint of a run are written alike everywhere."""

from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from importlib import import_module
from types import ModuleType
from typing import Any

from gptexp.process.fields import parse_count
from gptexp.process.terminal import warn
from gptexp.process.words import shown
from gptexp.storage.inventory import LATEST, located

PLACES = ("DIR", "RUN_DIR")  # names of arguments
NEWEST: dict[str, Any] = {"nargs": "?", "default": LATEST}  # of an argument that may be left out


def module_of(verb: str) -> ModuleType:
    """The module of a verb: its file has its name, except that of `run`, which is the name of a folder."""
    return import_module(f"gptexp.{'queue' if verb == 'run' else verb}")


class Once(Action):
    """Stores a value, and refuses an option that is given twice, of which argparse would silently take the last."""

    is_given = False

    def __call__(self, parser: ArgumentParser, namespace: Namespace, value: Any, option: str | None = None) -> None:
        if option is not None and self.is_given:
            raise ArgumentError(self, "given twice; give it once")
        self.is_given = True
        setattr(namespace, self.dest, value)


class Parser(ArgumentParser):
    """The parser of a verb. `type=int` reads what `parse_count` does; DIR and RUN_DIR are what `located` finds."""

    def __init__(self, verb: str, description: str | None) -> None:
        super().__init__(prog=f"gptexp {verb}", description=description, allow_abbrev=False)
        self.register("action", None, Once)
        self.register("type", int, _count)
        self.names = verb != "rm"  # what is removed has a path

    def add_checkpoint(self, directory: str = "a run's directory, or a sweep's", required: bool = False) -> None:
        """Add the arguments that name the checkpoint of a run: `directory` and `checkpoint`."""
        what = f"{directory}; RUN_DIR@CHECKPOINT is that checkpoint"
        self.add_argument("directory", metavar="DIR", help=what, **({} if required else NEWEST))
        what = "its step; best: the one with the lowest validation loss; last (default): the newest intact one"
        self.add_argument("--checkpoint", metavar="STEP|best|last", help=what)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, others = super().parse_known_args(args, namespace)
        for action in self._actions:
            if self.names and action.metavar in PLACES and not action.option_strings:
                setattr(known, action.dest, _located(getattr(known, action.dest)))
        return known, others


def _located(given: Any) -> Any:
    """The value of an argument that names runs or sweeps, in the form in which it was given."""
    if isinstance(given, list):
        return [_located(one) for one in given]
    if given is None or (found := located(str(given))) == str(given):
        return given
    warn(f"{given}: {found}")
    return type(given)(found)


def _count(text: str) -> int:
    try:
        return parse_count(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{shown(text)}: {error}") from None
