"""The tokenizer of weights that exist, and whether a run that starts from them gives its ids the same meaning."""

from contextlib import suppress

from gptexp.config.vocabulary import VOCAB_SIZES
from gptexp.data.tokenizer import Tokenizer, load_tokenizer
from gptexp.data.tokenizer_json import gpt2_vocabulary
from gptexp.process.errors import ConfigError, DataError
from gptexp.process.terminal import warn
from gptexp.storage import run_dir
from gptexp.storage.init_from import Source
from gptexp.storage.reader import read_json

VOCABULARY = "vocab.json"  # of GPT-2's tokenizer in transformers


def tokenizer_of(source: Source) -> Tokenizer | None:
    """The tokenizer that lies beside the weights of `source`; None if there is none.

    Raises `DataError` if its file is damaged, `ConfigError` if a package is missing.
    """
    name = _name_of(source)
    return None if name is None else load_tokenizer(name, source.path if source.kind == "run" else None)


def refuse_other_ids(source: Source, name: str, tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` if an id of `tokenizer`, which is `data.tokenizer=name`, is other text for `source`.

    Special tokens are not compared. Weights without a tokenizer are taken as they are.
    """
    try:
        theirs = tokenizer_of(source)
    except (ConfigError, DataError) as error:
        warn(f"{source.given}: its tokenizer is not compared with data.tokenizer={name} ({error})")
        return
    if theirs is None or theirs is tokenizer:
        return
    ids = range(min(tokenizer.n_vocab, theirs.n_vocab))
    pairs = zip(tokenizer.decode_tokens_bytes(ids), theirs.decode_tokens_bytes(ids), strict=True)
    for id, (now, was) in enumerate(pairs):
        if now and was and now != was:  # a special token may have no bytes
            raise ConfigError(
                f"data.tokenizer={name}: {source.given} was trained with another, in which id {id} is "
                f"{was.decode(errors='replace')!r}, not {now.decode(errors='replace')!r}; use "
                f"data.tokenizer={_to_use(source)}"
            )


def _name_of(source: Source) -> str | None:
    """The value of `data.tokenizer` for the tokenizer of `source`."""
    if source.kind == "run":
        return run_dir.load_config(source.path).data.tokenizer
    if source.kind == "nanogpt":
        return None
    vocabulary, whole = source.path / VOCABULARY, source.path / run_dir.TOKENIZER
    if vocabulary.is_file():
        with suppress(OSError, ValueError):  # then it is not GPT-2's
            if read_json(vocabulary.resolve()) == gpt2_vocabulary():
                return "gpt2"
    return str(whole) if whole.is_file() else None


def _to_use(source: Source) -> str:
    """`_name_of` a source that has one, which does not depend on another corpus."""
    name = _name_of(source)
    return name if name in VOCAB_SIZES and name is not None else str(source.path / run_dir.TOKENIZER)
