"""A run as a directory of Hugging Face's transformers: weights, configs, tokenizer and a model card.

The card, README.md, says what the model is, how well it does, and how it was trained, all from the run.
"""

import json
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file

from gptexp.config.blocks import in_words
from gptexp.config.parts import name_of
from gptexp.config.paths import HUB_MODELS, is_hub_model, path_list
from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import Config, DataConfig
from gptexp.config.transformers_json import (
    CONFIG_JSON,
    GENERATION_CONFIG_JSON,
    config_json,
    family_of,
    generation_config_json,
)
from gptexp.data.characters import CharTokenizer
from gptexp.data.tokenizer import Tokenizer, load_tokenizer
from gptexp.data.tokenizer_file import FileTokenizer
from gptexp.data.tokenizer_json import transformers_files
from gptexp.model.huggingface import to_transformers
from gptexp.model.loss import perplexity
from gptexp.model.own_model import Model, OwnModel
from gptexp.model.parametrisation import describe
from gptexp.model.shapes import count_parameters
from gptexp.process.errors import ConfigError, DataError, first_line
from gptexp.process.terminal import as_command, printable, warn
from gptexp.process.words import counted, duration
from gptexp.reporting.charts.pictures import Drawing
from gptexp.reporting.listings.records import Run
from gptexp.reporting.page.overview import as_started
from gptexp.reporting.page.report import build_report
from gptexp.run.load import LoadedRun, load_checkpointed
from gptexp.storage import run_dir
from gptexp.training.optimizer import describe_optimizer

_ARCHITECTURES = {"gpt2": "GPT-2", "llama": "Llama", "qwen3": "Qwen 3", "olmo2": "OLMo 2"}
CURVE, WEIGHTS = "loss.png", "model.safetensors"
_FOLDERS = re.compile(r"(?<![\w.*~-])/([^/,\]}:]*/)*")  # the folders of an absolute path in an argument
TASK = {"type": "text-generation", "name": "Text generation"}


def export(directory: Path, out: Path, name: str, averaged: bool = False, step: int | None = None) -> None:
    """Write a checkpoint of the run in `directory` to `out`, which must be new or empty: all or nothing.

    The weights are float32. Rows of the embedding that are padding are left out, so that every id has a token. `name`
    is the model's name in its card; `averaged` takes the average of the weights. `step` is that of the checkpoint, None
    for the newest. Raises `ConfigError`, `CheckpointError` or `StorageError`.
    """
    loaded = load_checkpointed(directory, averaged, step)
    family_of(loaded.config.model)  # raises for a block that transformers lacks, before anything is drawn
    tokenizer = load_tokenizer(loaded.config.data.tokenizer, directory)
    with Drawing(at_once=1) as drawing:
        report = build_report(directory)
        for figure in report.figures:
            if figure.key == "loss":
                drawing.add(CURVE, figure.spec)
        curve = drawing.pngs()
    [run] = report.analysis.runs
    if run.problem:
        warn(run.problem)
    card = model_card(name, loaded, run, tokenizer, CURVE if curve else None)
    with run_dir.storage(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out if out.exists() else out.parent, prefix=".export-") as folder:
            unfinished = Path(folder) / "complete"
            unfinished.mkdir()
            save_pretrained(loaded.model, tokenizer, unfinished)
            (unfinished / "README.md").write_text(card, encoding="utf-8")
            for picture, image in curve.items():
                (unfinished / picture).write_bytes(image)
            if not out.exists():
                unfinished.rename(out)
            else:  # a directory that is in use, or a mount, cannot be replaced
                for file in unfinished.iterdir():
                    file.rename(out / file.name)


