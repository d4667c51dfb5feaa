"""`init_from`: the run whose newest weights a new run starts from."""

from pathlib import Path

from gptexp.config.schema import AUTO, Config, fields_of
from gptexp.config.vocabulary import padded, padding_multiple
from gptexp.process.errors import ConfigError
from gptexp.process.words import shown
from gptexp.storage import run_dir


def check(config: Config, init_from: str) -> None:
    """Raise unless the run `init_from` has the model of `config`, except for dropout, and a checkpoint."""
    given = f"init_from={init_from}"
    try:
        old = run_dir.load_resolved(Path(init_from)).model
    except ConfigError as error:
        raise ConfigError(f"{given}: {error}") from None
    pairs = [(key, getattr(config.model, key), was) for key, _, was in fields_of(old) if key != "dropout"]
    different = [(key, shown(now), shown(was)) for key, now, was in pairs if now not in (was, AUTO)]
    if lines := [f"model.{key}={now}: {given} has {key}={was}; use the same value" for key, now, was in different]:
        raise ConfigError(lines)
    run_dir.require_checkpoint(Path(init_from))


def choose_vocab_size(config: Config, n_vocab: int) -> tuple[int, str]:
    """What `model.vocab_size=auto` is for a tokenizer with `n_vocab` ids, and the reason. Raises `ConfigError`."""
    if config.init_from is not None:
        size = run_dir.load_resolved(Path(config.init_from)).model.resolved_vocab_size
        if size < n_vocab:
            raise ConfigError(
                f"data.tokenizer={config.data.tokenizer}: has {n_vocab:,} ids, and the weights of "
                f"init_from={config.init_from} are for {size:,}; use the tokenizer of that run"
            )
        return size, f"that of init_from={config.init_from}"
    ids = f"the {n_vocab:,} ids of data.tokenizer={config.data.tokenizer}"
    return padded(n_vocab), f"{ids}, padded to a multiple of {padding_multiple(n_vocab)}"
