"""How the threads of a computation wait for each other.

OpenMP reads the environment when torch is imported. Processes that gptexp starts inherit it.
"""

import os

SPINS = 3000


def sleep_soon() -> None:
    """Let a thread that waits for the others sleep after about 50 µs, unless the environment says otherwise.

    Call it before torch is imported. In GNU's OpenMP, which torch's wheels for Linux have, a waiting thread spins for
    milliseconds. If another process holds the core of one thread, the others spin at each of the hundreds of operations
    of a step, and keep their cores from everybody. Measured on two cores only: beside two busy processes a step of
    model=bytes took 0.5 to 2.3 s, and 0.26 s with this setting; alone it took about 45 ms with both, and 49 or more
    with 1,000 spins.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