def save_pretrained(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights, configs and tokenizer into `folder`. Raises `OSError`, or `ConfigError` for an own model."""
    if isinstance(model, OwnModel):
        rule = "transformers has no such model; only gptexp can use it"
        raise ConfigError(f"model={name_of(model.cfg)}: {rule}", "not-exportable")
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


def model_card(name: str, loaded: LoadedRun, run: Run, tokenizer: Tokenizer, curve: str | None) -> str:
    """The text of the model card for the checkpoint `loaded`, called `name`; `run` may have trained on since.

    `curve` is the file with its loss curves, if there is one. The licence is left open: gptexp does not know the
    licence of the training text.
    """
    config, state = loaded.config, loaded.state
    parameters = count_parameters(replace(config.model, vocab_size=tokenizer.n_vocab))
    metrics = list(_metrics(run, loaded.val_loss))
    head = yaml.safe_dump(_head(name, config, metrics), sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{head}# license: to be filled in\n---\n\n# {name}",
        f"A language model of {_ARCHITECTURES[family_of(config.model)]}'s architecture with {parameters:,} parameters, "
        "trained with gptexp. Its licence is to be filled in.",
        "## Use",
        _use(name, tokenizer, config.model.block_size),
        *_notes(config, tokenizer),
        "## Results",
        _table("metric", "value", [(label, f"{value:.4f}") for label, _, value in metrics] or [("not evaluated", "")]),
        *([f"Evaluated after {state.evaluated_tokens:,} tokens."] if 0 < state.evaluated_tokens < state.tokens else []),
        *([f"![Training and validation loss over tokens]({curve})"] if curve is not None else []),
        "## Training",
        _table("", "", _training(loaded, run)),
        *_again(run.directory),
    ]
    return "\n\n".join(sections) + "\n"


def _head(name: str, config: Config, metrics: list[tuple[str, str, float]]) -> dict[str, Any]:
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [family_of(config.model), "gptexp"],
    }
    data = config.data
    if data.name == "hf" and isinstance(data.path, str):
        head["datasets"] = [data.path]
    if config.init_from is not None and is_hub_model(config.init_from):
        base = config.init_from.partition("@")[0]
        head["base_model"] = HUB_MODELS.get(base, base)
    if metrics:
        text = {"type": data.path if "datasets" in head else data.name, "name": f"held out from {data.name}"}
        values = [{"type": kind, "name": label, "value": round(value, 4)} for label, kind, value in metrics]
        head["model-index"] = [{"name": name, "results": [{"task": TASK, "dataset": text, "metrics": values}]}]
    return head


def _metrics(run: Run, val_loss: float | None) -> Iterator[tuple[str, str, float]]:
    """Yield the label, the type and the value of each figure of an evaluation of `run`."""
    if val_loss is None:
        return
    yield "validation loss, nats per token", "loss", val_loss
    yield "perplexity per token", "perplexity", perplexity(val_loss)
    newest = next((point.loss for point in reversed(run.val) if point.loss), None)
    if newest and run.bits_per_byte is not None and math.isfinite(run.bits_per_byte):
        yield "bits per byte", "bits_per_byte", val_loss * run.bits_per_byte / newest  # proportional, for the same text


def _use(name: str, tokenizer: Tokenizer, block_size: int) -> str:
    """A program that continues a prompt within the context length of the model."""
    try:
        prompt, ids = "The ", tokenizer.encode_ordinary("The ")
    except DataError:  # a vocabulary of characters may lack some of these
        prompt = tokenizer.decode([tokenizer.n_vocab - 1])
        ids = tokenizer.encode_ordinary(prompt)
    new = max(1, min(50, block_size - len(ids)))
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
start = tokenizer({prompt!r}, return_tensors="pt")
text = model.generate(**start, max_new_tokens={new}, do_sample=True, top_k=50)
print(tokenizer.decode(text[0]))
```"""


def _notes(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    family = family_of(config.model)
    notes = [f"The model sees at most {counted(config.model.block_size, 'token')}, the new ones included."]
    if isinstance(tokenizer, CharTokenizer):
        notes.append(
            f"Its vocabulary has {counted(tokenizer.n_vocab, 'character')}; transformers leaves out every other one "
            "without a word."
        )
    elif tokenizer.eot_token is not None:
        notes.append(
            "The name of the end-of-text token in a text is that token here. In training it was ordinary text, as with "
            "`split_special_tokens=True`."
        )
    if isinstance(tokenizer, FileTokenizer):
        notes.append(
            "The tokenizer adds no token to a text, such as `<s>`, and merges without dropout: so it encoded the "
            "training's text, whatever the file that it was made from says."
        )
    if config.data.document_mask:
        notes.append("In training a token saw only its own document; put one document in a sequence.")
    if config.model.parametrisation != "standard":
        notes.append(
            f"It was trained in the parametrisation {config.model.parametrisation}; the factors of that are multiplied "
            f"into these weights, so that this is a usual {_ARCHITECTURES[family]}."
        )
    if not config.model.bias and family == "gpt2":
        notes.append("The model has no biases; those in the file are zero, because transformers' GPT-2 has some.")
    yield " ".join(notes)


def _training(loaded: LoadedRun, run: Run) -> list[tuple[str, str]]:
    config, state, summary = loaded.config, loaded.state, run.summary
    m, s, b = config.model, config.schedule, config.batch
    rows = [
        ("model", f"{counted(m.n_layer, 'layer')}, {counted(m.n_head, 'head')}, width {m.n_embd}, {_biases(m.bias)}, "
         f"dropout {m.dropout:g}"),
        ("data", f"{_data(config.data)}; hash of the tokens {summary.get('data_hash', 'unknown')}"),
        ("tokenizer", Path(config.data.tokenizer).name),
        ("tokens", f"{state.tokens:,} in {counted(state.step, 'step')}"),
        ("batch", f"{b.total_batch_size:,} tokens a step, sequences of {config.seq_len:,}"),
        *([("batch ramp", b.step_sizes.ramp_in_words())] if b.ramp_tokens else []),
        ("optimizer", describe_optimizer(scaled_optim(config))),
        ("schedule", f"{s.name}, warm-up over {run.warmup_tokens:,} tokens, minimum {s.min_lr_ratio:g} of lr"),
        ("seed", str(config.train.seed)),
    ]  # fmt: skip
    if loaded.averaged:
        rows.append(("weights", f"moving average with a half-life of {config.train.ema_half_life_tokens:,} tokens"))
    if block := in_words(m):
        rows.insert(1, ("block", block))
    if m.parametrisation != "standard":
        rows.insert(1, ("parametrisation", describe(m)))
    if config.init_from is not None:
        rows.insert(
            1, ("weights from", config.init_from if is_hub_model(config.init_from) else Path(config.init_from).name)
        )
    if "device" in summary:
        ranks = counted(summary.get("world_size", 1), "rank")
        rows.append(("machine", f"{summary['device']}, {ranks}, {duration(state.seconds)}"))
    saved = run_dir.read_json(run.directory / run_dir.SUMMARY).get("versions")
    if isinstance(saved, dict):
        rows.append(("versions", ", ".join(f"{name} {number}" for name, number in saved.items())))
    if "git_commit" in summary:
        rows.append(("commit", summary["git_commit"]))
    return rows


def _data(data: DataConfig) -> str:
    """What the text is, without folders of the machine that read it."""
    if data.mix:
        sources = ", ".join(f"{_name(data, path)} with weight {weight:g}" for path, weight in data.mix.items())
    else:
        sources = ", ".join(_name(data, path) for path in (path_list(data.path) if data.path else []))
    subset = f", subset {data.subset}" if data.subset else ""
    return f"{data.name}{': ' if sources else ''}{sources}{subset}"


def _name(data: DataConfig, path: str) -> str:
    return path if data.name == "hf" else Path(path).name


def _biases(bias: bool) -> str:
    return "biases" if bias else "no biases"


def _table(left: str, right: str, rows: list[tuple[str, str]]) -> str:
    lines = [(left, right), ("---", "---"), *rows]
    return "\n".join(f"| {printable(a)} | {printable(b).replace('|', '&#124;')} |" for a, b in lines)


def _again(directory: Path) -> Iterator[str]:
    if (started := as_started(directory)) is not None:
        arguments = ["train", *started.flags, *started.overrides]
        command = as_command([_FOLDERS.sub("", argument) for argument in arguments])
        yield f"The command that trained it, with paths shortened to their last name:\n\n```sh\n{command}\n```"
