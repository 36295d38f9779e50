"""Run a command in a control group of its own that may have only so much memory, the page cache included, and no swap."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


class NoControlGroupError(Exception):
    """This system or user cannot make one; the message says why."""


@contextmanager
def memory_limit(limit: int) -> Iterator[Path]:
    """A control group inside our own, of version 1 or 2. Raises NoControlGroupError."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = next((path for _, names, path in groups if "memory" in names.split(",")), None)
    second = next((path for number, _, path in groups if number == "0"), None)
    parent = ROOT / "memory" / first.lstrip("/") if first is not None else ROOT / (second or "/").lstrip("/")
    group = parent / f"limited-{os.getpid()}"
    name = "memory.limit_in_bytes" if first is not None else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        raise NoControlGroupError(f"{group} cannot be made ({error.strerror})") from error
    try:
        if not (group / name).exists():
            raise NoControlGroupError(f"{parent} does not hand the control of memory on to groups inside it")
        try:
            (group / name).write_text(str(limit))
            swap = group / ("memory.swappiness" if first is not None else "memory.swap.max")
            if swap.exists():
                swap.write_text("0")
        except OSError as error:
            raise NoControlGroupError(f"{group} takes no limit ({error.strerror})") from error
        yield group
    finally:
        group.rmdir()


def run_in(group: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The command's end and output."""
    return subprocess.run(["sh", "-c", JOIN, str(group), *command], capture_output=True, text=True, check=False)


def peak_bytes(group: Path) -> int | None:
    """The most that was charged to the group; None where the system does not say."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text())
    return None


def forget_files(directory: Path) -> None:
    """Let the page cache go of the files: pages that others have read would not be charged to the group."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
