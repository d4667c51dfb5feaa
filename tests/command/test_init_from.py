"""`init_from`: weights of transformers and of nanoGPT, from a directory and from the hub."""

import json
import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from real_runs import weights
from refusals import refused
from safetensors.torch import load_file, save_file

from gptexp.config.compose import compose
from gptexp.config.schema import ModelConfig
from gptexp.distributed.sharding import WholeParameters
from gptexp.model.gpt import GPT
from gptexp.process.errors import CheckpointError, ConfigError
from gptexp.run.first_weights import load_first_weights
from gptexp.storage import run_dir
from gptexp.storage.init_from import check_tokenizer, choose_vocab_size, of_config

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 257}
MODEL = ModelConfig(block_size=16, **SHAPE)
X = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(1))
# With such a learning rate the weights stay, so that a run ends with those that it was given.
STILL = ("optim.lr=1e-30", "optim.weight_decay=0", "data.tokenizer=bytes", "hydra.run.dir=out")


def theirs(**changed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_positions=16, **{**SHAPE, **changed})).eval()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that transformers has saved. All tests of the session share it: read it, never write to it."""
    directory = tmp_path_factory.mktemp("transformers") / "model"
    theirs().save_pretrained(directory)
    return directory


@pytest.fixture
def mine(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved` that a test may change."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def given(tiny: list[str], *more: str) -> list[str]:
    """Overrides of a run with the sizes of `init_from`, in place of those of `TINY`."""
    kept = [text for text in tiny if not text.startswith("model")]
    return [*kept, "model=from_init", *STILL, *more]


def loaded(path: Path, model: ModelConfig = MODEL) -> GPT:
    torch.manual_seed(7)
    gpt = GPT(model).eval()
    load_first_weights(of_config(str(path)), WholeParameters(gpt))
    return gpt


def nanogpt(path: Path, bias: bool = True, prefix: str = "_orig_mod.", **changed: Any) -> GPT:
    """Write a checkpoint as nanoGPT's train.py does, and return a model with its weights."""
    torch.manual_seed(3)
    gpt = GPT(ModelConfig(block_size=16, bias=bias, **SHAPE)).eval()
    named = {name if name == "lm_head.weight" else f"transformer.{name}": w for name, w in gpt.state_dict().items()}
    named |= {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 16, 16) for n in range(2)}  # of torch before 2.0
    content = {
        "model": {prefix + name: weight for name, weight in named.items()},
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": {"block_size": 16, "bias": bias, "dropout": 0.0, **SHAPE},
        "iter_num": 5, "best_val_loss": torch.tensor(1.5), "config": {"dataset": "shakespeare"},
    }  # fmt: skip
    torch.save({**content, **changed}, path)
    return gpt


