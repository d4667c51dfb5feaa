"""`gptexp bench --peers CHECKOUT`: nanoGPT's own train.py and `gptexp train` in turns, on the same tokens and shapes.

Each turn is a new process, so a machine that slows down slows both. nanoGPT is compiled in each turn.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gptexp.config.compose import compose
from gptexp.config.metrics import Metric
from gptexp.config.schema import Config
from gptexp.data.loader import build_dataset
from gptexp.process.errors import ConfigError, UserError
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
# Not ru_maxrss, which begins with the memory of the process that has started this one.
PEAK = """
resident = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
own = int(resident.split()[1]) << 10
print("peak", (torch.cuda.max_memory_allocated() if device_type == "cuda" else own) / 2**30)
"""
STEP = re.compile(r"^iter \d+: loss [\d.]+, time ([\d.]+)ms", re.MULTILINE)
PEAK_LINE = re.compile(r"^peak ([\d.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Peer:
    """How nanoGPT runs. On a CPU it ignores its dtype; helped, it does not, and keeps freed memory as gptexp does."""

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

    Raises `ConfigError` if `checkout` is no nanoGPT, and `UserError` if a program fails.
    """
    if missing := [file for file in FILES if not (checkout / file).is_file()]:
        raise ConfigError(f"--peers {checkout}: has no {missing[0]}; give a clone of github.com/karpathy/nanoGPT")
    turns.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"versions": versions(), "git_commit": git_commit(), "workloads": {}}
    for name, of_workload in workloads.items():
        result["workloads"][name] = in_turns(name, [*of_workload, *overrides], checkout, turns)
        run_dir.write_json(turns.out / "peers.json", result)  # each time, so that an interrupted one keeps its results
    if as_json:
        print(json.dumps(result, indent=1))
        return 0
    for name, measured in result["workloads"].items():
        show(name, measured)
    print(f"{turns.out}/peers.json")
    return 0


def in_turns(name: str, overrides: Sequence[str], checkout: Path, wanted: Turns) -> dict[str, Any]:
    """Return the shape of a workload, the rates of its matrix products, and the medians of each program."""
    config, steps, out = compose(overrides), wanted.steps, wanted.out / name
    cache = str(out / "compiled")
    out.mkdir()
    build_dataset(config)  # tokenises before anything is timed
    turns: dict[str, list[Turn]] = {}
    for number in range(wanted.rounds):
        observed = run_until(Workload("", tuple(overrides), steps), [], out / f"{number}", cache, WARM_UP + steps)
        counted = observed.steps[WARM_UP:][:steps]
        own = Turn([step[Metric.STEP_MS] for step in counted], max(step[Metric.PEAK_MEM_GIB] for step in counted))
        turns.setdefault(OWN, []).append(own)
        effective = run_dir.read_json(out / f"{number}" / run_dir.EFFECTIVE)
        for peer in _peers(effective["device"], effective["dtype"]):
            turns.setdefault(peer.name, []).append(_nanogpt(peer, checkout, config, effective, steps))
        said = ", ".join(f"{name} {statistics.median(of_it[-1].step_ms):.1f} ms" for name, of_it in turns.items())
        print(f"round {number + 1}: {said}", file=sys.stderr, flush=True)
    rates = apart(ceilings, out / "0")["gemm_flops_per_s"]
    return {**described(out / "0"), "gemm_flops_per_s": rates, "programs": _medians(turns)}


def _medians(turns: Mapping[str, Sequence[Turn]]) -> dict[str, dict[str, Any]]:
    """Of each program: median and quartiles of all counted steps, and how many times as fast gptexp is, by round."""
    own = [statistics.median(turn.step_ms) for turn in turns[OWN]]
    found = {}
    for name, of_program in turns.items():
        low, middle, high = statistics.quantiles([ms for turn in of_program for ms in turn.step_ms], n=4)
        ratios = [statistics.median(turn.step_ms) / ms for turn, ms in zip(of_program, own, strict=True)]
        found[name] = {
            "step_ms": middle,
            "step_ms_quartiles": [low, high],
            "peak_gib": max(turn.peak_gib for turn in of_program),
            "ratios": ratios,
            "ratio": statistics.median(ratios),
        }
    return found


