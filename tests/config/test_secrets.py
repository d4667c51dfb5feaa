"""Secrets of the environment stay out of run directories. A sweep name stays inside the output folder."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import compose_sweep

from gptexp.config.compose import compose
from gptexp.config.overrides import SECRET
from gptexp.config.schema import Config, fields_of
from gptexp.process.errors import ConfigError

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
CANARY = "canary-0123456789abcdef"


def holds_canary(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "my_password", "CLIENT_SECRET")


@pytest.mark.parametrize("variable", SECRETS)
@pytest.mark.parametrize("override", ["log.wandb.name={}", "log.wandb.tags=[a,{}]"])
def test_a_pasted_secret_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, variable: str, override: str
) -> None:
    monkeypatch.setenv(variable, CANARY)
    with pytest.raises(ConfigError) as refused:
        compose([override.format(CANARY)])
    key = override.partition("=")[0]
    assert f"{key}: equals the secret ${variable}, which would be saved with the run" in str(refused.value)
    assert CANARY not in str(refused.value)


def test_each_interpolated_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, variable in enumerate(SECRETS):
        monkeypatch.setenv(variable, f"{CANARY}-{number}")
    tags = ",".join(f"${{oc.env:{variable}}}" for variable in SECRETS)
    with pytest.raises(ConfigError) as refused:
        compose([f"log.wandb.tags=[{tags}]", f"log.wandb.name=${{oc.env:{SECRETS[0]}}}"])
    for variable in SECRETS:
        assert f"log.wandb.tags: equals the secret ${variable}, which would be saved with the run" in str(refused.value)
    assert f"log.wandb.name: equals the secret ${SECRETS[0]}" in str(refused.value)
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize("text", [CANARY, "${oc.env:HF_TOKEN}"], ids=["pasted", "interpolated"])
def test_a_refused_secret_is_in_no_file_and_no_output(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, text: str
) -> None:
    refused = gptexp("train", *tiny, f"log.wandb.name={text}", "hydra.run.dir=out", env={"HF_TOKEN": CANARY})
    assert refused.returncode == 2, refused.stderr
    assert "log.wandb.name: equals the secret $HF_TOKEN" in refused.stderr
    assert CANARY not in refused.stdout + refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override", ["+hydra.job.env_set.API_KEY=abc", "hydra.job.env_copy=[HOME]", f"hydra.job.name={CANARY}"]
)
def test_hydra_keys_that_would_save_a_secret_are_refused(monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    with pytest.raises(ConfigError) as refused:
        compose([override])
    assert CANARY not in str(refused.value)


@pytest.mark.e2e
def test_a_run_writes_no_secret_to_its_files(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    secrets = {"WANDB_API_KEY": CANARY, "HF_TOKEN": CANARY, "WANDB_MODE": "offline"}
    options = [*(o for o in tiny if not o.startswith("log=")), "log=offline", "log.progress=off"]
    done = gptexp("train", *options, "hydra.run.dir=out", env=secrets)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out" / "wandb").iterdir())
    assert holds_canary(tmp_path / "out") == []


def test_no_config_key_has_the_name_of_a_secret() -> None:
    names = [key.rpartition(".")[2] for key, _, _ in fields_of(Config())]
    assert [name for name in names if SECRET.fullmatch(name)] == []


def test_a_value_that_only_contains_a_secrets_value_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOKENIZERS_CACHE is not a secret, so a path below it is accepted too."""
    monkeypatch.setenv("TOKENIZERS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "tok")
    (tmp_path / "tok.txt").write_text("text")
    config = compose(["data=text", f"data.path={tmp_path}/tok.txt", "log.wandb.name=my-tok"])
    assert config.log.wandb.name == "my-tok"


@pytest.mark.parametrize("name", ["..", "../x", "/tmp/x", "a/b", ".", "", "x" * 81, "a\\nb"])
def test_a_sweep_name_that_leads_out_of_the_output_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.name"):
        compose_sweep([f"sweep.name='{name}'", "optim.lr=1e-3,2e-3"])


def test_another_config_path_is_refused(gptexp: Gptexp) -> None:
    refused = gptexp("train", "--config-path", "x")
    assert refused.returncode == 2
    assert "not supported; give a folder with config groups: --config-dir DIR" in refused.stderr
