"""Loads the model of a run from the run directory alone, to sample, to evaluate, or for a notebook."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gptexp.config.batch import count_val_windows
from gptexp.config.metrics import Metric, bits_metric, of_text
from gptexp.config.parts import is_part, origin
from gptexp.config.schema import Config, result_deciding
from gptexp.data.loader import build_dataset, val_bytes_per_token
from gptexp.data.tokenizer import Tokenizer, load_tokenizer, masked_start
from gptexp.distributed.ranks import Rank
from gptexp.distributed.sharding import WholeParameters
from gptexp.machine.device import has_native_bfloat16, pick_device
from gptexp.machine.effective import Effective, apply, forward_context, load_effective, step_context
from gptexp.machine.resolve import resolve
from gptexp.model.generate import for_inference
from gptexp.model.gpt import GPT
from gptexp.model.loss import bits_per_byte, perplexity, plain_cross_entropy
from gptexp.model.own_model import Model, OwnModel
from gptexp.model.shapes import count_parameters
from gptexp.process.errors import ConfigError, DataError
from gptexp.process.fields import AUTO
from gptexp.process.terminal import warn
from gptexp.process.words import shown
from gptexp.reporting.statistics.best import one_checkpoint
from gptexp.run.first_weights import VOCABULARY, choose_weights, load_first_weights, tokenizer_of
from gptexp.storage import checkpoint, run_dir
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.init_from import Source
from gptexp.storage.inventory import located
from gptexp.training.evaluation import validation_loss


@dataclass
class LoadedRun:
    """A checkpoint of a run, ready for use."""

    model: Model  # in eval mode, on `device`
    config: Config
    effective: Effective
    checkpoint: Path
    state: TrainState  # of the checkpoint
    device: torch.device
    averaged: bool = False  # `model` has the average of the weights

    @property
    def val_loss(self) -> float | None:
        """The validation loss in the checkpoint's newest evaluation, for the weights that `model` has."""
        return self.state.val_loss_ema if self.averaged else self.state.val_loss


def load_checkpointed(directory: Path | str, averaged: bool = False, step: int | None = None) -> LoadedRun:
    """Load the newest valid checkpoint of a run, or that of `step`; `averaged`: the average of its weights.

    Raises `ConfigError` or `CheckpointError`.
    """
    directory = Path(directory)
    config = run_dir.load_resolved(directory)
    path, state = checkpoint.newest(directory / run_dir.CHECKPOINTS, step)
    refuse_another_model(directory, config)
    checkpoint.refuse_other_size(path, count_parameters(config.model))
    device = _device(config.train.device)
    model: Model
    if is_part(config.model):
        warn(f"part {origin('model', config.model)}")  # stdout has the result
        model = OwnModel(config.model)
    else:
        model = GPT(config.model, plain_cross_entropy, document_start=masked_start(config.data, directory))
    checkpoint.load_weights(path, model, averaged)
    saved = load_effective(directory)
    here = replace(config, train=replace(config.train, loss=AUTO))  # the plain loss needs no compiler
    if saved is None or saved.device != device.type:  # the kernels that the config asks for may not exist here
        fused: dict[str, Any] = {"fused": AUTO} if hasattr(config.optim, "fused") else {}
        optim = replace(config.optim, **fused)
        here = replace(here, train=replace(here.train, attention=AUTO), optim=optim)
    effective = resolve(here, device, Rank(), saved)
    return LoadedRun(model.to(device).eval(), config, effective, path, state, device, averaged)


def refuse_another_model(directory: Path, config: Config) -> None:
    """Raise `ConfigError` if an edited file would make another model of the same weights."""
    trained, now = run_dir.trained_with(directory), result_deciding(config)
    for key in run_dir.changed(now, trained):
        if (key.startswith("model.") and key != "model.dropout") or key == "data.tokenizer":
            was_auto = key == "model.vocab_size" and run_dir.load_config(directory).model.vocab_size == AUTO
            file = directory / (run_dir.EFFECTIVE if was_auto else run_dir.CONFIG)
            raise ConfigError(
                f"{file}: {key}={shown(now[key])}, and the weights were trained with {shown(trained[key])}; restore "
                "that value"
            )


def _device(trained_on: str) -> torch.device:
    """Return the kind of device that the run trained on, or the best one that this machine has."""
    try:
        return pick_device(trained_on, Rank())
    except ConfigError:
        return pick_device("auto", Rank())


