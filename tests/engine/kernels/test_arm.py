"""Kernels for 64-bit ARM: compiled for it on any processor, with the instructions that it has. Nothing is run here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages_for_tests import needs_numba

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "support" / "compile_for_arm.py"
NEON, DOT_PRODUCTS = "+neon,+fp-armv8", "+neon,+fp-armv8,+dotprod"
EVERYTHING = f"{DOT_PRODUCTS},+i8mm,+bf16"
OF_BYTES = [*(f"multiply_{bits}" for bits in (8, 4, 3, 2)), "multiply_q4_k", "multiply_q8_0", "multiply_rounded_mxfp4"]
CPUINFO = """\
processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes crc32 atomics asimdhp cpuid asimdrdm asimddp sve i8mm bf16
CPU implementer\t: 0x41

processor\t: 1
Features\t: fp asimd evtstrm aes crc32 atomics asimdhp cpuid asimdrdm asimddp bf16
"""


def compiled(features: str, *names: str) -> dict[str, dict[str, int]]:
    """Return how often each instruction of interest is in each kernel."""
    command = [sys.executable, str(SCRIPT), features, *names]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@needs_numba
def test_products_use_the_instructions_that_there_are() -> None:
    found = compiled(EVERYTHING, "multiply_4", "multiply_plain")
    assert found["multiply_4"]["usdot"] > 0 and found["multiply_plain"]["bfdot"] > 0
    (own,) = compiled(DOT_PRODUCTS, "multiply_4").values()
    assert own["usdot"] == own["bfdot"] == 0 < own["sdot"]


@needs_numba
@pytest.mark.slow
@pytest.mark.parametrize("features", [NEON, EVERYTHING])
def test_every_kernel_compiles(features: str) -> None:
    found = compiled(features)
    assert len(found) > 90
    of_bytes = [name for name in OF_BYTES if name in found and max(found[name]["usdot"], found[name]["sdot"]) > 0]
    assert of_bytes == ([] if features == NEON else OF_BYTES)
    assert any(own["bfdot"] for own in found.values()) == (features == EVERYTHING)
    assert found["multiply_wide"]["fmla"] > 0


def test_a_feature_counts_where_every_core_has_it() -> None:
    from engine.kernels.compiler.processor import features_of_arm

    assert features_of_arm(CPUINFO) == ["+dotprod", "+bf16"]
    assert features_of_arm("processor : 0\nflags : fpu avx2\n") == []
