"""A skip that is not on the list of allowed skips makes a run fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from allowed_skips import Skip, rows, unlisted

ROW = {"tests": "tests/a/*.py", "reason": "there is no browser", "why": "It is no package."}
FILE = """
import pytest

def test_one():
    pytest.skip("for no good reason")

def test_other():
    pass
"""


@pytest.mark.parametrize(
    ("test", "reason", "allowed"),
    [
        ("tests/a/test_x.py::test_y[1]", "there is no browser", True),
        ("tests/a/test_x.py", "there is no browser on this machine", True),
        ("tests/a/test_x.py::test_y", "no browser", False),
        ("tests/b/test_x.py::test_y", "there is no browser", False),
    ],
)
def test_a_row_allows_its_tests_for_its_reason(test: str, reason: str, allowed: bool) -> None:
    assert unlisted([Skip(test, reason)], [ROW]) == ([] if allowed else [Skip(test, reason)])


def test_rows_name_files_that_exist_and_say_why() -> None:
    root = Path(__file__).resolve().parents[1]
    assert all(list(root.glob(row["tests"])) and row["reason"] and row["why"].endswith(".") for row in rows())


@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n", "1"]])
def test_a_run_with_another_skip_fails(workers: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FILE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "allowed_skips", *workers, "test_it.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent / "support"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "1 of test_it.py: for no good reason" in done.stdout
    assert "test_it.py::test_one was skipped, and tests/allowed_skips.json has no row for it" in done.stdout
