"""`gptexp bench --peers CHECKOUT`: nanoGPT's own train.py and `gptexp train` in turns, on the same tokens and shapes.

Each turn is a new process, so a machine that slows down slows both. nanoGPT is always compiled. Both programs have one
compile cache, which torch fills in their first turns and reads in the later ones.
"""

import inspect
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from gptexp.config.blocks import in_words
from gptexp.config.compose import compose
from gptexp.config.metrics import Metric
from gptexp.config.run_plan import plan_run
from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import Config
from gptexp.data.loader import build_dataset
from gptexp.data.prepare import prepare
from gptexp.loggers.run_log import peak_memory_gib
from gptexp.optim.adamw import AdamWConfig
from gptexp.process.errors import EXIT_FAILED, ConfigError, UserError
from gptexp.process.signals import at_parents_death, ended_in_order
from gptexp.process.versions import git_commit, versions
from gptexp.reporting.listings.terminal_table import print_table
from gptexp.run.benchmark import WARM_UP, apart, ceilings, described, run_until
from gptexp.run.workloads import Workload
from gptexp.storage import run_dir

OWN = "gptexp"
FILES = ("train.py", "model.py", "configurator.py")  # of nanoGPT
TOKENS = 1_000_000  # of the corpus are given to nanoGPT, at most
# glibc's environment variables for the options that gptexp sets with mallopt(3).
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": str(256 << 20),
}
# Texts in nanoGPT's train.py: what makes it ignore its dtype on a CPU, and its vocabulary without a meta.pkl.
CPU_CONTEXT = "nullcontext() if device_type == 'cpu' else"
VOCABULARY = "meta_vocab_size = None"
# gptexp's own function, so that both programs count alike.
PEAK = f"""
import resource, sys
from contextlib import suppress
from pathlib import Path
{inspect.getsource(peak_memory_gib)}
print("peak", peak_memory_gib())
"""
STEP = re.compile(r"^iter \d+: loss \S+, time ([\d.]+)ms", re.MULTILINE)
PEAK_LINE = re.compile(r"^peak ([\d.]+)$", re.MULTILINE)
TITLES = ("program", "ms/step", "quartiles", "tokens/s", "of GEMM rate", "GiB", "gptexp faster by", "in each round")


@dataclass(frozen=True)
class Peer:
    """How nanoGPT runs. On a CPU it ignores its dtype; helped, it does not, and has gptexp's settings of the process.

    These keep freed memory, and let waiting threads sleep early.
    """

    dtype: str
    is_helped: bool

    @property
    def name(self) -> str:
        return f"nanoGPT{', helped' if self.is_helped else ''}, {self.dtype}"


@dataclass(frozen=True)
class Turns:
    """How much is measured, and where the runs of gptexp are kept."""

    rounds: int
    steps: int  # counted in each turn
    out: Path


@dataclass(frozen=True)
class Turn:
    """The counted steps of one process."""

    step_ms: list[float]
    peak_gib: float


def compare(
    workloads: Mapping[str, Sequence[str]], overrides: Sequence[str], checkout: Path, turns: Turns, as_json: bool
) -> int:
    """Train each workload, given by its overrides, in turns, and print the medians and ratios. Returns the exit code.

    A program that fails is left out of further turns of the workload, and the exit code is not 0. Raises `ConfigError`
    if `checkout` is no nanoGPT, and `DataError`.
    """
    _require_nanogpt(checkout)
    for of_workload in workloads.values():  # tokenise before anything is timed
        config = compose([*of_workload, *overrides])
        if block := in_words(config.model):
            raise ConfigError(f"--peers: nanoGPT has GPT-2's block alone, not {block}; leave one of them out")
        prepare(config.data)
    turns.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"versions": versions(), "git_commit": git_commit(), "workloads": {}}
    has_failed = False
    for name, of_workload in workloads.items():
        measured = result["workloads"][name] = in_turns(name, [*of_workload, *overrides], checkout, turns)
        run_dir.write_json(turns.out / "peers.json", result)  # each time, so that an interrupted one keeps its results
        if not as_json:
            show(name, measured)
        errors = {program: row["error"] for program, row in measured["programs"].items() if "error" in row}
        for program, error in errors.items():
            print(f"{name}: {program}: {error}", file=sys.stderr, flush=True)
        has_failed |= bool(errors)
    print(json.dumps(result, indent=1) if as_json else f"{turns.out}/peers.json")
    return EXIT_FAILED if has_failed else 0


