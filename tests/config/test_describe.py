"""`gptexp train --help KEY`: what a key means, its values and default, and the files that set it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, ForkServer
from omegaconf import OmegaConf

from gptexp.config.compose import composition, hydra_engine
from gptexp.config.describe import answer_help, describe, meanings, settings
from gptexp.config.paths import folders, options, packaged_conf
from gptexp.config.schema import Config, ModelConfig, every_key, fields_of
from gptexp.process.errors import ConfigError
from gptexp.process.words import shown


def test_a_key_has_its_meaning_source_values_default_and_files(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("lr: 2e-3\n")
    [text] = describe(["optim.lr"], options(folders(str(tmp_path))))
    lines = text.splitlines()
    assert lines[:5] == [
        "optim.lr",
        "  meaning   peak learning rate; each model file sets its own",
        "  values    float, above 0",
        "  default   5.0e-3, set by model=bytes",
        "  part of   optim: Algorithm of the updates, which optim=NAME chooses, and its keys.",
    ]
    set_by = [line.removeprefix("  set by").strip() for line in lines[5:]]
    for setter in (
        "model=gpt2 (6.0e-4)",
        "model=nano (7.5e-3)",
        "optim=mine (2e-3)",
        "experiment=tutorial (1.0e-2)",
        "sweep=lr (3.75e-3,7.5e-3,1.5e-2,3e-2,6e-2,1.2e-1,2.4e-1)",
        "experiment=lr_transfer (1.25e-3,2.5e-3,5e-3,1e-2,2e-2,6.25e-4,3.125e-4)",  # of several grids
    ):
        assert setter in set_by
    assert not any(line.startswith("schedule") for line in set_by)


def test_a_key_with_whole_numbers_says_that_it_takes_counts_and_what_k_is() -> None:
    for key, field, _, _ in every_key():
        [text] = describe([key], {})
        [values] = [line for line in text.splitlines() if line.startswith("  values ")]
        assert ("64k" in values) == ("int" in re.split(r"\W+", str(field.type))), key
        assert ("k = 1,024" in values) == ("unit" in field.metadata), key


def test_the_default_is_the_value_of_the_default_config(tmp_path: Path) -> None:
    """Of every key, also under a primary config of one's own, which chooses an option and sets a key."""
    own = tmp_path / "mine.yaml"
    own.write_text("defaults:\n  - config\n  - _self_\n  - override model: gpt2\noptim:\n  beta2: 0.99\n")
    groups = options(folders(str(tmp_path)))
    for name, path in ((None, None), ("mine", own)):
        with hydra_engine(str(tmp_path)) as engine:
            composed = composition(engine, [], str(tmp_path), multirun=False, config_name=name)
        keys = [key for key, _, _ in fields_of(Config())]
        for key, text in zip(keys, describe(keys, groups, path), strict=True):
            [line] = [line for line in text.splitlines() if line.startswith("  default ")]
            default = line.removeprefix("  default   ").partition(", set by ")[0]
            value = OmegaConf.select(composed, key)
            assert default == shown(value) or OmegaConf.create(f"it: {default}").it == value
    in_group, of_key = (describe([name], groups, own)[0] for name in ("optim", "optim.beta2"))
    assert "optim.lr=6.0e-4  (float" in in_group
    assert f"  default   0.99, set by {own}" in of_key.splitlines()


def test_every_key_and_group_is_described() -> None:
    groups = options([packaged_conf()])
    keys = [key for key, _, _, _ in every_key()]
    for key, text in zip(keys, describe(keys, groups), strict=True):
        assert text.splitlines()[0] == key
        assert "  default " in text
    for group, text in zip(groups, describe(list(groups), groups), strict=True):
        assert all(f"{group}={name}" in text for name in groups[group])
        assert all(key in text for key in keys if key.startswith(f"{group}."))
    assert meanings(ModelConfig)["block_size"] == "tokens: maximum length of a sequence"


@pytest.mark.parametrize("text", ["", "- 1", "defaults:", "model:", "text"])
def test_a_file_that_sets_no_key_is_no_obstacle(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    assert "lr" not in dict(settings(tmp_path / "odd.yaml", "optim"))


def test_an_unknown_key_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError) as error:
        answer_help(["--help", "optim.lrr", "lr", "qqqqqq"])
    first, second, third = error.value.problems
    assert first.startswith("--help optim.lrr: unknown key; nearest: optim.lr")
    assert second == "--help lr: unknown key; nearest: optim.lr, scaling.lr"
    assert third == "--help qqqqqq: unknown key; gptexp train --help lists all keys"


@pytest.mark.parametrize("argv", [["optim.lr=1"], ["--help"], ["--help", "optim.lr=1"], ["--cfg", "job", "-h"]])
def test_help_without_a_key_is_that_of_the_verb(argv: list[str]) -> None:
    assert not answer_help(argv)


@pytest.mark.parametrize("verb", ["train", "plan", "prepare"])
def test_each_verb_that_composes_answers_at_once(light_server: ForkServer, tmp_path: Path, verb: str) -> None:
    done = light_server.ask([verb, "--config-dir", ".", "--help", "model.n_layer", "log"], tmp_path)
    assert (done["code"], done["stderr"], done["torch"]) == (0, "", False)
    assert "number of blocks" in done["stdout"]
    assert "log.wandb.mode=auto" in done["stdout"]
    assert any(light_server.ask([verb, "--help", "optim.lr"], tmp_path)["cpu_s"] < 0.5 for _ in range(5))
    refused = light_server.ask([verb, "--help", "optim.lrr"], tmp_path)
    assert (refused["code"], len(refused["stderr"].splitlines())) == (2, 1)


def test_the_module_of_train_answers_like_the_verb(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gptexp.train", "--help", "optim.lrr"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("gptexp: config error: --help optim.lrr: unknown key; nearest: optim.lr")
