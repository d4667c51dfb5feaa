"""Keys of other trainers are answered with gptexp's own."""

import re

import pytest

from gptexp.config.aliases import ALIASES
from gptexp.config.compose import compose
from gptexp.config.paths import folders, options
from gptexp.config.schema import fields_by_key
from gptexp.process.errors import ConfigError


def test_each_answer_names_keys_and_groups_that_exist() -> None:
    known = {*fields_by_key(), "hydra.run.dir"}
    groups = {*options(folders(None)), "data.path", "init_from", "hydra.run.dir"}
    for name, answer in ALIASES.items():
        keys = re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+", answer)
        assert {*keys} <= known, name
        assert {*re.findall(r"([a-z_.]+)=", answer)} <= groups, name


def test_no_name_of_another_trainer_is_the_last_part_of_a_key() -> None:
    assert not ALIASES.keys() & {key.rpartition(".")[2] for key in fields_by_key()}


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("batch_size=4", "batch.total_batch_size"),
        ("training.learning_rate=1e-3", "optim.lr"),
        ("optim.max_grad_norm=1", "optim.grad_clip"),
        ("eval_interval=10", "train.eval_every"),
        ("n_kv_head=2", "model.n_kv_head"),
        ("train.seeed=3", "train.seed"),
    ],
)
def test_an_alias_is_answered_by_a_line(override: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    [problem] = caught.value.problems
    assert problem.code == "unknown-key"
    assert answer in problem


def test_a_suggestion_is_given_only_if_it_is_near() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["always_save_checkpoint=true"])
    assert "did you mean" not in str(caught.value)