@pytest.mark.e2e
def test_a_model_that_transformers_saved_trains_on_here(
    saved: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    done = gptexp("train", *given(tiny, f"init_from={saved}", "log.progress=auto"))
    assert done.returncode == 0, done.stderr
    assert f"weights         those of {saved}" in done.stdout
    assert f"vocabulary      257: that of init_from={saved}" in done.stdout
    gpt, found = GPT(MODEL).eval(), weights(tmp_path / "out")
    gpt.load_state_dict({**found, "lm_head.weight": found["wte.weight"]})
    torch.testing.assert_close(gpt(X), theirs()(X).logits, rtol=1e-5, atol=1e-5)
    saved_config = (tmp_path / "out/config.yaml").read_text()
    assert "n_embd: 32" in saved_config
    assert "vocab_size: auto" in saved_config


@pytest.mark.e2e
def test_all_ranks_start_with_the_weights_that_rank_0_has_read(
    saved: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    for reduction in ("mean", "tree"):
        out = f"hydra.run.dir={reduction}"
        done = gptexp("train", *given(tiny, f"init_from={saved}", "world.size=2", f"train.reduction={reduction}", out))
        assert done.returncode == 0, done.stderr
        torch.testing.assert_close(weights(tmp_path / reduction)["wte.weight"], theirs().transformer.wte.weight.data)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_a_checkpoint_of_nanogpt_has_the_same_logits_here(tmp_path: Path, bias: bool, prefix: str) -> None:
    expected = nanogpt(tmp_path / "ckpt.pt", bias, prefix)
    model = of_config(str(tmp_path / "ckpt.pt")).model()
    assert model == expected.cfg
    torch.testing.assert_close(loaded(tmp_path / "ckpt.pt", model)(X), expected(X), rtol=0, atol=0)


@dataclass
class GPTConfig:
    """build-nanogpt's, which its train_gpt2.py defines as the main program."""

    block_size: int = 16
    vocab_size: int = SHAPE["vocab_size"]
    n_layer: int = SHAPE["n_layer"]
    n_head: int = SHAPE["n_head"]
    n_embd: int = SHAPE["n_embd"]


@pytest.mark.parametrize("module", ["__main__", "mytrain"])
def test_a_checkpoint_of_build_nanogpt_has_the_same_logits_here(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config is an object of a class, whose code is not run: here there is no such class."""
    named = ModuleType(module)
    with monkeypatch.context() as there:
        there.setitem(sys.modules, module, named)
        there.setattr(GPTConfig, "__module__", module)
        vars(named)["GPTConfig"] = GPTConfig
        expected = nanogpt(tmp_path / "model.pt", prefix="", config=GPTConfig(), model_args=None)
    model = of_config(str(tmp_path / "model.pt")).model()
    assert model == expected.cfg
    torch.testing.assert_close(loaded(tmp_path / "model.pt", model)(X), expected(X), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["shards", "pickled", "pickled before torch 1.6", "bfloat16", "float16"])
def test_every_form_of_transformers_weights_is_read(mine: Path, kind: str) -> None:
    model = theirs()
    if kind.endswith("float16"):
        model = model.to(getattr(torch, kind))
    if kind.startswith("pickled"):  # as transformers saved before it had safetensors
        (mine / "model.safetensors").unlink()
        is_zip = kind == "pickled"
        torch.save(model.state_dict(), mine / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    else:
        model.save_pretrained(mine, max_shard_size="40KB" if kind == "shards" else "5GB")
    if kind == "shards":
        (mine / "model.safetensors").unlink()
        assert len(list(mine.glob("model-0*.safetensors"))) > 1
    torch.testing.assert_close(loaded(mine)(X), model.float()(X).logits, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_nanogpt_before_torch_1_6_is_read(tmp_path: Path) -> None:
    expected = nanogpt(tmp_path / "new.pt")
    content = torch.load(tmp_path / "new.pt", weights_only=True)
    torch.save(content, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=False)
    torch.testing.assert_close(loaded(tmp_path / "ckpt.pt")(X), expected(X), rtol=0, atol=0)


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.n_layer=3"], "model.n_layer=3: init_from=@DIR has n_layer=2; use the same value, or model=from_init"),
        (["model.bias=false"], "model.bias=false: init_from=@DIR has bias=true"),
        (["model.vocab_size=320"], "model.vocab_size=320: init_from=@DIR has vocab_size=257"),
        (["model.block_size=32"], "model.block_size=32: init_from=@DIR has block_size=16"),
        (["data.tokenizer=gpt2"], "has 50,257 ids, and the weights of init_from=@DIR are for 257"),
        (["init_from=@DIR/model.safetensors"], "one file of a model; give the directory that it lies in"),
        (["init_from=sweep"], "sweep: a sweep; give the directory of one of its runs"),
        (["init_from=null"], "model=from_init: init_from is not given; give it, or choose another model"),
        (["init_from=./gpt2"], "gpt2: no such file or directory; give a run, a directory that transformers saved"),
        (["init_from=empty"], "empty: it has neither config.yaml nor config.json; give a run"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    saved: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path, overrides: list[str], line: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/sweep.json").write_text("{}")
    changes = [text.replace("@DIR", str(saved)) for text in overrides]
    done = gptexp("train", *given(tiny, f"init_from={saved}", *changes))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert line.replace("@DIR", str(saved)) in done.stderr
    assert not (tmp_path / "out/checkpoints").exists()


def _changed(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace weights of a model, whose names have __ for a dot here; None removes one."""
    weights = {**load_file(directory / MODEL_FILE), **{name.replace("__", "."): w for name, w in changes.items()}}
    save_file({name: weight for name, weight in weights.items() if weight is not None}, directory / MODEL_FILE)


def _indexed(directory: Path, index: str) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(index)


MODEL_FILE = "model.safetensors"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "lm_head.weight differs from wte.weight": lambda d: _changed(d, lm_head__weight=torch.zeros(257, 32)),
    "has the weight ln_f.bias twice, also as": lambda d: _changed(d, ln_f__bias=torch.zeros(32)),
    "ln_f.bias has the type torch.int8": lambda d: _changed(
        d, transformer__ln_f__bias=torch.zeros(32, dtype=torch.int8)
    ),
    "h.0.mlp.c_fc.weight has the shape (4,), and the model (128, 32)": lambda d: _changed(
        d, transformer__h__0__mlp__c_fc__weight=torch.zeros(4)
    ),
    "wpe.weight has the shape (8, 32), and the model (16, 32)": lambda d: _changed(
        d, transformer__wpe__weight=torch.zeros(8, 32)
    ),
    "lacks the weight ln_f.bias": lambda d: _changed(d, transformer__ln_f__bias=None),
    "has no model.safetensors and no pytorch_model.bin": lambda d: (d / MODEL_FILE).unlink(),
    "model.safetensors: cannot be read": lambda d: (d / MODEL_FILE).write_bytes(b"x" * 99),
    "model.safetensors: cannot be read (": lambda d: os.truncate(d / MODEL_FILE, 9000),
    "not an index of weights": lambda d: _indexed(d, "{}"),
    "not an index of weights (nested": lambda d: _indexed(d, "[" * 100_000),
    "it names a file in another directory": lambda d: _indexed(d, '{"weight_map": {"a": "../b"}}'),
    "b: is missing": lambda d: _indexed(d, '{"weight_map": {"a": "b"}}'),
}


@pytest.mark.parametrize("line", DAMAGES)
def test_damaged_weights_are_refused_by_name(mine: Path, line: str) -> None:
    DAMAGES[line](mine)
    with pytest.raises(CheckpointError) as error:
        loaded(mine)
    assert line in str(error.value)


def test_an_index_that_an_earlier_model_has_left_behind_does_not_count(tmp_path: Path) -> None:
    """transformers removes the earlier files, but not the index of their names."""
    theirs().save_pretrained(tmp_path, max_shard_size="40KB")
    theirs().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    torch.testing.assert_close(loaded(tmp_path)(X), theirs()(X).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"model_type": "mistral"}, "other-architecture"),
        ({"activation_function": "relu"}, "other-architecture"),
        ({"n_inner": 0}, "out-of-range"),
        ({"n_embd": "wide"}, "wrong-type"),
        ({"n_head": 5}, "heads-not-divisible"),
    ],
)
def test_another_architecture_is_refused(mine: Path, changed: dict[str, Any], code: str) -> None:
    file = mine / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with refused(code, names=f"init_from={mine}: "):
        of_config(str(mine)).model()


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harmed"),)


