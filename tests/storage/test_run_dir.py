"""The run directory: atomic files, identity, locks."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gptexp.config.schema import Config, from_dict, to_dict
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir
from gptexp.storage.continuation import check_same


def test_a_config_is_equal_after_saving_and_loading(tmp_path: Path) -> None:
    config = Config()
    config.data.path = ["a", "b"]
    config.log.wandb.tags = ["x"]
    config.optim.lr = 6e-4
    run_dir.save_config(tmp_path, config)
    assert run_dir.load_config(tmp_path) == config
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize("text", ["nonsense: 1", "model: {n_layers: 2}", "- 1", "a: [", ""])
def test_a_damaged_config_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml: ") as error:
        run_dir.load_config(tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_yaml_tags_execute_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("model: !!python/object/apply:os.system ['touch owned']")
    with pytest.raises(ConfigError):
        run_dir.load_config(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_only_keys_that_change_the_result_must_agree(tmp_path: Path) -> None:
    old = Config()
    assert check_same(tmp_path, old) == "new"
    run_dir.save_config(tmp_path, old)
    changed = Config()
    changed.world.size, changed.log.progress, changed.batch.micro_batch_size, changed.train.save_every = 4, "off", 2, 7
    assert check_same(tmp_path, changed) == "unfinished"
    changed.optim.lr, changed.model.n_layer = 1.0, 3
    with pytest.raises(ConfigError, match=r"optim\.lr was 0\.0006, now 1\.0") as error:
        check_same(tmp_path, changed)
    assert len(error.value.problems) == 2
    run_dir.write_json(tmp_path / "summary.json", {"status": "completed"})
    assert check_same(tmp_path, old) == "completed"


def write_state(checkpoint: Path, text: str) -> None:
    """Write state.json, and its hash, into a checkpoint."""
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(text)
    (checkpoint / "manifest.json").write_text(
        json.dumps({"state.json": [len(text), hashlib.sha256(text.encode()).hexdigest()]})
    )


def test_keys_edited_after_a_checkpoint_are_refused_by_name(tmp_path: Path) -> None:
    trained, edited = Config(), Config()
    for step, lr in ((8, 0.5), (10, 6e-4)):  # the newest checkpoint counts
        trained.optim.lr = lr
        write_state(tmp_path / f"checkpoints/step-{step:08d}", json.dumps({"about": {"config": to_dict(trained)}}))
    edited.optim.lr, edited.train.seed, edited.train.log_every, edited.world.size = 3e-4, 7, 5, 2
    run_dir.save_config(tmp_path, edited)
    with pytest.raises(ConfigError) as error:
        check_same(tmp_path, edited)
    assert [line.partition(": ")[2] for line in error.value.problems] == [
        "cannot resume with another config: optim.lr was 0.0006, now 0.0003; start a new run",
        "cannot resume with another config: train.seed was 1337, now 7; start a new run",
    ]
    edited.optim.lr, edited.train.seed = 6e-4, 1337
    assert check_same(tmp_path, edited) == "unfinished"


def test_the_config_in_a_damaged_checkpoint_does_not_count(tmp_path: Path) -> None:
    """The checkpoint is skipped, and named, when it is loaded."""
    trained, damaged = Config(), Config()
    damaged.optim.lr = 0.5
    write_state(tmp_path / "checkpoints/step-00000008", json.dumps({"about": {"config": to_dict(trained)}}))
    write_state(tmp_path / "checkpoints/step-00000010", json.dumps({"about": {"config": to_dict(trained)}}))
    (tmp_path / "checkpoints/step-00000010/state.json").write_text(json.dumps({"about": {"config": to_dict(damaged)}}))
    run_dir.save_config(tmp_path, trained)
    assert check_same(tmp_path, trained) == "unfinished"


@pytest.mark.parametrize("text", ["{", "[]", '{"about": {}}', '{"about": {"config": {"nosuch": 1}}}'])
def test_a_checkpoint_that_does_not_state_its_config_is_no_obstacle(tmp_path: Path, text: str) -> None:
    run_dir.save_config(tmp_path, Config())
    write_state(tmp_path / "checkpoints/step-00000008", text)
    assert check_same(tmp_path, Config()) == "unfinished"


@pytest.mark.parametrize("trace", ["metrics.jsonl", "checkpoints/step-00000008/state.json"])
def test_a_run_that_has_lost_its_config_is_not_taken_for_a_new_one(tmp_path: Path, trace: str) -> None:
    """Otherwise a run of another config would continue from its checkpoints."""
    (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / trace).touch()
    with pytest.raises(ConfigError, match=r"holds a run that has lost its config\.yaml; restore it, or use a new"):
        check_same(tmp_path, Config())


@pytest.mark.parametrize(
    "name",
    [".lock", ".lock-rank0", ".lock-sweep", "metrics.jsonl", "summary.json", "checkpoints", ".hydra",
     ".hydra/config.yaml", "profile/trace.json"],
)  # fmt: skip
def test_a_run_directory_with_a_link_is_refused(tmp_path: Path, name: str) -> None:
    run_dir.save_config(tmp_path / "run", Config())
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"{re.escape(name)}: a link, and gptexp writes through none"):
        check_same(tmp_path / "run", Config())


def test_a_lock_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    assert not run_dir.is_locked(tmp_path)


def test_json_has_no_nan(tmp_path: Path) -> None:
    run_dir.write_json(tmp_path / "x.json", {"a": math.nan, "b": math.inf, "c": 1.5})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": None, "c": 1.5}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.e2e
def test_a_lock_is_released_when_its_process_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from gptexp.storage import run_dir\n"
        "with run_dir.held(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert run_dir.is_locked(tmp_path)
    with pytest.raises(ConfigError, match="another process uses it"), run_dir.held(tmp_path):
        pass
    os.kill(process.pid, 9)
    process.wait()
    assert not run_dir.is_locked(tmp_path)
    with run_dir.held(tmp_path):
        pass


def test_checking_a_lock_from_several_threads_does_not_take_it(tmp_path: Path) -> None:
    with run_dir.held(tmp_path):
        assert run_dir.is_locked(tmp_path)
    (tmp_path / run_dir.LOCK).touch()
    found = []

    def ask() -> None:
        found.extend(run_dir.is_locked(tmp_path) for _ in range(3000))

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(found) == 12_000
    assert not any(found)


def test_a_lock_file_that_cannot_be_opened_counts_as_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / run_dir.LOCK).touch()

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    assert not run_dir.is_locked(tmp_path)


def test_the_states_of_files_are_found_beside_links_to_nowhere(tmp_path: Path) -> None:
    """In whatever order the file system names them."""
    links, files = [f"link{n}" for n in range(20)], [f"file{n}" for n in range(20)]
    for link, file in zip(links, files, strict=True):
        (tmp_path / link).symlink_to("nowhere")
        (tmp_path / file).write_text(file)
    expected = {
        name: (stat.st_mtime_ns, stat.st_size, stat.st_ino) for name in files for stat in [(tmp_path / name).stat()]
    }
    assert run_dir.states_of(tmp_path, {*links, *files}) == expected
