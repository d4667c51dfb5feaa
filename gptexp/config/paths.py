"""Paths: files and globs in the configuration, the YAML files, and the flags that name YAML files."""

import glob
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs

from gptexp.process.errors import ConfigError, first_line
from gptexp.process.versions import PACKAGE
from gptexp.process.words import shown

CONFIG_NAME = "config"  # conf/config.yaml, which every other primary config includes
FILE_FLAGS = {"--config-dir": "dir", "-cd": "dir", "--config-name": "name", "-cn": "name"}  # for the user's files
OUTPUTS = Path(os.environ.get("GPTEXP_OUTPUTS") or "outputs")  # where runs and sweeps are unless a path says otherwise
OWN_CONF = "GPTEXP_CONF"  # environment: path of a folder that replaces conf/

# Models of the Hugging Face hub with a short name. A path of that name is written with ./ in front.
HUB_MODELS = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
}
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")

Groups = dict[str, dict[str, Path]]  # group -> option -> its file
Reading = tuple[str, str, str | None]  # how files become text: see `DataConfig.reading`


def conf_dir() -> Path:
    """The folder of YAML files: $GPTEXP_CONF if it is set, else `packaged_conf`. Raises `ConfigError`."""
    own = os.environ.get(OWN_CONF)
    if not own:
        return packaged_conf()
    if not (Path(own) / "config.yaml").is_file():
        raise _no_conf(f"{OWN_CONF}={own}")
    return Path(own).resolve()


