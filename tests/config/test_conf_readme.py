"""conf/README.md agrees with the schema and the files of conf/."""

from conf_readme import CONF, PAGE, page

from gptexp.config.compose import compose
from gptexp.config.schema import Config, fields_of


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python tests/config/conf_readme.py"


def test_every_key_has_a_meaning() -> None:
    rows = [line.split(" | ") for line in page().splitlines() if line.startswith("| `")]
    meaning = {row[0].strip("| `"): row[-1].strip(" |") for row in rows}
    for key, _, _ in fields_of(Config()):
        assert meaning[key], key


def test_every_option_is_on_the_page() -> None:
    text = page()
    for path in CONF.rglob("*.yaml"):
        assert f"({path.relative_to(CONF).as_posix()})" in text


def test_hydra_ignores_the_page_in_conf() -> None:
    """A file in conf/ that is not YAML is neither a group nor an option."""
    assert PAGE.parent == CONF
    assert compose(["model=gpt2"]).model.n_layer == 12