def load_run(
    directory: Path | str, ema: bool = False, checkpoint: int | str | None = None
) -> tuple[Model, Tokenizer, Config]:
    """Return the model in eval mode, its tokenizer and the run's config, for a notebook.

    `directory` is that of a run, or of a sweep, whose best run is loaded. `checkpoint` is a step, "best" (the lowest
    validation loss) or "last", the default; DIR@CHECKPOINT says the same. `model(x)` returns the logits (B, T, V) of
    token ids `x` (B, T), and `model(x, y)` the mean loss of the targets `y`. `ema` takes the averaged weights. Raises
    `ConfigError` if there is no run or no such checkpoint, `CheckpointError` if it is not intact or has no average, and
    `DataError` if the tokenizer cannot be downloaded.
    """
    path, step = one_checkpoint(located(str(directory)), None if checkpoint is None else str(checkpoint), ema)
    run = load_checkpointed(path, ema, step)
    return run.model, load_tokenizer(run.config.data.tokenizer, path), run.config


def load_for_inference(directory: Path | str, averaged: bool, step: int | None) -> tuple[Model, Tokenizer]:
    """Return a model to generate text with, which computes as the run did, and the run's tokenizer.

    If this device would have to emulate bfloat16, the model computes in float32. Arguments and errors are those of
    `load_checkpointed`; raises `DataError` if the tokenizer cannot be downloaded.
    """
    run = load_checkpointed(directory, averaged, step)
    dtype = getattr(torch, run.effective.dtype.value) if has_native_bfloat16(run.device) else torch.float32
    model = for_inference(run.model, dtype, run.effective.matmul_precision.value)
    return model, load_tokenizer(run.config.data.tokenizer, Path(directory))


def load_pretrained(source: Source, averaged: bool = False) -> tuple[Model, Tokenizer]:
    """Return the model of `source`, in eval mode, and its tokenizer. Raises `ConfigError` or `CheckpointError`.

    `averaged` takes the average of a run's weights.
    """
    if source.kind == "run":
        return load_run(source.path, averaged, source.step)[:2]
    tokenizer, config = tokenizer_of(source), source.model()
    if tokenizer is None:
        raise ConfigError(
            f"{source.given}: has no {run_dir.TOKENIZER}, and no {VOCABULARY} of GPT-2; give a directory in which "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…) has saved its tokenizer"
        )
    if tokenizer.n_vocab > config.resolved_vocab_size:
        raise ConfigError(
            f"{source.given}: its tokenizer has {tokenizer.n_vocab:,} ids, and its weights are for "
            f"{config.resolved_vocab_size:,}; give a directory with both of one model"
        )
    source = choose_weights(source, config)
    gpt = GPT(config, plain_cross_entropy)
    load_first_weights(source, WholeParameters(gpt))
    return gpt.to(_device("auto")).eval(), tokenizer


def evaluate_checkpoint(
    loaded: LoadedRun, directory: Path, config: Config, of_the_run: bool, val_tokens: int | None = None
) -> dict[str, float]:
    """Compute the validation losses and the perplexity of a run's checkpoint on the validation texts of `config`.

    If that text is the run's own (`of_the_run`), raises `DataError` unless its hash is the one that the run trained on.
    `val_tokens` limits the number of held-out tokens that are used; raises `ConfigError` if the run has fewer.
    """
    apply(loaded.effective)
    windows = None if val_tokens is None else count_val_windows(val_tokens, config.seq_len)
    dataset = build_dataset(config, windows)
    if windows is not None and windows > len(dataset.val_starts):
        raise ConfigError(
            f"--val-tokens={val_tokens}: the run has {len(dataset.val_starts) * dataset.seq_len}; use fewer, or give "
            "--data FILE"
        )
    trained_on = run_dir.read_summary(directory).get("data_hash") or checkpoint.data_hash(loaded.checkpoint)
    if of_the_run and trained_on not in (None, dataset.hash):
        raise DataError(
            f"{directory}: trained on other tokens ({trained_on}) than data={config.data.name} contains now "
            f"({dataset.hash}), so the held-out text may be part of the training text; give --data FILE"
        )
    found: dict[str, float] = {"step": loaded.state.step, "tokens": len(dataset.val_starts) * dataset.seq_len}
    if loaded.averaged:
        found["ema"] = True
    context, batch_size = forward_context(loaded.effective), loaded.effective.micro_batch_size.value
    tokenizer = load_tokenizer(config.data.tokenizer, directory)
    texts = {of_text(Metric.VAL_LOSS, name): text for name, text in dataset.texts.items()}
    for name, text in {Metric.VAL_LOSS: dataset, **texts}.items():
        with step_context(loaded.effective):
            loss = found[name] = validation_loss(loaded.model, text, batch_size, Rank(), loaded.device, context)
        if text is dataset:
            found[Metric.VAL_PPL] = perplexity(loss)
        try:
            found[bits_metric(name)] = bits_per_byte(loss, val_bytes_per_token(text, tokenizer))
        except DataError as error:
            warn(f"no bits per byte: {error}")
    return found