def _require_nanogpt(checkout: Path) -> None:
    if missing := [file for file in FILES if not (checkout / file).is_file()]:
        raise ConfigError(f"--peers {checkout}: has no {missing[0]}; give a clone of github.com/karpathy/nanoGPT")
    program = (checkout / "train.py").read_text()
    if not program.count(CPU_CONTEXT) == program.count(VOCABULARY) == 1:
        raise ConfigError(f"{checkout}/train.py: another nanoGPT than this version knows; use commit 3adf61e")


def in_turns(name: str, overrides: Sequence[str], checkout: Path, wanted: Turns) -> dict[str, Any]:
    """Return the shape of a workload, the rates of its matrix products, and the medians or the `error` of each program.

    If gptexp fails before it has chosen the shape, there is nothing but its error.
    """
    steps, out = wanted.steps, wanted.out / name
    out.mkdir()
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(out / "compiled")
    turns: dict[str, list[Turn]] = {}
    errors: dict[str, str] = {}

    def take(program: str, turn: Callable[[], Turn]) -> None:
        of_program = turns.setdefault(program, [])
        if program not in errors:
            try:
                of_program.append(turn())
            except UserError as error:
                errors[program] = str(error)

    first = out / "0"
    for number in range(wanted.rounds):
        take(OWN, partial(_gptexp, overrides, out / f"{number}", cache, steps))
        if not (first / run_dir.EFFECTIVE).is_file():
            return {"programs": {OWN: {"error": errors[OWN]}}}
        config, effective = run_dir.load_resolved(first), run_dir.read_json(first / run_dir.EFFECTIVE)
        peers = _peers(effective["device"], effective["dtype"])
        for peer in peers:
            take(peer.name, partial(_nanogpt, peer, checkout, config, effective, steps, cache))
        last = {program: of_it[-1].step_ms for program, of_it in turns.items() if program not in errors}
        said = ", ".join(f"{program} {statistics.median(times):.1f} ms" for program, times in last.items())
        print(f"round {number + 1}: {said}", file=sys.stderr, flush=True)
    dtypes = {OWN: effective["dtype"], **{peer.name: peer.dtype for peer in peers}}
    figures = _medians({program: of_it for program, of_it in turns.items() if program not in errors})
    programs = {
        program: {"dtype": dtypes[program], **(figures.get(program) or {"error": errors[program]})} for program in turns
    }
    rates = apart(ceilings, first)["gemm_flops_per_s"]
    return {**described(first), "gemm_flops_per_s": rates, "programs": programs}


def _medians(turns: Mapping[str, Sequence[Turn]]) -> dict[str, dict[str, Any]]:
    """Of each program: median and quartiles of all counted steps, and how many times as fast gptexp is, by round."""
    found = {}
    for name, of_program in turns.items():
        low, middle, high = statistics.quantiles([ms for turn in of_program for ms in turn.step_ms], n=4)
        found[name] = {
            "step_ms": middle,
            "step_ms_quartiles": [low, high],
            "peak_gib": max(turn.peak_gib for turn in of_program),
        }
        if OWN in turns:
            pairs = zip(of_program, turns[OWN], strict=True)
            ratios = [statistics.median(turn.step_ms) / statistics.median(own.step_ms) for turn, own in pairs]
            found[name] |= {"ratios": ratios, "ratio": statistics.median(ratios)}
    return found


def _peers(device: str, dtype: str) -> list[Peer]:
    if device == "cpu":
        return [Peer("float32", is_helped=False), Peer(dtype, is_helped=True)]
    return [Peer(dtype, is_helped=False)]


def _gptexp(overrides: Sequence[str], directory: Path, cache: str, steps: int) -> Turn:
    observed = run_until(Workload("", tuple(overrides), steps), [], directory, cache, WARM_UP + steps)
    counted = observed.steps[WARM_UP:][:steps]
    return Turn([step[Metric.STEP_MS] for step in counted], max(step[Metric.PEAK_MEM_GIB] for step in counted))


