"""Kills a run as often as requested, starts it again each time, and compares it with an undisturbed run.

    python tests/survival.py kills FOLDER --kills 50 --world-sizes 2
    python tests/survival.py crash FOLDER --points renamed --occurrences 2

Ranks are forked from this process, which has imported torch, so a start takes a fraction of a second. Each rank runs
the real `gptexp.run.rank.run` in a real process group. A driver reads their progress from shared memory, which decides
when it kills. The result is a JSON object on stdout: the hash of the final weights and moments, and counts of the kills
in different phases of the run.
"""

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gptexp
from gptexp.config.compose import compose
from gptexp.config.schema import Config, ModelConfig
from gptexp.distributed.ranks import Rank
from gptexp.loggers.jsonl import JsonlSink
from gptexp.model.gpt import GPT
from gptexp.process.signals import StopRequest
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.storage import checkpoint, run_dir, tensor_files
from gptexp.storage.checkpoint import load_latest
from gptexp.training.step import TrainStep

SAVE_EVERY = 4
MOST_STARTS = 400  # a run of a mutant may make no progress
PATIENCE_S = 60.0  # longest wait for a rank that makes no progress

# What each mutant changes: a file of the package, and texts in it with their replacements.
MUTANTS: dict[str, tuple[str, dict[str, str]]] = {
    "no reseed": ("training/step.py", {"torch.manual_seed(batch.dropout_seed)": "pass"}),
    "optimizer not loaded": (
        "training/snapshot.py",
        {"checkpoint.read(path, kind, parts)": "kind == OPTIMIZER or checkpoint.read(path, kind, parts)"},
    ),
    "step off by one": (
        "storage/checkpoint.py",
        {"= _checked(path)\n": "= _checked(path); state.tokens += state.tokens // state.step; state.step += 1\n"},
    ),
    "non-atomic save": (
        "storage/checkpoint.py",
        {
            'target.with_name(f".tmp-{target.name}-{time.time_ns()}")': "target",
        },
    ),
    "data from the local step": (
        "training/loop.py",
        {"t.plan.steps_from(state.step, state.tokens)": "t.plan.steps_from(0, 0)"},
    ),
}


def mutated_package(name: str, folder: Path) -> Path:
    """Copy the package into `folder`, apply one mutant, and return the folder for PYTHONPATH."""
    package = folder / f"mutant-{name.replace(' ', '-')}" / "gptexp"
    original = Path(gptexp.__file__).parent
    shutil.copytree(original, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(original.parent / "conf", package.parent / "conf")
    file, changes = MUTANTS[name]
    source = (package / file).read_text()
    for old, new in changes.items():
        assert source.count(old) == 1, f"{name}: {source.count(old)} places to break in {file}: {old}"
        source = source.replace(old, new)
    (package / file).write_text(source)
    return package.parent


def config(folder: Path, steps: int, optim: Sequence[str] = (), ramp: bool = False, sharding: str = "none") -> Config:
    """A small model with dropout, which averages its weights. A step has eight micro-batches, for 1, 2 or 4 ranks.

    `optim`: the overrides of the optimizer and its keys. With `ramp`, the first step has two micro-batches, and the
    other sizes of steps are four and six.
    """
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("\n".join(f"{i * i % 97} and {i % 13} make {i}." for i in range(20_000)))
    cfg = Config(model=ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=50304, dropout=0.1))
    cfg.batch.total_batch_size, cfg.batch.micro_batch_size = 8 * 16, 1
    cfg.world.threads_per_rank = 1
    cfg.data.name, cfg.data.path, cfg.data.val_tokens = "text", str(text), 0
    cfg.data.cache_dir = str(folder / "cache")
    cfg.train.max_steps, cfg.train.save_every, cfg.train.eval_every = steps, SAVE_EVERY, 0
    cfg.train.device, cfg.train.dtype, cfg.train.compile, cfg.train.reduction = "cpu", "float32", "off", "tree"
    cfg.train.matmul_precision = "highest"  # `auto` times both, and another choice changes the bits
    cfg.world.sharding = sharding
    if sharding != "none":
        cfg.train.reduction = "mean"
    cfg.log.progress, cfg.log.sample_tokens, cfg.log.wandb.mode = "off", 0, "disabled"
    composed = compose(["model.block_size=16", *optim])
    cfg.optim, cfg.model.parametrisation = composed.optim, composed.model.parametrisation
    cfg.model.base_n_embd, cfg.model.base_n_layer = composed.model.base_n_embd, composed.model.base_n_layer
    if cfg.optim.name == "schedulefree":
        cfg.schedule.name = "constant"
    else:
        cfg.train.ema_half_life_tokens = 1000
    if ramp:
        batch = cfg.batch
        batch.ramp_from_tokens, batch.ramp_tokens = 2 * 16, batch.step_sizes.tokens_after(steps) // 2
        cfg.train.save_every, cfg.train.save_every_tokens, cfg.train.reduction = None, SAVE_EVERY * 32, "mean"
    return cfg


