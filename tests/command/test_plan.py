"""`gptexp plan`: the arithmetic of a run or a grid, its illegal cells and its estimated time, without training."""

import itertools
import json
import os
import random
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import compose_sweep

from gptexp.command import planning, sweep_planning
from gptexp.command.planning import add_times, plan
from gptexp.command.sweep_planning import makespan, plan_sweep, show_sweep
from gptexp.config.compose import compose
from gptexp.config.run_plan import RunPlan
from gptexp.config.schema import Config
from gptexp.data.prepare import prepare
from gptexp.distributed.ranks import AT_ONCE
from gptexp.machine.effective import Effective
from gptexp.model.gpus import GPUS
from gptexp.plan import main
from gptexp.process.errors import ConfigError
from gptexp.process.words import counted
from gptexp.run.calibrate import Sample

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

GRID = ["model=nano", "batch.total_batch_size=4096,10000,16384", "optim.lr=1e-3,2e-3"]


def test_a_plan_has_the_parameters_steps_flops_and_memory_of_the_run(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["experiment=gpt2_124m", f"data.path={corpus}", "world=ddp8", "train.attention=flash"]
    main([*argv, "--json"])
    p = json.loads(capsys.readouterr().out)
    assert (p["parameters"], p["steps"], p["grad_accum_steps"]) == (124_475_904, 19_074, 4)
    assert p["tokens"] == 19_074 * 524_288
    assert p["flops_palm"] == pytest.approx(855.4e6 * p["tokens"], rel=1e-3)
    memory = p["memory_bytes"]
    assert memory["weights"] + memory["optimizer"] + memory["gradients"] == 16 * 124_475_904
    assert memory.pop("peak") == sum(memory.values())
    assert p["effective"]["sources"]["micro_batch_size"] == "asked"
    main(argv)
    table = capsys.readouterr().out
    assert "124,475,904" in table
    assert "16 sequences × 1,024 tokens × 8 ranks × 4 micro-steps" in table


@pytest.mark.e2e
def test_a_run_says_the_lines_of_its_plan(gptexp: Gptexp, tiny: list[str]) -> None:
    """Batch, length, schedule and intervals, word by word."""
    options = [*tiny, "train.ema_half_life_tokens=300", "schedule.warmup_steps=3"]
    trained, planned = gptexp("train", *options, "log.progress=lines"), gptexp("plan", *options)
    assert (trained.returncode, planned.returncode) == (0, 0), trained.stderr + planned.stderr
    shared = [line for line in planned.stdout.splitlines() if line in trained.stdout.splitlines()]
    titles = {line[:16].rstrip() for line in shared}
    assert {"batch", "length", "schedule", "average", "validation", "checkpoint", "device", "dtype"} <= titles


def test_the_plan_of_gpt3s_ramp_counts_its_steps_at_once() -> None:
    config = compose(
        ["model=gpt3_175b", "batch=gpt3_3m_ramp", "schedule=gpt3", "train.max_tokens=300e9", "world=ddp16"]
    )
    started = time.perf_counter()
    p = plan(config, gpu=GPUS["h100"])  # without timing the kernels of this machine
    assert time.perf_counter() - started < 1
    assert (p.run.step_sizes.ramp_steps, p.run.steps) == (17_895, 109_448)  # test_step_sizes.py counts them one by one
    assert 0 <= p.run.tokens - 300 * 10**9 < 3_145_728
    lines = dict(p.lines())
    assert lines["length"].startswith(f"109,448 steps, {p.run.tokens:,} tokens")
    assert (
        "from 32,768 tokens per step, linear over the first 12,000,000,000 tokens (17,895 steps)" in lines["batch ramp"]
    )
    assert p.time is not None
    assert p.time.step_s * p.run.tokens / 3_145_728 == pytest.approx(p.time.total_s)


def test_the_ramp_of_a_plan_is_that_of_the_whole_ramp_also_if_the_run_ends_before() -> None:
    p = plan(compose(["model=gpt3_125m", "batch=gpt3_ramp", "train.max_tokens=1e9"])).to_dict()
    assert abs(p["ramp_steps"] - 23_191) <= 2
    assert p["steps"] < p["ramp_steps"]
    assert p["ramp"].endswith("; the run ends at 163,840 tokens per step")
    assert plan(compose(["model=nano"])).to_dict()["ramp_steps"] == 0


@pytest.mark.e2e
@pytest.mark.parametrize("grid", [[], ["-m", "train.seed=1,2"]], ids=["train", "train -m"])
def test_a_dry_run_of_train_is_the_plan_and_writes_nothing(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, grid: list[str]
) -> None:
    dry, planned = gptexp("train", *grid, *tiny, "--dry-run"), gptexp("plan", *grid, *tiny)
    assert (dry.returncode, dry.stderr) == (0, "")
    assert dry.stdout == planned.stdout != ""
    assert gptexp("train", "--dry-run", *tiny, "lr=1").returncode == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.e2e
@pytest.mark.parametrize(
    "flags",
    [
        ["--tag", "a", "--tag=b", "--note", "why not"],
        ["-m", "train.seed=1,2", "--tag=a"],
        ["--config-dir", "mine", "model=flat"],
    ],
)
def test_a_dry_run_takes_the_flags_of_train(gptexp: Gptexp, tiny: list[str], tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "flat.yaml").write_text("n_layer: 1\nn_head: 1\nn_embd: 16\nblock_size: 16\n")
    for argv in (["train", "--dry-run"], ["plan"]):
        done = gptexp(*argv, *flags[:2], *tiny, *flags[2:])
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.e2e
@pytest.mark.parametrize("verb", [["train", "--dry-run"], ["plan"], ["train"]])
def test_a_directory_that_train_refuses_is_refused_by_a_plan(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, verb: list[str]
) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    (tmp_path / "file").touch()
    for directory, why in (("sweep", "holds a sweep or other runs"), ("file/run", "file is a file")):
        refused = gptexp(*verb, *tiny, f"hydra.run.dir={directory}")
        assert refused.returncode == 2, refused.stderr
        [line] = refused.stderr.splitlines()
        assert line.startswith(f"gptexp: config error: hydra.run.dir={directory}: ")
        assert why in line


@pytest.mark.e2e
def test_a_plan_has_the_number_of_epochs_if_the_corpus_is_prepared(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    env = {"GPTEXP_CACHE": str(tmp_path / "cache")}
    assert json.loads(gptexp("plan", *tiny, "--json", env=env).stdout)["epochs"] is None
    prepared = gptexp("prepare", *tiny, env=env)
    assert prepared.returncode == 0, prepared.stderr
    directory = Path(prepared.stdout.splitlines()[-1])
    tokens = json.loads((directory / "manifest.json").read_text())["tokens"]
    p = json.loads(gptexp("plan", *tiny, "--json", env=env).stdout)
    assert p["corpus_tokens"] == ((tokens - 1) // 16 - 7) * 16
    assert p["epochs"] == 4 * 128 / p["corpus_tokens"]


@pytest.mark.e2e
def test_a_cell_of_a_grid_has_the_plan_of_the_same_single_run() -> None:
    precision = "train.matmul_precision=highest"  # `auto` times both in each process
    grid = compose_sweep([*GRID, precision])
    cells = plan_sweep(grid.drafts)
    assert len(cells) == grid.of == 6
    for cell, (batch, lr) in zip(cells, itertools.product((4096, 10000, 16384), (1e-3, 2e-3)), strict=True):
        assert [float(cell.draft.values[key]) for key in ("batch.total_batch_size", "optim.lr")] == [batch, lr]
        if batch == 10000:
            assert cell.plan is None
            assert "nearest batch: 8,192 or 10,240" in cell.draft.problems[0]
        else:
            assert cell.plan is not None
            values = cell.plan.to_dict()
            alone = plan(compose([*GRID[:1], f"batch.total_batch_size={batch}", f"optim.lr={lr}", precision])).to_dict()
            for how in ("reasons", "sources"):  # the other cells reuse the choices of the first
                alone["effective"][how] = values["effective"][how]
            assert values == alone


def test_cells_of_one_shape_share_one_timing_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models at three batch sizes need two samples, each of the run with the most micro-steps."""
    sampled: list[tuple[int, int]] = []

    def sample(cfg: Config, run: RunPlan, effective: Effective) -> Sample:
        sampled.append((cfg.model.n_layer, run.batch.grad_accum_steps))
        return Sample(start_s=2.0, first_s=1.0, step_s=0.3, micro_s=0.1, micro_steps=2)

    monkeypatch.setattr(planning, "sample", sample)
    grid = compose_sweep(
        ["model=nano", "batch.total_batch_size=2048,8192,4096", "model.n_layer=1,2", "train.max_tokens=81920"]
    )
    plans = [cell.plan for cell in plan_sweep(grid.drafts) if cell.plan is not None]
    add_times(plans)
    assert sorted(sampled) == [(1, 4), (2, 4)]
    steps = {planned.run.batch.total_batch_size: planned.time and planned.time.step_s for planned in plans}
    assert steps == {2048: pytest.approx(0.2), 4096: pytest.approx(0.3), 8192: pytest.approx(0.5)}


@pytest.mark.e2e
def test_the_time_says_how_many_measurements_of_the_sharpness_it_does_not_count(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "sample", lambda *_: Sample(2.0, 1.0, 0.3, 0.1, micro_steps=2))
    own = ["model=nano", "data=text", f"data.path={corpus}", "batch.total_batch_size=4096", "train.max_tokens=81920"]
    own += ["data.val_tokens=1024", "--time"]
    measured = [*own, "train.sharpness_every_tokens=30000"]  # after steps 8 and 15, and at the end
    every_step = [*own, "train.sharpness_every_tokens=100"]
    for argv, end in (
        (own, "s to start)"),
        (measured, "; 3 measurements of the sharpness not counted"),
        (every_step, "; 20 measurements of the sharpness not counted"),
        (["-m", *measured, "optim.lr=1e-3,2e-3"], "; 6 measurements of the sharpness not counted"),
        (["-m", *own, "optim.lr=1e-3,2e-3"], " s"),
    ):
        main(argv)
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time   ")]
        assert line.startswith("time            about "), line
        assert line.endswith(end), line


def test_the_makespan_equals_that_of_a_simulated_queue() -> None:
    draw = random.Random(0)
    for _ in range(50):
        times, places = [draw.uniform(1, 9) for _ in range(draw.randint(1, 12))], draw.randint(1, 4)
        free = [0.0] * places
        for duration in times:  # a brute-force queue
            place = free.index(min(free))
            free[place] += duration
        assert makespan(times, places) == pytest.approx(max(free))
    assert makespan([1.0, 2.0, 3.0], 1) == 6


@pytest.mark.parametrize(
    ("own", "gpus", "sharing"),
    [
        (["sweep.parallel=2", "train.device=cpu"], [], "2"),
        ([], ["0", "1", "2"], "3"),  # cells on GPUs share the cores, too
        (["sweep.parallel=2", "hydra/launcher=submitit_slurm"], [], None),  # each has a job of its own
        (["sweep.parallel=2", "hydra/launcher=ray"], [], None),
    ],
)
def test_cells_are_planned_for_the_cores_that_they_will_share(
    own: list[str], gpus: list[str], sharing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(AT_ONCE, raising=False)
    monkeypatch.setattr("gptexp.sweep.launchers.visible_gpus", lambda: gpus)
    sweep_planning.share_machine(compose_sweep(["model=nano", "optim.lr=1e-3,2e-3,4e-3", *own]))
    found = os.environ.get(AT_ONCE)
    monkeypatch.setenv(AT_ONCE, "")  # so that it is restored
    assert found == sharing


def test_no_number_or_title_of_a_grid_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")  # of the terminal that a pipe reads from
    grid = compose_sweep(
        ["batch.total_batch_size=4096,8192", "optim.lr=0.00123456,2e-3", "log.note='a very long note'"]
    )
    cells = plan_sweep(grid.drafts)
    for width in (None, 80, 50):
        monkeypatch.setattr(sweep_planning, "terminal_width", lambda width=width: width)
        show_sweep(cells, grid.of, grid.at_once)
        [title, *rows] = capsys.readouterr().out.splitlines()[:5]
        assert {"total_batch_size", "lr", "steps"} <= {*title.split()}
        assert "…" not in title
        assert [row.split()[0] for row in rows] == ["4096", "4096", "8192", "8192"]
        assert [row.split()[1] for row in rows] == ["0.00123456", "0.002"] * 2
        assert ("epochs" in title) == (width is None or width > 70)


def test_a_grid_with_illegal_cells_is_printed_and_refused(gptexp: Gptexp, tmp_path: Path) -> None:
    done = gptexp("plan", "-m", *GRID)
    assert done.returncode == 2
    assert done.stdout.count("illegal") == 2
    assert "nearest batch: 8,192 or 10,240 (cell batch.total_batch_size=10000 optim.lr=0.001 and 1 more)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


GPT2_ON_8 = ["model=gpt2", "batch=gpt2", "world=ddp8", "batch.micro_batch_size=auto"]


def test_a_plan_for_a_gpu_that_is_not_here_has_the_choices_and_the_time_of_that_gpu() -> None:
    choices = {}
    for name, peak in (("rtx4090", 165.2e12), ("h100", 989.4e12)):
        gpu = GPUS[name]
        p = plan(compose([*GPT2_ON_8, "train.max_tokens=10000000000"]), gpu=gpu).to_dict()
        e = p["effective"]
        assert (e["device"], e["dtype"], e["compile"], e["loss"]) == ("cuda", "bfloat16", True, "plain")
        assert gpu.memory_bytes is not None
        assert p["memory_bytes"]["peak"] <= 0.85 * gpu.memory_bytes
        assert p["time"]["total_s"] == pytest.approx(p["flops_palm"] / (8 * peak * 0.4))
        assert p["assumed"] == {"memory_bytes": gpu.memory_bytes, "peak_flops_per_s": peak, "mfu": 0.4}
        choices[name] = p["micro_batch_size"], e["attention"]
    assert choices == {"rtx4090": (32, "flash"), "h100": (64, "cudnn")}


def test_a_plan_for_another_gpu_says_that_it_is_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*GPT2_ON_8, "device=a100", "train.max_tokens=10000000000"]
    main(argv)
    out, err = capsys.readouterr()
    lines = {line[:16].rstrip(): line[16:] for line in out.splitlines()}
    assert lines["device"].endswith("nothing is measured")
    # 0.449 s of computing at 40%, and the embedding's gradient, for which the step waits.
    assert "(0.451 s per step): not measured, at an assumed MFU of 40%" in lines["time"]
    assert lines["float32 matmul"].startswith("high")
    assert "threads" not in lines  # the cores beside that GPU are unknown
    assert err == ""
    main(["-m", *argv, "optim.lr=1e-3,2e-3"])
    assert "about 4 h 47 min: not measured, at an assumed MFU of 40%" in capsys.readouterr().out
    unknown = plan(compose([*GPT2_ON_8, "train.dtype=float32"]), gpu=GPUS["a100"])
    assert unknown.time is None
    assert unknown.to_dict()["assumed"]["peak_flops_per_s"] is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    "command", ["gptexp plan device=h100 world=ddp8 model=gpt2", "gptexp plan device=h100 world=ddp8 model=nano"]
)
def test_a_files_micro_batch_that_does_not_divide_the_step_is_chosen_anew_for_another_gpu(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = shlex.split(command)[2:]
    main(arguments)
    out, err = capsys.readouterr()
    size, length = (1, 1024) if "model=gpt2" in command else (4, 256)
    assert f"{counted(size, 'sequence')} × {length:,} tokens × 8 ranks × 1 micro-step" in out
    [line] = err.splitlines()
    assert line.startswith(
        "gptexp: warning: batch.micro_batch_size=8, from a file, is refused; this plan needs "
        "batch.micro_batch_size=auto: batch.total_batch_size=8,192 tokens is not divisible"
    )
    main([*arguments, "batch.micro_batch_size=auto"])  # the command that the warning asks for
    again, err = capsys.readouterr()
    assert (again, err) == (out, "")
    with pytest.raises(ConfigError, match="not divisible"):
        main([*arguments, "batch.micro_batch_size=8"])
    with pytest.raises(ConfigError, match="not divisible"):
        main([text for text in arguments if not text.startswith("device=")])


def test_a_plan_warns_if_a_rank_does_not_fit_a_published_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["model=gpt2", "batch=gpt2", "batch.micro_batch_size=64", "device=rtx4090"])
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(r"gptexp: warning: a rank needs about \d\d\.\d GiB, and the RTX 4090 has 22\.4 GiB; use ", line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["device=h900"],
            "device=h900: unknown; use one of a100, h100, h200, h800, b200, l40s, rtx4090, or leave",
        ),
        (["device=h100", "train.device=cpu"], "train.device=cpu: the plan is for the GPU H100; leave out one of them"),
        (["device=h100", "--time"], "--time: times a few steps on this machine; leave it out, device=GPU estimates"),
    ],
)
def test_a_plan_for_a_gpu_that_cannot_be_made_is_refused(arguments: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        main(arguments)
    assert line in str(refused.value)


@pytest.mark.e2e
@pytest.mark.parametrize(("steps", "warned"), [(150, False), (2000, True)])
def test_a_plan_warns_of_more_than_four_epochs(
    tiny: list[str], steps: int, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(compose(tiny).data)
    main([*tiny, f"train.max_steps={steps}"])
    capsys.readouterr()
    main([*tiny, f"train.max_steps={steps}", "--json"])
    out, err = capsys.readouterr()
    p = json.loads(out)
    assert (p["epochs"] > 4) == warned
    assert [f"gptexp: warning: {line}" for line in p["warnings"]] == err.splitlines()
    assert [line.startswith(f"{p['epochs']:.2f} epochs: ") for line in p["warnings"]] == [True] * warned


@pytest.mark.parametrize(
    ("overrides", "steps", "least"),
    [
        (["schedule.warmup_steps=39"], 39, 40),
        (["schedule.warmup_steps=40"], 40, 40),
        (["schedule.warmup_steps=40", "optim.beta2=0.99"], 40, 200),
        (["schedule.warmup_steps=40", "optim.beta2_half_life_tokens=2560"], 40, 59),
        (["schedule.warmup_steps=1", "optim=sgd"], 1, 0),
        (["schedule.warmup_steps=1", "optim=lion"], 1, 0),  # its beta2 is of the first moment
    ],
)
def test_a_plan_says_how_many_steps_adam_asks_for_if_the_warm_up_is_shorter(
    tiny: list[str], overrides: list[str], steps: int, least: int
) -> None:
    run = plan(compose([*tiny, "train.max_steps=100", *overrides])).run
    assert (run.warmup_steps, run.least_warmup_steps) == (steps, least)
    schedule = dict(run.lines(None))["schedule"]
    assert (f"; beta2 asks for {least})" in schedule) == ("asks for" in schedule) == (steps < least)


def test_large_numbers_of_epochs_are_rounded_and_have_separators(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(compose(tiny).data)
    long = [*tiny, "train.max_steps=1000000"]
    epochs = plan(compose(long)).epochs
    assert epochs is not None
    assert epochs > 1000
    main(long)
    out, err = capsys.readouterr()
    assert f"warning: {epochs:,.0f} epochs: " in err
    assert f" tokens, {epochs:,.0f} epochs\n" in out
    main([*long, "-m", "optim.lr=1e-3,1e-2"])
    assert f" {epochs:,.0f} " in capsys.readouterr().out


@pytest.mark.e2e
def test_a_named_grid_is_planned_as_json(gptexp: Gptexp) -> None:
    values = json.loads(gptexp("plan", "sweep=lr", "--json").stdout)
    assert len(values["cells"]) == values["of"] == 7


OPTUNA = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=9", "optim.lr=interval(1e-3,1e-2)"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["model=nano", *OPTUNA], 0, "9 cells, 3,686,400 tokens in all; Optuna chooses their values"),
        (["model=glob(gpt9*)"], 2, "the sweep has no cells"),
        (["model=nano", "optim.lr=1e-3,2e-3,4e-3", "hydra/launcher=submitit_slurm"], 0, " tokens in all, 3 at once"),
        (
            ["model=nano", "batch.total_batch_size=4096,16384", "schedule.warmup_steps=5"],
            0,
            "warning: schedule.warmup_steps=5 counts steps",
        ),
    ],
)
def test_a_sweep_is_planned_cell_by_cell(gptexp: Gptexp, argv: list[str], code: int, said: str) -> None:
    done = gptexp("plan", "-m", *argv)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
