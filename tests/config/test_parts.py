"""Parts of the user's own: their keys, what is refused, and that a saved config is read without an import."""

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from gptexp.config import parts, rules
from gptexp.config.compose import compose
from gptexp.config.describe import describe
from gptexp.config.paths import folders, options
from gptexp.config.schema import Config, from_dict, result_deciding, to_dict, with_parts
from gptexp.model.shapes import count_parameters
from gptexp.process.errors import ConfigError, DataError

OPTIM = """
import torch
class Own(torch.optim.Optimizer):
    may_split_rows = True
    def __init__(self, params, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.95), rho: float | None = None,
                 *, size: int, kind: str = "plain", exact: bool = False, hook: object = None):
        super().__init__(params, {"lr": lr, "betas": betas})
        self.kwargs = (lr, betas, rho, size, kind, exact, hook)
    def step(self):
        pass
class Reads(torch.optim.Optimizer):
    def __init__(self, params, lr: float, kind: str = "item"):
        super().__init__(params, {"lr": lr})
        self.kind = kind
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.zeros_like(p)
                if self.kind == "item" and p.grad.norm().item() > 0: pass
                if self.kind == "numpy": p.numpy()
                if self.kind == "dict": self.state[p]["more"] = {"a": 1}
                if self.kind == "tuple": self.state[p]["more"] = (p, p)
                if self.kind == "bool": self.state[p]["more"] = True
            if self.kind == "group": group["count"] = torch.zeros(())
        if self.kind == "global": self.state["t"] = 0
class Named(torch.optim.Optimizer):
    def __init__(self, params, lr: float, name: str = "a"): ...
class Builds(torch.optim.Optimizer):
    def __init__(self, params, lr: float, build: int = 1): ...
class Tuples(torch.optim.Optimizer):
    def __init__(self, params, lr: float, *, pair: tuple[float, float], other: tuple[int, int] | None = None):
        super().__init__(params, {"lr": lr})
        self.pair, self.other = pair, other
    def step(self): ...
class NoDecay(torch.optim.Optimizer):
    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})
class NoRate(torch.optim.Optimizer):
    def __init__(self, params, rho: float = 0.1): ...
class Swapped(torch.optim.Optimizer):
    def __init__(self, lr, params): ...
class NoType(torch.optim.Optimizer):
    def __init__(self, params, lr: float, other: torch.Tensor): ...
def function(params, lr): ...
constant = 3
"""
MODEL = """
import torch
from torch import nn
class Tiny(nn.Module):
    def __init__(self, vocab_size, block_size, width: int = 8, n_embd: int = 4, drop: float = 0.0):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
    def forward(self, x):
        return self.head(self.embedding(x))
class Wrong(Tiny):
    def forward(self, x):
        return self.embedding(x)
class Tuple(Tiny):
    def forward(self, x):
        return super().forward(x), None
class Empty(nn.Module):
    def __init__(self, vocab_size, block_size): super().__init__()
class Buffers(Tiny):
    def __init__(self, vocab_size, block_size):
        super().__init__(vocab_size, block_size)
        self.register_buffer("mean", torch.zeros(3))
class Retyped(Tiny):
    def __init__(self, vocab_size, block_size, n_embd: str = "wide"): super().__init__(vocab_size, block_size)
class NoBlock(nn.Module):
    def __init__(self, vocab_size): ...
def function(vocab_size, block_size): ...
"""
SCHEDULE = """
def halves(tokens: int, warmup_tokens: int, decay_tokens: int, base: float = 0.5) -> float:
    return base ** (tokens // 100_000)
def negative(tokens, warmup_tokens, decay_tokens, at: int = 500_000):
    return -1.0 if tokens > at else 1.0
def fails(tokens, warmup_tokens, decay_tokens):
    raise KeyError("no such stair")
"""


