"""`--tag` and `--note` of `gptexp train`: any text arrives in the config as it is, and changes no result."""

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ForkServer

from gptexp.command.hydra_main import spelled_out
from gptexp.config.compose import composition, hydra_engine, job_of
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

TEXTS = (
    "plain", "two words", "a,b", "[x]", "{a: b}", "a=b", "null", "3", "1e-3", " both ends ", "it's", '"quoted"', "\\",
    "end\\", "$x", "${x}", "\\${x}", "\\\\${oc.env:HOME}", "\u00fc\u4e16", "-x", "--tag",
    "line\nbreak", "\t", "#", "%(x)s",
)  # fmt: skip


def test_any_text_is_kept_as_it_is() -> None:
    """Each text is a tag. A composition takes long, so it has many tags; its note is all of them in one text."""
    draw = random.Random(0)
    texts = [*TEXTS, *("".join(draw.choices("ab\\\"'${},=: []\n", k=draw.randint(1, 9))) for _ in range(150))]
    with hydra_engine() as engine:
        for some in (["null"], ["3", "other"], texts[:60], texts[60:120], texts[120:]):
            note = "".join(some)
            overrides = spelled_out([f"--note={note}", *(f"--tag={text}" for text in some)])
            log = job_of(composition(engine, overrides, None, multirun=False)).log
            assert (log.note, log.tags) == (note, some)


def test_other_arguments_are_left_as_they_are() -> None:
    argv = ["-m", "optim.lr=1e-3,2e-3", "--config-dir", "my", "--cfg", "job"]
    assert spelled_out(argv) == argv
    assert spelled_out([*argv[:2], "--tag", "a", *argv[2:]]) == [*argv, 'log.tags=["a"]']


def test_hydras_flags_know_the_short_forms(light_server: ForkServer, tmp_path: Path) -> None:
    done = light_server.ask(["train", "--tag", "a b", "--cfg", "job", "--note", "x", "-p", "log"], tmp_path)
    assert done["code"] == 0, done
    shown = yaml.safe_load(done["stdout"])
    assert (shown["tags"], shown["note"]) == (["a b"], "x")
    assert "--tag T" in light_server.ask(["train", "--help"], tmp_path)["stdout"]


@pytest.mark.e2e
def test_a_run_is_continued_with_other_tags_and_keeps_them(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    started = [*tiny, "hydra.run.dir=out"]
    stopped = gptexp("train", *started, "train.max_minutes=0.0001", "--tag", "first", "--note", "a note")
    assert stopped.returncode == 0, stopped.stderr
    assert run_dir.load_config(tmp_path / "out").log.tags == ["first"]
    again = gptexp("train", *started, "--tag", "second", "--tag", "third")
    assert again.returncode == 0, again.stderr
    assert "cannot resume" not in again.stderr
    log = run_dir.load_config(tmp_path / "out").log
    assert (log.tags, log.note) == (["second", "third"], None)
    assert run_dir.status(tmp_path / "out") == "completed"


@pytest.mark.e2e
def test_the_cells_of_a_sweep_have_its_tags(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    done = gptexp("train", "-m", *tiny, "optim.lr=1e-3,2e-3", "sweep.name=grid", "--tag", "a, b", "--note", "n")
    assert done.returncode == 0, done.stderr
    logs = [run_dir.load_config(path).log for path in (tmp_path / "outputs/grid").glob("lr=*")]
    assert [(log.tags, log.note) for log in logs] == [(["a, b"], "n")] * 2