class Pulse:
    """The progress of each rank, in memory shared with the driver: its steps, and whether it is saving."""

    RANKS = 8

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * self.RANKS)

    def beat(self, rank: int, steps: int, saving: bool) -> None:
        struct.pack_into("<ii", self._memory, 8 * rank, steps, saving)

    def read(self, rank: int) -> tuple[int, bool]:
        steps, saving = struct.unpack_from("<ii", self._memory, 8 * rank)
        return steps, bool(saving)


def watch(pulse: Pulse, rank: int) -> None:
    """Patch this process so that it reports its steps and saves to `pulse`."""
    steps, plain_step = 0, TrainStep.__call__
    plain_begin, writes = checkpoint.begin_to_save, False

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        report = plain_step(*args, **kwargs)
        steps += 1
        pulse.beat(rank, steps, writes)
        return report

    def begin(*args: Any, **kwargs: Any) -> Any:
        nonlocal writes
        writes = True
        pulse.beat(rank, steps, True)
        future = plain_begin(*args, **kwargs)

        def ended(_: object) -> None:
            nonlocal writes
            writes = False

        future.add_done_callback(ended)
        return future

    TrainStep.__call__ = train_step  # type: ignore[method-assign]
    checkpoint.begin_to_save = begin


def start(cfg: Config, directory: Path, world_size: int, prepare: Callable[[int], None]) -> list[int]:
    """Fork the ranks of a run; their process ids. Each calls `prepare` with its rank first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cfg = replace(cfg, world=replace(cfg.world, size=world_size))
    run_dir.save_config(directory, cfg)
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ.update(
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size)
                )
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # stdout is for the result only
                prepare(rank)
                code = run(Job(cfg, directory, Rank(rank, world_size, rank, world_size), StopRequest()))
            except Exception as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return pids


def reap(pids: list[int], seconds: float) -> list[int]:
    """Wait `seconds` for processes to end, then kill the others; their exit codes."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(pids):
        late = time.monotonic() > deadline
        for pid in pids:
            if pid in codes:
                continue
            if late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def contents(directory: Path) -> str:
    """Hash of the final weights, optimizer state and average of a run."""
    newest = max((directory / run_dir.CHECKPOINTS).glob("step-*"))
    files = [path.read_bytes() for path in sorted(newest.iterdir()) if path.suffix == ".safetensors"]
    return f"{newest.name}-{hashlib.sha256(b''.join(files)).hexdigest()[:16]}"


def apart(directory: Path, other: Path) -> float:
    """The largest difference between the final weights of two runs, over the norm of the tensor."""
    found = []
    for each in (directory, other):
        cfg = run_dir.load_resolved(each)
        gpt = GPT(cfg.model)
        checkpoint.load_weights(max((each / run_dir.CHECKPOINTS).glob("step-*")), gpt)
        found.append({name: p.detach() for name, p in gpt.named_parameters()})
    a, b = found
    return max(float((a[name] - b[name]).abs().max() / b[name].norm()) for name in b)


def leftovers(directory: Path) -> int:
    found = directory / run_dir.CHECKPOINTS
    return len([*found.glob(".tmp-*"), *found.glob(".del-*"), *directory.glob(".*.json*.*")])