EVALUATION = """
def score(model, tokenizer, batches, k: int = 1) -> float:
    return 0.5
def other(model, batches):
    return 0.5
"""
DATA = """
import numpy as np
def documents(count: int = 3, path: str = "a*b", kind: str = "text"):
    for number in range(count):
        yield {"text": f"text {number}", "ids": [number, 7], "array": np.array([number]), "empty": ""}[kind]
        if kind == "text" and number == 40:
            raise RuntimeError("no more")
class Endless:
    def __init__(self, kind: str = "text"): self.kind = kind
    def __iter__(self):
        while True:
            yield {"text": "word " * 9, "high": [9999], "low": [-1], "float": [0.5], "none": None}[self.kind]
def plain(count: int = 3):
    return ["a"]
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with config groups; its optim/NAME.yaml names the part NAME of the package `lab`."""
    package = tmp_path / "lab"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "optim.py").write_text(OPTIM)
    (package / "schedule.py").write_text(SCHEDULE)
    (package / "evaluation.py").write_text(EVALUATION)
    (package / "data.py").write_text(DATA)
    (package / "model.py").write_text(MODEL)
    (package / "broken.py").write_text("import math\n\nmath.missing()\n")
    for group, names in {
        "optim": (
            "Own",
            "Reads",
            "Named",
            "Builds",
            "Tuples",
            "NoDecay",
            "NoRate",
            "Swapped",
            "NoType",
            "function",
            "constant",
            "Missing",
        ),
        "schedule": ("halves", "negative", "fails"),
        "model": ("Retyped", "Tiny", "Wrong", "Tuple", "Empty", "Buffers", "NoBlock", "function"),
        "data": ("documents", "Endless", "plain"),
    }.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        for name in names:
            more = "size: 4\n" if name == "Own" else ""
            (tmp_path / f"conf/{group}/{name.lower()}.yaml").write_text(f"_target_: lab.{group}.{name}\n{more}")
    (tmp_path / "conf/optim/typo.yaml").write_text("_target_: lab.optim.Own\nsize: 3\nrhoo: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "conf"
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]
    for cached in (parts.imported, parts.keys_class, parts.saved_class):
        cached.cache_clear()


def composed(lab: Path, *overrides: str) -> Config:
    return compose(overrides, config_dir=str(lab))


def refused(lab: Path, *overrides: str) -> tuple[str, str]:
    """The code and the line of the only problem."""
    with pytest.raises(ConfigError) as caught:
        composed(lab, *overrides)
    [problem] = caught.value.problems
    return problem.code, problem


def test_the_keys_of_a_part_are_the_parameters_of_its_target(lab: Path) -> None:
    optim = composed(lab, "optim=own", "optim.rho=1e-2", "optim.size=2k", "optim.exact=true").optim
    assert (optim.name, optim.lr) == ("own", 5e-3)  # the model's rate, as for every optimizer
    assert [getattr(optim, key) for key in ("betas", "rho", "size", "kind", "exact")] == [
        [0.9, 0.95], 0.01, 2000, "plain", True,
    ]  # fmt: skip
    assert not hasattr(optim, "hook"), "YAML cannot hold it, and it has a default"
    assert (optim.may_split_rows, optim.may_split_parameters) == (True, False)
    built = optim.build([{"params": [], "lr": 1.0, "weight_decay": 0.0}], {}, False)
    assert built.kwargs == (5e-3, (0.9, 0.95), 0.01, 2000, "plain", True, None)  # type: ignore[attr-defined]


def test_the_help_of_a_key_of_a_part_names_its_type_its_default_and_the_part(lab: Path) -> None:
    groups = options(folders(str(lab)))
    rho, base = describe(["optim.rho", "schedule.base"], groups)
    lines = [line.split(maxsplit=1)[1] for line in rho.splitlines()[2:]]
    assert lines == ["float or null, finite", "null", "optim=own"]
    assert "lab.schedule.halves" in base
    with pytest.raises(ConfigError, match=r"optim\.rho"):
        describe(["optim.rhoo"], groups)


def test_the_state_of_an_own_optimizer_is_counted_if_it_computes_without_numbers(lab: Path) -> None:
    from gptexp.model.optimizer_state import state_bytes

    model = composed(lab, "model=nano", "model.vocab_size=50304").model
    bytes_of = {
        kind: state_bytes(composed(lab, "optim=reads", f"optim.kind={kind}").optim, model) for kind in ("item", "numpy")
    }
    assert bytes_of == {"item": 4 * count_parameters(model), "numpy": 0}
    for kind in ("dict", "tuple", "bool", "group", "global"):
        with pytest.raises(ConfigError) as caught:
            state_bytes(composed(lab, "optim=reads", f"optim.kind={kind}").optim, model)
        assert caught.value.code == "wrong-contract"


def test_a_tuple_is_a_list_on_the_command_line_and_a_tuple_for_the_part(lab: Path) -> None:
    optim = composed(lab, "optim=own", "optim.betas=[0.8,0.9]").optim
    assert optim.build([{"params": [], "lr": 1.0}], {}, False).kwargs[1] == (0.8, 0.9)  # type: ignore[attr-defined]
    optim = composed(lab, "optim=tuples", "optim.pair=[1.0,2.0]", "optim.other=[3,4]").optim
    built = optim.build([{"params": [], "lr": 1.0}], {}, False)
    assert (built.pair, built.other) == ((1.0, 2.0), (3, 4))  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["__post_init__", "__init__", "build", "a.b", "class"])