@pytest.mark.parametrize("name", ["ckpt.pt", "copy/pytorch_model.bin"])
def test_code_in_a_file_is_not_run(mine: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (mine / "model.safetensors").unlink()
    torch.save({"model": Harmful(), "model_args": {}}, tmp_path / name)
    with pytest.raises(CheckpointError, match=name) as error:
        loaded(tmp_path / name.split("/")[0])
    assert "weights_only" not in str(error.value), "torch's advice to run the code"
    assert not (tmp_path / "harmed").exists()
    pickle.loads(pickle.dumps(Harmful()))
    assert (tmp_path / "harmed").exists(), "the file is harmful to a loader that runs code"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"model_args": None}, "not a checkpoint of nanoGPT"),
        ({"model": [1]}, "holds no weights by name"),
        ({"model": {"wte.weight": [1.0]}}, "wte.weight is no tensor by name"),
        ({"model": {7: torch.zeros(1)}}, "7 is no tensor by name"),
    ],
)
def test_another_file_of_torch_is_no_checkpoint_of_nanogpt(tmp_path: Path, changed: dict[str, Any], line: str) -> None:
    nanogpt(tmp_path / "ckpt.pt", **changed)
    with pytest.raises(CheckpointError, match=line):
        of_config(str(tmp_path / "ckpt.pt")).model()


