"""A config file with the fitted law: `optim=NAME` then sets the learning rate that belongs to the batch size."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gptexp.process.errors import ConfigError
from gptexp.reporting.own_file import MARKS, check_own
from gptexp.storage.run_dir import storage, write_atomically

if TYPE_CHECKING:
    from gptexp.reporting.analysis import Analysis  # imports scipy

COMMAND = "gptexp report"


def check_target(path: Path) -> None:
    """Raise `ConfigError` unless the law can be written to `path`, a file optim/NAME.yaml in a folder of configs."""
    given = f"--write-optim {path}"
    if path.parent.name != "optim" or path.suffix != ".yaml":
        raise ConfigError(f"{given}: an option of the group optim must be a file optim/NAME.yaml; give such a path")
    if "site-packages" in path.resolve().parts:
        raise ConfigError(f"{given}: is in an installed package, whose removal deletes it; use a folder of your own")
    check_own("--write-optim", path, COMMAND)


def write_optim(path: Path, analysis: "Analysis") -> None:
    """Write the law of `analysis` to `path`. Raises `ConfigError` if there is not exactly one law."""
    laws = [(arm.law, arm.runs[0].config) for arm in analysis.arms if arm.law is not None]
    if len(laws) != 1:
        raise ConfigError(
            f"--write-optim {path}: {analysis.name} has {len(laws)} fitted laws, and must have one; "
            + (
                "report a sweep with one arm"
                if laws
                else "two batch sizes need an optimum with an interval, which takes seeds; the report says what to run"
            )
        )
    [(law, config)] = laws
    holds_for = _holds_for(config)
    if holds_for:
        holds_for = f"# Give with it: {holds_for}\n"
    sizes = ", ".join(f"{size:,}" for size in law.sizes)
    warning = "# In log-log the optima lie on a curve: use this law between these sizes only.\n" if law.bends else ""
    text = (
        f"{MARKS[COMMAND]} from {analysis.name}: optima at {sizes} tokens a step.\n"
        f"# lr = {law.lr:.6g} * (batch.total_batch_size / {law.tokens:.6g}) ** {law.exponent:.4f}; 95% interval of the "
        f"exponent: {law.low:.3f} to {law.high:.3f}.\n{warning}{holds_for}"
        f"defaults:\n  - {config['optim.name']}\n{yaml.safe_dump(_other_keys(config), sort_keys=False)}"
        f"lr: {_power_law(law.lr, law.tokens, law.exponent)}\n"
    )
    with storage(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def _power_law(value: float, tokens: float, exponent: float) -> str:
    """A value of the file that is `value` at `tokens` tokens a step, and grows with the batch size."""
    return f"${{power_law:${{batch.total_batch_size}},{value:.6g},{tokens:.6g},{exponent:.4f}}}"


def _other_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's keys, besides its name and `lr`, as the runs of an arm had them.

    A weight decay that was scaled with the batch size is a power law of that too. Raises `ConfigError` if it is none.
    """
    keys = {key.removeprefix("optim."): value for key, value in config.items() if key.startswith("optim.")}
    if config["scaling.weight_decay"] == "tau":
        exponents = {"none": 0.0, "sqrt": 0.5, "linear": 1.0, "power": config["scaling.exponent"]}
        if config["scaling.lr"] not in exponents:
            raise ConfigError(
                f"--write-optim: with scaling.lr={config['scaling.lr']} and scaling.weight_decay=tau the weight decay "
                "is no power of the batch size, and a file of a law cannot give it; use another rule"
            )
        exponent = 1 - exponents[config["scaling.lr"]]
        keys["weight_decay"] = _power_law(keys["weight_decay"], config["scaling.reference_tokens"], exponent)
    return {key: value for key, value in keys.items() if key not in ("name", "lr")}


def _holds_for(config: Mapping[str, Any]) -> str:
    """The arguments of the runs of an arm, besides those of its optimizer, for which its law holds."""
    rules = {key: config[key] for key in ("scaling.betas", "scaling.eps")}
    given = {key: rule for key, rule in rules.items() if rule != "none"}
    if given:
        given["scaling.reference_tokens"] = config["scaling.reference_tokens"]
    return " ".join(f"{key}={value}" for key, value in given.items())
