"""`gptexp bench --peers`: the process of nanoGPT, with a stand-in that prints its lines, and the figures of both."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from compare_nanogpt import main as compare_nanogpt
from conftest import ROOT

from gptexp import bench
from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.config.vocabulary import with_vocab_size
from gptexp.process.errors import ConfigError, UserError
from gptexp.process.terminal import run_verb
from gptexp.run import peers
from gptexp.run.observe import Observed
from gptexp.run.peers import CPU_CONTEXT, KEEP_FREED_MEMORY, VOCABULARY, WARM_UP, Peer, Turn, _medians, _nanogpt
from gptexp.run.workloads import Workload
from gptexp.storage import run_dir

SPINS = "GOMP_SPINCOUNT"
STAND_IN = f"""
import json, os, pathlib, sys, time
# ctx = {CPU_CONTEXT} torch.amp.autocast(device_type)
class torch:
    class cuda:
        is_initialized = staticmethod(lambda: False)
options = dict(text.removeprefix("--").split("=") for text in sys.argv[1:])
here = pathlib.Path()
{VOCABULARY}
tokens = (here / "data" / options["dataset"] / "train.bin").stat().st_size
seen = {{"options": options, "environ": dict(os.environ), "vocab_size": meta_vocab_size, "bytes": tokens}}
seen |= {{"program": (here / "train.py").read_text(), "pid": os.getpid()}}
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(seen))
for number in range(int(options["max_iters"]) + 1):
    print(f"iter {{number}}: loss {{'nan' if number else 4.2}}, time {{100 + number}}.5ms, mfu 1.0%")
if options["dtype"] in os.environ.get("FAIL", ""):
    sys.exit(3)
"""
EFFECTIVE = {"device": "cpu", "device_name": "a CPU", "dtype": "bfloat16", "micro_batch_size": 4, "vocab_size": 384}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "nanoGPT"
    folder.mkdir()
    for name in ("model.py", "configurator.py"):
        (folder / name).touch()
    (folder / "train.py").write_text(STAND_IN)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    return folder


def resolved(*overrides: str) -> Config:
    return with_vocab_size(compose(["model=nano", "data.tokenizer=bytes", *overrides]), 384)


@pytest.mark.parametrize("is_helped", [False, True])
def test_nanogpt_gets_the_options_tokens_and_dtype_of_the_run(checkout: Path, tmp_path: Path, is_helped: bool) -> None:
    """The learning rate of a constant schedule: the final one of nanoGPT's decay is that at its beginning."""
    config = resolved(
        "model.n_layer=3", "model.n_head=5", "model.n_embd=40", "model.bias=false", "model.dropout=0.25",
        "batch.seq_len=16", "batch.micro_batch_size=auto", "batch.total_batch_size=768", "optim.lr=2e-5",
        "optim.grad_clip=0", "optim.weight_decay=0.2", "optim.beta1=0.8", "optim.beta2=0.85", "schedule=constant",
        "schedule.warmup_steps=7", "scaling.lr=linear", "scaling.reference_tokens=384",
    )  # fmt: skip
    ballast = b"1" * (256 << 20)  # memory of the process that starts it
    turn = _nanogpt(Peer("bfloat16", is_helped), checkout, config, {**EFFECTIVE, "micro_batch_size": 16}, 5, "cache")
    del ballast
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert turn.step_ms == [100.5 + n for n in range(WARM_UP + 1, WARM_UP + 6)]
    assert 0.001 < turn.peak_gib < 0.1  # not that of this process
    assert seen["options"].pop("out_dir")
    assert seen["options"] == {
        "dataset": "bench", "device": "cpu", "dtype": "bfloat16", "compile": "True", "max_iters": f"{WARM_UP + 5}",
        "eval_interval": "1000000000", "eval_iters": "1", "log_interval": "1", "gradient_accumulation_steps": "3",
        "batch_size": "16", "block_size": "16", "bias": "False", "dropout": "0.25", "n_layer": "3", "n_head": "5",
        "n_embd": "40", "grad_clip": "0.0", "learning_rate": "4e-05", "min_lr": "4e-05", "warmup_iters": "7",
        "weight_decay": "0.2", "beta1": "0.8", "beta2": "0.85",
    }  # fmt: skip
    assert seen["vocab_size"] == 384
    assert 2 * 768 < seen["bytes"] <= 2 * 1_000_000
    assert seen["environ"]["TORCHINDUCTOR_CACHE_DIR"] == "cache"
    assert (KEEP_FREED_MEMORY.items() <= seen["environ"].items()) == is_helped
    assert (CPU_CONTEXT not in seen["program"]) == is_helped  # which makes it ignore its dtype on a CPU


