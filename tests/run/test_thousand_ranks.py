"""A thousand ranks in one process, with torch's fake process group: shares of the data, the plan, the start of a rank.

The fake group computes nothing: a collective returns at once and leaves its tensors as they are.
"""

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY, events, summary
from real_runs import newest
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptexp import load_run
from gptexp.command.planning import Plan, plan
from gptexp.config.compose import compose
from gptexp.config.run_plan import plan_run
from gptexp.config.vocabulary import with_vocab_size
from gptexp.data import agreement, loader, prepare
from gptexp.data.loader import build_dataset, micro_batches, val_batches
from gptexp.data.shards import ShardWriter
from gptexp.distributed import group
from gptexp.distributed.ranks import Rank
from gptexp.machine.resolve import resolve
from gptexp.model.gpus import GPUS
from gptexp.process.signals import StopRequest
from gptexp.run import build, faults
from gptexp.run import rank as rank_module
from gptexp.run.build import build_split_gpt, wrap
from gptexp.run.first_weights import choose_weights, load_first_weights
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.storage import checkpoint, init_from, tensor_files
from gptexp.storage.tensor_files import MODEL, OPTIMIZER, file_name
from gptexp.training import loop

WORLDS = [1024, 4096]
CPU = torch.device("cpu")


def config_of(corpus: Path, world_size: int, *more: str) -> Any:
    """`TINY` with one sequence for each rank in a step."""
    kept = [o for o in TINY if not o.startswith("batch.")]
    sizes = [f"batch.total_batch_size={16 * world_size}", "batch.micro_batch_size=1", f"world.size={world_size}"]
    return compose([*kept, f"data.path={corpus}", *sizes, *more])


