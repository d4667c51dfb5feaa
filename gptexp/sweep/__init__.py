"""Hydra's multirun: the cells of a sweep, and how they run.

`space` parses the swept keys. `cells` composes, checks and names cells. `sweepers` chooses them, as a grid or a random
sample, and runs each; `study` lets Optuna choose. `launchers` starts cells on this machine, `jobs` as SLURM jobs, `ray`
on a Ray cluster. `grid` registers all of these with Hydra.
"""