def whole_metrics(directory: Path, steps: int) -> bool:
    """Whether metrics.jsonl has every step exactly once, and whole lines only."""
    try:
        events = [json.loads(line) for line in (directory / run_dir.METRICS).read_text().splitlines()]
    except ValueError:
        return False
    return [e["step"] for e in events if e["event"] == "step"] == list(range(steps))


def undisturbed(cfg: Config, folder: Path, world_size: int = 1) -> str:
    directory = folder / "undisturbed"
    codes = reap(start(cfg, directory, world_size, lambda rank: None), 300)
    assert not any(codes)
    return contents(directory)


def kills(
    folder: Path,
    count: int,
    steps: int,
    world_sizes: list[int],
    seed: int,
    optim: Sequence[str],
    ramp: bool,
    sharding: str,
) -> dict[str, Any]:
    """Kill a run `count` times, then let it complete. With sharding=full each start draws the files of checkpoints."""
    draw, pulse = random.Random(seed), Pulse()
    cfg = config(folder, steps, optim, ramp, sharding)
    # A ramp has no tree of reductions, so the sums of another world size round differently. Nor has a sharding.
    expected = undisturbed(cfg, folder, world_sizes[0] if ramp or sharding != "none" else 1)
    directory = folder / "killed"
    resumed_at, in_save, half_written, delivered, starts, alone = set(), 0, 0, 0, 0, 0
    sizes: dict[int, int] = {}
    code = 1
    while code and starts < MOST_STARTS:
        starts += 1
        half_written += leftovers(directory) > 0
        found = load_latest(directory / run_dir.CHECKPOINTS)
        resumed_at.add(found[1].step if found else 0)
        world_size = draw.choice(world_sizes)
        sizes[world_size] = sizes.get(world_size, 0) + 1
        for rank in range(world_size):
            pulse.beat(rank, 0, False)
        pids = start(cfg, directory, world_size, lambda rank: watch(pulse, rank))
        if delivered == count:
            code = max(map(abs, reap(pids, 10 * PATIENCE_S)))
            if code:
                break
            continue
        victim = draw.randrange(world_size)
        saving = draw.random() < 0.6
        after, delay = draw.randint(1, 2 * SAVE_EVERY), draw.random() * (0.02 if saving else 0.03)
        if not _wait(pulse, pids, 0 if saving else victim, after, saving):
            code = max(map(abs, reap(pids, 1)))  # it ended before the kill, or made no progress
            continue
        time.sleep(delay)
        in_save += pulse.read(0)[1]
        one = world_size > 1 and draw.random() < 0.6
        for pid in [pids[victim]] if one else pids:
            os.kill(pid, signal.SIGKILL)
        delivered, alone = delivered + 1, alone + one
        reap(pids, 1.0)
    return {
        "package": str(Path(gptexp.__file__).parent.parent),
        "expected": expected,
        "found": contents(directory) if not code else f"never ended, {starts} starts",
        "apart": apart(directory, folder / "undisturbed") if not code else None,
        "kills": delivered,
        "of one rank": alone,
        "resume steps": len(resumed_at),
        "in a save": in_save,
        "half-written": half_written,
        "rejected": len(list((directory / run_dir.CHECKPOINTS).glob("rejected-*"))),
        "left over": leftovers(directory),
        "metrics whole": whole_metrics(directory, steps),
        "starts per world size": sizes,
    }


