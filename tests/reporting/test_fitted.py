"""The law of a sweep as a config file. It sets the learning rate of any batch size and overwrites no other file."""

from dataclasses import replace
from pathlib import Path

import pytest
from sweeps import report_of, write_sweep

from gptexp.config.compose import compose
from gptexp.config.schema import result_deciding
from gptexp.process.errors import ConfigError
from gptexp.reporting.analysis import Analysis, analyse
from gptexp.reporting.fitted import check_target, write_optim
from gptexp.reporting.records import find_runs


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose best learning rate grows with the root of the batch size; tests must not write into it."""
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "root")


@pytest.fixture(scope="module")
def analysis(swept: Path) -> Analysis:
    return analyse("sweep", find_runs(swept))


def test_the_law_sets_the_learning_rate_of_any_batch_size(swept: Path, analysis: Analysis, tmp_path: Path) -> None:
    own = tmp_path / "mine"
    write_optim(own / "optim" / "fitted.yaml", analysis)
    law = report_of(swept)["arms"][0]["law"]
    for batch in (4096, 32768):
        cfg = compose(["optim=fitted", f"batch.total_batch_size={batch}"], str(own))
        assert cfg.optim.lr == pytest.approx(law["lr"] * (batch / law["tokens"]) ** law["exponent"], rel=1e-3)
        assert cfg.optim.name == "adamw"
    assert compose(["optim=fitted", "optim.lr=0.5"], str(own)).optim.lr == 0.5


@pytest.mark.parametrize(
    "optim",
    [
        ["optim=muon", "optim.momentum=0.9", "optim.ns_steps=3"],
        ["optim=adamw", "optim.beta2=0.99", "optim.weight_decay=0"],
        ["optim=adamw", "optim.beta2_half_life_tokens=99"],
    ],
)
def test_a_law_keeps_the_optimizer_of_its_sweep_with_all_keys(optim: list[str], swept: Path, tmp_path: Path) -> None:
    runs, config = find_runs(swept), compose(optim)
    of_optim = {key: value for key, value in result_deciding(config).items() if key.startswith("optim.")}
    for run in runs:
        run.config = {key: value for key, value in run.config.items() if not key.startswith("optim.")} | of_optim
    write_optim(tmp_path / "optim" / "fitted.yaml", analyse("sweep", runs))
    assert replace(compose(["optim=fitted"], str(tmp_path)).optim, lr=1.0) == replace(config.optim, lr=1.0)


def test_the_law_is_not_scaled_twice(analysis: Analysis, tmp_path: Path) -> None:
    write_optim(tmp_path / "optim" / "fitted.yaml", analysis)
    twice = ["optim=fitted", "scaling.lr=sqrt", "scaling.reference_tokens=8192"]
    with pytest.raises(ConfigError, match=r"scaling.lr=sqrt: the fitted law of optim scales lr with the batch size"):
        compose(twice, str(tmp_path))
    decay = ["optim=fitted", "scaling.weight_decay=tau", twice[2]]
    with pytest.raises(ConfigError, match=r"scaling.weight_decay=tau: the fitted law of optim changes lr"):
        compose(decay, str(tmp_path))
    assert compose([*twice, "optim.lr=0.5"], str(tmp_path)).optim.lr == 0.5
    assert compose(["optim=fitted", "scaling.betas=half_life", *twice[2:]], str(tmp_path)).scaling.betas == "half_life"


def test_the_law_of_an_arm_with_scaled_betas_says_so(swept: Path, tmp_path: Path) -> None:
    runs = find_runs(swept)
    for run in runs:
        run.config |= {"scaling.betas": "beta2_half_life", "scaling.reference_tokens": 8192}
    write_optim(tmp_path / "optim" / "fitted.yaml", analyse("sweep", runs))
    given = "# Give with it: scaling.betas=beta2_half_life scaling.reference_tokens=8192"
    assert f"{given}\n" in (tmp_path / "optim" / "fitted.yaml").read_text()


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0), ("power", 4**0.3)])
def test_a_law_has_the_weight_decay_that_the_rule_gave_its_runs(
    swept: Path, tmp_path: Path, rule: str, factor: float
) -> None:
    """At four times the reference batch size: 4 times that of the file, divided by the factor of the learning rate."""
    runs = find_runs(swept)
    for run in runs:
        run.config |= {
            "scaling.lr": rule, "scaling.exponent": 0.3, "scaling.weight_decay": "tau",
            "scaling.reference_tokens": 4096,
        }  # fmt: skip
    write_optim(tmp_path / "optim" / "fitted.yaml", analyse("sweep", runs))
    optim = compose(["model=nano", "optim=fitted", "batch.total_batch_size=16384"], str(tmp_path)).optim
    assert optim.weight_decay == pytest.approx(0.1 * 4 / factor, rel=1e-3)


def test_a_law_whose_weight_decay_is_no_power_is_not_written(swept: Path, tmp_path: Path) -> None:
    runs = find_runs(swept)
    for run in runs:
        run.config |= {"scaling.lr": "surge", "scaling.weight_decay": "tau", "scaling.reference_tokens": 4096}
    with pytest.raises(ConfigError, match=r"with scaling.lr=surge and scaling.weight_decay=tau the weight decay is no"):
        write_optim(tmp_path / "optim" / "fitted.yaml", analyse("sweep", runs))


def test_a_law_replaces_one_written_before(analysis: Analysis, tmp_path: Path) -> None:
    path = tmp_path / "optim" / "fitted.yaml"
    write_optim(path, analysis)
    text = path.read_text()
    path.write_text(text + "# more\n")
    write_optim(path, analysis)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("fitted.yaml", "must be a file optim/NAME.yaml"),
        ("optim/fitted.txt", "must be a file optim/NAME.yaml"),
        ("lib/site-packages/gptexp/conf/optim/fitted.yaml", "is in an installed package"),
        ("optim/own.yaml", "exists, and gptexp report did not write it"),
    ],
)
def test_a_law_is_not_written_to_a_wrong_path_or_over_another_file(tmp_path: Path, path: str, said: str) -> None:
    own = tmp_path / "optim" / "own.yaml"
    own.parent.mkdir()
    own.write_text("lr: 1\n")
    with pytest.raises(ConfigError, match=said):
        check_target(tmp_path / path)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [own]
    assert own.read_text() == "lr: 1\n"


def test_a_sweep_without_a_law_writes_no_file(tmp_path: Path) -> None:
    edge = analyse("edge", find_runs(write_sweep(tmp_path / "edge", centre=0.001)))
    with pytest.raises(ConfigError, match="has 0 fitted laws"):
        write_optim(tmp_path / "optim" / "fitted.yaml", edge)
