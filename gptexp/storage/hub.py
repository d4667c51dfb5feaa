"""Models on the Hugging Face hub: `init_from` downloads them, `gptexp export --push` uploads them.

No other file imports huggingface_hub.
"""

import logging
import shlex
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from gptexp.process.errors import ConfigError, StorageError, first_line
from gptexp.process.words import shown

CONFIG_FILES = ["config.json", "vocab.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"]
WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]
OLD_WEIGHT_FILES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]  # of a model without safetensors


def require(given: str) -> None:
    """Raise `ConfigError` if huggingface_hub, which `given` needs, is not installed."""
    if find_spec("huggingface_hub") is None:
        raise ConfigError(f"{given}: needs the package huggingface_hub; run: pip install 'gptexp[hf]'")


def check_name(repository: str) -> None:
    """Raise `ConfigError` if --push cannot upload to the model `repository`, as far as can be told offline."""
    require(f"--push {repository}")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise ConfigError(
            f"--push {shown(repository)}: no name of a model; give OWNER/NAME, of letters, digits, '-', '_' and '.'"
        ) from None


def upload_model(directory: Path, repository: str, private: bool) -> str:
    """Upload the files in `directory` to the model `repository`, and create it if it is new. Returns a line about it.

    Raises `StorageError`; the local files stay in any case.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=directory)
    except Exception as error:  # of the network and of the hub
        later = shlex.join(["hf", "upload", repository, str(directory)])
        raise StorageError(
            f"--push {repository}: not uploaded ({type(error).__name__}: {first_line(error)}); {directory} is "
            f"complete, to upload it later: hf auth login, then {later}"
        ) from None
    return f"uploaded: {commit.commit_url}"


@cache
def download_model(given: str, repository: str, revision: str | None, weights: bool) -> Path:
    """Download config.json of the model `repository`, and its weights if `weights`. Returns their directory.

    Files that were downloaded before come from the hub's own cache, without a network. Raises `ConfigError`.
    """
    require(given)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars  # type: ignore[attr-defined]

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it prints two lines for each attempt
    enable_progress_bars() if weights and sys.stderr.isatty() else disable_progress_bars()

    def download(patterns: list[str]) -> Path:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[*CONFIG_FILES, *patterns]))

    try:
        directory = download(WEIGHT_FILES if weights else [])
        if weights and not any(directory.glob("model*.safetensors")):
            directory = download(OLD_WEIGHT_FILES)
    except Exception as error:  # of the network and of the hub
        raise ConfigError(
            f"{given}: no such path here, and the hub's model {repository} cannot be had "
            f"({type(error).__name__}: {first_line(error)}); without a network: hf download {repository} on another "
            "machine, and give the directory"
        ) from None
    if not (directory / CONFIG_FILES[0]).is_file():
        raise ConfigError(f"{given}: the hub's model {repository} has no config.json; give another")
    return directory
