"""A process that reads the bodies of requests, from both sides.

Bodies come from anyone, and a tokenizer and its chat template from whoever made the model. So they meet in a process that
has no model, no keys and no sockets of clients, may take so much memory and time, and can be ended without the server.

    python -m engine.server.reading_process DESCRIPTOR

speaks in frames over the socket DESCRIPTOR: first come the settings (`body_reader.py`), then a path and a body for
each reply. A frame is a JSON object and any bytes behind it, each with its length before it.
"""

from __future__ import annotations

import array
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.errors import is_panic
from engine.server.errors import ApiError
from engine.worker import package_path, python_module

MEMORY_BYTES = 2_000_000_000
"""The address space that reading may take, beside what the process has when it is ready."""
START_SECONDS = 60
"""For the process to be ready; a tokenizer of a quarter of a million tokens takes one."""
_LENGTHS = struct.Struct("<QQ")
_TOKEN = "i"
_PR_SET_PDEATHSIG = 1
Frame = tuple[dict[str, Any], bytes]


class EndedError(Exception):
    """The process has ended, or was ended since its time was over."""


class ReadingProcess:
    """The process from the server's side: one body at a time, from one thread, which must outlive it."""

    def __init__(self, settings: Callable[[], bytes]) -> None:
        """settings: those of a reader, as JSON; asked for at each start."""
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process unless it runs. Raises RuntimeError where it does not come to be ready."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*python_module("engine.server.reading_process"), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment() | package_path() | {"TOKENIZERS_PARALLELISM": "false"},
            )
        self._socket = ours
        try:
            self._exchange({}, self._settings(), time.monotonic() + START_SECONDS)
        except (TimeoutError, EndedError) as error:
            raise RuntimeError("the process that reads the bodies of requests does not start") from error

    def ask(self, path: str, body: bytes, seconds: float) -> Frame:
        """The reply to a body. Raises TimeoutError where it takes longer, and EndedError; the process is gone then."""
        self.start()
        return self._exchange({"path": path}, body, time.monotonic() + seconds)

    def kill(self) -> None:
        """End the process from any thread; it has nothing to save, and a body that is being read fails."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process, from the thread that it is asked from."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._socket.close()

    def _exchange(self, header: dict[str, Any], data: bytes, deadline: float) -> Frame:
        try:
            send(self._socket, header, data, deadline)
            return receive(self._socket, deadline)
        except TimeoutError:
            self.close()
            raise
        except (OSError, EOFError) as error:
            self.close()
            raise EndedError from error


def send(connection: socket.socket, header: dict[str, Any], data: bytes, deadline: float | None = None) -> None:
    """Write a frame. Raises OSError, and TimeoutError at the deadline, by time.monotonic()."""
    text = json.dumps(header).encode()
    _limit(connection, deadline)
    connection.sendall(_LENGTHS.pack(len(text), len(data)) + text + data)


def receive(connection: socket.socket, deadline: float | None = None) -> Frame:
    """Read a frame. Raises EOFError where the other side has ended, and the errors of `send`."""
    lengths = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size, deadline))
    text, data = (_exactly(connection, length, deadline) for length in lengths)
    return json.loads(text), data


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    found = bytearray(count)
    rest = memoryview(found)
    while rest:
        _limit(connection, deadline)
        read = connection.recv_into(rest)
        if not read:
            raise EOFError
        rest = rest[read:]
    return bytes(found)


def _limit(connection: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        connection.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _environment() -> dict[str, str]:
    """The environment without what reading has no use for: keys of this server and of the hub."""
    return {name: value for name, value in os.environ.items() if name not in ("COMPRESS_API_KEY", "HF_TOKEN")}


# The other side


def pack_tokens(prompts: list[list[int]]) -> bytes:
    """Token ids one after the other, as 32-bit integers."""
    return array.array(_TOKEN, [token for prompt in prompts for token in prompt]).tobytes()


def unpack_tokens(data: bytes, counts: list[int]) -> list[list[int]]:
    """The prompts that `pack_tokens` wrote, by their lengths."""
    tokens = array.array(_TOKEN)
    tokens.frombytes(data)
    found, start = tokens.tolist(), 0
    prompts = []
    for count in counts:
        prompts.append(found[start : start + count])
        start += count
    return prompts


def main(arguments: list[str]) -> int:
    """Read bodies until the other side is gone."""
    _end_with_the_server()
    from engine.server.body_reader import BodyReader, ReadingSettings

    connection = socket.socket(fileno=int(arguments[0]))
    _, data = receive(connection)
    reader = BodyReader(ReadingSettings.of_json(data))
    send(connection, {}, b"")
    reader.prepare()
    _take_no_more()
    with suppress(EOFError, OSError):
        while True:
            header, body = receive(connection)
            send(connection, *_reply(reader, header["path"], body))
    return 0


def _reply(reader: Any, path: str, body: bytes) -> Frame:
    try:
        read = reader.read(path, body)
    except ApiError as error:
        return _refused(error)
    except Exception:  # a fault of ours, which the server's log describes
        return {"failed": traceback.format_exc()[-4000:]}, b""
    except BaseException as error:
        if not is_panic(error):
            raise
        return _refused(ApiError(400, "the tokenizer fails at this text; change it", code="reading_failed"))
    if isinstance(read, dict):
        return {"answer": True}, json.dumps(read, separators=(",", ":")).encode()
    counts = [len(prompt) for prompt in read.prompts]
    return {"read": asdict(replace(read, prompts=())), "counts": counts}, pack_tokens(read.prompts)


def _refused(error: ApiError) -> Frame:
    return {"refused": {"status": error.status, "message": error.message, "param": error.param, "code": error.code}}, b""


def _end_with_the_server() -> None:
    """Signals of a terminal are for the server; where that is killed, the system ends this process too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_no_more() -> None:
    """From here on: no files written, and so much memory."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
