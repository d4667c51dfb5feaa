"""The law of a sweep as a config file. It sets the learning rate of any batch size and overwrites no other file.

A run that is unlike those of the sweep is refused or warned of.
"""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ForkServer
from refusals import codes_in
from sweeps import TOKENS, compose_sweep, report_of, write_sweep

from gptexp.command import planning
from gptexp.config.branching import Parent
from gptexp.config.compose import compose
from gptexp.config.fitted import fitted_warnings, other_text
from gptexp.config.rules import check
from gptexp.config.schema import Config, FittedConfig, result_deciding
from gptexp.process.errors import ConfigError
from gptexp.reporting.listings.differences import differences
from gptexp.reporting.listings.records import Run, find_runs
from gptexp.reporting.page.fitted import check_target, write_optim
from gptexp.reporting.statistics.analysis import analyse
from gptexp.storage import run_dir
from gptexp.sweep.cells import cell_name

LIKE = ("model=gpt2", f"train.max_tokens={TOKENS}", "batch.micro_batch_size=1", "optim=fitted")  # as the sweep's runs
INSTEAD = "; give optim.lr, or fitted.anyway=true to use the law all the same"
UNLIKE = ": unlike the runs of the fitted law of optim, so another learning rate may be best"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose best learning rate grows with the root of the batch size; tests must not write into it."""
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "root")


def write_law(folder: Path, runs: Sequence[Run]) -> str:
    """Write the law of `runs` as optim=fitted. Returns `folder`, for --config-dir."""
    write_optim(folder / "optim" / "fitted.yaml", analyse("sweep", runs))
    return str(folder)


@pytest.fixture(scope="module")
def own(swept: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the law as optim=fitted; tests must not write into it."""
    return write_law(tmp_path_factory.mktemp("own"), find_runs(swept))


@pytest.fixture
def runs(swept: Path) -> list[Run]:
    """The runs of the sweep, which a test may change in memory."""
    return find_runs(swept)


@pytest.mark.e2e
def test_the_law_sets_the_learning_rate_of_any_batch_size(swept: Path, own: str) -> None:
    law = report_of(swept)["arms"][0]["law"]
    for batch in (4096, 32768):
        cfg = compose([*LIKE, f"batch.total_batch_size={batch}"], own)
        assert cfg.optim.lr == pytest.approx(law["lr"] * (batch / law["tokens"]) ** law["exponent"], rel=1e-3)
        assert cfg.optim.name == "adamw"
    assert compose([*LIKE, "optim.lr=0.5"], own).optim.lr == 0.5


@pytest.mark.e2e
@pytest.mark.parametrize(
    "optim",
    [
        ["optim=muon", "optim.momentum=0.9", "optim.ns_steps=3"],
        ["optim=adamw", "optim.beta2=0.99", "optim.weight_decay=0"],
        ["optim=adamw", "optim.beta2_half_life_tokens=99"],
        ["optim=schedulefree", "schedule=constant"],
    ],
)
def test_a_law_keeps_the_optimizer_of_its_sweep_with_all_keys(
    optim: list[str], runs: list[Run], tmp_path: Path
) -> None:
    if "optim=schedulefree" in optim:
        pytest.importorskip("pytorch_optimizer", reason="no pytorch_optimizer; pip install 'gptexp[optim]'")
    config = compose(optim)
    of_optim = {key: value for key, value in result_deciding(config).items() if key.startswith("optim.")}
    for run in runs:
        run.config = {key: value for key, value in run.config.items() if not key.startswith("optim.")} | of_optim
    write_law(tmp_path, runs)
    assert replace(compose([*LIKE], str(tmp_path)).optim, lr=1.0) == replace(config.optim, lr=1.0)


def test_the_law_is_not_scaled_twice(own: str) -> None:
    scaled = [*LIKE, "scaling.reference_tokens=8192"]
    for rule in ("scaling.lr=sqrt", "scaling.weight_decay=tau"):
        with pytest.raises(ConfigError, match=f"{rule}: the fitted law of optim "):
            compose([*scaled, rule], own)
    assert compose([*scaled, "scaling.lr=sqrt", "optim.lr=0.5"], own).optim.lr == 0.5
    assert compose([*scaled, "scaling.betas=half_life"], own).scaling.betas == "half_life"


