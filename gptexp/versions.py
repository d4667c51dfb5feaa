"""What a run was made with."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from gptexp import __version__


def versions() -> dict[str, str]:
    """Versions of gptexp, Python and what decides numerics or files."""
    packages = ("torch", "numpy", "tiktoken", "hydra-core", "omegaconf", "wandb", "safetensors")
    return {"gptexp": __version__, "python": sys.version.split()[0], **{name: version(name) for name in packages}}


def git_commit() -> str | None:
    """The commit of the checkout that gptexp runs from, with `-dirty` where files differ; None in an installation."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