def test_a_saved_key_that_no_part_can_have_is_refused(lab: Path, key: str) -> None:
    values = to_dict(composed(lab, "optim=own"))
    values["optim"][key] = 3
    with pytest.raises(ValueError, match="optim"):
        from_dict(values)


def test_a_part_without_weight_decay_has_none(lab: Path) -> None:
    assert composed(lab, "optim=nodecay").optim.weight_decay == 0
    code, line = refused(lab, "optim=nodecay", "optim.weight_decay=0.1")
    assert code == "out-of-range"
    assert "lab.optim.NoDecay" in line


@pytest.mark.parametrize(
    ("overrides", "code", "names"),
    [
        (["optim=own", "optim.rhoo=1"], "unknown-key", "optim.rho"),
        (["optim=own", "optim.exact=maybe"], "wrong-type", "optim.exact"),
        (["optim=own", "optim.size=1.5"], "wrong-type", "optim.size"),
        (["optim=own", "optim.lr=-1"], "out-of-range", "optim.lr"),
        (["optim=own", "optim._target_=lab.optim.NoDecay"], "part-name", "optim=NAME"),
        (["optim=own", "optim.betas=0.9"], "wrong-type", "optim.betas"),
        (["optim=own", "optim.betas=[0.9,0.9,0.9]"], "wrong-type", "2 values"),
        (["optim=named"], "wrong-contract", "name"),
        (["optim=builds"], "wrong-contract", "build"),
        (["optim=typo"], "unknown-key", "did you mean rho?"),
        (["optim=norate"], "wrong-contract", "lr"),
        (["optim=swapped"], "wrong-contract", "params"),
        (["optim=notype"], "wrong-contract", "other"),
        (["optim=function"], "wrong-contract", "torch.optim.Optimizer"),
        (["optim=constant"], "wrong-contract", "int"),
        (["optim=missing"], "not-importable", "Missing"),
        (["model=noblock"], "wrong-contract", "vocab_size, block_size"),
        (["model=retyped"], "wrong-contract", "n_embd"),
        (["model=function"], "wrong-contract", "torch.nn.Module"),
        (["model=tiny", "model.n_layer=2"], "key-not-read", "model.n_layer"),
        (
            ["model=tiny", "model.parametrisation=mup"],
            "needs-own-blocks",
            "model.parametrisation",
        ),
        (["model=tiny", "train.attention=flash"], "needs-own-blocks", "train.attention"),
        (["model=tiny", "train.loss=chunked"], "needs-own-blocks", "train.loss"),
        (["model=tiny", "world=ddp2", "world.sharding=full", "batch.micro_batch_size=4"], "needs-own-blocks", "full"),
        (["model=tiny", "batch.micro_batch_size=auto"], "needs-own-blocks", "batch.micro_batch_size"),
        (["model=tiny", "optim=muon"], "needs-own-blocks", "optim.name=muon"),
        (["model=tiny", "model.widht=3"], "unknown-key", "model.width"),
        (["data=plain"], "wrong-contract", "generator"),
        (["data=documents", "data.subset=x"], "key-not-read", "data.subset"),
        (["schedule=negative"], "wrong-factor", "-1.0"),
        (["schedule=fails"], "part-fails", "schedule.py:7"),
        (["optim=sgd", "optim.rho=1"], "unknown-key", "optim.rho"),
    ],
)
def test_what_is_wrong_is_one_line(lab: Path, overrides: list[str], code: str, names: str) -> None:
    found, line = refused(lab, *overrides)
    assert (found, names in line) == (code, True), line


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("lab.nothing.Own", "not-importable"),
        ("nolab.optim.Own", "not-importable"),
        ("lab.broken.Own", "not-importable"),  # broken.py:3
        ("lab.optim.Ownn", "not-importable"),  # did you mean Own?
        ("os.system", "not-a-target"),
        ("gptexp.optim.base.OptimConfig", "not-a-target"),
        ("Own", "not-a-target"),
        ("lab.optim.Own; import os", "not-a-target"),
    ],
)
def test_a_target_that_is_no_part_is_refused(lab: Path, target: str, code: str) -> None:
    (lab / "optim/other.yaml").write_text(f"_target_: '{target}'\n")
    assert refused(lab, "optim=other")[0] == code


