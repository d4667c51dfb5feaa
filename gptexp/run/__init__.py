"""One run, from its directory to its end: ranks, processes, summaries, and loading a run for later use."""