def test_the_law_of_an_arm_with_scaled_betas_says_so(runs: list[Run], tmp_path: Path) -> None:
    for run in runs:
        run.config |= {"scaling.betas": "beta2_half_life", "scaling.reference_tokens": 8192}
    write_law(tmp_path, runs)
    given = ["scaling.betas=beta2_half_life", "scaling.reference_tokens=8192"]
    assert f"# Give with it: {' '.join(given)}\n" in (tmp_path / "optim" / "fitted.yaml").read_text()
    assert list(fitted_warnings(compose([*LIKE, *given], str(tmp_path)))) == []
    betas = "scaling.betas=none (the fit: beta2_half_life), scaling.reference_tokens=null (the fit: 8192)"
    assert list(fitted_warnings(compose([*LIKE], str(tmp_path)))) == [betas + UNLIKE]


@pytest.mark.e2e
@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0), ("power", 4**0.3)])
def test_a_law_has_the_weight_decay_that_the_rule_gave_its_runs(
    runs: list[Run], tmp_path: Path, rule: str, factor: float
) -> None:
    """At four times the reference batch size: 4 times that of the file, divided by the factor of the learning rate."""
    for run in runs:
        run.config |= {
            "scaling.lr": rule, "scaling.exponent": 0.3, "scaling.weight_decay": "tau",
            "scaling.reference_tokens": 4096,
        }  # fmt: skip
    write_law(tmp_path, runs)
    cfg = compose([*LIKE, "batch.total_batch_size=16384"], str(tmp_path))
    assert cfg.optim.weight_decay == pytest.approx(0.1 * 4 / factor, rel=1e-3)
    assert list(fitted_warnings(cfg)) == []


def test_a_law_whose_weight_decay_is_no_power_is_not_written(runs: list[Run], tmp_path: Path) -> None:
    for run in runs:
        run.config |= {"scaling.lr": "surge", "scaling.weight_decay": "tau", "scaling.reference_tokens": 4096}
    with pytest.raises(ConfigError, match=r"with scaling.lr=surge and scaling.weight_decay=tau the weight decay is no"):
        write_law(tmp_path, runs)


def test_a_law_replaces_one_written_before(runs: list[Run], tmp_path: Path) -> None:
    path = tmp_path / "optim" / "fitted.yaml"
    write_law(tmp_path, runs)
    text = path.read_text()
    for before in (text + "# more\n", "# Fitted by gptexp report from old, whose version knew no facts\nlr: 1\n"):
        path.write_text(before)
        check_target(path)
        write_law(tmp_path, runs)
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


@pytest.mark.e2e
def test_a_sweep_without_a_law_writes_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 0 fitted laws"):
        write_law(tmp_path, find_runs(write_sweep(tmp_path / "edge", centre=0.001)))


def test_a_law_has_the_facts_of_its_fit(own: str) -> None:
    fit = compose([*LIKE], own).fitted
    assert (fit.min_batch_tokens, fit.max_batch_tokens, fit.min_tokens, fit.max_tokens) == (4096, 16384, TOKENS, TOKENS)
    assert (fit.data_hash, fit.anyway) == ("0123", False)
    runs = result_deciding(Config())
    assert fit.settings == {key: runs[key] for key in fit.settings}
    sections = {"model", "optim", "schedule", "batch", "scaling", "data", "init_from"}
    assert {key.partition(".")[0] for key in fit.settings} == sections


STRANGE = "${oc.env:HOME}\nmodel: {n_layer: 1}"


