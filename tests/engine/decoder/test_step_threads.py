"""Threads that stay with a step: more of them than processors, and two decoders at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages_for_tests import needs_numba

TESTS = Path(__file__).parents[2]


@needs_numba
@pytest.mark.parametrize(
    "further",
    [
        {},
        pytest.param({"OMP_THREAD_LIMIT": "2"}, marks=pytest.mark.slow),
        pytest.param({"NUMBA_THREADING_LAYER": "workqueue"}, marks=pytest.mark.slow),
    ],
    ids=["eight", "two of eight", "without OpenMP"],
)
def test_a_step_gives_the_same_bits_on_any_number_of_threads(further: dict[str, str]) -> None:
    own = {"NUMBA_NUM_THREADS": "8", "OMP_NUM_THREADS": "8", "COMPRESS_KERNELS": "compiled"} | further
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "support")))
    command = [sys.executable, str(TESTS / "support" / "steps_on_threads.py")]
    done = subprocess.run(command, env=os.environ | own | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.split()[-1:] == ["equal"], done.stderr
