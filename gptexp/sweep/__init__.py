"""Hydra's multirun: the cells of a sweep, and how they run.

`space` parses the swept keys. `cells` composes, checks and names cells. `sweepers` choose the cells: a grid, a random
sample, or Optuna's choice. `launchers` run them on this machine or as SLURM jobs. `plugins` registers both with Hydra.
"""
