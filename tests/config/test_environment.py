"""wandb's environment variables: each counts unless its key is set, and a wrong value is refused."""

import pytest

from gptexp.config.compose import WANDB_VARIABLES, compose
from gptexp.config.schema import Config, LogConfig, fields_of
from gptexp.process.errors import ConfigError

GIVEN = {
    "log.wandb.entity": ("a-team", "a-team"),
    "log.wandb.project": ("mine", "mine"),
    "log.wandb.group": ("together", "together"),
    "log.wandb.name": ("a name", "a name"),
    "log.wandb.tags": ("a, b c,,d", ["a", "b c", "d"]),
    "log.note": ("why\nand how", "why\nand how"),
}


def log_of(*overrides: str) -> dict[str, object]:
    return {key: value for key, _, value in fields_of(compose(overrides)) if key in GIVEN}


@pytest.fixture
def every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, key in WANDB_VARIABLES.items():
        monkeypatch.setenv(variable, GIVEN[key][0])


@pytest.mark.usefixtures("every_variable")
def test_each_variable_sets_its_key() -> None:
    assert log_of() == {key: value for key, (_, value) in GIVEN.items()}


@pytest.mark.usefixtures("every_variable")
def test_a_key_on_the_command_line_wins_also_with_its_default() -> None:
    explicit = [
        "log.wandb.entity=null", "log.wandb.project=gptexp", "log.wandb.group=null", "log.wandb.name=x",
        "log.wandb.tags=[]", "log.note=null",
    ]  # fmt: skip
    defaults = {key: value for key, _, value in fields_of(Config()) if key in GIVEN}
    assert log_of(*explicit) == {**defaults, "log.wandb.name": "x"}


@pytest.mark.usefixtures("every_variable")
def test_a_key_in_a_file_wins(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("own")
    (folder / "log").mkdir()
    (folder / "log" / "ours.yaml").write_text("wandb: {project: ours}\n")
    config = compose(["log=ours"], config_dir=str(folder))
    assert (config.log.wandb.project, config.log.wandb.entity) == ("ours", "a-team")


@pytest.mark.usefixtures("every_variable")
def test_the_cells_of_a_sweep_keep_their_names() -> None:
    found = compose(["sweep.name=grid"]).log.wandb
    assert (found.name, found.project) == (None, "mine")


@pytest.mark.usefixtures("every_variable")
def test_without_wandb_no_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "a/b")
    log = compose(["model=gpt2", "log=disabled"]).log
    assert log == LogConfig(wandb=log.wandb)
    assert compose(["log=disabled"]).log.wandb.project == "gptexp"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("WANDB_PROJECT", "a/b", "WANDB_PROJECT=a/b: must have 1 to 80 characters"),
        ("WANDB_TAGS", f"a,{'x' * 65}", "each tag must have 1 to 64 characters; or set log.wandb.tags"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as refused:
        compose([])
    [line] = refused.value.problems
    assert line.startswith(variable)
    assert said in line


@pytest.mark.e2e
@pytest.mark.parametrize("variable", WANDB_VARIABLES)
def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, " ")
    assert compose([]) == compose(["log.note=null"])
