"""Runs that are interrupted: by SIGKILL at any moment, and by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from artifacts_for_tests import CALIBRATION, listing, make_workplace

ROOT = Path(__file__).resolve().parents[3]
KILLS = 5
"""Number of kills, one for each command."""


@pytest.mark.slow
def test_killed_runs_leave_the_old_state_or_the_new_one() -> None:
    """The script checks each state and each run that follows. benchmarks/kill_runs.py on its own kills 200 times."""
    result = subprocess.run(
        [sys.executable, "benchmarks/kill_runs.py", "--kills", str(KILLS), "--seed", "1", "--no-results"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{KILLS} kills" in result.stdout


@pytest.mark.parametrize("overwrite", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["new", "replacing"])
def test_keyboard_interrupt_is_one_word_and_130(tmp_path: Path, overwrite: bool) -> None:
    make_workplace(tmp_path)
    output = "model" if overwrite else "out"
    before = listing(tmp_path)
    command = ["prune", "model", "--sparsity", "0.5", "--epochs", "100000", *CALIBRATION, "-o", output, "--overwrite"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *command],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    work = f".{output}.work"
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / work / "diep.safetensors").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, stdout, stderr) == (130, "", "Interrupted.\n")
    left = {name: entry for name, entry in listing(tmp_path).items() if name.split("/")[0] != work}
    assert left == before  # the files that `--resume` needs stay beside the output
