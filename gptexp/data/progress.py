"""The progress bar of a tokenisation, if stderr is a terminal."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gptexp.data.documents import Part


@contextmanager
def progress(name: str, parts: Sequence[Part]) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with the number of each part that is complete, and its tokens for the rate."""
    # Imported here because most calls of `prepare` find the tokens in the cache.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    text = TextColumn("tokenising {task.description}")
    columns = (text, BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    console = Console(stderr=True)
    sizes = [sum(span.size for span in part) for part in parts]
    started, done = time.perf_counter(), 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=sum(sizes) if len(parts) > 1 else None, rate="")  # unknown with one part

        def advance(number: int, tokens: int) -> None:
            nonlocal done
            done += tokens
            rate = done / (time.perf_counter() - started)
            bar.update(task, advance=sizes[number], rate=f"{rate / 1e6:.1f}M tokens/s")

        yield advance
