"""The compiled kernels, or None where Numba is not installed, and the marks of tests that need them."""

from __future__ import annotations

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
needs_pairs = needs_kernels("MULTIPLIES_BFLOAT16", "this processor does not multiply pairs of bfloat16")
