"""A run as a directory of Hugging Face's transformers: weights, configs, tokenizer and a model card."""

import json
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from gptexp.config.transformers_json import CONFIG_JSON, GENERATION_CONFIG_JSON, config_json, generation_config_json
from gptexp.data.tokenizer import Tokenizer, load_tokenizer
from gptexp.data.tokenizer_json import transformers_files
from gptexp.model.gpt import GPT
from gptexp.model.huggingface import to_transformers
from gptexp.process.errors import first_line
from gptexp.process.terminal import warn
from gptexp.reporting.charts.pictures import png
from gptexp.reporting.page.report import build_report
from gptexp.run.load import load_checkpointed
from gptexp.run.model_card import model_card
from gptexp.storage import run_dir

CURVE, WEIGHTS = "loss.png", "model.safetensors"


def export(directory: Path, out: Path, name: str, averaged: bool = False) -> None:
    """Write the newest checkpoint of the run in `directory` to `out`, which must be new or empty, all of it or nothing.

    The weights are float32. Rows of the embedding that are padding are left out, so that every id has a token. `name`
    is what its card calls the model; `averaged` takes the average of the weights. Raises `ConfigError`,
    `CheckpointError` or `StorageError`.
    """
    loaded = load_checkpointed(directory, averaged)
    tokenizer = load_tokenizer(loaded.config.data.tokenizer, directory)
    report = build_report(directory)
    [run] = report.analysis.runs
    if run.problem:
        warn(run.problem)
    curve = next((figure for figure in report.figures if figure.key == "loss"), None)
    card = model_card(name, loaded, run, tokenizer, CURVE if curve is not None else None)
    with run_dir.storage(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out if out.exists() else out.parent, prefix=".export-") as folder:
            unfinished = Path(folder) / "complete"
            unfinished.mkdir()
            save_pretrained(loaded.model, tokenizer, unfinished)
            (unfinished / "README.md").write_text(card, encoding="utf-8")
            if curve is not None:
                (unfinished / CURVE).write_bytes(png(curve.spec))
            if not out.exists():
                unfinished.rename(out)
            else:  # a directory that is in use, or a mount, cannot be replaced
                for file in unfinished.iterdir():
                    file.rename(out / file.name)


def save_pretrained(model: GPT, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights, configs and tokenizer into `folder`. Raises `OSError`."""
    files = {
        CONFIG_JSON: _json(config_json(model.cfg, tokenizer.n_vocab, tokenizer.eot_token)),
        GENERATION_CONFIG_JSON: _json(generation_config_json(tokenizer.eot_token)),
        **transformers_files(tokenizer, model.cfg.block_size),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    try:
        save_file(to_transformers(weights, model.cfg, tokenizer.n_vocab), folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(first_line(error)) from None
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes a file that only its owner can read


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
