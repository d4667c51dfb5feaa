"""A config file with the fitted law: `optim=NAME` then sets the learning rate that belongs to the batch size."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gptexp.config.parts import SOURCE, TARGET
from gptexp.config.vocabulary import NAMES
from gptexp.optim import OPTIMIZERS
from gptexp.optim.base import OptimConfig
from gptexp.process.errors import ConfigError
from gptexp.reporting.page.own_file import HEADER, MARKS, check_own
from gptexp.storage.run_dir import storage, write_atomically
from gptexp.storage.sweep_record import SweepRecord

if TYPE_CHECKING:
    from gptexp.reporting.statistics.analysis import Analysis  # imports scipy
    from gptexp.reporting.statistics.law import Law

COMMAND = "gptexp report"
VARYING = ("batch.total_batch_size", "model.vocab_size")  # keys that the law covers, and that the tokenizer decides

HELD = ("model", "data", "schedule", "batch", "scaling", "init_from")  # groups of keys on whose values a law depends


def check_target(path: Path) -> None:
    """Raise `ConfigError` unless the law can be written to `path`, a file optim/NAME.yaml in a folder of configs."""
    option = f"--write-optim {path}"
    if path.parent.name != "optim" or path.suffix != ".yaml":
        raise ConfigError(f"{option}: an option of the group optim must be a file optim/NAME.yaml; give such a path")
    if "site-packages" in path.resolve().parts:
        raise ConfigError(f"{option}: is in an installed package, whose removal deletes it; use a folder of your own")
    check_own("--write-optim", path, COMMAND)


def write_optim(path: Path, analysis: "Analysis") -> "Law":
    """Write the law of `analysis` to `path`, and return it. Raises `ConfigError` if there is not exactly one law."""
    laws = [(arm.law, arm.runs) for arm in analysis.arms if arm.law is not None]
    if len(laws) != 1:
        raise ConfigError(
            f"--write-optim {path}: {analysis.name} has {len(laws)} fitted laws, and must have one; "
            + (
                "report a sweep with one arm"
                if laws
                else "two batch sizes need a bracketed optimum; the report says what to run"
            )
        )
    [(law, runs)] = laws
    config, lengths = runs[0].config, [run.of_tokens for run in runs if run.batch in law.sizes]
    optim, scaling = _other_keys(config), _scaling(config)
    settings = {**_settings(config), **{f"optim.{key}": value for key, value in optim.items()}, **scaling}
    given = " ".join(f"{key}={value}" for key, value in scaling.items() if value != "none")
    holds_for = f"# Give with it: {given}\n" if given else ""
    keys: dict[str, Any] = {"optim": {**optim, "lr": _power_law(law.lr, law.tokens, law.exponent)}}
    if OPTIMIZERS.get(config["optim.name"], OptimConfig).averages_weights:
        keys["schedule"] = {"name": "constant"}  # the only schedule that this optimizer takes
    sizes = ", ".join(f"{size:,}" for size in law.sizes)
    warning = "# In log-log the optima lie on a curve: use this law between these sizes only.\n" if law.bends else ""
    text = (
        f"{HEADER}{MARKS[COMMAND]} from {analysis.name}: optima at {sizes} tokens a step.\n"
        f"# lr = {law.lr:.6g} * (batch.total_batch_size / {law.tokens:.6g}) ** {law.exponent:.4f}; 95% interval of the "
        f"exponent: {law.low:.3f} to {law.high:.3f}.\n{warning}{holds_for}"
        f"defaults:\n  - override /optim_keys@optim: {config['optim.name']}\n"
        f"{yaml.safe_dump(keys, sort_keys=False)}fitted:\n"
        f"  min_batch_tokens: {min(law.sizes)}\n  max_batch_tokens: {max(law.sizes)}\n"
        f"  min_tokens: {min(lengths)}\n  max_tokens: {max(lengths)}\n"
        f"  data_hash: {json.dumps(_as_data(runs[0].summary.get('data_hash')))}\n"
        f"  settings: {yaml.safe_dump(settings, sort_keys=False, default_flow_style=True, width=110, indent=4)}"
    )
    with storage(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return law


def settings_given(sweep: SweepRecord | None) -> list[str]:
    """The arguments of the sweep's command that set keys on which its law depends."""
    arguments = [(text, text.partition("=")[0]) for text in (sweep.overrides if sweep is not None else ())]
    return [text for text, key in arguments if key.partition(".")[0] in HELD and key not in VARYING]


def points_above_cells(analysis: "Analysis") -> list[str]:
    """A sentence for each batch size at which the law's learning rate is significantly worse than one that was run."""
    sentences = []
    laws = [(arm.curves, arm.law) for arm in analysis.arms if arm.law is not None]
    for curves, law in laws:
        for batch in law.sizes:
            lr, run = law.at(batch), curves.by_batch[batch].best
            if curves.worse([(batch, lr)], (batch, run)):
                above, below = curves.cell_losses([(batch, lr), (batch, run)]).mean(0)
                sentences.append(
                    f"at {batch:,} tokens a step the law's learning rate {lr:.3g} has a loss {above - below:.4f} nats "
                    f"above that of {run:.3g}, which was run"
                )
    return sentences


def _power_law(value: float, tokens: float, exponent: float) -> str:
    """The text of a config value: a power of the batch size that is `value` at `tokens` tokens a step."""
    return f"${{power_law:${{batch.total_batch_size}},{value:.6g},{tokens:.6g},{exponent:.4f}}}"


def _other_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's keys, besides its name and `lr`, as the runs of an arm had them.

    A weight decay that was scaled becomes a power of the batch size. Raises `ConfigError` if its rule is no power.
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
    return {key: value for key, value in keys.items() if key not in ("name", "lr", TARGET, SOURCE)}


def _scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling rules of the runs of an arm, for the keys that the file does not scale."""
    rules = {key: config[key] for key in ("scaling.betas", "scaling.eps")}
    if any(rule != "none" for rule in rules.values()):
        rules["scaling.reference_tokens"] = config["scaling.reference_tokens"]
    return rules


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys on whose values a law depends, without those of `scaling` and the optimizer's own."""
    names = ["optim.name", "init_from", "data.name"]
    if config["data.tokenizer"] in NAMES:  # the path of a tokenizer's file says little: the hash of the tokens decides
        names.append("data.tokenizer")
    kept = [key for key in config if key.startswith(("model.", "schedule.", "batch.")) or key in names]
    return {key: _as_data(config[key]) for key in kept if key not in VARYING}


def _as_data(value: Any) -> Any:
    """A value without interpolations, which Hydra would resolve in the file: the run may be a stranger's."""
    return value.replace("${", "$ {") if isinstance(value, str) else value
