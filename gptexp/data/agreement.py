"""The data of a run with several ranks: rank 0 prepares the data, and tells the other ranks where they are.

Otherwise every rank would list the folders of the corpus and open each file of tokens, on a file system that all nodes
share. If a node does not see the files of rank 0, its first rank prepares the data there and tells the other ranks of
the node. With data=tokens it always does so: these files lie outside of the cache, and may differ between nodes.
"""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gptexp.config.schema import Config
from gptexp.data.loader import Dataset, open_dataset
from gptexp.data.prepare import prepare, prepare_texts
from gptexp.data.stream import manifest_state
from gptexp.distributed.group import wait_for
from gptexp.distributed.ranks import Rank
from gptexp.process.errors import DataError

EVERYWHERE = "tokens"  # the key in the store under which rank 0 tells the first rank of each node


def open_shared_dataset(cfg: Config, rank: Rank, store: dist.Store) -> Dataset:
    """Open the data of the run. Raises `DataError`, on all ranks if rank 0 cannot prepare them. *Collective.*"""
    on_this_node = f"{EVERYWHERE} of {platform.node()}"
    if rank.is_main:
        place, is_here = _prepare_and_tell(cfg, store, [EVERYWHERE, on_this_node]), False
    else:
        key = on_this_node if rank.local_rank else EVERYWHERE
        wait_for(store, key)
        place = json.loads(store.get(key))
        must_look = cfg.data.name == "tokens" and not rank.local_rank
        is_here = "error" in place or (not must_look and _states(place["directories"]) == place["states"])
        if not is_here:  # for the first rank of a node; or for a later rank, if two nodes have the same name
            place = _prepare_and_tell(cfg, store, [on_this_node])
        elif not rank.local_rank:
            store.set(on_this_node, json.dumps(place))
    if error := place.get("error"):
        raise DataError(error)
    return _open(cfg, place, check_files=not is_here)


def _prepare_and_tell(cfg: Config, store: dist.Store, keys: Sequence[str]) -> dict[str, Any]:
    """Prepare the data, and store under `keys` where they are and the states of their manifests, or the error."""

    def tell(place: dict[str, Any]) -> dict[str, Any]:
        for key in keys:
            store.set(key, json.dumps(place))
        return place

    try:
        paths = [*prepare(cfg.data), *prepare_texts(cfg.data).values()]
        directories = [None if path is None else str(path) for path in paths]
        return tell({"directories": directories, "states": _states(directories)})
    except DataError as error:
        tell({"error": str(error)})
        raise


def _states(directories: Sequence[str | None]) -> list[Any]:
    """What distinguishes the files from those of the same name on a disk of another node."""
    return [path and manifest_state(Path(path)) for path in directories]


def _open(cfg: Config, place: dict[str, Any], check_files: bool) -> Dataset:
    train, val, *others = place["directories"]
    directories = Path(train), None if val is None else Path(val)
    named = dict(zip(cfg.data.validation, map(Path, others), strict=True))
    dataset = open_dataset(cfg.data, directories, cfg.seq_len, cfg.train.seed, check_files=check_files, others=named)
    dataset.check_ids(cfg.model.vocab_size)
    return dataset
