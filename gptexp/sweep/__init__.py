"""Hydra's multirun: the cells of a sweep, and how they run.

`space` parses the swept keys. `cells` composes, checks and names cells. `sweepers` chooses them, a grid or a random
sample, and takes each from its start to its record; `study` lets Optuna choose. `launchers` starts cells on this
machine, `jobs` as SLURM jobs, `ray` on a Ray cluster. `grid` registers all with Hydra.
"""
