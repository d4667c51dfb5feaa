"""What a CPU computes fast, by its make and instructions: the rules on the known kinds of CPUs."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptexp.machine import cpu

XEON_WITH_AMX = {"avx512_f": True, "avx512_bf16": True, "avx512_fp16": True, "amx_bf16": True}
XEON_WITHOUT_AMX = {**XEON_WITH_AMX, "amx_bf16": False}  # a virtual machine that hides AMX
ZEN_5 = {"avx512_f": True, "avx512_bf16": True}
AVX2 = {"avx2": True}
ARM = {"bf16": True}
INTEL, AMD = "GenuineIntel", "AuthenticAMD"

On = Callable[[dict[str, bool], str], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """Simulate a CPU."""

    def simulate(capabilities: dict[str, bool], vendor: str) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        monkeypatch.setattr(cpu, "_cpuinfo", lambda: {"vendor_id": vendor})

    return simulate


@pytest.mark.parametrize(
    ("capabilities", "vendor", "native", "fast", "onednn"),
    [
        (XEON_WITH_AMX, INTEL, True, True, False),
        (XEON_WITHOUT_AMX, INTEL, True, False, False),
        ({"avx512_f": True, "avx512_bf16": True}, INTEL, True, True, False),  # Cooper Lake
        (ZEN_5, AMD, True, True, True),
        (AVX2, AMD, False, False, False),
        (ARM, "", True, True, False),
        ({**ZEN_5, "avx512_fp16": True}, AMD, True, True, True),
    ],
)
def test_rules_on_known_cpus(
    on: On, capabilities: dict[str, bool], vendor: str, native: bool, fast: bool, onednn: bool
) -> None:
    on(capabilities, vendor)
    found = cpu.has_native_bfloat16(), cpu.has_fast_bfloat16(), cpu.has_fast_onednn_float32()
    assert found == (native, fast, onednn)
    assert cpu.has_amx() == (capabilities is XEON_WITH_AMX)


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Processor
stepping\t: {stepping}

processor\t: 1
vendor_id\t: another
"""


def test_the_fingerprint_tells_models_and_visible_instructions_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    found = []
    for stepping, capabilities in ((1, XEON_WITH_AMX), (1, XEON_WITHOUT_AMX), (2, XEON_WITH_AMX), (1, XEON_WITH_AMX)):
        cpu.CPUINFO.write_text(CPUINFO.format(stepping=stepping))
        cpu._cpuinfo.cache_clear()
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        found.append(cpu.fingerprint())
    cpu._cpuinfo.cache_clear()
    assert (len(set(found)), found[0] == found[3]) == (3, True)
    assert "GenuineIntel Intel(R) Xeon(R) Processor" in found[0]
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "missing")  # another system
    assert cpu.fingerprint()
    cpu._cpuinfo.cache_clear()


def test_the_error_limit_separates_float32_from_bfloat16() -> None:
    assert 1e-8 < cpu.onednn_float32_error() < 1e-2
    assert torch.get_float32_matmul_precision() == "highest"  # as before
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    exact = a.double() @ b.double()
    rounded = (a.bfloat16().float() @ b.bfloat16().float()).double()
    assert (rounded - exact).norm() / exact.norm() > 100 * cpu.FLOAT32_ERROR
    assert ((a @ b).double() - exact).norm() / exact.norm() < cpu.FLOAT32_ERROR / 2


@pytest.mark.e2e
def test_flushed_denormals_are_zero_on_all_threads() -> None:
    """In a new process, because the setting stays and threads inherit it when they start."""
    script = (
        "import torch; from gptexp.machine.cpu import flush_denormals; flush_denormals(); torch.set_num_threads(2);"
        "x = torch.full((1 << 20,), 2.0**-100); print((x * 2.0**-40).count_nonzero().item())"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "0\n"