@pytest.mark.parametrize(("world_size", "accumulation"), [(1024, 3), pytest.param(4096, 1, marks=pytest.mark.e2e)])
def test_every_sample_of_a_step_is_read_by_one_rank_and_shares_are_contiguous(
    corpus: Path, world_size: int, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config_of(corpus, world_size, f"batch.total_batch_size={16 * world_size * accumulation}")
    dataset = build_dataset(cfg)
    asked: list[int] = []

    class Order:
        seed = 0

        def train_starts(self, samples: np.ndarray, seq_len: int) -> np.ndarray:
            asked.extend(samples.tolist())
            return 0 * samples

    monkeypatch.setattr(loader, "fingerprint", lambda rows: 0)
    dataset.order = Order()  # type: ignore[assignment]
    steps = plan_run(cfg, 1)
    second = steps.step(1, 16 * world_size * accumulation)
    for rank in range(world_size):
        assert len(list(micro_batches(dataset, [second], rank, CPU))) == accumulation
    samples = world_size * accumulation
    assert asked == list(range(samples, 2 * samples))  # in the order of the ranks, so each share is contiguous


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_validation_window_is_evaluated_by_one_rank(corpus: Path, world_size: int) -> None:
    """Most ranks have an empty batch: the corpus has fewer windows than there are ranks."""
    dataset = build_dataset(config_of(corpus, world_size))
    windows = [x.shape[0] for rank in range(world_size) for x, _ in val_batches(dataset, 4, rank, world_size, CPU)]
    assert (sum(windows), len(windows), set(windows)) == (len(dataset.val_starts), world_size, {0, 1})


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_plan_of_a_thousand_gpus_has_the_memory_of_two(world_size: int) -> None:
    """Under DDP the memory of a rank depends on its own share of the batch alone."""

    def planned(size: int) -> Plan:
        batch = [f"batch.total_batch_size={size * 1024}", "batch.micro_batch_size=1", f"world.size={size}"]
        return plan(compose(["model=gpt2", "train.max_tokens=1e10", *batch]), gpu=GPUS["h100"])

    large, small = planned(world_size), planned(2)
    assert large.memory == small.memory
    assert (large.run.batch.world_size, large.run.batch.grad_accum_steps) == (world_size, 1)


class CountingStore(dist.Store):
    """A store that counts the messages of one rank. Every other rank has done its part before it."""

    def __init__(self, world_size: int, known: dict[str, bytes]) -> None:
        super().__init__()
        self.world_size, self.values = world_size, known
        self.messages: Counter[str] = Counter()
        self.keys = 0

    def _count(self, kind: str, keys: int = 1) -> None:
        self.messages[kind] += 1
        self.keys += keys

    def set(self, key: str, value: Any) -> None:
        self._count("set")
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self._count("get")
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self._count("add")
        return self.world_size

    def check(self, keys: list[str]) -> bool:
        self._count("check", len(keys))
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._count("wait", len(keys))
        assert all(key in self.values for key in keys), keys


def unreduced(_group: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.fixture
def fake_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, CountingStore]]:
    """Replace process groups by fake ones, and the store by one that counts. Yields the stores by world size."""
    stores: dict[int, CountingStore] = {}
    known: dict[str, bytes] = {}
    init, new_group = dist.init_process_group, dist.new_group

    def fake_init(_backend: str, *, rank: int, world_size: int, **_: Any) -> None:
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def connect(rank: Rank) -> dist.Store:
        return stores.setdefault(rank.world_size, CountingStore(rank.world_size, known))

    def fake_wrap(*args: Any) -> torch.nn.Module:
        """The real one. The fake group's all-reduce has no result that DDP could take, so a hook returns it."""
        ddp = wrap(*args)
        assert isinstance(ddp, torch.nn.parallel.DistributedDataParallel)
        ddp.register_comm_hook(None, unreduced)
        return ddp

    monkeypatch.setattr(build, "wrap", fake_wrap)
    monkeypatch.setattr(dist, "init_process_group", fake_init)
    monkeypatch.setattr(dist, "new_group", lambda **_: new_group(backend="fake"))
    monkeypatch.setattr(rank_module, "connect", connect)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")  # so that it is restored, also if it was not set
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    yield stores
    group.destroy_process_group()


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_rank_of_a_thousand_starts_trains_and_saves(
    corpus: Path, tmp_path: Path, fake_group: dict[int, CountingStore], world_size: int
) -> None:
    cfg = config_of(corpus, world_size, "train.max_steps=2", "log.progress=lines")
    assert run(Job(cfg, tmp_path / "run", Rank(0, world_size, 0, 8), StopRequest())) == 0
    assert summary(tmp_path / "run")["status"] == "completed"
    assert [event["tokens"] for event in events(tmp_path / "run", "step")] == [16 * world_size, 32 * world_size]
    store = fake_group[world_size]
    assert (sum(store.messages.values()), store.keys) == (5, 5)  # at any number of ranks
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"  # the messages of gloo, which here is none


