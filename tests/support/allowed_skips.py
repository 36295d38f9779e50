"""A pytest plugin that prints skipped tests, and fails the run for a skip that tests/allowed_skips.json does not list.

The file is a list of rows: `tests` (a path below the root, which may have wildcards), `reason` (the beginning of the test's
reason for skipping) and `why` (an explanation for people). A row is for machines that lack something. It never hides a test
on all machines.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ALLOWED = Path(__file__).resolve().parents[1] / "allowed_skips.json"


class Skip(NamedTuple):
    """One test that was skipped, or one file."""

    test: str
    """Path below the root, with the test's name."""
    reason: str


def unlisted(skips: Iterable[Skip], rows: list[dict[str, str]]) -> list[Skip]:
    """Return the skips that no row allows."""
    return [skip for skip in skips if not any(_allows(row, skip) for row in rows)]


def _allows(row: dict[str, str], skip: Skip) -> bool:
    return fnmatch(skip.test.partition("::")[0], row["tests"]) and skip.reason.startswith(row["reason"])


def rows() -> list[dict[str, str]]:
    """Return the list of allowed skips."""
    found: list[dict[str, str]] = json.loads(ALLOWED.read_text(encoding="utf-8"))
    return found


class SkipList:
    """Collects skips. With pytest-xdist, it does so in the process that gathers the reports of all workers."""

    def __init__(self) -> None:
        self.skips: list[Skip] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            where = report.longrepr
            reason = where[2] if isinstance(where, tuple) else str(where)
            self.skips.append(Skip(report.nodeid, reason.removeprefix("Skipped: ")))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        if not hasattr(session.config, "workerinput") and unlisted(self.skips, rows()) and session.exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        counts = Counter((skip.test.partition("::")[0], skip.reason) for skip in self.skips)
        for (path, reason), count in sorted(counts.items()):
            terminalreporter.write_line(f"skipped: {count} of {path}: {reason}")
        for skip in unlisted(self.skips, rows()):
            terminalreporter.write_line(f"FAILED: {skip.test} was skipped, and tests/allowed_skips.json has no row for it")


def pytest_configure(config: Any) -> None:
    """Add the plugin."""
    config.pluginmanager.register(SkipList(), "skip-list")
