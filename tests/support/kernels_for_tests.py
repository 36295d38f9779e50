"""The compiled kernels (None without Numba), marks of tests that need them, and tests without some instructions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
from packages_for_tests import needs_numba

kernels: Any = None if needs_numba.args[0] else import_module("engine.kernels.compiled")


def needs_kernels(feature: str, reason: str) -> pytest.MarkDecorator:
    """Return the mark of tests that need the compiled kernels on a processor with this feature."""
    lacks = kernels is None or not getattr(kernels, feature)
    return pytest.mark.skipif(lacks, reason=needs_numba.kwargs["reason"] if kernels is None else reason)


needs_integers = needs_kernels("MULTIPLIES_INTEGERS", "this processor does not multiply low-bit matrices as integers")
needs_quadruples = needs_kernels("MULTIPLIES_QUADRUPLES", "this processor does not multiply 8-bit integers four at a time")
needs_pairs = needs_kernels("MULTIPLIES_BFLOAT16", "this processor does not multiply pairs of bfloat16")
LACKING = {"AVX2 alone": r"(?:avx512|amx)\w*", "AVX-512 without BF16": r"(?:avx512bf16|amx)\w*"}
"""Patterns of the features that older processors lack, by what these have."""


def passed_without(features: str, *arguments: str) -> str:
    """Return what pytest prints for tests that pass where kernels do not use features of the processor of a pattern."""
    from engine.kernels.compiler.processor import FEATURES, NAME

    left = re.sub(rf"\+({features})\b", lambda found: "-" + found[1], FEATURES)
    environment = os.environ | {"NUMBA_CPU_NAME": NAME, "NUMBA_CPU_FEATURES": left, "COMPRESS_KERNELS": "compiled"}
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-1000:]
    return done.stdout
