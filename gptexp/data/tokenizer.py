"""GPT-2's byte-pair encoding through tiktoken; the only file that imports it.

The ranks of gpt2 (the same as r50k_base) ship beside this file and are checked by hash, so that tokenising needs no
network. tiktoken downloads its other encodings itself.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gptexp.errors import DataError

if TYPE_CHECKING:
    import tiktoken

# Ids including special tokens. Encodings with more than 65,536 ids do not fit the 16-bit shards.
VOCAB_SIZES = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "p50k_edit": 50284}

END_OF_TEXT = 50256  # <|endoftext|>, the same id in all four

_RANKS = Path(__file__).with_name("gpt2.tiktoken")
_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


@cache
def load_tokenizer(name: str) -> "tiktoken.Encoding":
    """The encoding `name`. `encode_ordinary` treats special tokens as text; `decode` needs ids below `n_vocab`."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from tiktoken_ext.openai_public import r50k_pat_str

    if name not in ("gpt2", "r50k_base"):
        try:
            return tiktoken.get_encoding(name)
        except OSError as error:
            raise DataError(f"data.tokenizer={name}: tiktoken cannot download it ({error}); use gpt2") from None
    return tiktoken.Encoding(
        name,
        pat_str=r50k_pat_str,
        mergeable_ranks=load_tiktoken_bpe(str(_RANKS), expected_hash=_RANKS_SHA256),
        special_tokens={"<|endoftext|>": END_OF_TEXT},
    )