def _wait(pulse: Pulse, pids: list[int], rank: int, steps: int, saving: bool) -> bool:
    """Wait until `rank` has done `steps` steps and, if `saving`, saves; False if a process ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        done, in_save = pulse.read(rank)
        if done >= steps and (in_save or not saving):
            return True
        for pid in pids:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return False
        time.sleep(0.0002)
    return False


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash_at(point: str, occurrence: int) -> None:
    """Patch this process so that it kills itself the `occurrence`th time that it reaches `point` of saving."""
    seen = 0

    def due(here: bool = True) -> bool:
        nonlocal seen
        seen += here
        return here and seen == occurrence

    def around(owner: Any, name: str, before: Callable[..., bool] | None, after: Callable[..., bool] | None) -> None:
        plain = getattr(owner, name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            if before and due(before(*args)):
                _die()
            result = plain(*args, **kwargs)
            if after and due(after(*args)):
                _die()
            return result

        setattr(owner, name, patched)

    always = lambda *_: True  # noqa: E731
    is_new = lambda path, *_: path.name.startswith(".tmp-")  # noqa: E731
    is_step = lambda path, *_: path.name.startswith("step-")  # noqa: E731
    patches: dict[str, tuple[Any, str, Callable[..., bool] | None, Callable[..., bool] | None]] = {
        "before": (checkpoint, "begin_to_save", always, None),
        "weights": (tensor_files, "write", None, lambda path, *_: path.name == "model.safetensors"),
        "optimizer": (tensor_files, "write", None, lambda path, *_: path.name == "optimizer.safetensors"),
        "manifest": (checkpoint, "fsync", lambda path: path.name == checkpoint.MANIFEST, None),
        "synced": (Path, "rename", is_new, None),
        "renamed": (Path, "rename", None, is_new),
        "doomed": (Path, "rename", None, is_step),
        "half removed": (shutil, "rmtree", None, None),
        "half a line": (JsonlSink, "write", None, None),
        "replaced": (Path, "replace", lambda _, target: target.name in (run_dir.EFFECTIVE, run_dir.SUMMARY), None),
    }
    if point == "half removed":
        plain_rmtree = shutil.rmtree

        def rmtree(path: Path, **kwargs: Any) -> None:
            if due(path.name.startswith(".del-")):
                (path / "state.json").unlink()
                _die()
            plain_rmtree(path, **kwargs)

        shutil.rmtree = rmtree  # type: ignore[assignment]
    elif point == "half a line":
        plain_write = JsonlSink.write

        def write(sink: Any, event: dict[str, Any]) -> None:
            if due(event["event"] == "checkpoint"):
                sink._file.write(json.dumps(event).encode()[:40])
                _die()
            plain_write(sink, event)

        JsonlSink.write = write  # type: ignore[method-assign]
    else:
        around(*patches[point])


POINTS = ("before", "weights", "optimizer", "manifest", "synced", "renamed", "doomed", "half removed", "half a line",
          "replaced")  # fmt: skip


def crashes(folder: Path, points: list[str], occurrences: list[int]) -> list[dict[str, Any]]:
    """For each point and occurrence, kill a run once and start it again."""
    steps = 5 * SAVE_EVERY
    cfg = config(folder, steps)
    expected = undisturbed(cfg, folder)
    found = []
    for point in points:
        for occurrence in occurrences:
            directory = folder / f"{point}-{occurrence}"
            [died] = reap(start(cfg, directory, 1, lambda _: crash_at(point, occurrence)), PATIENCE_S)  # noqa: B023
            half_written = leftovers(directory)
            [code] = reap(start(cfg, directory, 1, lambda _: None), PATIENCE_S)
            found.append(
                {
                    "point": point,
                    "occurrence": occurrence,
                    "died": died == -signal.SIGKILL,
                    "half-written": half_written,
                    "same": code == 0 and contents(directory) == expected,
                    "left over": leftovers(directory),
                    "rejected": len(list((directory / run_dir.CHECKPOINTS).glob("rejected-*"))),
                    "metrics whole": whole_metrics(directory, steps),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("kills", "crash"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optim", nargs="+", default=[], metavar="OVERRIDE")
    parser.add_argument("--ramp", action="store_true")
    parser.add_argument("--sharding", default="none")
    parser.add_argument("--points", nargs="+", default=POINTS)
    parser.add_argument("--occurrences", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    from fork_server import import_torch

    import_torch()
    if args.what == "kills":
        how = (args.world_sizes, args.seed, args.optim, args.ramp, args.sharding)
        print(json.dumps(kills(args.folder, args.kills, args.steps, *how)))
    else:
        print(json.dumps(crashes(args.folder, args.points, args.occurrences)))


if __name__ == "__main__":
    main()
