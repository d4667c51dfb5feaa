"""Which checkpoint of a run a command loads: RUN_DIR@STEP, RUN_DIR@best, RUN_DIR@last, --checkpoint, its directory."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch
from conftest import BYTES, TINY, ForkServer, clean, events
from safetensors.torch import load_file

import gptexp
from gptexp import evaluate
from gptexp.command.start import resume
from gptexp.config.schema import Config
from gptexp.process.errors import UserError
from gptexp.process.signals import StopRequest
from gptexp.run.load import load_pretrained
from gptexp.storage import branch, run_dir
from gptexp.storage.init_from import find

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
STEPS = [12, 4]  # the newest, and the best


@pytest.fixture(scope="module")
def trained(torch_server: ForkServer, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run whose checkpoint of step 4 is better than its last one, and its last lines. Tests copy it.

    It begins with weights of a run on digits, of which its validation text consists, and forgets them step by step.
    """
    folder = tmp_path_factory.mktemp("trained")
    (folder / "digits.txt").write_text("0123456789" * 500)
    digits = [*BYTES, f"data.path={folder}/digits.txt", "optim.lr=3e-2", "train.max_steps=12", "hydra.run.dir=digits"]
    own = [
        *BYTES,
        f"data.path={corpus}",
        f"data.val_path={folder}/digits.txt",
        "init_from=digits",
        "train.max_steps=12",
        "train.save_every=4",
        "train.eval_every=4",
        "train.keep_last=1",
        "train.ema_half_life_tokens=300",
        "optim.lr=1e-2",
        "schedule=constant",
        "log.progress=auto",
        "hydra.run.dir=run",
    ]
    for overrides in (digits, own):
        argv = ["train", *TINY, *overrides]
        done = torch_server.ask(argv, folder, clean(os.environ, folder / "cache"), timeout=240)
        assert done["code"] == 0, done["stderr"]
    return folder / "run", done["stdout"].splitlines()[-8:]


@pytest.fixture
def run(trained: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTEXP_CACHE", str(trained[0].parent / "cache"))
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained[0], tmp_path / "run")


def losses(run: Path) -> dict[int, float]:
    return {event["step"] + 1: event["val/loss"] for event in events(run, "eval")}


FORMS = [
    (["run"], 12),
    (["run@last"], 12),
    (["run@best"], 4),
    (["run@4"], 4),
    (["run", "--checkpoint", "4"], 4),
    (["run", "--checkpoint", "best"], 4),
    (["run@best", "--checkpoint", "best"], 4),
    (["run/checkpoints/step-00000004"], 4),
    (["run/checkpoints/step-00000004/"], 4),
]


@pytest.mark.parametrize(("given", "step"), FORMS)
def test_evaluate_has_the_loss_that_the_run_logged_at_that_step(
    run: Path, capsys: pytest.CaptureFixture[str], given: list[str], step: int
) -> None:
    assert losses(run)[4] < losses(run)[12]
    evaluate.main(given)
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == step
    assert found["val/loss"] == pytest.approx(losses(run)[step], rel=1e-6)


def test_every_verb_loads_the_weights_of_that_step(run: Path, gptexp: Gptexp) -> None:
    of = {step: load_file(run / f"checkpoints/step-{step:08d}/model.safetensors")["wte.weight"] for step in STEPS}
    assert not torch.equal(of[4], of[12])
    averaged = load_file(run / "checkpoints/step-00000004/ema.safetensors")["wte.weight"]
    assert torch.equal(gptexp_load("run@best"), of[4])
    assert torch.equal(gptexp_load("run", checkpoint=4), of[4])
    assert torch.equal(gptexp_load("run@best", ema=True), averaged)
    assert torch.equal(load_pretrained(find("run@best", "of tasks"))[0].wte.weight, of[4])

    assert gptexp("export", "run@best", "out").returncode == 0
    exported = load_file("out/model.safetensors")["transformer.wte.weight"]
    assert torch.equal(exported, of[4][: len(exported)])
    assert f"{losses(run)[4]:.4f}" in Path("out/README.md").read_text()

    few = ["--num-samples", "2", "--max-new-tokens", "8"]
    sampled, newest = (gptexp("sample", name, *few).stdout for name in ("run@best", "run"))
    shutil.copytree("run", "only")
    shutil.rmtree("only/checkpoints/step-00000012")
    assert sampled == gptexp("sample", "only", *few).stdout != newest

    sharpness = gptexp("sharpness", "run@best", "--sequences", "2")
    assert json.loads(sharpness.stdout)["step"] == 4


def gptexp_load(*given: str, **more: int | bool) -> torch.Tensor:
    return gptexp.load_run(*given, **more)[0].wte.weight.detach()  # type: ignore[arg-type]


def test_a_run_starts_or_branches_from_it(run: Path, gptexp: Gptexp, tiny: list[str]) -> None:
    before = load_file(run / "checkpoints/step-00000004/model.safetensors")
    still = [*tiny, *BYTES, "optim.lr=1e-12", "train.max_steps=1"]
    begun = gptexp("train", *still, "init_from=run@best", "hydra.run.dir=new")
    assert begun.returncode == 0, begun.stderr
    for key, weight in load_file("new/checkpoints/step-00000001/model.safetensors").items():
        torch.testing.assert_close(weight, before[key], atol=1e-9, rtol=1e-6)
    assert run_dir.load_config(Path("new")).init_from == f"{run}@4", "another checkpoint may be the best later"
    branched = gptexp("train", "branch_from=run@best", "train.max_steps=8", "hydra.run.dir=branch")
    assert branched.returncode == 0, branched.stderr
    assert run_dir.load_config(Path("branch")).branch_from == f"{run}@4"
    for name in ("run@4", "run/checkpoints/step-00000004"):
        assert find(name, "init_from").step == 4
        assert (parent := branch.find(Config(branch_from=name))) is not None
        assert (parent.directory, parent.step) == (run, 4)