@pytest.fixture
def no_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which `run_verb` sets GOMP_SPINCOUNT; it is taken back after the test."""
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv(SPINS, "")
    monkeypatch.delenv(SPINS)


@pytest.mark.usefixtures("no_spins")
@pytest.mark.parametrize(("given", "as_it_is", "helped"), [({}, None, "3000"), ({SPINS: "7"}, "7", "7")])
def test_nanogpt_as_it_is_has_the_users_spin_count_and_helped_that_of_gptexp(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], as_it_is: str | None, helped: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SystemExit):
        run_verb(lambda argv: 0)
    environments = [peers._environment(Peer("float32", is_helped), given) for is_helped in (False, True)]
    assert [env.get(SPINS) for env in environments] == [as_it_is, helped]
    assert {**environments[0], **KEEP_FREED_MEMORY, SPINS: helped} == environments[1]


def test_a_nanogpt_that_fails_or_prints_something_else_is_an_error(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn() -> Turn:
        return _nanogpt(Peer("bfloat16", False), checkout, resolved(), EFFECTIVE, 2, "cache")

    monkeypatch.setenv("FAIL", "bfloat16")
    with pytest.raises(UserError, match="exit code 3"):
        turn()
    monkeypatch.delenv("FAIL")
    for text, other, line in (
        ("iter {number}: loss", "iteration {number}: loss", "printed 0 times of steps and 1 of the peak memory, not 6"),
        (
            '["max_iters"]) + 1',
            '["max_iters"])',
            "printed 5 times of steps and 1 of the peak memory, not 6 and 1: iter",
        ),
        ("if options", "sys.exit(0)\nif options", "printed 6 times of steps and 0 of the peak memory, not 6 and 1"),
    ):
        assert text in STAND_IN
        (checkout / "train.py").write_text(STAND_IN.replace(text, other))
        with pytest.raises(UserError, match=line):
            turn()


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nanogpt_ends_with_the_bench(checkout: Path, tmp_path: Path, number: int) -> None:
    """Its folder goes too, unless the bench was killed."""
    (checkout / "train.py").write_text(STAND_IN.replace("for number in", "time.sleep(600)\nfor number in"))
    call = (
        f"_nanogpt(Peer('float32', False), Path({str(checkout)!r}), test_peers.resolved(), test_peers.EFFECTIVE, 2, '')"
    )
    imports = "import test_peers\nfrom pathlib import Path\nfrom gptexp.run.peers import Peer, _nanogpt"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/run")])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", f"{imports}\n{call}"], env=env)
    seen = tmp_path / "seen.json"
    try:
        while not (seen.exists() and seen.read_text().endswith("}")):
            assert parent.poll() is None
            time.sleep(0.05)
        nanogpt = psutil.Process(json.loads(seen.read_text())["pid"])
    finally:
        parent.send_signal(number)
        parent.wait(60)
    _, alive = psutil.wait_procs([nanogpt], timeout=10)
    for process in alive:
        process.kill()
    assert not alive
    assert len([*tmp_path.glob("nanogpt-*")]) == (number == signal.SIGKILL)


def fake_run(workload: Workload, extra: Sequence[str], directory: Path, cache: str, steps: int) -> Observed:
    """Stands for `run_until`: a run whose counted steps take 50 ms."""
    run_dir.save_config(directory, compose(workload.overrides))
    run_dir.write_json(directory / run_dir.EFFECTIVE, EFFECTIVE)
    times = [900.0] * WARM_UP + [50.0] * (steps - WARM_UP) + [900.0]  # it logs further ones until it is killed
    return Observed([{"perf/step_ms": ms, "perf/peak_mem_gib": 0.5} for ms in times], 1.0)


@pytest.fixture
def argv(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a `bench --peers` whose runs of gptexp and whose rates are known."""
    monkeypatch.setattr(peers, "run_until", fake_run)
    monkeypatch.setattr(peers, "apart", lambda call, *args: {"gemm_flops_per_s": {"model": 1e12}})
    shape = ["data.tokenizer=bytes", "batch.micro_batch_size=4", "batch.total_batch_size=2048"]
    return [*shape, "--peers", str(checkout), "--rounds", "2", "--steps", "4", "--device", "cpu",
            "--out", str(tmp_path / "out")]  # fmt: skip


