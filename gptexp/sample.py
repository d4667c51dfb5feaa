"""`gptexp sample DIR`: text from a checkpoint of a run, or of a sweep's best run."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from itertools import count

from gptexp.command.arguments import Parser
from gptexp.process.errors import ConfigError, DataError
from gptexp.process.fields import LIMIT
from gptexp.process.imports import permanent
from gptexp.process.terminal import emit_part, print_error, run_verb, say
from gptexp.reporting.statistics.best import one_checkpoint

Pieces = Iterator[tuple[int, str]]  # as `stream` yields them: (number of the sample, text)


def main(argv: list[str] | None = None) -> None:
    """Generate text with a checkpoint of a run, or of a sweep's best run, and print it as it comes."""
    parser = Parser("sample", main.__doc__)
    parser.add_checkpoint()
    parser.add_argument(
        "--prompt",
        default="",
        metavar="TEXT",
        help="text to continue (default: none, so that a new document starts); -: stdin, with its last newline",
    )
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="ask for prompts, until Ctrl-D; Ctrl-C ends a continuation; each prompt has the seed after the one before",
    )
    parser.add_argument("--num-samples", type=int, metavar="N", help="default: 3; with --interactive 1")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="of each sample (default: 100)")
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="draw from the K most likely tokens (default: 50); 0: all"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="of those, draw from the fewest that have the share P of their probability (default: 1, all)",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="default: 1; 0: always the most likely token"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ema", action="store_true", help="take the averaged weights (train.ema_half_life_tokens)")
    args = parser.parse_args(argv)
    if args.num_samples is None:
        args.num_samples = 1 if args.interactive else 3
    _check(args)
    directory, step = one_checkpoint(args.directory, args.checkpoint, args.ema)
    prompt = _prompt(args.prompt)

    with permanent():
        from gptexp.model.generate import Sampling, stream
        from gptexp.run.load import load_for_inference

    model, tokenizer = load_for_inference(directory, args.ema, step)
    how = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    if args.interactive:
        _converse(lambda text, n: stream(model, tokenizer, text, args.num_samples, replace(how, seed=how.seed + n)))
    else:
        _print_samples(prompt, stream(model, tokenizer, prompt, args.num_samples, how))


def _check(args: argparse.Namespace) -> None:
    """Raise `ConfigError` if a value is out of range, or if stdin would be read in two ways."""
    for name, lowest in (("num_samples", 1), ("max_new_tokens", 1), ("top_k", 0), ("temperature", 0)):
        value = getattr(args, name)
        if not lowest <= value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')}={value}: must be {lowest} or above")
    if 0 < args.temperature < 1e-6:
        raise ConfigError(f"--temperature={args.temperature}: must be 0 or at least 0.000001")
    if not 0 < args.top_p <= 1:
        raise ConfigError(f"--top-p={args.top_p}: must be above 0 and at most 1")
    if not 0 <= args.seed < LIMIT:
        raise ConfigError(f"--seed={args.seed}: must lie in [0, 2^63)")
    if args.interactive and args.prompt:
        raise ConfigError("--interactive asks for the prompts: leave out --prompt")


def _prompt(given: str) -> str:
    """The text that --prompt gives, or stdin. Bytes that are not UTF-8 become U+FFFD."""
    text = sys.stdin.buffer.read() if given == "-" else os.fsencode(given)
    return text.decode(errors="replace")


def _print_samples(prompt: str, pieces: Pieces) -> None:
    """Print samples as they come, each after the prompt, with a line `---` between two."""
    shown = 0
    emit_part(prompt)
    try:
        for number, piece in pieces:
            if number != shown:
                emit_part(f"\n---\n{prompt}")
                shown = number
            emit_part(piece)
    finally:
        emit_part("\n")


def _converse(continued: Callable[[str, int], Pieces]) -> None:
    """For each line of stdin until its end, print the samples `continued(line, number of earlier prompts)`.

    Ctrl-C ends the samples of one line, or discards a line that is being typed.
    """
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as arguments are decoded
    for_people = sys.stdin.isatty() and sys.stdout.isatty()
    if for_people:
        with suppress(ImportError):  # some builds of Python lack it
            import readline  # noqa: F401  # input() then edits the line and has a history

        say("Type a text to continue; Ctrl-C ends a continuation, Ctrl-D the program.")
    numbers = count()
    while True:
        try:
            prompt = _prompt(input("> " if for_people else ""))
            _print_samples(prompt, continued(prompt, next(numbers)))
        except KeyboardInterrupt:
            emit_part("\n")
        except DataError as error:  # the tokenizer has no ids for this text
            print_error(error)
        except EOFError:
            break
    if for_people:
        say("")


if __name__ == "__main__":
    run_verb(main)