@pytest.mark.e2e
@pytest.mark.usefixtures("run")
def test_in_a_sweep_best_is_the_step_that_it_stands_for(gptexp: Gptexp, tiny: list[str]) -> None:
    swept = gptexp("train", "-m", *tiny, *BYTES, "train.max_steps=1", "init_from=run@best,run@4", "sweep.name=s")
    assert swept.returncode == 0, swept.stderr
    [cell] = Path("outputs/s").glob("*/config.yaml")
    assert str(run_dir.load_config(cell.parent).init_from).endswith("run@4")


def without_best(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    assert "keep_best: true" in text
    (run / "config.yaml").write_text(text.replace("keep_best: true", "keep_best: false"))


def unevaluated(run: Path) -> None:
    for path in run_dir.published(run / "checkpoints"):
        shutil.rmtree(path)


REFUSED: list[tuple[Sequence[str], Callable[[Path], object], int]] = [
    (["evaluate", "run@5"], lambda _: None, 2),
    (["evaluate", "run", "--checkpoint", "5"], lambda _: None, 2),
    (["evaluate", "run", "--checkpoint", "first"], lambda _: None, 2),
    (["evaluate", "run", "--checkpoint", "²"], lambda _: None, 2),
    (["evaluate", "run", "--checkpoint", ""], lambda _: None, 2),
    (["evaluate", "run@4", "--checkpoint", "12"], lambda _: None, 2),
    (["evaluate", "nowhere@4"], lambda _: None, 2),
    (["sample", "run@5"], lambda _: None, 2),
    (["export", "run@5", "out"], lambda _: None, 2),
    (["sharpness", "run@5"], lambda _: None, 2),
    (["sharpness", "run@4", "--all"], lambda _: None, 2),
    (["evaluate", "run@5", "--tasks", "hellaswag"], lambda _: None, 2),
    (["plan", "init_from=run@5", "model=from_init"], lambda _: None, 2),
    (["plan", "branch_from=run@5"], lambda _: None, 2),
    (["evaluate", "run@best"], without_best, 2),
    (["plan", "branch_from=run@best"], without_best, 2),
    (["evaluate", "run@best"], unevaluated, 4),
    (["evaluate", "run@4"], lambda run: (run / "checkpoints/step-00000004/model.safetensors").write_bytes(b"x"), 4),
    (["evaluate", "run@best"], lambda run: (run / "checkpoints/step-00000004/model.safetensors").write_bytes(b"x"), 4),
]


@pytest.mark.parametrize(("argv", "change", "code"), REFUSED)
def test_a_checkpoint_that_is_not_there_is_refused_in_one_line(
    run: Path, argv: list[str], change: Callable[[Path], object], code: int
) -> None:
    change(run)
    with pytest.raises(UserError) as refused:
        import_module(f"gptexp.{argv[0]}").main(argv[1:])
    assert (refused.value.exit_code, len(refused.value.problems)) == (code, 1)
    if "5" in argv[1][-1:]:
        assert "12, 4" in str(refused.value), "the steps that there are"
    if change is without_best:
        assert "train.keep_best" in str(refused.value)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("given", ["run@best", "run@4", "run/checkpoints/step-00000004"])
def test_a_run_is_resumed_from_no_other_checkpoint_than_its_newest(given: str) -> None:
    with pytest.raises(UserError, match=f"branch_from={given}") as refused:
        resume(Path(given), None, None, StopRequest())
    assert refused.value.exit_code == 2


def test_evaluate_names_the_file_that_is_too_short(run: Path) -> None:
    Path("short.txt").write_text("01")
    with pytest.raises(UserError, match=r"short\.txt"):
        evaluate.main([str(run), "--data", "short.txt"])


def test_a_directory_with_an_at_sign_in_its_name_is_that_directory(run: Path) -> None:
    run.rename("run@4")
    assert run_dir.run_and_checkpoint("run@4") == ("run@4", None)
    assert run_dir.run_and_checkpoint("run@4@best") == ("run@4", "best")
    for name in ("outputs/a@b/run", "outputs/run@", "@5", "run@-1", "run@1e3", "x" * 5000):
        assert run_dir.run_and_checkpoint(name) == (name, None)
    (Path("step-00000001")).mkdir()
    assert run_dir.run_and_checkpoint("step-00000001") == ("step-00000001", None), "in no folder of checkpoints"


def test_without_an_evaluation_there_is_no_best(run: Path) -> None:
    for path in run_dir.published(run / "checkpoints"):
        state = run_dir.read_json(path / "state.json")
        (path / "state.json").write_text(json.dumps({**state, "val_loss": None}))
    with pytest.raises(UserError, match="save_every") as refused:
        run_dir.choose_step(run, "best", "run@best")
    assert refused.value.code == "no-such-checkpoint"


def test_the_last_lines_of_a_run_name_the_best_checkpoint_and_a_command_that_works(
    trained: tuple[Path, list[str]], gptexp: Gptexp, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, lines = trained
    [line] = [line for line in lines if f"{losses(directory)[4]:.4f}" in line]
    assert re.search(r"\bstep 4\b", line)
    command = shlex.split(line[line.index("gptexp sample") :])
    monkeypatch.setenv("GPTEXP_CACHE", str(directory.parent / "cache"))
    assert gptexp(*command[1:], "--max-new-tokens", "2").returncode == 0