class Collectives(TorchDispatchMode):
    """Records the collectives of this process, and the number of elements of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            self.found.append((op._opname, sum(t.numel() for t in tree_leaves(args) if isinstance(t, torch.Tensor))))
        return op(*args, **(kwargs or {}))


def test_the_collectives_of_a_step_are_as_large_at_any_number_of_ranks(
    corpus: Path, tmp_path: Path, fake_group: dict[int, CountingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue_step, found = loop._Loop.queue_step, {}

    def recorded(own: loop._Loop) -> None:
        with Collectives() as collectives:
            queue_step(own)
        found[own.t.rank.world_size, own.state.step] = collectives.found

    monkeypatch.setattr(loop._Loop, "queue_step", recorded)
    for world_size in WORLDS:
        cfg = config_of(corpus, world_size, "train.max_steps=3", "train.eval_every_tokens=0")
        assert run(Job(cfg, tmp_path / str(world_size), Rank(0, world_size, 0, 8), StopRequest())) == 0
    steps = [[found[world_size, step] for world_size in WORLDS] for step in (1, 2, 3)]
    assert all(of_1024 == of_4096 for of_1024, of_4096 in steps)  # in the second one DDP agrees on its buckets
    # Beside the gradients, which a hook reduces: the slowest rank, and all other numbers.
    assert steps[2][0] == [("allreduce_", 1), ("allreduce_", 17)]


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_a_rank_of_a_split_model_reads_its_rows_of_the_first_weights(
    corpus: Path, finished_run: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has hashed them, as it chose the checkpoint. Of a sharded one only this rank's files are there."""
    cfg = with_vocab_size(config_of(corpus, 1024, "world.sharding=full"), 50304)
    source = choose_weights(init_from.of_config(str(finished_run)), cfg.model)
    whole = {name: p.detach() for name, p in load_run(finished_run)[0].named_parameters()}
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=1024)
    _, parameters = build_split_gpt(cfg, resolve(cfg, CPU, Rank(5, 1024, 5, 8), None), CPU, drawn=False)
    each = {name: -(-len(tensor) // 1024) for name, tensor in whole.items()}  # rows of a rank
    rows = {name: whole[name][5 * n : 6 * n].clone() for name, n in each.items()}
    if kind == "sharded":
        tensor_files.write(tmp_path / file_name(MODEL, 5, 1024), rows)
        layout = {"files": {MODEL: 1024, OPTIMIZER: 1024}, "split": True, "counts": []}
        (tmp_path / "state.json").write_text(json.dumps({"tensors": layout}))
        source = replace(source, checkpoint=tmp_path)
    monkeypatch.setattr(checkpoint, "_sha256", None)
    for own in parameters.named.values():
        own.data.zero_()
    load_first_weights(source, parameters)
    dist.destroy_process_group()
    assert each["wte.weight"] == 50
    assert all(torch.equal(parameters.named[name], own) for name, own in rows.items())


class Opened:
    """Files that this process opens and folders that it lists, below one folder, while `on`."""

    def __init__(self) -> None:
        self.on: Path | None = None
        self.files: list[str] = []
        self.folders: list[str] = []
        sys.addaudithook(self._hook)  # it cannot be removed again

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on is None or event not in ("open", "os.listdir", "os.scandir") or not isinstance(args[0], str | Path):
            return
        path = Path(args[0])
        if self.on in path.parents or self.on == path:
            (self.files if event == "open" else self.folders).append(str(path.relative_to(self.on)))


@pytest.fixture(scope="module")
def opened() -> Opened:
    return Opened()


@pytest.fixture
def opened_by(
    tmp_path: Path, fake_group: dict[int, CountingStore], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Counter[str], list[str]]]:
    """Train as a rank, after rank 0. Returns the files that it opens, with how often, and the folders that it lists.

    They lie on a file system that all nodes share: the files of the corpus, its 80 files of tokens, and the run.
    """
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i}.txt").write_text("The cat sees fish.\n" * 200)
    monkeypatch.setattr(prepare, "ShardWriter", partial(ShardWriter, tokens_per_shard=950))
    cfg = config_of(
        tmp_path / "texts" / "*.txt", 1024, f"data.cache_dir={tmp_path / 'cache'}", "data.tokenizer=bytes",
        "train.eval_every_tokens=0", "train.save_every_tokens=0",
    )  # fmt: skip
    agreed: list[Any] = []

    def agree(decide: Any, rank: Rank, _group: object = None) -> Any:
        if rank.is_main:
            agreed.append(decide())
        return agreed[-1]

    monkeypatch.setattr(rank_module, "agree", agree)

    def train(number: int, local_rank: int, steps: int = 1) -> tuple[Counter[str], list[str]]:
        changed = replace(cfg, train=replace(cfg.train, max_steps=steps))
        if number:
            agreed[-1][1].touch()  # rank 0's mark, for which the first rank of a node looks
        opened.files, opened.folders, opened.on = [], [], tmp_path
        try:
            job = Job(changed, tmp_path / "run", Rank(number, 1024, local_rank, 8), StopRequest())
            assert run(job) == 0
        finally:
            opened.on = None
        return Counter(Path(name).name for name in opened.files), opened.folders

    assert len(train(0, 0)[0]) > 80
    return train


