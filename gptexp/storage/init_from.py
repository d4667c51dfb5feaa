"""`init_from`: where the first weights of a run come from, and the model that they are for.

They come from another run, from a directory or a repository of the hub with transformers' GPT-2, or from a checkpoint
of nanoGPT. Here is what can be said before torch is loaded; run/first_weights.py reads the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gptexp.config.paths import HUB_MODELS, is_hub_model
from gptexp.config.schema import AUTO, Config, ModelConfig, fields_of
from gptexp.config.vocabulary import VOCAB_SIZES, padded, padding_multiple
from gptexp.process.errors import CheckpointError, ConfigError, first_line
from gptexp.process.words import shown
from gptexp.storage import run_dir
from gptexp.storage.reader import read_json

CONFIG_JSON = "config.json"  # of transformers
# What a `GPT` is, and transformers can be told to change. A config.json without a key has this value.
_FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",  # the approximation by tanh
    "layer_norm_epsilon": 1e-5,  # torch's default, which `GPT` uses
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
_SIZES = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}  # its defaults


@dataclass(frozen=True)
class Source:
    """A place with weights, on this machine."""

    given: str  # what names it, for errors
    kind: Literal["run", "transformers", "nanogpt"]
    path: Path  # a directory; of nanoGPT a file

    def model(self) -> ModelConfig:
        """The model that the weights are for, without dropout. Raises `ConfigError` or `CheckpointError`."""
        try:
            if self.kind == "run":
                return run_dir.load_resolved(self.path).model
            return _of_transformers(self.path) if self.kind == "transformers" else _of_nanogpt(self.path)
        except ConfigError as error:
            raise ConfigError(f"{self.given}: {error}") from None


def find(name: str, given: str, weights: bool = False) -> Source:
    """Find the weights `name`. Of a model on the hub, downloads config.json, and the `weights` if asked to.

    Errors begin with `given`. Raises `ConfigError` if there is nothing, or if the hub is asked in vain.
    """
    if is_hub_model(name):
        from gptexp.storage import hub  # imports huggingface_hub, which takes half a second

        model, _, revision = name.partition("@")
        repository = HUB_MODELS.get(model, model)
        return Source(given, "transformers", hub.download_model(given, repository, revision or None, weights))
    path = Path(name)
    if path.is_file():
        return Source(given, "nanogpt", path)
    if run_dir.is_run(path):
        return Source(given, "run", path)
    if (path / CONFIG_JSON).is_file():
        return Source(given, "transformers", path)
    what = f"it has neither {run_dir.CONFIG} nor {CONFIG_JSON}" if path.is_dir() else "no such file or directory"
    raise ConfigError(
        f"{given}: {what}; give a run, a directory that transformers saved, a ckpt.pt of nanoGPT, "
        f"{', '.join(HUB_MODELS)}, or OWNER/NAME on the hub"
    )


def of_config(init_from: str, weights: bool = False) -> Source:
    """`find` for a value of `init_from`."""
    return find(init_from, f"init_from={init_from}", weights)


def check(config: Config, init_from: str) -> None:
    """Raise unless the weights of `init_from` exist, and are for the model of `config`, dropout aside."""
    source = of_config(init_from)
    pairs = [(key, getattr(config.model, key), was) for key, _, was in fields_of(source.model()) if key != "dropout"]
    different = [(key, shown(now), shown(was)) for key, now, was in pairs if now not in (was, AUTO)]
    if lines := [
        f"model.{key}={now}: init_from={init_from} has {key}={was}; use the same value, or model=from_init"
        for key, now, was in different
    ]:
        raise ConfigError(lines)
    if (n_vocab := VOCAB_SIZES.get(config.data.tokenizer)) is not None:
        choose_vocab_size(config, n_vocab)
    if source.kind == "run":
        run_dir.require_checkpoint(source.path)


def choose_vocab_size(config: Config, n_vocab: int) -> tuple[int, str]:
    """What `model.vocab_size=auto` is for a tokenizer with `n_vocab` ids, and the reason. Raises `ConfigError`."""
    if config.init_from is not None:
        size = of_config(config.init_from).model().resolved_vocab_size
        if size < n_vocab:
            raise ConfigError(
                f"data.tokenizer={config.data.tokenizer}: has {n_vocab:,} ids, and the weights of "
                f"init_from={config.init_from} are for {size:,}; use the tokenizer that they were trained with"
            )
        return size, f"that of init_from={config.init_from}"
    ids = f"the {n_vocab:,} ids of data.tokenizer={config.data.tokenizer}"
    return padded(n_vocab), f"{ids}, padded to a multiple of {padding_multiple(n_vocab)}"


def _of_transformers(directory: Path) -> ModelConfig:
    try:
        content = read_json((directory / CONFIG_JSON).resolve())  # the hub's cache consists of links
    except (OSError, ValueError) as error:
        raise ConfigError(f"{CONFIG_JSON}: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{CONFIG_JSON}: not a JSON object")
    return model_config(content)


def model_config(content: Mapping[str, Any]) -> ModelConfig:
    """The model that transformers' config.json describes. Raises `ConfigError` for another architecture.

    The size of the vocabulary stays as it is, also 50,257: rows added to a trained wte would have the logit 0, which is
    far above GPT-2's own logits, so that the padding would get most of the probability.
    """
    for key, expected in _FIXED.items():
        if content.get(key, expected) != expected:
            raise ConfigError(f"{key}={shown(content[key])}: gptexp's model has {expected}; give another GPT-2")
    values = {key: content.get(key, default) for key, default in _SIZES.items()}
    inner = content.get("n_inner")
    if inner is not None and inner != 4 * values["n_embd"]:
        raise ConfigError(f"n_inner={shown(inner)}: gptexp's model has 4·n_embd = {4 * values['n_embd']}")
    return _model(block_size=values.pop("n_positions"), **values)


def _of_nanogpt(path: Path) -> ModelConfig:
    import torch  # only here: a config is refused without waiting for torch

    content = nanogpt_checkpoint(path, torch.device("meta"))
    sizes = {key: content["model_args"].get(key) for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    return _model(bias=bool(content["model_args"].get("bias", True)), **sizes)


def _model(bias: bool = True, **sizes: Any) -> ModelConfig:
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{key}={shown(value)}: must be a whole number above 0")
    if sizes["n_embd"] % sizes["n_head"]:
        raise ConfigError(f"n_embd={sizes['n_embd']}: not divisible by n_head={sizes['n_head']}")
    return ModelConfig(bias=bias, **sizes)


def nanogpt_checkpoint(path: Path, device: Any) -> dict[str, Any]:
    """The content of nanoGPT's ckpt.pt, with its tensors on `device`. Runs no code that is in the file.

    Raises `CheckpointError` for another file.
    """
    from pickle import UnpicklingError

    import torch

    try:
        content = torch.load(path, map_location=device, weights_only=True, mmap=True)
    except (OSError, UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path}: not a checkpoint of nanoGPT ({first_line(error)})") from None
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("model", "model_args")):
        raise CheckpointError(f"{path}: not a checkpoint of nanoGPT (it lacks 'model' or 'model_args')")
    return content
