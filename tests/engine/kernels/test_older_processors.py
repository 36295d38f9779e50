"""The kernels of processors that lack instructions of this one: all tests of kernels and compiled steps pass there too."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels_for_tests import LACKING, kernels, passed_without
from packages_for_tests import needs_numba

HERE = Path(__file__).parent
TESTS = (HERE, *(HERE.parent / "decoder" / f"test_{name}.py" for name in ("decode_step", "independence")))


@needs_numba
@pytest.mark.slow
@pytest.mark.parametrize("features", LACKING.values(), ids=LACKING)
def test_kernels_of_older_processors(features: str) -> None:
    """Kernels are compiled without these instructions; torch keeps its own."""
    if not kernels.MULTIPLIES_BFLOAT16:
        pytest.skip("this processor is one of them")
    said = passed_without(features, "-m", "not slow", *map(str, TESTS))
    assert " passed" in said and " failed" not in said