def test_a_bias_of_nanogpt_that_is_not_a_truth_value_is_refused(tmp_path: Path) -> None:
    nanogpt(tmp_path / "ckpt.pt", model_args={"block_size": 16, "bias": "False", **SHAPE})
    with refused("wrong-type"):
        of_config(str(tmp_path / "ckpt.pt")).model()


@pytest.mark.parametrize("keep", [0, 1, 999, 5000])
def test_a_checkpoint_that_was_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    nanogpt(tmp_path / "ckpt.pt")
    os.truncate(tmp_path / "ckpt.pt", keep)
    with pytest.raises(CheckpointError, match=r"ckpt.pt: cannot be read \(.*\); copy or download it again"):
        of_config(str(tmp_path / "ckpt.pt")).model()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_changed_byte_in_a_checkpoint_is_never_an_error_of_python(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both formats of torch.save: it is refused in one line, or it is a byte of a weight."""
    plain = partial(torch.save, _use_new_zipfile_serialization=zipped)
    monkeypatch.setattr(torch, "save", plain)
    nanogpt(tmp_path / "whole.pt")
    whole, draw, lines = (tmp_path / "whole.pt").read_bytes(), random.Random(5), []
    structure = (len(whole) - 4000, len(whole)) if zipped else (0, 3000)  # the rest is mostly weights
    for number in range(150):
        damaged = bytearray(whole)
        damaged[draw.randrange(*structure)] ^= 1 << draw.randrange(8)
        file = tmp_path / f"{number}.pt"
        file.write_bytes(damaged)
        if line := _refusal(file):
            lines.append(line)
    assert len(lines) > 50
    assert not any("\n" in line for line in lines)


def _refusal(file: Path) -> str | None:
    """The line with which a checkpoint is refused, if it is."""
    source = of_config(str(file))
    try:
        load_first_weights(source, WholeParameters(GPT(source.model())))
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return None


def test_a_model_larger_than_its_files_is_refused_before_it_is_built(
    mine: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """A model of 24 TiB."""
    config = mine / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "n_embd": 1 << 19}))
    done = gptexp("train", *given(tiny, f"init_from={mine}"))
    assert done.returncode == 4, done.stderr
    line = done.stderr.splitlines()[-1]
    assert "config.json describes 6,597,227,577,344 parameters, and its weights are 139," in line


# --- the tokenizer of the weights ------------------------------------------------------------------------------------


def trained(gptexp: Gptexp, tiny: list[str], corpus: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Train a model whose vocabulary is that of its tokenizer, or that of `init_from`."""
    replaced = ("model.vocab_size", "data.tokenizer", "data.path", *(["model"] if "model=from_init" in more else []))
    kept = [text for text in tiny if not text.startswith(replaced)]
    size = [] if "model=from_init" in more else ["model.vocab_size=auto"]
    return gptexp("train", *kept, *size, f"data.path={corpus}", *more)


@pytest.mark.e2e
def test_weights_of_a_run_are_refused_for_other_characters(
    gptexp: Gptexp, tiny: list[str], corpus: Path, tmp_path: Path
) -> None:
    """As many characters, which would have each other's ids."""
    text = corpus.read_text()
    (tmp_path / "other.txt").write_text(text.replace("e", "\u00e9"))
    (tmp_path / "fewer.txt").write_text(text.replace("e", "o"))
    first = trained(gptexp, tiny, corpus, "data.tokenizer=chars", "hydra.run.dir=first")
    assert first.returncode == 0, first.stderr
    from_first = ("data.tokenizer=chars", "init_from=first")
    for name in ("other", "fewer"):
        done = trained(gptexp, tiny, tmp_path / f"{name}.txt", *from_first, f"hydra.run.dir={name}")
        assert done.returncode == 2, done.stderr
        assert "was trained with another, in which id " in done.stderr
        assert f"; use data.tokenizer={tmp_path / 'first/tokenizer.json'}" in done.stderr
    same = trained(gptexp, tiny, corpus, *from_first, "hydra.run.dir=same")
    assert same.returncode == 0, same.stderr
    assert gptexp("rm", "same", "--yes").returncode == 0
    own = ("data.tokenizer=first/tokenizer.json", "init_from=first", "hydra.run.dir=with-its-own")
    advised = trained(gptexp, tiny, tmp_path / "fewer.txt", *own)
    assert advised.returncode == 0, advised.stderr


@pytest.mark.e2e
def test_weights_of_transformers_are_compared_with_the_tokenizer_beside_them(
    gptexp: Gptexp, tiny: list[str], corpus: Path, tmp_path: Path
) -> None:
    """Ids are compared by the text that they stand for, not the files."""
    (tmp_path / "fewer.txt").write_text(corpus.read_text().replace("e", "o"))
    assert trained(gptexp, tiny, corpus, "data.tokenizer=chars", "hydra.run.dir=first").returncode == 0
    assert gptexp("export", "first", "exported").returncode == 0
    theirs = tmp_path / "exported/tokenizer.json"
    from_theirs = ("model=from_init", "init_from=exported")
    done = trained(gptexp, tiny, tmp_path / "fewer.txt", *from_theirs, "data.tokenizer=chars", "hydra.run.dir=a")
    assert done.returncode == 2, done.stderr
    assert f"use data.tokenizer={theirs}" in done.stderr
    for name, source in (("b", from_theirs), ("c", ("model=from_init", "init_from=first"))):
        same = trained(gptexp, tiny, corpus, *source, f"data.tokenizer={theirs}", f"hydra.run.dir={name}")
        assert same.returncode == 0, same.stderr
        assert "not compared" not in same.stderr
    theirs.write_text("{")
    damaged = trained(gptexp, tiny, corpus, *from_theirs, "data.tokenizer=chars", "hydra.run.dir=d")
    assert damaged.returncode == 0, damaged.stderr
    assert "exported: its tokenizer is not compared with data.tokenizer=chars (" in damaged.stderr


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        ("bytes", "gpt2", "data.tokenizer=gpt2: "),
        (
            "gpt2",
            "p50k_base",
            "data.tokenizer=p50k_base: init_from=@RUN was trained with another; use data.tokenizer=gpt2",
        ),
        ("gpt2", "r50k_base", None),
        ("gpt2", "chars", None),  # known once the text is read
    ],
)
def test_the_tokenizer_of_a_run_is_compared_before_the_text_is_read(
    tmp_path: Path, before: str, now: str, line: str | None
) -> None:
    run_dir.save_config(tmp_path, compose(["model=nano", f"data.tokenizer={before}", "model.vocab_size=50432"]))
    config = compose(["model=nano", f"data.tokenizer={now}", "model.vocab_size=50432"])
    source = of_config(str(tmp_path))
    if line is None:
        check_tokenizer(config, source)
    else:
        with pytest.raises(ConfigError, match=re.escape(line.replace("@RUN", str(tmp_path)))):
            check_tokenizer(config, source)