@pytest.mark.parametrize(("number", "local_rank"), [(8, 0), (5, 5)])
def test_only_rank_0_lists_folders_and_opens_all_files(
    opened_by: Callable[..., tuple[Counter[str], list[str]]], number: int, local_rank: int
) -> None:
    """Rank 8 is the first of the second node. Both read the manifest once, and the tokens that they train on."""
    files, folders = opened_by(number, local_rank)
    assert folders == []
    assert files.pop("manifest.json") == 1
    assert sum(files.values()) <= 2 + 1  # a sequence of 17 tokens may be in two files, and a window for validation
    assert all(name.startswith("tokens-") for name in files)


def test_a_resumed_rank_opens_the_checkpoint_that_rank_0_has_chosen(
    opened_by: Callable[..., tuple[Counter[str], list[str]]],
) -> None:
    opened_by(0, 0, steps=2)
    files, folders = opened_by(5, 5, steps=2)
    assert folders == []
    of_run = {name: count for name, count in files.items() if not name.startswith("tokens-")}
    assert of_run.keys() == {"manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"}
    assert max(of_run.values()) <= 8


def test_a_node_with_files_of_its_own_looks_for_them(
    opened_by: Callable[..., tuple[Counter[str], list[str]]], fake_group: dict[int, CountingStore]
) -> None:
    store = fake_group[1024]
    told = json.loads(store.values["tokens"])
    copied = {**told, "states": [[size, time + 1, change] for size, time, change in told["states"][:1]] + [None]}
    store.values["tokens"] = json.dumps(copied).encode()  # as if rank 0's disk had other files under this name
    files, folders = opened_by(8, 0)
    assert folders == ["texts"]
    assert len(files) > 80  # it has checked them
    assert json.loads(store.values[f"tokens of {platform.node()}"]) == told


@pytest.mark.parametrize(
    ("name", "local_rank", "looks"), [("tokens", 0, True), ("tokens", 5, False), ("text", 0, False)]
)
def test_the_first_rank_of_each_node_looks_for_token_files_that_lie_elsewhere(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, local_rank: int, looks: bool
) -> None:
    """The cache that all nodes share says which they are, and nothing of what is on the disks of the nodes."""
    cfg = config_of(corpus, 1024)
    cfg = replace(cfg, data=replace(cfg.data, name=name))
    told = json.dumps({"directories": [None, None], "states": [None, None]}).encode()
    store = CountingStore(1024, {"tokens": told, f"tokens of {platform.node()}": told})
    checked: list[tuple[dict[str, Any], bool]] = []
    monkeypatch.setattr(agreement, "_prepare_and_tell", lambda *_: {"found": "here"})
    monkeypatch.setattr(agreement, "_open", lambda _, told, check_files: checked.append((told, check_files)))
    job = Job(cfg, tmp_path, Rank(8 + local_rank, 1024, local_rank, 8), StopRequest())
    agreement.open_shared_dataset(job.cfg, job.rank, store)
    assert checked == [({"found": "here"} if looks else json.loads(told), looks)]


def test_a_rank_that_waits_for_ten_minutes_asks_the_store_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 600:
            store.set("tokens", "")

    store = CountingStore(4096, {})
    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert group.wait_for(store, "tokens")
    assert store.messages["check"] < 600 / 5 + 15
    now[0], store.values = 0.0, {}
    assert not group.wait_for(store, "tokens", 7.0)
    assert now[0] == pytest.approx(7.0)


