"""One run at a time for each output: an advisory lock on the file `.NAME.lock` beside the output NAME.

The kernel holds the lock (flock) as long as the process lives, so the next run can take over after a killed one. On
some shared file systems, flock excludes only processes of one machine, and some file systems do not support flock.
Therefore the owner also touches the file every few seconds: a recently touched file from another machine has a live
owner. The file's age is measured with the clock of the file system, by comparison with a file touched now, because the
clocks of two machines differ.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, OutputError
from engine.files.json_file import parse_object, shown

TOUCH_SECONDS = 5.0
"""Interval at which the owner touches its lock file."""
STALE_SECONDS = 60.0
"""Age after which the untouched lock file of another machine counts as abandoned."""
MAX_BYTES = 4096
ATTEMPTS = 100
NO_FLOCK = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Busy(Exception):
    """Another run holds the lock; the text says which run it is and how the lock becomes free."""


@dataclass(frozen=True)
class _Claim:
    """A lock that this process holds."""

    descriptor: int
    thread: int
    """Identifier of the thread that holds the lock; another thread of this process counts as another run."""


_claims: dict[Path, _Claim] = {}


def _forget_claims() -> None:
    """Close the lock descriptors that a forked child inherits: the child must not keep the lock of a killed parent."""
    for claim in _claims.values():
        os.close(claim.descriptor)
    _claims.clear()


os.register_at_fork(after_in_child=_forget_claims)


def lock_path(output: Path) -> Path:
    """Return the path of an output's lock file, with links resolved: every path to one place has one lock."""
    return Path(os.path.realpath(output.absolute().parent)) / f".{output.name}.lock"


@contextmanager
def claimed(output: Path, *, is_directory: bool = True) -> Iterator[None]:
    """Hold the lock of `output` during the body; the same thread may claim it again inside the body.

    The lock also covers the files beside the output that carry its name: the partial result and the work directory. For
    an output directory, missing parents are created, and those that are empty at the end are removed. For an output
    file, the parents must exist. Raises OutputError if another run holds the lock or if no lock file can be created.
    """
    if output.name in ("", ".."):  # such a path names no output; check_output refuses it
        yield
        return
    path = lock_path(output)
    held = _claims.get(path)
    if held is not None and held.thread == threading.get_ident():
        yield
        return
    new_parents = [parent for parent in path.parents if not os.path.exists(parent)] if is_directory else []
    try:
        descriptor = _acquired(output, path, is_directory)
        try:
            _claims[path] = _Claim(descriptor, threading.get_ident())
            with _touching(descriptor):
                yield
        finally:
            if _claims.pop(path, None) is not None:
                _release(path, descriptor)
    finally:
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()


def _acquired(output: Path, path: Path, is_directory: bool) -> int:
    """Return a descriptor that holds the lock. Raises OutputError as `claimed` does."""
    try:
        for _ in range(ATTEMPTS):
            if is_directory and not os.path.exists(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            # A run that is ending may remove the file or the directory just before it is opened here.
            with suppress(FileNotFoundError):
                if (descriptor := _try(path)) is not None:
                    return descriptor
            if not is_directory:
                os.stat(path.parent)  # raises if missing: the parent of an output file is never created
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except _Busy as busy:
        raise OutputError(f"{output}: is being written by {busy}, or give another output") from None
    except OSError as error:
        verb, reason = "made" if is_directory else "written", error.strerror or type(error).__name__
        raise OutputError(f"{output}: cannot be {verb} ({reason}); make space or give another --output") from error


def _try(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if the file was removed meanwhile. Raises _Busy or OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor, is_new = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        descriptor, is_new = os.open(path, flags), False
    with ExitStack() as undone:
        undone.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EEXIST, f"{path.name} is not a lock file")
        has_flock = _locked(descriptor)
        if not _is_at(path, descriptor):
            return None
        if not is_new:
            _check_owner(path, descriptor, has_flock)
        undone.callback(os.unlink, path)  # before the descriptor is closed
        if not is_new and not has_flock:
            return None  # without flock, only a newly created file is exclusive to one run
        _write_owner(descriptor)
        undone.pop_all()
        return descriptor


def _locked(descriptor: int) -> bool:
    """Lock the file.

    Returns False if its file system does not support locks; raises _Busy if another process has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _Busy(f"{_named(_owner(descriptor))}; wait until it ends") from None
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return False
    return True


def _check_owner(path: Path, descriptor: int, has_flock: bool) -> None:
    """Raise _Busy if an existing lock file may have a live owner although flock succeeded or is not supported."""
    owner = _owner(descriptor)
    for _ in range(10):
        if owner is not None:
            break
        time.sleep(0.1)  # the owner may be about to write its name
        owner = _owner(descriptor)
    is_ours = owner is not None and owner["machine"] == _machine()
    if is_ours and (has_flock or _is_dead(owner)):
        return
    if (owner is not None or not has_flock) and _is_fresh(path, descriptor):
        raise _Busy(
            f"{_named(owner)}; wait until it ends (after a crash, its lock expires within {STALE_SECONDS:.0f} seconds)"
        )


def _is_fresh(path: Path, descriptor: int) -> bool:
    with tempfile.TemporaryFile(dir=path.parent) as now:
        os.utime(now.fileno())
        return abs(os.fstat(now.fileno()).st_mtime - os.fstat(descriptor).st_mtime) < STALE_SECONDS


def _is_dead(owner: dict[str, Any] | None) -> bool:
    """Return whether the owner, a process with this host name, has ended."""
    if owner is None or owner["host"] != socket.gethostname():  # for example in a container, which has its own process IDs
        return False
    try:
        os.kill(owner["process"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether `path` still names the open file."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _machine() -> str:
    """Return an identifier shared by all processes under one kernel, and therefore under the same file locks."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _write_owner(descriptor: int) -> None:
    values = {
        "host": socket.gethostname(),
        "machine": _machine(),
        "process": os.getpid(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    data = json.dumps(values).encode()
    os.ftruncate(descriptor, 0)
    if os.pwrite(descriptor, data, 0) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def _owner(descriptor: int) -> dict[str, Any] | None:
    """Return the validated content of a lock file, or None if it is not valid. A lock file is not trusted."""
    try:
        values = parse_object(os.pread(descriptor, MAX_BYTES, 0), "lock")
    except CheckpointError:
        return None
    process = values.get("process")
    is_valid = isinstance(process, int) and process is not True and process > 0
    texts = (values.get(name) for name in ("host", "machine", "started"))
    return values if is_valid and all(isinstance(text, str) for text in texts) else None


def _named(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "another run"
    return f"another run (process {owner['process']} on {shown(owner['host'])} since {shown(owner['started'])})"


@contextmanager
def _touching(descriptor: int) -> Iterator[None]:
    """Touch the file every few seconds while the body runs."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(TOUCH_SECONDS):
            with suppress(OSError):
                os.utime(descriptor)

    thread = threading.Thread(target=touch, name="output lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # wait, so that no other file with the same descriptor number is touched


def _release(path: Path, descriptor: int) -> None:
    """Remove the file while the lock is held, so that no other run can acquire it in between; then close it."""
    with suppress(OSError):
        if _is_at(path, descriptor):
            os.unlink(path)
    os.close(descriptor)