def test_a_vocabulary_far_larger_than_the_tokenizers_must_be_asked_for(mine: Path) -> None:
    config = compose(["model=nano", "data.tokenizer=bytes", f"init_from={mine}"])
    file = mine / "config.json"
    for rows, accepted in ((257 + 1023, True), (257 + 1024, False), (50257, False)):
        file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": rows}))
        if accepted:
            assert choose_vocab_size(config, 257) == (rows, f"that of init_from={mine}")
        else:
            with pytest.raises(ConfigError, match=f"to leave the other ids unused, model.vocab_size={rows}$"):
                choose_vocab_size(config, 257)


def test_the_number_that_the_refusal_names_is_accepted(
    mine: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    theirs(vocab_size=1300).save_pretrained(mine)
    done = gptexp("train", *given(tiny, f"init_from={mine}"))
    assert done.returncode == 2, done.stderr
    advised = done.stderr.strip().rpartition(" ")[2]
    assert advised == "model.vocab_size=1300"
    done = gptexp("train", *given(tiny, f"init_from={mine}", advised))
    assert done.returncode == 0, done.stderr


# --- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(saved: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which a stand-in for the hub has the model `saved`."""
    pytest.importorskip("huggingface_hub", reason="no huggingface_hub; pip install 'gptexp[hf]'")
    script = Path(__file__).parents[1] / "hub_server.py"
    with subprocess.Popen([sys.executable, str(script), str(saved)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        yield {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "PID": str(process.pid)}
        process.kill()


@pytest.mark.parametrize("name", ["gpt2", pytest.param("owner/name@main", marks=pytest.mark.e2e)])
def test_a_model_of_the_hub_is_downloaded_once(
    hub: dict[str, str], gptexp: Gptexp, tiny: list[str], tmp_path: Path, name: str
) -> None:
    """Also beside a folder of the same name, which would be ./gpt2."""
    (tmp_path / "gpt2").mkdir()
    first = gptexp("train", *given(tiny, f"init_from={name}"), env=hub)
    assert first.returncode == 0, first.stderr
    torch.testing.assert_close(weights(tmp_path / "out")["wte.weight"], theirs().transformer.wte.weight.data)
    os.kill(int(hub["PID"]), 9)
    again = gptexp("train", *given(tiny, f"init_from={name}", "hydra.run.dir=again"), env=hub)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("name", ["gpt2-xl", "owner/missing"])
def test_a_model_that_cannot_be_had_is_one_line_that_says_what_to_do(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, name: str
) -> None:
    pytest.importorskip("huggingface_hub", reason="no huggingface_hub; pip install 'gptexp[hf]'")
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    done = gptexp("train", *given(tiny, f"init_from={name}"), env=nobody)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert done.stderr.startswith(f"gptexp: config error: init_from={name}: no such path here, and the hub's model ")
    assert "hf download" in done.stderr
    assert not (tmp_path / "out").exists()


# --- fine-tuning -----------------------------------------------------------------------------------------------------


def test_the_recipe_is_nanogpts(saved: Path) -> None:
    """config/finetune_shakespeare.py, and the defaults of train.py."""
    from gptexp.command.hydra_main import register_from_init

    register_from_init()
    config = compose(["experiment=finetune_gpt2", f"init_from={saved}"])
    assert (config.model.n_layer, config.model.n_embd, config.model.dropout) == (2, 32, 0.0)
    assert (config.optim.lr, config.optim.weight_decay, config.optim.grad_clip) == (3e-5, 0.1, 1.0)
    assert (config.optim.beta1, config.optim.beta2) == (0.9, 0.95)
    assert (config.schedule.name, config.schedule.warmup_ratio) == ("constant", 0.0)
    assert (config.batch.total_batch_size, config.batch.micro_batch_size) == (32 * 1024, 1)
    assert config.run_length == (20, 20 * 32 * 1024)
    assert config.train.eval_every_tokens == 5 * 32 * 1024


@pytest.mark.slow
def test_the_recipe_trains(saved: Path, gptexp: Gptexp, corpus: Path, tmp_path: Path) -> None:
    """With bytes, because the model is small: fewer steps of fewer tokens than the recipe has."""
    short = [
        "batch.total_batch_size=256",
        "train.max_tokens=2560",
        "train.eval_every_tokens=1280",
        "data.tokenizer=bytes",
    ]
    text = ["data=text", f"data.path={corpus}", "log=disabled", "log.progress=off", "hydra.run.dir=out"]
    done = gptexp("train", "experiment=finetune_gpt2", f"init_from={saved}", "optim.lr=1e-2", *short, *text)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    of_validation = [event["val/loss"] for event in losses if event["event"] == "eval"]
    assert of_validation[-1] < of_validation[0]