@pytest.mark.parametrize("text", ["12e4567890123456", "0123456789012345", None, STRANGE])
def test_a_text_of_a_run_is_written_as_data(runs: list[Run], tmp_path: Path, text: str | None) -> None:
    """Hydra trusts the file of a law, and the runs may be a stranger's. A path of a tokenizer is no fact."""
    for run in runs:
        run.summary["data_hash"] = text
        run.config |= {"init_from": STRANGE, "data.tokenizer": "/gone/tokenizer.json"}
    fit = compose([*LIKE], write_law(tmp_path, runs)).fitted
    assert fit.data_hash == (text and text.replace("${", "$ {"))
    assert fit.settings["init_from"] == STRANGE.replace("${", "$ {")
    assert "data.tokenizer" not in fit.settings


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("overrides", "first", "keys"),
    [
        (["model.n_layer=6"], "model.n_layer=6 (the fit: 12)", 1),
        (["model.dropout=0.1"], "model.dropout=0.1 (the fit: 0.0)", 1),
        (["model=nano"], "model.n_layer=2 (the fit: 12), model.n_head=2", 4),
        (["model.parametrisation=mup", "model.base_n_embd=64", "model.base_n_head=1"], "model.parametrisation=mup", 3),
    ],
)
def test_the_law_of_another_model_is_refused_unless_it_is_wanted(
    own: str, overrides: list[str], first: str, keys: int
) -> None:
    with pytest.raises(ConfigError) as error:
        compose([*LIKE, *overrides], own)
    [problem] = error.value.problems
    assert problem.startswith(first)
    assert problem.count("(the fit: ") + problem.count("1 other key") == keys
    assert problem.endswith(UNLIKE + INSTEAD)
    [warning] = fitted_warnings(compose([*LIKE, *overrides, "fitted.anyway=true"], own))
    assert warning + INSTEAD == problem
    assert compose([*LIKE, *overrides, "optim.lr=0.5"], own).fitted == FittedConfig()


def test_the_law_of_another_optimizer_is_refused_unless_it_is_wanted(runs: list[Run], tmp_path: Path) -> None:
    """A file that extends that of the law can choose one with the same keys."""
    law, other = tmp_path / "optim" / "fitted.yaml", tmp_path / "optim" / "other.yaml"
    write_law(tmp_path, runs)
    law.write_text(
        law.read_text().replace("optim_keys@optim: adamw", "optim_keys@optim: soap").replace("  fused", "  #")
    )
    other.write_text("# @package _global_\ndefaults: [fitted]\noptim: {weight_decay: 0.2}\n")
    pytest.importorskip("pytorch_optimizer", reason="no pytorch_optimizer; pip install 'gptexp[optim]'")
    name = f"optim.name=soap (the fit: adamw){UNLIKE}"
    with pytest.raises(ConfigError) as error:
        compose([*LIKE, "optim=other"], str(tmp_path))
    assert error.value.problems == [name + INSTEAD]
    cfg = compose([*LIKE, "optim=other", "fitted.anyway=true"], str(tmp_path))
    assert list(fitted_warnings(cfg)) == [name, f"optim.weight_decay=0.2 (the fit: 0.1){UNLIKE}"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        (["batch.total_batch_size=4096"], []),
        (["batch.total_batch_size=16384"], []),
        (["batch.total_batch_size=32768"], ["batch.total_batch_size=32,768 is 1.0 octave above"]),
        (["batch.total_batch_size=1024"], ["batch.total_batch_size=1,024 is 2.0 octaves below"]),
        (
            ["batch.total_batch_size=16400", "batch.seq_len=16"],
            ["batch.total_batch_size=16,400 is 0.001 octaves above", "batch.seq_len=16 (the fit: null)"],
        ),
        ([f"train.max_tokens={TOKENS * 3 // 2}"], []),
        ([f"train.max_tokens={TOKENS * 2 // 3 + 1}"], []),
        ([f"train.max_tokens={TOKENS * 2}"], ["a run of 524,288 tokens is 1.0 octave above"]),
        (["train.max_steps=8"], ["a run of 65,536 tokens is 2.0 octaves below"]),
        (["schedule.name=linear"], ["schedule.name=linear (the fit: cosine)"]),
        (["optim.beta2=0.99"], ["optim.beta2=0.99 (the fit: 0.95)"]),
        (["data=shakespeare"], ["data.name=shakespeare (the fit: stdlib)"]),
        (["data.tokenizer=bytes"], ["data.tokenizer=bytes (the fit: gpt2)"]),
        (["data.order=sequential", "train.seed=5", "train.eval_every=4", "optim.grad_clip=1"], []),
        (["batch.ramp_from_tokens=4096", "batch.ramp_tokens=65536"], ["batch.ramp_from_tokens=4096 (the fit: null)"]),
        (["init_from=gpt2"], ["init_from=gpt2 (the fit: null)"]),
        (["optim.lr=0.5", "batch.total_batch_size=65536", "schedule=linear"], []),
    ],
)
def test_a_run_unlike_those_of_the_fit_is_warned_of(own: str, overrides: list[str], keys: list[str]) -> None:
    warnings = list(fitted_warnings(compose([*LIKE, *overrides], own)))
    assert [warning[: len(key)] for warning, key in zip(warnings, keys, strict=True)] == keys