class SharedStore(dist.Store):
    """A store of ranks that are threads. Counts the messages of all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.messages = dist.HashStore(), 0

    def _count(self, name: str, *args: Any) -> Any:
        self.messages += 1
        return getattr(self.inner, name)(*args)

    def set(self, key: str, value: Any) -> None:
        self._count("set", key, value)

    def get(self, key: str) -> Any:
        return self._count("get", key)

    def add(self, key: str, amount: int) -> Any:
        return self._count("add", key, amount)

    def check(self, keys: list[str]) -> Any:
        return self._count("check", keys)


@pytest.mark.e2e
def test_the_messages_after_a_lost_rank_grow_as_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the others asks about each rank."""
    monkeypatch.setattr(faults, "ANSWER_S", 1.0)

    def messages(world_size: int, lost: int) -> int:
        store = SharedStore()
        others = [Rank(number, world_size) for number in range(world_size) if number != lost]
        with ThreadPoolExecutor(len(others)) as threads:
            assert list(threads.map(partial(faults._missing, store), others)) == [[lost]] * len(others)
        return store.messages

    assert messages(64, lost=5) / messages(16, lost=5) < 6  # W² would be 16


# Ranks as threads connect through one store, and wait for each other once. Prints the messages to the store. torch has
# one process group in a process: each thread makes gloo's own in its place.
CONNECT = """
import os, sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
from gptexp.distributed import group
from gptexp.distributed.ranks import Rank

world_size = int(sys.argv[1])
inner, lock, messages = dist.HashStore(), threading.Lock(), []

class Store(dist.Store):
    def count(self, name, *args):
        with lock:
            messages.append(name)
        return getattr(inner, name)(*args)
    def set(self, *args): return self.count("set", *args)
    def get(self, *args): return self.count("get", *args)
    def add(self, *args): return self.count("add", *args)
    def wait(self, *args): return self.count("wait", *args)
    def check(self, *args): return inner.check(*args)  # rank 0 asks as often as it takes long

def make_gloo(backend, *, store, rank, world_size, timeout, **_):
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(backend, store), rank, world_size, timeout)
    kept.append(gloo)
    gloo.barrier().wait()

def connect(rank):
    store = Store()
    kept.append(store)
    group.init_process_group(Rank(rank, world_size), store, torch.device("cpu"), "auto", 60.0)
    connected.append(rank)

kept, connected = [], []
dist.init_process_group, dist.new_group = make_gloo, lambda **_: None
threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(world_size)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(messages), flush=True)
os._exit(len(connected) != world_size)
"""


@pytest.mark.e2e
def test_the_messages_of_gloo_ranks_to_the_store_grow_as_w_log_w() -> None:
    def messages(world_size: int) -> int:
        command = [sys.executable, "-c", CONNECT, str(world_size)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    small, large = messages(group.LAZY_FROM), messages(2 * group.LAZY_FROM)
    assert large / small < 2.4  # W² would be 4
    assert messages(16) / messages(8) > 3  # of fewer, each rank asks for the addresses of all others


LATE = """
import os, pathlib
init, m.LAZY_FROM = m.init_process_group, 2
def init_late(*args):
    patient = init(*args)
    pathlib.Path("late.txt").write_text(os.environ["TORCH_GLOO_LAZY_INIT"])
    return patient
m.init_process_group = init_late
"""


@pytest.mark.slow
def test_ranks_that_connect_late_train_the_same_weights(
    sabotage: Callable[[str, str], dict[str, str]], tiny: list[str], tmp_path: Path
) -> None:
    start = [sys.executable, "-m", "gptexp", "train", *tiny, "world.size=2"]
    env = sabotage("gptexp.distributed.group", LATE)
    for directory, environment in (("late", env), ("early", dict(os.environ))):
        command = [*start, f"hydra.run.dir={directory}"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "late.txt").read_text() == "1"
    weights = [(newest(tmp_path / run) / "model.safetensors").read_bytes() for run in ("late", "early")]
    assert weights[0] == weights[1]
