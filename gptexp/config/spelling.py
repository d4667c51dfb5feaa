"""The spelling of the command line's overrides: as Hydra must read them, and as they were typed. No Hydra."""

import re
from collections.abc import Sequence
from typing import get_args

from gptexp.config.schema import fields_by_key, in_digits, kinds_of

# What Hydra reads as a number or a truth value, or does not read without quotes (<|endoftext|>, ###, 日本).
NO_TEXT = re.compile(
    r"[+-]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)(e[+-]?\d+)?|[+-]?(inf|nan)|true|false|.*[^\w\s/\\.:+$%*@?|-].*",
    re.IGNORECASE | re.ASCII,
)

# The groups of config.yaml without a file. Hydra refuses null on the command line; an empty option has its name.
MAY_BE_NULL, NULL = ("schedule", "batch", "sweep", "experiment"), "null"


OF_USER = "user."  # how keys of the user's own begin


def canonical(overrides: Sequence[str]) -> list[str]:
    """The overrides as gptexp spells them: whole numbers in digits, not 1e6 or 1M, and `++key` of the schema as `key`.

    Hydra reads 1e6 as a float, and refuses a text in range(…). Hydra's `++key` also adds new keys.
    A key with text takes what was typed: without quotes, Hydra reads the commit 7e10243 as infinity. `None`, as Python
    and wandb write it, is null for a key that may be null. So is a group's null, of the groups `MAY_BE_NULL`; `~group`
    is the same.
    """
    spelt = []
    for text in overrides:
        if text.removeprefix("~") in MAY_BE_NULL:  # Hydra's way to leave out a group
            text = f"{text.removeprefix('~')}={NULL}"
        key, equals, value = text.partition("=")
        if key.lstrip("+").startswith(OF_USER):
            spelt.append(f"++{text.lstrip('+')}")  # Hydra adds a new key so
            continue
        field = fields_by_key().get(key.removeprefix("++"))
        if field is not None and equals:
            value = in_digits(key.removeprefix("++"), value)
            if kinds_of(field) == [str] and "choices" not in field.metadata and not set(value) & set("'\"\\[](){}$"):
                parts = (part.strip() for part in value.split(","))
                value = ",".join(f"'{part}'" if NO_TEXT.fullmatch(part) else part for part in parts)
            if type(None) in get_args(field.type) and not set(value) & set("'\""):
                value = ",".join("null" if part == "None" else part for part in value.split(","))
            added = "++" if kinds_of(field) == [dict] else ""  # Hydra adds a new key of a mapping so
            text = f"{added}{key.removeprefix('++')}={value}"
        elif key in MAY_BE_NULL:
            named = (f"'{NULL}'" if option in (NULL, "None") else option for option in value.split(","))
            text = f"{key}={','.join(named)}"
        spelt.append(text)
    return spelt


def as_typed(overrides: Sequence[str]) -> list[str]:
    """Overrides without the quotes that `canonical` gives to texts that Hydra would read as something else."""
    bare = [re.sub(r"(?<=[=,])'([^',]*)'(?=,|$)", r"\1", text) for text in overrides]
    return [b if again == text else text for b, again, text in zip(bare, canonical(bare), overrides, strict=True)]
