"""Counts such as 1k and 200M: on the command line, in files, in swept values, and in the names of cells."""

import random
import shlex
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from sweeps import compose_sweep

from gptexp.config.compose import compose, composition, hydra_engine
from gptexp.config.schema import every_key, fields_of
from gptexp.config.spelling import as_typed, canonical
from gptexp.optim import OPTIMIZERS
from gptexp.process.errors import ConfigError
from gptexp.sweep.cells import command, fixed_arguments, name_sweep, settle
from gptexp.sweep.grid import compose_cells

INT = {key: f for key, f, _, _ in every_key() if int in (f.type, *getattr(f.type, "__args__", ()))}

# The keys whose value is the size of a batch or of a context in tokens.
SIZES_OF_BATCHES = {
    "batch.total_batch_size", "batch.ramp_from_tokens", "batch.ramp_quantum_tokens", "scaling.reference_tokens",
    "scaling.noise_scale_tokens", "fitted.min_batch_tokens", "fitted.max_batch_tokens",
    "model.block_size", "model.window", "batch.seq_len", "optim.gradient_noise_like_batch",
}  # fmt: skip


def write(folder: Path, name: str, content: object) -> None:
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    package = "" if file.parent == folder else "# @package _global_\n"
    file.write_text(package + yaml.safe_dump(content))


def nested(values: dict[str, object]) -> object:
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={value}" for key, value in values.items()]))


@pytest.mark.e2e
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_key_with_whole_numbers_takes_counts_in_a_file(optimizer: str, tmp_path: Path) -> None:
    keys = [key for key in INT if not key.startswith("optim.") or key[6:] in OPTIMIZERS[optimizer].__dataclass_fields__]
    write(tmp_path, "experiment/mine", nested(dict.fromkeys(keys, "3k")))
    with hydra_engine(str(tmp_path)) as engine:
        composed = composition(engine, ["experiment=mine", f"optim={optimizer}"], str(tmp_path), multirun=False)
    values = {key: OmegaConf.select(composed, key) for key in keys}
    assert values == {key: 3 * 1024 if key in SIZES_OF_BATCHES else 3000 for key in keys}
    assert {type(value) for value in values.values()} == {int}
    assert len(keys) > 40


@pytest.mark.e2e
@pytest.mark.parametrize("text", ["4k", "4096", "4_096", 4096.0, "4.096e3", "0.00390625M"])
def test_a_count_in_a_file_and_on_the_command_line_gives_one_config(
    text: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compose(["model=nano", "batch.total_batch_size=4096", "train.max_tokens=2_000_000", "train.seed=7_000"])
    monkeypatch.setenv("SEED", "7k")
    values = {"batch": {"total_batch_size": text}, "train": {"max_tokens": "2M", "seed": "${oc.env:SEED}"}}
    write(tmp_path, "experiment/mine", values)
    defaults = ["config", "_self_", {"override model": "nano"}]
    write(tmp_path, "own", {"defaults": defaults, **values})
    assert compose(["model=nano", "experiment=mine"], str(tmp_path)) == plain
    assert compose([], str(tmp_path), "own") == plain
    typed = [f"batch.total_batch_size={text}", "train.max_tokens=2M", "train.seed=7k"]
    assert compose(["model=nano", *typed]) == plain
    assert all(type(value) is type(dict(_values(plain))[key]) for key, value in _values(compose(typed)))


def _values(config: object) -> list[tuple[str, object]]:
    return [(key, value) for key, _, value in fields_of(config) if key in INT]


@pytest.mark.parametrize("value", ["200m", "1.0005k", 1.5, True, "many", "1,000"])
@pytest.mark.parametrize("key", ["train.max_tokens", "train.max_steps", "batch.micro_batch_size"])
def test_a_wrong_count_in_a_file_is_one_line_with_the_file_the_key_and_the_value(
    key: str, value: object, tmp_path: Path
) -> None:
    section, name = key.split(".")
    write(tmp_path, "experiment/mine", {section: {name: value}})
    with pytest.raises(ConfigError) as error:
        compose(["experiment=mine"], str(tmp_path))
    [problem] = error.value.problems
    assert "\n" not in problem
    for part in (key, "experiment/mine", f"'{value}'", "whole number"):
        assert part in problem


def test_keys_with_other_types_do_not_take_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "1k").mkdir()
    (folder / "2M").write_text("Some text.\n")
    monkeypatch.chdir(folder)
    config = compose(["log.note=1k", "sweep.name=2M", "log.tags=[1k,2B]", "data=text", "data.path=2M"])
    assert (config.log.note, config.sweep.name, config.data.path) == ("1k", "2M", str(folder / "2M"))
    assert config.log.tags == ["1k", "2B"]
    with pytest.raises(ConfigError) as error:
        compose(["optim.lr=1k"])
    assert [problem.code for problem in error.value.problems] == ["wrong-type"]