def test_nothing_is_imported_from_the_directory_of_a_run(lab: Path) -> None:
    (lab.parent / "effective.json").write_text("{}")
    code, line = refused(lab, "optim=own")
    assert (code, "lab" in sys.modules) == ("not-importable", False), line


def test_a_file_may_not_take_the_name_of_an_option_of_gptexp(lab: Path) -> None:
    (lab / "optim/lion.yaml").write_text("_target_: lab.optim.NoDecay\n")
    code, _ = refused(lab, "optim=lion")
    assert code == "name-taken"


def test_a_key_that_must_be_given_is_named(lab: Path) -> None:
    (lab / "optim/own.yaml").write_text("_target_: lab.optim.Own\n")
    _, line = refused(lab, "optim=own")
    assert "size" in line


def test_an_own_model_is_trained_by_its_logits(lab: Path) -> None:
    from gptexp.model.flops import flops_per_token
    from gptexp.model.own_model import OwnModel
    from gptexp.model.shapes import parameter_shapes

    config = composed(lab, "model=tiny", "model.width=6", "model.vocab_size=10", "data.tokenizer=chars").model
    model = OwnModel(config, z_loss=0.1)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: shape for name, shape, _ in parameter_shapes(config)
    }
    assert count_parameters(config) == 10 * 6 + 10 * 6 + 10
    assert flops_per_token(config, 8) == (6 * 130, 6 * 130)
    x, y = torch.randint(10, (2, 3, 5))
    logits = model(x)
    loss = model(x, y)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()))
    torch.testing.assert_close(model.logits(x, []), logits[:, -1])
    loss.backward()
    trained = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    logits = model(x).flatten(0, 1)
    (torch.nn.functional.cross_entropy(logits, y.flatten()) + 0.1 * (logits.logsumexp(-1) ** 2).mean()).backward()
    for grad, p in zip(trained, model.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("wrong", "must give logits (2, 3, 320)"),
        ("buffers", "buffer mean"),
        ("tuple", "a tuple"),
        ("empty", "no parameters"),
    ],
)
def test_an_own_model_of_another_contract_is_one_line(lab: Path, name: str, names: str) -> None:
    from gptexp.model.own_model import OwnModel

    with pytest.raises(ConfigError) as caught:
        OwnModel(composed(lab, f"model={name}", "model.vocab_size=320", "data.tokenizer=bytes").model)(
            torch.zeros((2, 3), dtype=torch.int64)
        )
    assert names in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "ids"),
    [
        (["data.count=2"], [*b"text 0", 256, *b"text 1", 256]),
        (["data.kind=ids", "data.count=2"], [0, 7, 256, 1, 7, 256]),
        (["data.kind=array"], [0, 256, 1, 256, 2, 256]),
    ],
)
def test_a_source_gives_texts_or_ids(lab: Path, overrides: list[str], ids: list[int]) -> None:
    from gptexp.data.prepare import prepare
    from gptexp.data.stream import TokenStream

    data = composed(lab, "data=documents", "data.val_tokens=0", "data.tokenizer=bytes", *overrides).data
    assert data.path == "a*b", "the source's own key, and no glob"
    directory, _ = prepare(data)
    stream = TokenStream(directory)
    assert stream.read(0, len(stream)).tolist() == ids[:-1]
    assert prepare(data)[0] == directory


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["data=documents", "data.count=50"], "RuntimeError: no more ("),
        (["data=documents", "data.kind=empty"], "contains no text"),
        (["data=endless", "data.kind=high"], "0 to 256"),
        (["data=endless", "data.kind=low"], "0 to 256"),
        (["data=endless", "data.kind=float"], "list of ids"),
        (["data=endless", "data.kind=none"], "TypeError"),
    ],
)  # fmt: skip
def test_a_source_that_fails_is_a_data_error(lab: Path, overrides: list[str], names: str) -> None:
    from gptexp.data.prepare import prepare

    with pytest.raises(DataError) as caught:
        prepare(composed(lab, "data.max_tokens=5000", "data.val_tokens=0", "data.tokenizer=bytes", *overrides).data)
    assert names in str(caught.value)


def test_a_source_that_does_not_end_is_read_up_to_max_tokens(lab: Path) -> None:
    from gptexp.data.prepare import prepare
    from gptexp.data.stream import TokenStream

    data = composed(lab, "data=endless", "data.max_tokens=5000", "data.val_tokens=0", "data.tokenizer=bytes").data
    assert 5000 < len(TokenStream(prepare(data)[0])) < 5100


