"""`model=from_init`: the sizes of the model whose weights `init_from` names, as values of the config."""

from typing import Any

from omegaconf import OmegaConf

from gptexp.process.errors import ConfigError
from gptexp.storage.init_from import of_config


def register() -> None:
    """Make the resolver of conf/model/from_init.yaml known, which composition calls."""
    OmegaConf.register_new_resolver("from_init", _size, replace=True)


def _size(key: str, init_from: str | None) -> Any:
    """The value of `model.key` in the model of `init_from`. Raises `ConfigError`."""
    if init_from is None:
        raise ConfigError("model=from_init: init_from is not given; give it, or choose another model")
    return getattr(of_config(init_from).model(), key)