# --- sweeps ---
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        ("1k,4k,16k", [1024, 4096, 16384]),
        ("choice(1k,4_096,1.6384e4)", [1024, 4096, 16384]),
        ("range(1k,4k,1k)", [1024, 2048, 3072]),
        ("sort(4k,1k)", [1024, 4096]),
        ("1k,1024,1.024e3", [1024]),
    ],
)
def test_swept_sizes_may_be_counts_also_in_a_file(value: str, sizes: list[int], tmp_path: Path) -> None:
    write(tmp_path, "sweep/mine", {"hydra": {"sweeper": {"params": {"batch.total_batch_size": value}}}})
    small = ["hydra.mode=MULTIRUN", "model.block_size=64", "batch.micro_batch_size=1"]
    grids = [compose_sweep([*small, f"batch.total_batch_size={value}"])]
    with hydra_engine(str(tmp_path)) as engine:
        of_file = composition(engine, [*small, "sweep=mine"], str(tmp_path), multirun=True)
        grids.append(compose_cells(engine, of_file))
    for grid in grids:
        assert [d.config.batch.total_batch_size for d in grid.drafts if d.config] == sizes
        assert [d.values for d in grid.drafts] == [{"batch.total_batch_size": str(size)} for size in sizes]


@pytest.mark.parametrize("value", ["range(1m,4m)", "1k,1.0005k", "choice(1k,2b)", "[1k, 2m]"])
def test_a_wrong_swept_count_in_a_file_is_one_line_with_the_key_and_the_value(value: str, tmp_path: Path) -> None:
    write(tmp_path, "sweep/mine", {"hydra": {"sweeper": {"params": {"train.max_tokens": yaml.safe_load(value)}}}})
    with pytest.raises(ConfigError) as error, hydra_engine(str(tmp_path)) as engine:
        compose_cells(engine, composition(engine, ["sweep=mine"], str(tmp_path), multirun=True))
    [problem] = error.value.problems
    assert "\n" not in problem
    assert "train.max_tokens" in problem
    assert "whole number" in problem


@pytest.mark.e2e
def test_the_ends_of_an_interval_and_the_number_of_cells_may_be_counts() -> None:
    many = ["hydra.mode=MULTIRUN", "hydra/sweeper=random", "hydra.sweeper.n_cells=0.02k", "hydra.sweeper.seed=1k"]
    spelt, plain = (
        compose_sweep([*many, f"train.seed={interval}"])
        for interval in ("tag(log,interval(1k,2M))", "tag(log,interval(1000,2000000))")
    )
    assert [draft.values for draft in spelt.drafts] == [draft.values for draft in plain.drafts]
    assert len({draft.values["train.seed"] for draft in spelt.drafts}) == spelt.of == 20
    optuna = compose_sweep(
        ["hydra.mode=MULTIRUN", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1e2", "optim.lr=1,2"]
    )
    assert optuna.of == 100


def sweep_of(sizes: str, tokens: str, corpus: Path, tmp_path: Path) -> tuple[str, list[str], list[str], list[str]]:
    """The name of a sweep, the names of its cells, and what its commands print."""
    given = ["model.block_size=64", "batch.micro_batch_size=1", "data=text", f"data.path={corpus}"]
    given += [f"batch.total_batch_size={sizes}", f"train.max_tokens={tokens}"]
    with hydra_engine() as engine:
        config = composition(engine, given, None, multirun=True)
        cells = settle(compose_cells(engine, config).drafts, tmp_path)
    name_sweep(config)
    return config.sweep.name, [cell.name for cell in cells], command(config), fixed_arguments(config)


@pytest.mark.e2e
def test_the_same_sizes_in_any_spelling_are_the_same_sweep_with_the_same_cells(corpus: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    spelt = {
        1024: ["1k", "1024", "1_024", "1.024e3"],
        4096: ["4k", "4096.0", "4e0k"],
        2**19: ["0.5M", "512k", "524288"],
    }
    plain = sweep_of(",".join(map(str, spelt)), "2000000", corpus, tmp_path)
    assert len(plain[1]) == 3
    for _ in range(4):
        sizes = ",".join(rng.choice(texts) for texts in spelt.values())
        tokens = rng.choice(["2M", "2e6", "2_000k", "0.002B"])
        assert sweep_of(sizes, tokens, corpus, tmp_path) == plain, (sizes, tokens)


@pytest.mark.parametrize("typed", ["batch.total_batch_size=1k,0.5M", "train.seed=range(1k,4k)", "train.max_tokens=2B"])
def test_a_printed_command_stays_what_it_is_when_typed_again(typed: str) -> None:
    printed = as_typed(canonical([typed]))
    assert as_typed(canonical(shlex.split(shlex.join(printed)))) == printed == canonical([typed])
    assert not any(letter in printed[0].partition("=")[2] for letter in "kMB")
