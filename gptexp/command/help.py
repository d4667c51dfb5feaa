"""`gptexp train --help`."""

from collections.abc import Sequence

from omegaconf import OmegaConf, open_dict

from gptexp.config.compose import composition, hydra_engine, is_multirun
from gptexp.config.paths import folders, options


def print_help(overrides: Sequence[str], config_dir: str | None, config_name: str | None) -> None:
    """Print usage, the config groups and the composed keys.

    Hydra's own --help takes a second, because it copies the repository of configs for each group.
    """
    with hydra_engine(config_dir) as engine:
        job = composition(engine, overrides, config_dir, is_multirun(overrides), config_name)
    with open_dict(job):
        text = job.pop("hydra").help
    print(text.header)
    print("Groups (override as group=option):\n")
    for group, names in sorted(options(folders(config_dir)).items()):
        print(f"  {group:<15} {', '.join(sorted(names))}")
    print(f"\nKeys of this composition (override as key=value):\n\n{OmegaConf.to_yaml(job)}\n{text.footer}")