def _peers(device: str, dtype: str) -> list[Peer]:
    if device == "cpu":
        return [Peer("float32", is_helped=False), Peer(dtype, is_helped=True)]
    return [Peer(dtype, is_helped=False)]


def _nanogpt(peer: Peer, checkout: Path, config: Config, effective: Mapping[str, Any], steps: int) -> Turn:
    """Train with a copy of nanoGPT, whose micro-steps have as many tokens as those of the run with `effective`."""
    with TemporaryDirectory(prefix="nanogpt-") as name:
        copy = Path(name)
        for file in FILES:
            shutil.copy(checkout / file, copy)
        program = (copy / "train.py").read_text()
        if not program.count(CPU_CONTEXT) == program.count(VOCABULARY) == 1:
            raise UserError(f"{checkout}/train.py: another nanoGPT than this version knows; use commit 3adf61e")
        program = program.replace(VOCABULARY, f"meta_vocab_size = {effective['vocab_size']}")
        program = program.replace(CPU_CONTEXT, "") if peer.is_helped else program
        (copy / "train.py").write_text(program + PEAK)
        _give_tokens(copy / "data" / "bench", config)
        options = _options(config, effective, steps) | {"dtype": peer.dtype, "out_dir": str(copy / "out")}
        done = subprocess.run(
            [sys.executable, "-u", "train.py", *(f"--{key}={value}" for key, value in options.items())],
            cwd=copy,
            env={**os.environ, **(KEEP_FREED_MEMORY if peer.is_helped else {})},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise UserError(f"nanoGPT ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    # Its step has a whole number of micro-batches on each rank; ours may be split otherwise.
    tokens = options["gradient_accumulation_steps"] * options["batch_size"] * config.seq_len
    share = config.batch.total_batch_size / tokens
    times = [share * float(ms) for ms in STEP.findall(done.stdout)]
    return Turn(times[WARM_UP + 1 :], float(PEAK_LINE.findall(done.stdout)[-1]))


def _give_tokens(folder: Path, config: Config) -> None:
    folder.mkdir(parents=True)
    train = build_dataset(config).train
    tokens = train.read(0, min(len(train), TOKENS))
    for split in ("train", "val"):
        tokens.tofile(folder / f"{split}.bin")


def _options(config: Config, effective: Mapping[str, Any], steps: int) -> dict[str, Any]:
    model, micro_batch_size = config.model, effective["micro_batch_size"]
    accumulation = max(1, round(config.batch.total_batch_size / (micro_batch_size * config.seq_len)))
    return {
        "dataset": "bench", "device": effective["device"], "compile": True, "max_iters": WARM_UP + steps,
        "eval_interval": 10**9, "eval_iters": 1, "log_interval": 1, "gradient_accumulation_steps": accumulation,
        "batch_size": micro_batch_size, "block_size": config.seq_len, "bias": True, "dropout": 0.0,
        "n_layer": model.n_layer, "n_head": model.n_head, "n_embd": model.n_embd, "learning_rate": 6e-4,
        "warmup_iters": 5,
    }  # fmt: skip


def show(name: str, measured: Mapping[str, Any]) -> None:
    """Print the table of a workload."""
    titles = ("program", "ms/step", "quartiles", "tokens/s", "of GEMM rate", "GiB", "gptexp faster by", "in each round")
    rows = []
    for program, row in measured["programs"].items():
        per_s = 1e3 * measured["total_batch_size"] / row["step_ms"]
        share = measured["flops_per_token_palm"] * per_s / measured["gemm_flops_per_s"]["model"]
        low, high = row["step_ms_quartiles"]
        ratios = ("", "") if program == OWN else (f"{row['ratio']:.2f}×", ", ".join(f"{r:.2f}" for r in row["ratios"]))
        figures = (f"{row['step_ms']:,.1f}", f"{low:,.1f}-{high:,.1f}", f"{per_s:,.0f}", f"{100 * share:.1f}%")
        rows.append((program, *figures, f"{row['peak_gib']:.2f}", *ratios))
    print(f"{name}: {measured['effective']['device_name']}, micro-batches of {measured['micro_batch_size']}")
    print_table([*zip(titles, zip(*rows, strict=True), strict=True)], ("program",), (), (), None)
    print()