def rows_of(printed: str) -> dict[str, list[str]]:
    """The cells of the tables' rows, by program: cells are two spaces or more apart."""
    rows = (re.split(r" {2,}", line.strip()) for line in printed.splitlines())
    return {first: cells for first, *cells in rows if first.startswith(("gptexp", "nanoGPT"))}


def test_the_figures_of_both_programs_are_printed_and_kept(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """nanoGPT's counted steps of each round take 104.5 to 107.5 ms."""
    assert bench.main(argv) == 0
    printed, said = capsys.readouterr()
    kept = json.loads((tmp_path / "out" / "peers.json").read_text())["workloads"]["run"]
    share = 100 * kept["flops_per_token_palm"] * 2048 / 0.05 / 1e12
    assert share > 1
    names = ["gptexp", "nanoGPT, float32", "nanoGPT, helped, bfloat16"]
    rows = rows_of(printed)
    peak = rows[names[1]].pop(3)
    assert rows[names[2]].pop(4) == f"{kept['programs'][names[2]]['peak_gib']:.2f}"
    assert peak == f"{kept['programs'][names[1]]['peak_gib']:.2f}"
    assert rows == {
        names[0]: ["50.0", "50.0-50.0", "40,960", f"{share:.1f}%", "0.50"],
        names[1]: ["106.0", "104.8-107.2", "19,321", "2.12×", "2.12, 2.12"],  # the rate is one of bfloat16
        names[2]: ["106.0", "104.8-107.2", "19,321", f"{share * 50 / 106:.1f}%", "2.12×", "2.12, 2.12"],
    }
    assert [*kept["programs"]] == names
    assert [row["dtype"] for row in kept["programs"].values()] == ["bfloat16", "float32", "bfloat16"]
    assert [row["step_ms"] for row in kept["programs"].values()] == [50, 106, 106]
    assert kept["programs"][names[1]]["ratios"] == [2.12, 2.12]
    assert "round 2: gptexp 50.0 ms, nanoGPT, float32 106.0 ms" in said
    assert printed.startswith("\nrun: a CPU, micro-batches of 4\n")
    assert printed.endswith(f"\n{tmp_path}/out/peers.json\n")


def test_a_program_that_fails_is_left_out_and_the_others_are_measured(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAIL", "float32")
    assert bench.main(["nano", "small", *argv, "--json"]) == 1
    printed, said = capsys.readouterr()
    kept = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert json.loads(printed) == kept
    for name in ("nano", "small"):
        own, failed, helped = kept["workloads"][name]["programs"].values()
        assert failed == {"dtype": "float32", "error": "nanoGPT ended with exit code 3: "}
        assert (own["step_ms"], helped["ratio"]) == (50, 2.12)
        assert said.count(f"{name}: nanoGPT, float32: nanoGPT ended with exit code 3") == 1  # it is not tried again
    peers.show("nano", kept["workloads"]["nano"])
    assert rows_of(capsys.readouterr()[0])["nanoGPT, float32"] == ["failed"]


def test_a_run_that_fails_keeps_the_results_of_other_programs_and_workloads(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of `small` fails before it has chosen a shape, that of `char` after it, and in the second round only.

    The table of a workload is printed before the next one begins.
    """
    tables = []

    def run(workload: Workload, extra: Sequence[str], directory: Path, *args: object) -> Observed:
        tables.append(capsys.readouterr()[0])
        if directory.parent.name == "small" or directory.match("char/1"):
            raise UserError("the run ended early: more memory than there is")
        return fake_run(workload, extra, directory, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(peers, "run_until", run)
    assert bench.main(["nano", "small", "char", *argv]) == 1
    printed, said = capsys.readouterr()
    error = {"error": "the run ended early: more memory than there is"}
    assert rows_of(tables[2])["gptexp"][0] == "50.0"  # tables[0] and [1]: before the rounds of `nano`
    assert rows_of(tables[3]) == {"gptexp": ["failed"]}
    assert {program: cells[0] for program, cells in rows_of(printed).items()} == {
        "gptexp": "failed", "nanoGPT, float32": "106.0", "nanoGPT, helped, bfloat16": "106.0",
    }  # fmt: skip
    assert "×" not in printed
    assert f"char: gptexp: {error['error']}" in said
    kept = json.loads((tmp_path / "out" / "peers.json").read_text())["workloads"]
    assert kept["nano"]["programs"]["gptexp"]["step_ms"] == 50
    assert kept["small"] == {"programs": {"gptexp": error}}
    assert kept["char"]["programs"]["gptexp"] == {"dtype": "bfloat16", **error}


@pytest.mark.parametrize("given", [None, "a cache"])
def test_both_programs_have_the_compile_cache_of_the_environment(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    caches = []

    def run(*args: object) -> Observed:
        caches.append(args[3])
        return fake_run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(peers, "run_until", run)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if given:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
    assert bench.main(argv) == 0
    seen = json.loads((tmp_path / "seen.json").read_text())["environ"]["TORCHINDUCTOR_CACHE_DIR"]
    assert [*caches, seen] == 3 * [given or str(tmp_path / "out/run/compiled")]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["nano_ddp2", "--peers", "."], "world.size=2: --peers measures world.size=1 only"),
        (["nano", "--peers", ".", "batch.ramp_from_tokens=2048", "batch.ramp_tokens=16384"],
         "batch.ramp_from_tokens=2048: --peers measures batch.ramp_from_tokens=null only"),
        (["nano", "--peers", ".", "optim=muon"], "optim=muon: --peers measures optim=adamw only"),
        (["nano", "--peers", ".", "model.parametrisation=mup", "model.base_n_embd=32"],
         "model.parametrisation=mup: --peers measures model.parametrisation=standard only"),
        (["nano", "--rounds", "7"], "--rounds 7: only --peers counts them; leave it out, or give --peers CHECKOUT"),
        (["nano", "--steps", "0"], "--steps 0: only --peers counts them"),
        (["nano", "--peers", ".", "--rounds", "0"], "--rounds=0 --steps=20: must be at least 1 and 2"),
        (["nano", "--peers", ".", "--steps", "0"], "--rounds=3 --steps=0: must be at least 1 and 2"),
        (["comm", "--peers", "X", "--rounds", "0"], "--peers X: bench comm trains nothing; leave it out"),
        (["comm", "world.size=2", "--rounds", "0"], "--rounds 0: bench comm trains nothing; leave it out"),
        (["comm", "world.size=2", "--steps", "4"], "--steps 4: bench comm trains nothing; leave it out"),
        (["nano", "--peers", "."], "--peers .: has no train.py; give a clone of github.com/karpathy/nanoGPT"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(line)):
        bench.main([*argv, "--device", "cpu"])
    assert not [*tmp_path.iterdir()]


def test_ranks_of_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"world\.size=2: --peers measures world\.size=1 only"):
        bench.main(["nano", "batch.micro_batch_size=4", "--peers", "."])


def test_another_nanogpt_is_refused(argv: list[str], checkout: Path, tmp_path: Path) -> None:
    (checkout / "train.py").write_text(STAND_IN.replace("nullcontext()", "other"))
    with pytest.raises(ConfigError, match="another nanoGPT"):
        bench.main(argv)
    assert not (tmp_path / "out").exists()


def test_the_check_on_a_gpu_gives_its_arguments_to_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(bench, "main", lambda argv: given.extend(argv) or 0)
    options = ["--device", "cuda", "--dtype", "bfloat16", "--rounds", "1", "--steps", "25", "--only"]
    assert compare_nanogpt(["CHECKOUT", "model=gpt2", "data=tokens", *options, "stock"]) == 0
    assert given == ["model=gpt2", "data=tokens", "train.dtype=bfloat16", "--peers", "CHECKOUT", "--device", "cuda",
                     "--rounds", "1", "--steps", "25"]  # fmt: skip
    with pytest.raises(ConfigError, match="--only=tuned: bench --peers leaves out no other program"):
        compare_nanogpt(["CHECKOUT", "model=gpt2", *options, "tuned"])


@pytest.mark.usefixtures("no_spins")
def test_the_check_on_a_gpu_measures_in_the_environment_of_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "main", lambda argv: int(os.environ[SPINS]))
    monkeypatch.setattr(sys, "argv", ["compare_nanogpt.py", "CHECKOUT", "model=gpt2"])
    with pytest.raises(SystemExit, match="3000"):
        runpy.run_path(str(ROOT / "tests/compare_nanogpt.py"), run_name="__main__")


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
