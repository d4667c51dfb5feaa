"""Facilities of every process: errors with exit codes, signals, output to the terminal, versions."""
