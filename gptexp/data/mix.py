"""`data.mix`: several sources in one stream of tokens, each with a given share of it.

The source that is used up first limits the length of the stream, so no text is repeated. The stream has the first
tokens of each source, one source after the other. data.order=shuffled mixes its windows.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from pathlib import Path

from gptexp.data.stream import Shard, read_manifest, write_references
from gptexp.process.errors import DataError
from gptexp.process.words import counted
from gptexp.storage.run_dir import keep_tokenizer


def shares_of(tokens: Mapping[str, int], weights: Mapping[str, float], most: int | None) -> dict[str, int]:
    """How many of its `tokens` each source gives: together as many as possible, but at most `most`."""
    share = _fractions(weights)
    length = min(tokens[source] / share[source] for source in weights)
    if most is not None:
        length = min(length, Fraction(most))
    return {source: floor(share[source] * length) for source in weights}


def most_of(weights: Mapping[str, float], most: int | None) -> dict[str, int | None]:
    """How many tokens of each source a mix of at most `most` tokens can need. None: all.

    Rounded up: with fewer, `shares_of` would make the whole mix shorter.
    """
    return {source: None if most is None else ceil(share * most) for source, share in _fractions(weights).items()}


def _fractions(weights: Mapping[str, float]) -> dict[str, Fraction]:
    whole = sum(map(Fraction, weights.values()))
    return {source: Fraction(weight) / whole for source, weight in weights.items()}


def mix_dir(cache: Path, sources: Mapping[str, Path], weights: Mapping[str, float], most: int | None) -> Path:
    """The directory of a mix. `sources` are the directories of the prepared tokens of each source."""
    identity = [[directory.name, float(weights[source])] for source, directory in sources.items()]
    return cache / f"mix-{hashlib.sha256(json.dumps([identity, most]).encode()).hexdigest()[:16]}"


def write_mix(
    target: Path, sources: Mapping[str, Path], weights: Mapping[str, float], most: int | None, tokenizer: str
) -> None:
    """Write the manifest of a mix into the directory `target`, and print its shares. Raises `DataError`."""
    manifests = {source: read_manifest(directory) for source, directory in sources.items()}
    tokens = {source: sum(shard.tokens for shard in m.shards) for source, m in manifests.items()}
    shares = shares_of(tokens, weights, most)
    if empty := [source for source, share in shares.items() if not share]:
        raise DataError(f"data.mix: {empty[0]} would give no token; give it a larger weight, or more text")
    shards = [shard for source, m in manifests.items() for shard in _first(m.shards, shares[source])]
    first = next(iter(manifests.values()))
    n_vocab, max_id = first.n_vocab, max(m.max_id for m in manifests.values())
    target.mkdir(parents=True, exist_ok=True)
    keep_tokenizer(target, next(iter(sources.values())))
    about = {"corpus": "mix", "tokenizer": tokenizer, "shares": shares}
    write_references(target, shards, first.dtype, max_id, n_vocab, about)
    whole = sum(shares.values())
    for source, share in shares.items():
        print(
            f"mix: {share / whole:.1%} {source}: {counted(share, 'token')} of its {tokens[source]:,}", file=sys.stderr
        )


def _first(shards: list[Shard], tokens: int) -> list[Shard]:
    """The first `tokens` of `shards`, as references."""
    references = []
    for shard in shards:
        if tokens > 0:
            references.append(replace(shard, tokens=min(tokens, shard.tokens), is_own=False))
        tokens -= shard.tokens
    return references
