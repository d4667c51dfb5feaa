"""conf/README.md, written from gptexp/config/schema.py and the files of conf/: `python tests/config/conf_readme.py`."""

import dataclasses
from pathlib import Path
from typing import Any

from gptexp.config.describe import comment, default_options, doc, kind, meaning, root, settings
from gptexp.config.schema import Config, every_key
from gptexp.process.words import shown

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PAGE = CONF / "README.md"

HEAD = """\
# Configuration

<!-- Written by tests/config/conf_readme.py from gptexp/config/schema.py and conf/. Edit those, then run it again. -->

A run is described by one config. `conf/config.yaml` names one option of each group; the options are the files below.
`gptexp/config/schema.py` and `gptexp/optim` define all keys, with types and defaults. The command line overrides both:

```sh
gptexp train model=gpt2 optim.lr=3e-4      # an option of a group, and a single key
gptexp train model=gpt2 --cfg job          # print the composed config, and train nothing
gptexp train --help                        # print the groups, their options, and the keys
gptexp train --help optim.lr               # what a key means, its values, and the files that set it
gptexp train --config-dir my model=small   # also find options in your own folder, here my/model/small.yaml
gptexp train --config-dir my --config-name mine   # compose my/mine.yaml in place of conf/config.yaml
```

A config for `--config-name` includes gptexp's, and its own values win. An option of a group is chosen with `override`:

```yaml
defaults:
  - config                  # gptexp's conf/config.yaml
  - _self_
  - override model: gpt2
optim: {lr: 1e-3}
```

- An option file holds only the values that differ from the defaults.
- Later groups of the defaults list win over earlier ones, and the command line wins over all files. A model file sets
  the learning rate for its size, an `optim` file that sets `lr` wins over it, and `optim.lr=…` wins over both. The
  first line of a run's output says where its learning rate came from.
- Lengths are in tokens or in ratios. A length in steps (`max_steps`, `*_every`, …) is null unless given. When given,
  it wins over its twin in tokens. A length in tokens that is given on the command line wins over one in steps from a
  file.
- `auto` is decided once at the start of a run; the decision and its reason are in `effective.json`.
- `on` and `off` need quotes in YAML files (`"on"`), because YAML reads them as booleans.
- The environment variable `GPTEXP_CONF` names a folder that replaces `conf/`.
- A key with whole numbers also takes `1e6`, `64k`, `0.5M` and `2B`: k is 1,000, and 1,024 in the size of a batch, where
  GPT-3's 0.5M is 524,288. `++key=value` is `key=value`.
- A wrong config exits with code 2 before anything is created, with one line for each problem.
"""


def page() -> str:
    """The text of conf/README.md."""
    parts = [HEAD, "## Groups and keys\n"]
    config = Config()
    for f in dataclasses.fields(Config):
        section = getattr(config, f.name)
        if not dataclasses.is_dataclass(section) or f.name == "sweep":
            continue
        text = doc(root(type(section)))
        parts += [
            f"### `{f.name}`\n",
            *([f"{text}\n"] if text else []),
            _options(CONF / f.name),
            _keys(f.name),
        ]
    parts += ["### `sweep.*` and top-level keys\n", _keys("sweep"), _keys("")]
    parts += ["## Recipes and grids\n", "### `experiment`\n", _options(CONF / "experiment")]
    parts += ["### `sweep`\n", _options(CONF / "sweep")]
    parts += ["## Hydra's own groups\n"]
    for group in ("hydra/launcher", "hydra/sweeper"):
        parts.append(f"### `{group}`\n")
        parts += [_hydra_option(group, path) for path in sorted((CONF / group).glob("*.yaml"))]
    parts += ["## Other files\n", "| file | content |\n|---|---|"]
    for name in ("config.yaml", "base/default.yaml", "wandb_sweep.yaml"):
        parts.append(f"| [{name}]({name}) | {_cell(comment(CONF / name))} |")
    return "\n".join(parts) + "\n"


def _options(folder: Path) -> str:
    """A table of a group's files."""
    default = default_options().get(folder.name)
    rows = ["| option | sets | |\n|---|---|---|"]
    if not folder.exists():
        return "This group has no files.\n"
    for path in sorted(folder.glob("*.yaml")):
        name = f"[{path.stem}]({path.relative_to(CONF).as_posix()})" + (" (default)" if path.stem == default else "")
        sets = " ".join(f"`{text}`" for text in _settings(path))
        rows.append(f"| {name} | {sets} | {_cell(comment(path))} |")
    return "\n".join(rows) + "\n"


def _settings(path: Path) -> list[str]:
    """`key=value` for each key that an option sets, with the text of the value in the file."""
    found = settings(path, path.parent.relative_to(CONF).as_posix())
    return [f"{key}={value}" for key, value in found if (key, value) != ("hydra.mode", "MULTIRUN")]


def _hydra_option(group: str, path: Path) -> str:
    """A launcher or sweeper: its comment and its own keys with the comments on their lines."""
    rows = [f"[{path.stem}]({path.relative_to(CONF).as_posix()}): {comment(path)}\n"]
    keys = [line for line in path.read_text().splitlines() if not line.startswith(("#", "_target_"))]
    if not keys:
        return rows[0]
    rows.append("| key | default | |\n|---|---|---|")
    above: list[str] = []  # the keys that this line's key is below, each indented by two spaces more
    for line in keys:
        setting, _, meaning = line.partition("#")
        key, _, value = setting.partition(":")
        above[(len(key) - len(key.lstrip())) // 2 :] = [key.strip().strip('"')]
        name, default = ".".join([group.replace("/", "."), *above]), f"`{value.strip()}`" if value.strip() else ""
        rows.append(f"| `{name}` | {default} | {_cell(meaning.strip())} |")
    return "\n".join(rows) + "\n"


def _keys(section: str) -> str:
    """A table of the keys of a section and of those inside it; of "": the keys outside of all sections."""
    rows = ["| key | type | default | meaning |\n|---|---|---|---|"]
    for key, f, value, cls in every_key():
        if key.startswith(f"{section}.") if section else "." not in key:
            default = "[]" if value == [] else shown(value)
            rows.append(f"| `{key}` | {_kind(f)} | `{default}` | {_cell(meaning(key, f.name, cls))} |")
    return "\n".join(rows) + "\n"


def _kind(f: "dataclasses.Field[Any]") -> str:
    """The values that a key takes; its choices are code."""
    text = kind(f)
    return ", ".join(f"`{choice}`" for choice in text.split(", ")) if f.metadata.get("choices") else _cell(text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
