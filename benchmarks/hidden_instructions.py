"""Environments of processes in which neither this engine nor torch uses some instructions of the processor."""

from __future__ import annotations

import os
import sys

from results import NOT_POSSIBLE_HERE

from engine.kernels import torch_products

HIDDEN = {
    "avx512": {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+64bit,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+bmi,+bmi2,+f16c,+fma",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}
"""Variables by the name of what is hidden. Libraries read them when they are imported."""


def hide(hidden: str) -> None:
    """Begin this process anew in such an environment, unless it is in it already: libraries have read the other one."""
    own = HIDDEN.get(hidden, {})
    if not own.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | own)
    if own:
        torch_products.has_half_arithmetic = lambda: (
            False
        )  # torch tells what the processor has, whatever the environment hides


def require_built_without(hidden: str, build: str) -> None:
    """End the process with a word on stderr if llama.cpp uses what is to be hidden. build: as it prints it."""
    if hidden and f"{hidden.upper()} = 1" in build:
        print(f"llama.cpp was built with {hidden}, which it cannot hide; build it with GGML_NATIVE=OFF", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)
