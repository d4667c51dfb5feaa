"""How a rank's process ends."""

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise OSError('no such disk')", 1, "OSError: no such disk"),
    ],
)
def test_a_rank_leaves_with_its_own_exit_code_and_everything_said(end: str, code: int, said: str) -> None:
    """Its exit handlers run; the interpreter, which other threads may still use, is not taken apart."""
    script = textwrap.dedent(f"""
        import atexit, sys
        from gptexp.distributed import leaving
        class Late:
            def __del__(self): print("taken apart")
        late = Late()
        atexit.register(print, "handlers ran")
        with leaving():
            print("unflushed", end=" ")
            {end}
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "unflushed handlers ran\n")
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
