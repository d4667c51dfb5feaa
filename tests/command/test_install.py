"""An installed gptexp, from a wheel or editable, finds its YAML files and trains."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "gptexp"
    ignore = shutil.ignore_patterns(".git", "outputs", "__pycache__", ".venv*", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=180)
    [path] = out.glob("*.whl")
    return path


def test_the_wheel_contains_conf_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {str(p.relative_to(ROOT)) for p in (ROOT / "conf").rglob("*.yaml")}
    assert {f"gptexp/{name}" for name in shipped} <= names
    assert "gptexp/data/gpt2.tiktoken" in names
    assert not [n for n in names if n.startswith(("tests/", "conf/", "launch/"))]


@pytest.mark.parametrize("editable", [False, True])
def test_an_installed_package_trains_outside_of_the_checkout(
    wheel: Path, tmp_path: Path, editable: bool, tiny: list[str]
) -> None:
    """In a new virtual environment that shares the packages of the tests."""
    venv.create(tmp_path / "env", with_pip=False)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    installer = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
    if editable:
        (site / "gptexp.pth").write_text(f"{ROOT}\n")
    else:
        subprocess.run([*installer, str(wheel)], check=True, timeout=120)
    shared = next(p for p in map(Path, sys.path) if (p / "hydra").is_dir())
    (site / "shared.pth").write_text(f"{shared}\n")
    (tmp_path / "work").mkdir()
    python = str(tmp_path / "env" / "bin" / "python")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it could contain a checkout
    where = subprocess.run(
        [python, "-c", "import gptexp, gptexp.config.paths as c; print(gptexp.__file__, c.conf_dir(), sep='\\n')"],
        cwd=tmp_path / "work", capture_output=True, text=True, check=True, timeout=60, env=env,
    ).stdout.splitlines()  # fmt: skip
    root = str(ROOT) if editable else str(site)
    assert all(path.startswith(root) for path in where)
    command = [python, "-m", "gptexp", "train", *tiny, "train.max_steps=1", "world.size=2"]
    done = subprocess.run(command, cwd=tmp_path / "work", capture_output=True, text=True, timeout=180, env=env)
    assert done.returncode == 0, done.stderr
    assert "completed after 1 step" in done.stdout
