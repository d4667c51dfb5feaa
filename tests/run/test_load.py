"""Opening a run on another machine than the one that trained it."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ForkServer, summary
from real_runs import finished_run

from gptexp import load_run
from gptexp.model.generate import InferenceLinear
from gptexp.run.load import load_for_inference


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path, torch_server: ForkServer) -> Path:
    return finished_run(tmp_path_factory, corpus, torch_server).directory


@pytest.fixture
def from_gpu(finished: Path, tmp_path: Path) -> Path:
    """The finished run, changed to look like a run on a GPU with kernels that a CPU does not have."""
    directory = tmp_path / "from_gpu"
    shutil.copytree(finished, directory)
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["train"].update(device="auto", attention="cudnn")
    config["optim"].update(fused="on")
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    effective = json.loads((directory / "effective.json").read_text())
    assert {"device", "attention"} <= effective.keys()
    (directory / "effective.json").write_text(json.dumps({**effective, "device": "cuda", "attention": "cudnn"}))
    return directory


@pytest.mark.e2e
def test_a_run_of_a_gpu_is_loaded_on_a_cpu(from_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    model, _, _ = load_run(from_gpu)
    assert next(model.parameters()).device.type == "cpu"


def test_a_run_of_a_gpu_is_evaluated_on_a_cpu(
    from_gpu: Path, finished: Path, gptexp: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    env = {"GPTEXP_CACHE": str(finished.parent / "tokens"), "CUDA_VISIBLE_DEVICES": ""}
    done = gptexp("evaluate", str(from_gpu), env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["val/loss"] == pytest.approx(summary(finished)["final_val_loss"], rel=1e-5)


def test_a_loaded_model_returns_logits_and_loss(finished: Path) -> None:
    """The mean loss of the targets is that of torch's own cross-entropy on the logits of all positions."""
    model, tokenizer, config = load_run(finished)
    ids = torch.tensor([[*tokenizer.encode_ordinary("The cat sees bread."), tokenizer.eot_token]] * 2)
    x, y = ids[:, :-1], ids[:, 1:]
    logits = model(x)
    assert logits.shape == (*x.shape, config.model.vocab_size)
    assert config.model.vocab_size > tokenizer.n_vocab
    loss = model(x, y)
    assert loss.shape == ()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()))
    assert tokenizer.decode(x[0].tolist()) == "The cat sees bread."


@pytest.mark.parametrize(("dtype", "native"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_a_model_to_sample_with_computes_as_the_run_did(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, native: bool
) -> None:
    """In bfloat16 to the bit, if the device has it, else in float32."""
    monkeypatch.setattr("gptexp.run.load.has_native_bfloat16", lambda _: native)
    shutil.copytree(finished, tmp_path / "run")
    config = yaml.safe_load((finished / "config.yaml").read_text())
    config["train"].update(dtype=dtype, matmul_precision="high")
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    model, tokenizer = load_for_inference(tmp_path / "run", False, None)
    assert {m.precision for m in model.modules() if isinstance(m, InferenceLinear)} == {"high"}
    x = torch.tensor([tokenizer.encode_ordinary("The cat sees bread.")])
    low = dtype == "bfloat16" and native
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        expected = load_run(tmp_path / "run")[0](x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0 if low else 1e-5)


def test_of_a_sweep_its_best_run_is_loaded(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, loss in {"worse": 5.0, "better": 4.0}.items():
        shutil.copytree(finished, tmp_path / name)
        (tmp_path / name / "summary.json").write_text(json.dumps({**summary(finished), "final_val_loss": loss}))
        config = yaml.safe_load((finished / "config.yaml").read_text())
        config["optim"]["lr"] = loss / 100
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
    _, _, config = load_run(str(tmp_path))
    assert config.optim.lr == 0.04
    assert "its best run is better" in capsys.readouterr().err