def test_evaluations_have_the_keys_of_their_targets(lab: Path) -> None:
    one, five = "{_target_: lab.evaluation.score, every_tokens: 1k}", "{_target_: lab.evaluation.score, name: a, k: 5}"
    entries = composed(lab, f"train.evaluations=[{one},{five}]").train.evaluations
    plain = [{key: value for key, value in entry.items() if not key.startswith("_")} for entry in entries]
    assert plain == [{"name": "score", "every_tokens": 1000, "k": 1}, {"name": "a", "every_tokens": 0, "k": 5}]
    assert len({entry["_source_"] for entry in entries}) == 1


@pytest.mark.parametrize(
    ("entry", "more", "code"),
    [
        ("{_target_: lab.evaluation.score, kk: 1}", [], "unknown-key"),
        ("{_target_: lab.evaluation.score, k: many}", [], "wrong-type"),
        ("{_target_: lab.evaluation.score, every_tokens: -1}", [], "out-of-range"),
        ("{_target_: lab.evaluation.score, name: ../a}", [], "not-a-name"),
        ("{_target_: lab.evaluation.other}", [], "wrong-contract"),
        ("{name: a}", [], "not-a-target"),
        ("{_target_: lab.evaluation.score},{_target_: lab.evaluation.score}", [], "metric-given-twice"),
        ("{_target_: lab.evaluation.score}", ["data.val_tokens=0"], "validation-off"),
        ("{_target_: lab.evaluation.score}", ["world.size=2", "world.sharding=full"], "needs-whole-model"),
        ("score", [], "wrong-type"),
    ],
)
def test_a_wrong_evaluation_is_one_line(lab: Path, entry: str, more: list[str], code: str) -> None:
    assert refused(lab, f"train.evaluations=[{entry}]", *more)[0] == code


@pytest.mark.parametrize(
    ("entry", "more", "code"),
    [
        ("{_target_: lab.step.norms, kk: 1}", [], "unknown-key"),
        ("{_target_: lab.step.norms, every_tokens: 1k}", [], "unknown-key"),
        ("{_target_: lab.evaluation.other}", [], "wrong-contract"),
        ("{_target_: lab.step.norms},{_target_: lab.step.norms}", [], "metric-given-twice"),
        ("{_target_: lab.step.norms}", ["world.size=2", "world.sharding=full"], "needs-whole-model"),
    ],
)
def test_a_wrong_metric_of_steps_is_one_line(lab: Path, entry: str, more: list[str], code: str) -> None:
    (lab.parent / "lab/step.py").write_text("def norms(model, order: float = 2.0):\n    return 0.0\n")
    assert composed(lab, "log.metrics=[{_target_: lab.step.norms}]").log.metrics[0]["order"] == 2.0
    assert refused(lab, f"log.metrics=[{entry}]", *more)[0] == code


def test_a_saved_config_is_read_without_an_import(lab: Path) -> None:
    config = composed(lab, "optim=own", "schedule=halves", "schedule.base=0.7")
    values = to_dict(config)
    forget()
    sys.path.remove(str(lab.parent))
    read = from_dict(values)
    assert to_dict(read) == values
    assert result_deciding(read) == result_deciding(config)
    assert not rules.saved_problems(read)
    assert "lab" not in sys.modules
    with pytest.raises(ConfigError) as caught:
        with_parts(read)
    assert caught.value.code == "not-importable"


def test_a_part_whose_file_has_changed_is_refused(lab: Path) -> None:
    values = to_dict(composed(lab, "optim=own"))
    forget()
    (lab.parent / "lab/optim.py").write_text(OPTIM + "\n# another version\n")
    [problem] = rules.problems(with_parts(from_dict(values)), 1)
    assert problem.code == "part-changed"
    assert not {f.name for f in fields(from_dict(values).optim)} - {*values["optim"]}


def test_parts_of_different_keys_and_sources_have_different_hashes(lab: Path) -> None:
    one, other = composed(lab, "optim=own"), composed(lab, "optim=own", "optim.rho=1")
    assert result_deciding(one) != result_deciding(other)
    assert result_deciding(one)["optim._source_"] == result_deciding(other)["optim._source_"]


def test_the_factor_of_an_own_schedule_follows_the_warm_up(lab: Path) -> None:
    from gptexp.config.schedule import resolve_schedule

    config = composed(lab, "schedule=halves", "schedule.warmup_tokens=50_000")
    schedule = resolve_schedule(config, 1_000_000)
    assert [schedule.lr_factor(tokens, 1000) for tokens in (24_000, 60_000, 110_000, 350_000)] == [0.5, 1, 0.5, 0.125]