def _nanogpt(peer: Peer, checkout: Path, config: Config, effective: Mapping[str, Any], steps: int, cache: str) -> Turn:
    """Train with a copy of nanoGPT as the run with the resolved `config` and `effective` does."""
    with ended_in_order(), TemporaryDirectory(prefix="nanogpt-") as name:
        copy = Path(name)
        for file in FILES:
            shutil.copy(checkout / file, copy)
        program = (copy / "train.py").read_text()
        program = program.replace(VOCABULARY, f"meta_vocab_size = {config.model.resolved_vocab_size}")
        program = program.replace(CPU_CONTEXT, "") if peer.is_helped else program
        (copy / "train.py").write_text(program + PEAK)
        _give_tokens(copy / "data" / "bench", config)
        options = _options(config, effective, steps) | {"dtype": peer.dtype, "out_dir": str(copy / "out")}
        done = subprocess.run(
            [sys.executable, "-u", "train.py", *(f"--{key}={value}" for key, value in options.items())],
            cwd=copy,
            env=_environment(peer, psutil.Process().environ()) | {"TORCHINDUCTOR_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            preexec_fn=partial(at_parents_death, signal.SIGKILL),
        )
    if done.returncode:
        raise UserError(f"nanoGPT ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    times, peaks = STEP.findall(done.stdout), PEAK_LINE.findall(done.stdout)
    first = WARM_UP + 1  # its step 0 is one more, which compiles
    if (len(times), len(peaks)) != (first + steps, 1):
        found = f"{len(times)} times of steps and {len(peaks)} of the peak memory"
        raise UserError(f"nanoGPT printed {found}, not {first + steps} and 1: {done.stdout.strip()[-2000:]}")
    return Turn([float(ms) for ms in times[first:]], float(peaks[0]))


def _environment(peer: Peer, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of nanoGPT's process. `given` is that which the user gave to this process.

    `run_verb` has added gptexp's GOMP_SPINCOUNT to it.
    """
    if peer.is_helped:
        return {**os.environ, **KEEP_FREED_MEMORY}
    return {name: text for name, text in os.environ.items() if name != "GOMP_SPINCOUNT" or name in given}


def _give_tokens(folder: Path, config: Config) -> None:
    folder.mkdir(parents=True)
    train = build_dataset(config).train
    tokens = train.read(0, min(len(train), TOKENS))
    for split in ("train", "val"):
        tokens.tofile(folder / f"{split}.bin")


def _options(config: Config, effective: Mapping[str, Any], steps: int) -> dict[str, Any]:
    model, plan, optim = config.model, plan_run(config, effective["micro_batch_size"]), scaled_optim(config)
    assert isinstance(optim, AdamWConfig), "bench refuses other optimizers"
    return {
        "dataset": "bench", "device": effective["device"], "compile": True, "max_iters": WARM_UP + steps,
        "eval_interval": 10**9, "eval_iters": 1, "log_interval": 1,
        "gradient_accumulation_steps": plan.batch.grad_accum_steps, "batch_size": plan.batch.micro_batch_size,
        "block_size": config.seq_len, "bias": model.bias, "dropout": model.dropout, "n_layer": model.n_layer,
        "n_head": model.n_head, "n_embd": model.n_embd, "grad_clip": optim.grad_clip, "learning_rate": optim.lr,
        "min_lr": optim.lr, "warmup_iters": plan.warmup_steps, "weight_decay": optim.weight_decay,
        "beta1": optim.beta1, "beta2": optim.beta2,
    }  # fmt: skip


def show(name: str, measured: Mapping[str, Any]) -> None:
    """Print the table of a workload. A program that has failed has empty cells."""
    rows = [(program, *_cells(measured, row)) for program, row in measured["programs"].items()]
    if "effective" in measured:
        name += f": {measured['effective']['device_name']}, micro-batches of {measured['micro_batch_size']}"
    print(f"\n{name}")
    print_table([*zip(TITLES, zip(*rows, strict=True), strict=True)], ("program",), (), (), None)
    sys.stdout.flush()


def _cells(measured: Mapping[str, Any], row: Mapping[str, Any]) -> Sequence[str]:
    if "error" in row:
        return ("failed", *[""] * (len(TITLES) - 2))
    per_s = 1e3 * measured["total_batch_size"] / row["step_ms"]
    share = measured["flops_per_token_palm"] * per_s / measured["gemm_flops_per_s"]["model"]
    low, high = row["step_ms_quartiles"]
    ratios = [] if row is measured["programs"][OWN] else row.get("ratios", [])
    return (
        f"{row['step_ms']:,.1f}",
        f"{low:,.1f}-{high:,.1f}",
        f"{per_s:,.0f}",
        f"{100 * share:.1f}%" if row["dtype"] == measured["effective"]["dtype"] else "",  # the rates' dtype
        f"{row['peak_gib']:.2f}",
        f"{row['ratio']:.2f}×" if ratios else "",
        ", ".join(f"{ratio:.2f}" for ratio in ratios),
    )