def test_the_commands_of_the_readme_use_the_law_without_a_warning(runs: list[Run], tmp_path: Path) -> None:
    """Its sweep is of model=nano, and of the default length. Without the model it is that of the first minute."""
    nano = compose(["model=nano"])
    for run in runs:
        run.config |= {k: v for k, v in result_deciding(nano).items() if k.startswith("model.")}
        run.of_tokens = nano.train.max_tokens
    write_law(tmp_path, runs)
    use = ["optim=fitted", "batch.total_batch_size=4096"]
    assert list(fitted_warnings(compose(["model=nano", *use], str(tmp_path)))) == []
    with pytest.raises(ConfigError, match=r"model.n_head=8 \(the fit: 2\)"):
        compose(use, str(tmp_path))


def test_another_text_is_warned_of_unless_a_key_says_so(own: str) -> None:
    line = (
        "the text (hash 4567) is not that of the fitted law of optim (hash 0123), so another learning rate may be best"
    )
    like = compose([*LIKE], own)
    assert (other_text(like, "0123"), other_text(like, "4567")) == ([], [line])
    assert other_text(compose([*LIKE, "data=shakespeare"], own), "4567") == []
    assert other_text(compose([*LIKE, "optim.lr=0.5"], own), "4567") == []


def test_a_plan_of_cells_warns_of_another_text_where_the_law_is_used(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_count_epoch", lambda cfg: planning.Epoch(10**9, "4567"))
    cells = [compose([*LIKE[:-1], "optim=adamw"], own), compose([*LIKE], own)]
    for order in (cells, cells[::-1]):
        epochs: dict[str, planning.Epoch] = {}
        warned = [any("hash 4567" in line for line in planning.plan(cfg, epochs=epochs).warnings) for cfg in order]
        assert warned == [cfg is cells[1] for cfg in order]


def test_a_law_without_facts_is_used_without_a_question(own: str, tmp_path: Path) -> None:
    """As an older version wrote it, or as one is written by hand."""
    (tmp_path / "optim").mkdir()
    law = "defaults:\n  - adamw\nlr: ${power_law:${batch.total_batch_size},0.02,8192,0.5}\n"
    (tmp_path / "optim" / "fitted.yaml").write_text(law)
    cfg = compose(["model=nano", "optim=fitted", "batch.total_batch_size=32768", "schedule=linear"], str(tmp_path))
    assert cfg.optim.lr == pytest.approx(0.04)
    assert [*fitted_warnings(cfg), *other_text(cfg, "4567")] == []


@pytest.mark.e2e
def test_a_sweep_uses_the_law_and_refuses_the_cells_of_other_models(own: str) -> None:
    sizes = compose_sweep([*LIKE, "hydra.mode=MULTIRUN", "batch.total_batch_size=4096,16384,65536"], own)
    configs = [draft.config for draft in sizes.drafts if draft.config is not None]
    lrs = [config.optim.lr for config in configs]
    assert [lr / lrs[0] for lr in lrs] == pytest.approx([1, 2, 4], rel=0.05)
    assert [len([*fitted_warnings(config)]) for config in configs] == [0, 0, 1]
    models = compose_sweep([*LIKE[1:], "hydra.mode=MULTIRUN", "model=gpt2,nano"], own)
    assert [(d.title, len(d.problems)) for d in models.drafts] == [("model=gpt2", 0), ("model=nano", 1)]
    given = compose_sweep([*LIKE[1:], "hydra.mode=MULTIRUN", "model=gpt2,nano", "optim.lr=1e-3,2e-3"], own)
    assert [draft.problems for draft in given.drafts] == [[]] * 4


def test_the_facts_of_a_law_are_no_part_of_a_run(own: str, corpus: Path, tmp_path: Path) -> None:
    """Neither of the name of a cell, nor of what tells arms or runs from one another."""
    like = [*LIKE, "data=text", f"data.path={corpus}"]
    by_law = compose([*like, "fitted.anyway=true"], own)
    as_typed = compose([*like, f"optim.lr={by_law.optim.lr!r}"], own)
    assert by_law.fitted != as_typed.fitted
    assert result_deciding(by_law) == result_deciding(as_typed)
    assert cell_name(by_law, {}, tmp_path) == cell_name(as_typed, {}, tmp_path)
    for name, config in (("law", by_law), ("typed", as_typed)):
        run_dir.save_config(tmp_path / name, config)
    assert differences(find_runs(tmp_path)) == []
    assert run_dir.load_config(tmp_path / "law") == by_law


def test_a_run_goes_on_that_was_allowed_to_start(own: str, tmp_path: Path) -> None:
    run_dir.save_config(tmp_path, compose([*LIKE, "model=nano", "fitted.anyway=true"], own))
    check(run_dir.load_config(tmp_path), 1)


def test_a_branch_has_the_learning_rate_of_its_run_and_no_law(own: str, tmp_path: Path) -> None:
    run = compose([*LIKE, "schedule=constant"], own)
    parent = Parent(tmp_path, run, step=16, tokens=16 * 8192)
    longer = ["branch_from=run", f"train.max_tokens={8 * TOKENS}", "schedule=wsd"]
    for given in (longer, [*LIKE, *longer]):
        branch = compose(given, own, find_parent=lambda _: parent)
        assert (branch.optim, branch.fitted) == (run.optim, FittedConfig())


@pytest.mark.e2e
def test_the_law_of_another_model_is_refused_before_torch_is_loaded(
    own: str, light_server: ForkServer, tmp_path: Path
) -> None:
    for verb in ("train", "plan"):
        answer = light_server.ask([verb, "--config-dir", own, *LIKE, "model=nano"], tmp_path)
        assert (answer["code"], codes_in(answer["stderr"])) == (2, ["law-of-other-runs"]), answer
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def of_tiny(runs: list[Run], tiny: Sequence[str], tmp_path: Path) -> list[str]:
    """Arguments of a run of the model of `tiny`, by a law that was fitted to it on other text with larger batches."""
    config = result_deciding(compose(tiny))
    for run in runs:
        run.config |= {key: value for key, value in config.items() if key.startswith(("model.", "data."))}
    write_law(tmp_path / "my", runs)
    return [*("--config-dir", "my", "optim=fitted"), *(text for text in tiny if not text.startswith("optim.lr="))]


WARNED = (
    "gptexp: warning: batch.total_batch_size=128 is 5.0 octaves below the smallest batch size of the fit, 4,096",
    "gptexp: warning: a run of 512 tokens is 9.0 octaves below the smallest number of tokens of the fit, 262,144",
    "gptexp: warning: the text (hash ",
)


@pytest.mark.e2e
def test_a_run_prints_each_warning_once_and_so_does_its_plan(
    gptexp: Callable[..., subprocess.CompletedProcess[str]], of_tiny: list[str]
) -> None:
    for verb in (("train", "hydra.run.dir=out", "log.progress=lines"), ("plan",)):
        done = gptexp(verb[0], *of_tiny, *verb[1:])
        assert done.returncode == 0, done.stderr
        assert [done.stderr.count(line) for line in WARNED] == [1, 1, 1], done.stderr
        assert done.stderr.count("warning: ") == 3, done.stderr
    resumed = gptexp("resume", "out")
    assert (resumed.returncode, resumed.stderr) == (0, "")


@pytest.mark.e2e
def test_a_sweep_prints_each_warning_once(
    gptexp: Callable[..., subprocess.CompletedProcess[str]], of_tiny: list[str]
) -> None:
    for verb in ("train", "plan"):
        done = gptexp(verb, "-m", *of_tiny, "train.seed=1,2")
        assert done.returncode == 0, done.stderr
        assert [done.stderr.count(line) for line in WARNED[:2]] == [1, 1], done.stderr
