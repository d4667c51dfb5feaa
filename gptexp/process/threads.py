"""How the threads of a computation wait for each other. OpenMP reads it when torch is imported."""

import os

SPINS = 3000


def sleep_soon() -> None:
    """Let a thread that waits for the others sleep after about 50 µs, unless the environment says otherwise.

    In GNU's OpenMP, which torch uses, it spins for milliseconds. If another process has the core of one thread, the
    other threads spin at each of the hundreds of operations of a step, and keep their cores from everybody. Beside
    two busy processes on two cores, a step of model=bytes took 1 to 2.3 s so, and 0.26 s with this setting. Fewer
    spins would slow it down on a quiet machine.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