def packaged_conf() -> Path:
    """conf/ in the installed package, else in the checkout. Raises `ConfigError`."""
    for candidate in (PACKAGE / "conf", PACKAGE.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise _no_conf(str(PACKAGE / "conf"))


def _no_conf(folder: str) -> ConfigError:
    return ConfigError(f"{folder}: contains no config.yaml; set {OWN_CONF} to the folder that contains it", "no-conf")


def folders(config_dir: str | None) -> list[Path]:
    """The folders with config groups: gptexp's and the user's. Raises `ConfigError` if the user's does not exist."""
    if config_dir is None:
        return [conf_dir()]
    if not Path(config_dir).is_dir():
        rule = "no such folder; give a folder with config groups"
        raise ConfigError(f"--config-dir {shown(config_dir)}: {rule}", "no-such-folder")
    return [conf_dir(), Path(config_dir)]


def config_flags(hydra: Any) -> list[str]:
    """The flags --config-dir and --config-name of a command, with values, from its record in Hydra's own keys."""
    sources = hydra["runtime"]["config_sources"]
    given = [text for s in sources if s["provider"] == "command-line" for text in ("--config-dir", s["path"])]
    name = hydra["job"]["config_name"]
    return given if name == CONFIG_NAME else [*given, "--config-name", name]


def own_config(config_dir: str | None, config_name: str | None) -> Path | None:
    """The user's primary config, DIR/NAME.yaml; None if no name is given. Raises `ConfigError` if it does not exist."""
    if config_name is None:
        return None
    given, name = f"--config-name {shown(config_name)}", config_name.removesuffix(".yaml")
    if Path(name).name != name:
        raise ConfigError(f"{given}: must be a name without a path; give its folder: --config-dir DIR", "not-a-name")
    if config_dir is None:
        raise ConfigError(f"{given}: needs the folder of {shown(name)}.yaml; add --config-dir DIR", "folder-missing")
    own, file = folders(config_dir)[-1], f"{name}.yaml"
    if not is_file(own / file):
        rule = f"{shown(str(own / file))} does not exist; give the name of a YAML file in {own}"
        raise ConfigError(f"{given}: {rule}", "no-such-file")
    if is_file(conf_dir() / file) or name == "schema":
        fix = f"rename {own / file}, or for the config of a run --like {own}"
        raise ConfigError(f"{given}: gptexp has a {file} of its own; {fix}", "name-taken")
    return own / file


def options(folders: Sequence[Path]) -> Groups:
    """The config groups with their files, except `base`, which is not selectable.

    Raises `ConfigError` if two folders have the same option: Hydra would take the first one's.
    """
    groups: Groups = {}
    for folder in folders:
        for file in (*folder.glob("*/*.yaml"), *folder.glob("hydra/*/*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            if group != "base" and groups.setdefault(group, {}).setdefault(file.stem, file) != file:
                raise ConfigError(f"{file}: gptexp has {group}={file.stem}; rename the file", "name-taken")
    return groups


def user_cache_dir() -> Path:
    """gptexp's folder in the user's cache directory, or in the temporary directory for a user without a home."""
    try:
        return Path(platformdirs.user_cache_dir("gptexp"))
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"gptexp-{os.getuid()}"


def cache_dir(given: str | None) -> Path:
    """The directory of token files: `given` (data.cache_dir), else $GPTEXP_CACHE, else the user's cache directory."""
    return Path(given or os.environ.get("GPTEXP_CACHE") or user_cache_dir())


def remember_key(cache: Path, patterns: Sequence[str], reading: Reading, key: str) -> None:
    """Record in the cache that the files of `patterns`, in this reading, have this key of 16 digits.

    A cache that cannot be written stays as it is.
    """
    record = _record(cache, patterns, reading)
    with suppress(OSError):
        if not is_file(record) or record.read_text() != key:
            record.parent.mkdir(exist_ok=True)
            record.write_text(key)


def remembered_key(cache: Path, patterns: Sequence[str], reading: Reading) -> str | None:
    """The key under which the cache has tokens of the files of `patterns`; None if there are none, or one file is left.

    A text that has changed has another key, so only the tokens of a text that is gone are found.
    """
    if not any(map(exists, patterns)):
        with suppress(OSError, ValueError):
            key = _record(cache, patterns, reading).read_text()
            if re.fullmatch("[0-9a-f]{16}", key) and any(map(is_file, cache.glob(f"*-{key}/manifest.json"))):
                return key
    return None


def _record(cache: Path, patterns: Sequence[str], reading: Reading) -> Path:
    return cache / "texts" / hashlib.sha256(json.dumps([*reading, *patterns]).encode()).hexdigest()[:16]


def is_hub_model(name: str) -> bool:
    """Whether `init_from=name` names a model of the hub: a short name, or OWNER/NAME that is no path here.

    A revision may follow: NAME@REVISION. A path may be followed by a checkpoint: RUN_DIR@STEP.
    """
    model = name.partition("@")[0]
    if model in HUB_MODELS:
        return True
    return _REPOSITORY.fullmatch(name) is not None and not Path(name).exists() and not Path(model).exists()


def is_hub_name(value: Any) -> bool:
    """Whether `value` is OWNER/NAME or OWNER/NAME@REVISION, as data sets of the hub are named."""
    return isinstance(value, str) and _REPOSITORY.fullmatch(value) is not None


def is_path_list(value: Any) -> bool:
    """Whether `value` is a path or a glob, or a non-empty list of them."""
    return isinstance(value, str) or (
        isinstance(value, Sequence) and len(value) > 0 and all(isinstance(v, str) for v in value)
    )


def path_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def matching_files(pattern: str) -> list[Path]:
    """The file with exactly this name if there is one, else the files that match the glob, sorted."""
    if is_file(Path(pattern)):
        return [Path(pattern)]
    return [Path(p) for p in sorted(glob.glob(pattern, recursive=True)) if is_file(Path(p))]


def exists(pattern: str) -> bool:
    """Whether `pattern` matches a file, or is a saved data set. Raises `ConfigError` for a damaged one."""
    return bool(saved_dataset_files(Path(pattern)) or matching_files(pattern))


def no_files(pattern: str) -> str:
    """Why `pattern` matches no file, and what to give."""
    if os.path.isdir(pattern):  # noqa: PTH112  Path.is_dir raises `OSError` for a long name
        return f"a folder; give its files, for example {shown(str(Path(pattern, '*.txt')))}"
    return "no such file; give a file, a glob or a list of them"


def saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a data set that Hugging Face's `save_to_disk` wrote in `folder`; empty for another folder.

    Of several splits, the one named train is read. Raises `ConfigError` if it is missing, or if the folder is damaged.
    """
    if is_file(folder / "dataset_dict.json"):
        folder /= "train"
        if not folder.is_dir():
            rule = "a data set without a split 'train'; give the folder of one split"
            raise ConfigError(f"{folder.parent}: {rule}", "split-missing")
    state = folder / "state.json"
    if not is_file(state):
        return []
    try:
        content = json.loads(state.read_text())
        files = [folder / str(entry["filename"]) for entry in content["_data_files"]]
        if missing := [file.name for file in files if not is_file(file)]:
            raise ValueError(f"it names {shown(missing[0])}, which is missing")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        rule = f"not that of a saved data set ({first_line(error)}); save it again"
        raise ConfigError(f"{state}: {rule}", "data-set-damaged") from None
    if content.get("_indices_files"):
        rule = "a data set with selected rows; call flatten_indices() before save_to_disk"
        raise ConfigError(f"{folder}: {rule}", "data-set-with-indices")
    return files


def absolute(pattern: str) -> str:
    """The absolute path or glob. Special characters in the path of the working directory are escaped in a glob."""
    if Path(pattern).expanduser().is_absolute():
        return str(Path(pattern).expanduser())
    path = Path.cwd() / pattern
    return str(path if is_file(path) else Path(glob.escape(str(Path.cwd()))) / pattern)


def is_file(path: Path) -> bool:
    """Whether `path` is a file. False where `Path.is_file` raises `OSError`, for example for a long name."""
    try:
        return path.is_file()
    except OSError:
        return False


def why_not_creatable(directory: Path) -> str | None:
    """The reason why `directory` cannot be created or written, or None."""
    try:
        parent = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    except OSError as error:
        return f"{error.strerror}"
    if not parent.is_dir():
        return f"{parent} is a file"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} cannot be written"
    return None
