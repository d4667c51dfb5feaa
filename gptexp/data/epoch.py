"""The tokens of an epoch: a pass over the training windows. Imports numpy only when it counts them."""

from dataclasses import replace
from pathlib import Path

from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError
from gptexp.process.imports import permanent
from gptexp.process.words import shown

_COUNTED: dict[str, int] = {}  # a sweep composes many configs of the same text


def epoch_tokens(cfg: Config, directory: Path) -> int:
    """The training tokens of the corpus whose tokens are in `directory`. Raises `DataError` if there are too few."""
    with permanent():
        from gptexp.data.prepare import has_own_validation
        from gptexp.data.split import split
        from gptexp.data.stream import TokenStream

    stream = TokenStream(directory, cfg.data.max_tokens)
    data = replace(cfg.data, val_tokens=0, val_ratio=None) if has_own_validation(cfg.data) else cfg.data
    return split(data, len(stream), cfg.seq_len, cfg.train.seed).order.n_train * cfg.seq_len


def count_epoch(cfg: Config, tokenise: bool = True) -> int:
    """`epoch_tokens` of the config's text, which is tokenised now if that has not been done and `tokenise` allows it.

    Raises `DataError`, or `ConfigError` for a text that is not tokenised.
    """
    with permanent():
        from gptexp.data.prepare import prepare, prepared_dir

    windows = repr((cfg.data, cfg.seq_len, cfg.train.seed))
    if windows not in _COUNTED:
        directory = prepare(cfg.data)[0] if tokenise else prepared_dir(cfg.data)
        if directory is None:
            rule = "the length is unknown until the text is tokenised; run gptexp prepare with the same arguments"
            raise ConfigError(f"train.epochs={shown(cfg.train.epochs)}: {rule}", "not-tokenised")
        _COUNTED[windows] = epoch_tokens(cfg, directory)
    return _COUNTED[windows]
