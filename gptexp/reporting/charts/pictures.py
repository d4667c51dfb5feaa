"""PNGs of Vega-Lite specifications, and the JavaScript that draws them in a browser. Both come from vl-convert.

vl-convert ends its process if it gets too little memory. So it runs in processes of its own: those of drawer.py.
"""

import base64
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import Self

from gptexp.config.paths import user_cache_dir
from gptexp.process.cores import count_cores
from gptexp.process.terminal import warn
from gptexp.reporting.charts import drawer
from gptexp.reporting.charts.vega_lite import Spec, theme

PNG_WIDTH = 640  # pixels before scaling; replaces the width of the page's container
MOST_AT_ONCE = 4  # processes; each takes 150 MB
ENTRY = "window.vegaEmbed = vegaEmbed;"


class Drawing:
    """Processes that draw figures while their caller goes on. They start at once, and load Vega in half a second.

    As a context it ends them.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self._processes = [_Process() for _ in range(at_once or min(MOST_AT_ONCE, count_cores()))]
        self._waiting: SimpleQueue[tuple[str, str] | None] = SimpleQueue()
        self._images: dict[str, bytes] = {}
        self._pool = ThreadPoolExecutor(len(self._processes))  # each thread waits for its process
        self._ends = [self._pool.submit(self._draw, process) for process in self._processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            self._waiting.put(None)
            process.end()
        self._pool.shutdown()

    def add(self, key: str, spec: Spec) -> None:
        """Draw this specification as soon as a process is free."""
        look = {"width": PNG_WIDTH, "config": {**theme("light"), "background": "white", "aria": False}}
        self._waiting.put((key, json.dumps({**spec, **look})))

    def pngs(self) -> dict[str, bytes]:
        """Wait for the pictures, by key. If some are missing, prints why."""
        for _ in self._processes:
            self._waiting.put(None)
        errors = [error for end in self._ends if (error := end.exception()) is not None]
        for error in errors[:1]:
            warn(f"pictures are missing: {error}")
        return self._images

    def _draw(self, process: "_Process") -> None:
        while (waiting := self._waiting.get()) is not None:
            key, request = waiting
            self._images[key] = base64.b64decode(process.answer(request))


def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which defines the global `vegaEmbed`.

    Bundling takes seconds, so the script is cached in the user's cache directory. If it fails, prints why and returns
    an empty script, so that a page has everything but its charts.
    """
    cached = user_cache_dir() / f"vega-lite-{drawer.VEGA_LITE}-{version('vl-convert-python')}.js"
    try:
        return cached.read_text()
    except OSError:
        pass
    process = _Process()
    try:
        script = process.answer(json.dumps(ENTRY))
    except _DrawingError as error:
        warn(f"the page has no charts: {error}")
        return ""
    finally:
        process.end()
    script = script.replace("</script", "<\\/script")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_name(f"{cached.name}.{os.getpid()}")
        unfinished.write_text(script)
        unfinished.replace(cached)
    except OSError:  # without a cache the next report only takes longer
        pass
    return script


class _DrawingError(Exception):
    pass


class _Process:
    """A process that runs drawer.py."""

    def __init__(self) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115 - lives as long as the process; a full pipe would stop that
        pipe = subprocess.PIPE
        command = [sys.executable, "-Pm", drawer.__name__]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def answer(self, request: str) -> str:
        """What `drawer.main` answers to a line of JSON. Raises `_DrawingError`."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        with suppress(BrokenPipeError):  # the process has ended; its output says why
            print(request, file=requests, flush=True)
        if line := answers.readline():
            answer: str = json.loads(line)
            return answer
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {code}"
        if code < 0:
            why = f"its process was ended by {signal.Signals(-code).name}; it may lack memory (ulimit -v)"
        raise _DrawingError(f"vl-convert failed: {why}")
