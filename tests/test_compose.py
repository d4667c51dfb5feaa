"""From overrides to a config: precedence, paths, launchers."""

from pathlib import Path

import pytest

from gptexp.compose import compose, conf_dir, packaged_conf
from gptexp.distributed import launcher_rank
from gptexp.errors import ConfigError


def test_a_length_on_the_command_line_wins_over_a_file(corpus: Path) -> None:
    """schedule=gpt3 sets warmup_tokens, which would win over a ratio; what was typed wins over both."""
    long = ["schedule=gpt3", "batch=gpt3_3m", "model=gpt3_125m", "train.max_tokens=300_000_000_000"]
    assert compose(long).schedule.warmup_tokens == 375_000_000
    typed = compose([*long, "schedule.warmup_ratio=0.01"]).schedule
    assert (typed.warmup_tokens, typed.warmup_ratio, typed.decay_tokens) == (None, 0.01, 260_000_000_000)
    both = compose([*long, "schedule.warmup_ratio=0.01", "schedule.warmup_steps=50"]).schedule
    assert both.warmup_steps == 50


def test_paths_are_absolute_and_folders_before_them_no_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "d[1]"
    folder.mkdir()
    (folder / "x.txt").write_text("text")
    monkeypatch.chdir(folder)
    assert compose(["data=text", "data.path=x.txt"]).data.path == str(folder / "x.txt")
    from gptexp.data.corpora import matching_files

    pattern = compose(["data=text", "data.path=*.txt"]).data.path
    assert matching_files(pattern) == [folder / "x.txt"]


def test_world_size_is_the_launchers_unless_they_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose([]).world.size == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert compose(["world=ddp4"]).world.size == compose([]).world.size == 4
    with pytest.raises(ConfigError) as error:
        compose(["world=single", "optim.lr=1e-3", "model.n_head=3"])
    assert len(error.value.problems) == 2  # one does not hide the other
    assert "the launcher started 4 ranks" in error.value.problems[0]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 8, 1, 2)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, None),
        (
            {
                "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7",
                "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "n1",
            },
            (9, 16, 1, 8),
        ),
    ],
)  # fmt: skip
def test_who_launched_this(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: tuple[int, ...] | None
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the function sets is undone
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    rank = launcher_rank()
    assert (rank and (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size)) == expected


def test_an_empty_name_of_a_conf_folder_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPTEXP_CONF", "")
    assert conf_dir() == packaged_conf()
    monkeypatch.setenv("GPTEXP_CONF", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no config\.yaml in"):
        conf_dir()
