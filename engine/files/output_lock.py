"""One run at a time for each output: an advisory lock, the file `.NAME.lock` beside the output NAME.

The kernel holds the lock (flock) for as long as the process lives, so the next run takes over what a killed one leaves. On
some shared file systems flock keeps only the processes of one machine apart, and some have none. The owner therefore also
touches the file every few seconds: a file of another machine that was touched lately has an owner that lives. Its age is
measured by the clock of the file system, with a file touched now, because the clocks of two machines differ.
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
"""The owner touches its file this often."""
STALE_SECONDS = 60.0
"""A file of another machine that was not touched for this long has no owner any more."""
MAX_BYTES = 4096
ATTEMPTS = 100
NO_FLOCK = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Busy(Exception):
    """Another run has the lock; the text says which, and how it becomes free."""


@dataclass(frozen=True)
class _Claim:
    """A lock that this process holds."""

    descriptor: int
    thread: int
    """The thread that holds it: another one of this process is another run."""


_claims: dict[Path, _Claim] = {}


def _forget_claims() -> None:
    """A forked process owns no lock of its parent, and does not keep it when the parent is killed."""
    for claim in _claims.values():
        os.close(claim.descriptor)
    _claims.clear()


os.register_at_fork(after_in_child=_forget_claims)


def lock_path(output: Path) -> Path:
    """The lock file of an output, with all links of its directory resolved: two ways to one place are one lock."""
    return Path(os.path.realpath(output.absolute().parent)) / f".{output.name}.lock"


@contextmanager
def claimed(output: Path, *, is_directory: bool = True) -> Iterator[None]:
    """Hold the lock of `output` for the body; inside the body, the same thread may claim it again.

    The lock covers what lies beside the output under its name too: the partial result and the work directory. The parents of
    an output directory are made, and those that are still empty at the end are removed again; an output file needs them.
    Raises OutputError where another run holds the lock, or where no lock file can be made.
    """
    if output.name in ("", ".."):  # names nothing that could be written, which check_output refuses
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
    """A descriptor that holds the lock; OutputError as for `claimed`."""
    try:
        for _ in range(ATTEMPTS):
            if is_directory and not os.path.exists(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            # A run that ends may remove the file, or the directory, that this one is about to open.
            with suppress(FileNotFoundError):
                if (descriptor := _try(path)) is not None:
                    return descriptor
            if not is_directory:
                os.stat(path.parent)  # which nobody makes
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except _Busy as busy:
        raise OutputError(f"{output}: is being written by {busy}, or give another output") from None
    except OSError as error:
        verb, reason = "made" if is_directory else "written", error.strerror or type(error).__name__
        raise OutputError(f"{output}: cannot be {verb} ({reason}); make space or give another --output") from error


def _try(path: Path) -> int | None:
    """A descriptor that holds the lock, or None where the file went away meanwhile. Raises _Busy or OSError."""
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
            return None  # only a file that is made anew is one run's alone
        _write_owner(descriptor)
        undone.pop_all()
        return descriptor


def _locked(descriptor: int) -> bool:
    """Lock the file; False where its file system has no locks. Raises _Busy where another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _Busy(f"{_named(_owner(descriptor))}; wait until that ends") from None
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return False
    return True


def _check_owner(path: Path, descriptor: int, has_flock: bool) -> None:
    """Raise _Busy where the owner of a file that was there may live although its lock was free, or could not be tried."""
    owner = _owner(descriptor)
    for _ in range(10):
        if owner is not None:
            break
        time.sleep(0.1)  # its owner may be about to write it
        owner = _owner(descriptor)
    is_ours = owner is not None and owner["machine"] == _machine()
    if is_ours and (has_flock or _is_dead(owner)):
        return
    if (owner is not None or not has_flock) and _is_fresh(path, descriptor):
        raise _Busy(
            f"{_named(owner)}; wait until that ends (where it has crashed, its lock ends {STALE_SECONDS:.0f} seconds after)"
        )


def _is_fresh(path: Path, descriptor: int) -> bool:
    with tempfile.TemporaryFile(dir=path.parent) as now:
        os.utime(now.fileno())
        return abs(os.fstat(now.fileno()).st_mtime - os.fstat(descriptor).st_mtime) < STALE_SECONDS


def _is_dead(owner: dict[str, Any] | None) -> bool:
    """Whether a process of this machine and host name has ended."""
    if owner is None or owner["host"] != socket.gethostname():  # a container, say, which numbers its own processes
        return False
    try:
        os.kill(owner["process"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the file is still the one that has this name."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _machine() -> str:
    """Something that all processes which share a kernel, and its locks, have in common."""
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
    """The content of a lock file, which is trusted no more than any file; None where it says nothing."""
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
        thread.join()  # the descriptor's number must not be another file's when it is touched


def _release(path: Path, descriptor: int) -> None:
    """Remove the file while the lock is held, so that nobody can have got it in between, and let go of it."""
    with suppress(OSError):
        if _is_at(path, descriptor):
            os.unlink(path)
    os.close(descriptor)
