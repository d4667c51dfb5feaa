"""Versions of the software that a run uses."""

import sys
from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).resolve().parent.parent  # the folder gptexp


def versions() -> dict[str, str]:
    """Versions of gptexp, Python and the packages that affect numerics or file formats."""
    from importlib.metadata import version

    from torch import __version__ as of_torch  # with its build, such as +cpu or +cu130, which package metadata may lack

    packages = ("numpy", "tiktoken", "hydra-core", "omegaconf", "wandb", "safetensors")
    own = {"gptexp": VERSION, "python": sys.version.split()[0], "torch": str(of_torch)}
    return own | {name: version(name) for name in packages}


def git_commit() -> str | None:
    """The git commit of the checkout, with `-dirty` if files are modified; None if gptexp is installed as a package."""
    import subprocess

    root = PACKAGE.parent
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
