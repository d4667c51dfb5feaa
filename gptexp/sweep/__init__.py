"""Hydra's multirun: the cells of a sweep, and how they run.

`space` parses the swept keys. `cells` composes, checks and names cells. `sweepers` choose the cells: a grid, a random
sample, or Optuna's choice. `launchers` runs them on this machine, `jobs` as SLURM jobs. `plugins` registers all with
Hydra.
"""
