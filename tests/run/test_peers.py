"""`gptexp bench --peers`: the process of nanoGPT, with a stand-in that prints its lines, and the figures of both."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from gptexp.config.compose import compose
from gptexp.process.errors import UserError
from gptexp.run.peers import CPU_CONTEXT, KEEP_FREED_MEMORY, VOCABULARY, WARM_UP, Peer, Turn, _medians, _nanogpt

STAND_IN = f"""
import json, os, pathlib, sys
# ctx = {CPU_CONTEXT} torch.amp.autocast(device_type)
options = dict(text.removeprefix("--").split("=") for text in sys.argv[1:])
device_type = options["device"]
here = pathlib.Path()
{VOCABULARY}
tokens = (here / "data" / options["dataset"] / "train.bin").stat().st_size
seen = {{"options": options, "environ": dict(os.environ), "vocab_size": meta_vocab_size, "bytes": tokens}}
seen["program"] = (here / "train.py").read_text()
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(seen))
for number in range(int(options["max_iters"]) + 1):
    print(f"iter {{number}}: loss 4.2, time {{100 + number}}.5ms, mfu 1.0%")
if "FAIL" in os.environ:
    sys.exit(3)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "nanoGPT"
    folder.mkdir()
    for name in ("model.py", "configurator.py"):
        (folder / name).touch()
    (folder / "train.py").write_text(STAND_IN)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    return folder


@pytest.mark.parametrize("is_helped", [False, True])
def test_nanogpt_gets_the_shapes_tokens_and_dtype_of_the_run(checkout: Path, tmp_path: Path, is_helped: bool) -> None:
    """A step of 40 sequences in micro-batches of 16: nanoGPT takes 2 or 3 of them, and its time counts by tokens."""
    batch = ["batch.seq_len=16", "batch.micro_batch_size=8", "batch.total_batch_size=640"]
    config = compose(["model=nano", "data.tokenizer=bytes", *batch])
    effective = {"device": "cpu", "dtype": "bfloat16", "micro_batch_size": 16, "vocab_size": 384}
    turn = _nanogpt(Peer("bfloat16", is_helped), checkout, config, effective, steps=5)
    seen = json.loads((tmp_path / "seen.json").read_text())
    of_step = int(seen["options"]["gradient_accumulation_steps"]) * 16 * 16
    assert turn.step_ms == pytest.approx([640 / of_step * (100.5 + n) for n in range(WARM_UP + 1, WARM_UP + 6)])
    assert 0.001 < turn.peak_gib < 0.1  # not that of this process
    options = {key: seen["options"][key] for key in ("dtype", "compile", "n_layer", "n_embd", "block_size")}
    m = config.model
    assert options == {"dtype": "bfloat16", "compile": "True", "n_layer": f"{m.n_layer}", "n_embd": f"{m.n_embd}",
                       "block_size": "16"}  # fmt: skip
    assert seen["vocab_size"] == 384
    assert 2 * 640 < seen["bytes"] <= 2 * 1_000_000
    assert (KEEP_FREED_MEMORY.items() <= seen["environ"].items()) == is_helped
    assert (CPU_CONTEXT not in seen["program"]) == is_helped  # which makes it ignore its dtype on a CPU


def test_a_nanogpt_that_fails_or_is_another_is_an_error(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["model=nano", "data.tokenizer=bytes"])
    effective = {"device": "cpu", "dtype": "bfloat16", "micro_batch_size": 1, "vocab_size": 384}
    monkeypatch.setenv("FAIL", "")
    with pytest.raises(UserError, match="exit code 3"):
        _nanogpt(Peer("bfloat16", False), checkout, config, effective, steps=2)
    (checkout / "train.py").write_text(STAND_IN.replace("nullcontext()", "other"))
    with pytest.raises(UserError, match="another nanoGPT"):
        _nanogpt(Peer("bfloat16", True), checkout, config, effective, steps=2)


def test_a_ratio_is_that_of_the_medians_of_one_round() -> None:
    """The second round ran on a machine that had slowed down to a third."""
    turns = {"gptexp": [Turn([1.0, 2.0, 9.0], 1.0), Turn([6.0, 6.0, 6.0], 2.0)],
             "other": [Turn([3.0, 3.0, 3.0], 3.0), Turn([9.0, 9.0, 30.0], 4.0)]}  # fmt: skip
    found = _medians(turns)
    assert (found["other"]["ratios"], found["other"]["ratio"]) == ([1.5, 1.5], 1.5)
    assert (found["gptexp"]["step_ms"], found["other"]["step_ms"]) == (6.0, 6.0)
    assert (found["gptexp"]["peak_gib"], found["other"]["peak_gib"]) == (2.0, 4.0)


@pytest.mark.slow
def test_a_run_and_a_stand_in_are_measured_in_turns(
    gptexp: Callable[..., "subprocess.CompletedProcess[str]"], checkout: Path, tiny: list[str], tmp_path: Path
) -> None:
    overrides = [text for text in tiny if not text.startswith(("log=", "train.max_steps"))]
    options = ["--peers", str(checkout), "--rounds", "2", "--steps", "4", "--device", "cpu", "--out", "out"]
    done = gptexp("bench", *overrides, *options, env={"PYTHONPATH": str(ROOT), "SEEN": str(tmp_path / "seen.json")})
    assert done.returncode == 0, done.stderr
    [measured] = json.loads((tmp_path / "out/peers.json").read_text())["workloads"].values()
    assert [len(row["ratios"]) for row in measured["programs"].values()] == [2, 2, 2]
    for program in measured["programs"]:
        assert program in done.stdout
