"""Run a command in a control group with limited memory, including the page cache, and no swap; or watch a command."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


class NoControlGroupError(Exception):
    """Raised if this system or user cannot make a control group. The message has the reason."""


@contextmanager
def memory_limit(limit: int) -> Iterator[Path]:
    """Yield a control group inside our own, of version 1 or 2. Raises NoControlGroupError."""
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


def run_in(group: Path, command: Sequence[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Return the completed command with its output. Raises subprocess.TimeoutExpired after so many seconds."""
    command = ["sh", "-c", JOIN, str(group), *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)


def run_watched(
    command: Sequence[str], *, with_children: bool = False, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], int]:
    """Return the completed command with its output, and its peak of resident memory, as the system reports it during the
    run.

    The system's figure at the end, `ru_maxrss`, would include the parent's memory. with_children: whether to take the
    largest peak of the process and of those that it started.
    """
    env = None if environment is None else os.environ | environment
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process, peak = subprocess.Popen(command, stdout=said, stderr=errors, text=True, env=env), 0
        while process.poll() is None:
            try:
                started = (
                    Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split() if with_children else []
                )
                peak = max([peak, *map(resident_peak, [process.pid, *map(int, started)])])
            except OSError:  # a process has just ended
                continue
            time.sleep(0.02)
        said.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, said.read(), errors.read()), peak


def _children(process: int) -> list[int]:
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


def resident_peak(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return max([0, *(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))])


def peak_bytes(group: Path) -> int | None:
    """Return the peak that was charged to the group, or None if the system does not report it."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text())
    return None


def forget_files(directory: Path) -> None:
    """Drop the files from the page cache, because pages that others have read would not be charged to the group."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
