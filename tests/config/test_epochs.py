"""`train.epochs`: a length in passes over the training text."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import summary

from gptexp.config.compose import compose
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir

EPOCH = 10_000


def length(*overrides: str) -> tuple[int, float | None]:
    config = compose(["model=nano", *overrides], count_epoch=lambda _: EPOCH)
    return config.run_length[1], config.train.epochs


def test_epochs_set_the_tokens() -> None:
    assert length("train.epochs=3") == (30_000, 3)
    assert length("train.epochs=0.5") == (5_000, 0.5)
    assert length("train.epochs=1e-9") == (1, 1e-9)
    assert length() == (409_600, None)


def test_a_length_on_the_command_line_takes_precedence_over_one_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\ntrain: {epochs: 2, max_tokens: 5000}\n")

    def of_file(*overrides: str) -> int:
        config = compose(
            ["model=nano", *overrides], config_dir=str(tmp_path), config_name="mine", count_epoch=lambda _: EPOCH
        )
        return config.run_length[0]

    steps = -(-2 * EPOCH // 8192)
    assert of_file() == steps
    assert of_file("train.max_tokens=81920") == 10
    assert of_file("train.max_steps=7") == 7
    assert of_file("train.epochs=4") == -(-4 * EPOCH // 8192)


@pytest.mark.parametrize("other", ["train.max_steps=3", "train.max_tokens=1M"])
def test_two_lengths_are_refused(other: str) -> None:
    with pytest.raises(ConfigError) as caught:
        length("train.epochs=2", other)
    assert caught.value.code == "two-lengths"


def test_rules_of_lengths_hold_for_the_tokens_of_the_epochs() -> None:
    assert length("train.epochs=200", "schedule.warmup_tokens=1M")[0] == 2_000_000
    with pytest.raises(ConfigError) as caught:
        length("train.epochs=2", "schedule.warmup_tokens=1M")
    assert caught.value.code == "warmup-too-long"


def test_another_problem_is_said_before_the_text_is_counted() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["model=nano", "train.epochs=2", "optim.lr=-1"], count_epoch=lambda _: pytest.fail("counted"))
    assert caught.value.code == "out-of-range"


@pytest.mark.e2e
def test_a_run_of_epochs_tokenises_first_and_saves_its_tokens(
    gptexp: Callable[..., subprocess.CompletedProcess[str]], tiny: list[str], tmp_path: Path
) -> None:
    argv = [text for text in tiny if not text.startswith("train.max_steps")]
    argv.append(f"data.cache_dir={tmp_path / 'tokens'}")
    refused = gptexp("plan", *argv, "train.epochs=0.02")
    assert refused.returncode == 2
    assert "gptexp prepare" in refused.stderr
    done = gptexp("train", *argv, "train.epochs=0.02", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    config = run_dir.load_config(tmp_path / "out")
    assert config.train.epochs == 0.02
    assert summary(tmp_path / "out")["tokens"] >= config.train.max_tokens
    planned = gptexp("plan", *argv, "train.epochs=0.02", "--json")
    assert planned.returncode == 0, planned.stderr
    swept = gptexp("train", "-m", *argv, "train.epochs=0.02,0.04", "sweep.name=s")
    assert swept.returncode == 0, swept.stderr
    lengths = {run_dir.load_config(path.parent).train.max_tokens for path in tmp_path.glob("outputs/s/*/config.yaml")}
    assert sorted(lengths) == pytest.approx([config.train.max_tokens, 2 * config.train.max_tokens], abs=1)
