"""Data sets of the Hugging Face hub, streamed by the package datasets. No other file imports it.

`repo` is OWNER/NAME or OWNER/NAME@REVISION: a branch, a tag or a commit.
"""

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from gptexp.process.errors import ConfigError, UnavailableError, first_line
from gptexp.process.words import shown


def count_shards(repo: str, subset: str | None, split: str) -> int:
    """The number of files of a data set. Raises `UnavailableError`."""
    return int(_streamed(repo, subset, split).num_shards)


def rows(repo: str, subset: str | None, split: str, shard: int) -> Iterator[dict[str, Any]]:
    """Yield the rows in one file of a data set, as they arrive. Raises `UnavailableError`."""
    streamed = _streamed(repo, subset, split)
    arriving = iter(streamed.shard(num_shards=streamed.num_shards, index=shard))
    while True:
        try:
            row = next(arriving)
        except StopIteration:
            return
        except Exception as error:  # from the network or any format
            raise UnavailableError(_problem(repo, f"{type(error).__name__}: {first_line(error)}")) from None
        yield row


@cache
def _streamed(repo: str, subset: str | None, split: str) -> Any:
    try:
        from datasets import load_dataset

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it prints two lines for each of five attempts
    except ImportError:
        raise ConfigError(f"data.path={repo}: needs the package datasets; run: pip install 'gptexp[hf]'") from None
    name, _, revision = repo.partition("@")
    try:
        return load_dataset(name, subset, split=split, revision=revision or None, streaming=True)
    except Exception as error:  # also `ValueError` for a wrong subset or split, which names the right ones
        raise UnavailableError(_problem(repo, first_line(error))) from None


def _problem(repo: str, why: str) -> str:
    return (
        f"data.path={shown(repo)}: the data set cannot be read ({why}); without the hub, copy its files here and use "
        "data=text data.path=FILES"
    )
