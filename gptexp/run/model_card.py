"""The README.md of an exported model: what it is, how well it does, and how it was trained, all from the run."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from gptexp.config.paths import HUB_MODELS, is_hub_model, path_list
from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import Config, DataConfig
from gptexp.data.characters import CharTokenizer
from gptexp.data.tokenizer import Tokenizer
from gptexp.model.flops import count_parameters
from gptexp.model.loss import perplexity
from gptexp.model.parametrisation import describe
from gptexp.process.errors import DataError
from gptexp.process.terminal import as_command, printable
from gptexp.process.words import counted, duration
from gptexp.reporting.listings.records import Run
from gptexp.reporting.page.overview import as_started
from gptexp.run.load import LoadedRun
from gptexp.storage import run_dir
from gptexp.training.optim import describe_optimizer

_FOLDERS = re.compile(r"(?<![\w.*~-])/([^/,\]}:]*/)*")  # of an absolute path, in an argument
TASK = {"type": "text-generation", "name": "Text generation"}


def model_card(name: str, loaded: LoadedRun, run: Run, tokenizer: Tokenizer, curve: str | None) -> str:
    """The text of the card of the model `name`: the checkpoint `loaded`, which `run` may have trained on from.

    `curve` is the file with its loss curves, if there is one. The licence is left to be filled in: gptexp does not know
    that of the text.
    """
    config, state = loaded.config, loaded.state
    parameters = count_parameters(replace(config.model, vocab_size=tokenizer.n_vocab))
    metrics = list(_metrics(run, loaded.val_loss))
    head = yaml.safe_dump(_head(name, config, metrics), sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{head}# license: to be filled in\n---\n\n# {name}",
        f"A language model of GPT-2's architecture with {parameters:,} parameters, trained with gptexp. Its licence is "
        "to be filled in.",
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
        "tags": ["gpt2", "gptexp"],
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
        yield "bits per byte", "bits_per_byte", val_loss * run.bits_per_byte / newest  # the text is the same


def _use(name: str, tokenizer: Tokenizer, block_size: int) -> str:
    """A program that continues a prompt as far as the model sees."""
    try:
        prompt, ids = "The ", tokenizer.encode_ordinary("The ")
    except DataError:  # of a vocabulary of characters
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
    if config.model.parametrisation != "standard":
        notes.append(
            f"It was trained in the parametrisation {config.model.parametrisation}; the factors of that are multiplied "
            "into these weights, so that this is a usual GPT-2."
        )
    if not config.model.bias:
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
