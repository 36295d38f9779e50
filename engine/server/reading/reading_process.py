"""A process that reads request bodies, seen from the server and from the process.

Bodies come from any client, and a tokenizer and its chat template from any model author. Therefore they are processed
in a separate process without model, keys and client sockets, with limited memory and time, which can be ended without
the server.

    python -m engine.server.reading.reading_process DESCRIPTOR

The process exchanges frames over the socket DESCRIPTOR: first the settings (`body_reader.py`), then a path and a body
for each reply. A frame is a JSON object followed by bytes, each preceded by its length.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import is_panic
from engine.generation.worker import package_path, python_module
from engine.server.errors import ApiError
from engine.server.reading.image_parts import packed
from engine.server.reading.name_reader import SETTINGS as NAMES_ONLY
from engine.server.reading.name_reader import NameReader

if TYPE_CHECKING:
    from engine.server.reading.body_reader import BodyReader, Read

MEMORY_BYTES = 2_000_000_000
"""Additional address space that reading may use after the process is ready."""
START_SECONDS = 60
"""Time limit for the process to be ready; loading a tokenizer of 250,000 tokens takes one second."""
_LENGTHS = struct.Struct("<QQ")
_TOKEN = "i"
_PR_SET_PDEATHSIG = 1
Data = bytes | bytearray | memoryview
Frame = tuple[dict[str, Any], Data]
Reply = tuple[dict[str, Any], Sequence[Data]]
"""A frame before it is sent, its data in parts."""


class EndedError(Exception):
    """The process has ended, or was ended because its time was over."""


class ReadingProcess:
    """The server's side of the process. It reads one body at a time, for one thread, which must outlive it."""

    def __init__(self, settings: Callable[[], bytes]) -> None:
        """settings: returns a reader's settings as JSON; called at each start."""
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process unless it runs. Raises RuntimeError if it does not become ready."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*python_module("engine.server.reading.reading_process"), str(theirs.fileno())],
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
        """Return the reply to a body.

        Raises TimeoutError after `seconds`, and EndedError; the process has ended in both cases.
        """
        self.start()
        return self._exchange({"path": path}, body, time.monotonic() + seconds)

    def kill(self) -> None:
        """End the process from any thread. It has nothing to save, and a body that is being read fails."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process, from the thread that uses it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._socket.close()

    def _exchange(self, header: dict[str, Any], data: bytes, deadline: float) -> Frame:
        try:
            send(self._socket, header, [data], deadline)
            return receive(self._socket, deadline)
        except TimeoutError:
            self.close()
            raise
        except (OSError, EOFError) as error:
            self.close()
            raise EndedError from error


def send(connection: socket.socket, header: dict[str, Any], parts: Sequence[Data], deadline: float | None = None) -> None:
    """Write a frame, whose data are in parts. Raises OSError, and TimeoutError at the deadline, by time.monotonic()."""
    text = json.dumps(header).encode()
    size = sum(memoryview(part).nbytes for part in parts)
    for part in (_LENGTHS.pack(len(text), size) + text, *parts):
        _limit(connection, deadline)
        connection.sendall(part)


def receive(connection: socket.socket, deadline: float | None = None) -> Frame:
    """Read a frame. Raises EOFError if the other side has ended, and the errors of `send`."""
    lengths = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size, deadline))
    text, data = (_exactly(connection, length, deadline) for length in lengths)
    return json.loads(text), data


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytearray:
    found = bytearray(count)
    rest = memoryview(found)
    while rest:
        _limit(connection, deadline)
        read = connection.recv_into(rest)
        if not read:
            raise EOFError
        rest = rest[read:]
    return found


def _limit(connection: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        connection.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _environment() -> dict[str, str]:
    """Return the environment without the keys of this server and of the hub, which reading does not need."""
    return {name: value for name, value in os.environ.items() if name not in ("COMPRESS_API_KEY", "HF_TOKEN")}


# The side of the process itself


def pack_tokens(prompts: Sequence[Sequence[int]]) -> bytes:
    """Return the token ids of all prompts as consecutive 32-bit integers."""
    return array.array(_TOKEN, [token for prompt in prompts for token in prompt]).tobytes()


def packed_bytes(counts: list[int]) -> int:
    """Return the size of prompts of these lengths from `pack_tokens`."""
    return sum(counts) * array.array(_TOKEN).itemsize


def unpack_tokens(data: Data, counts: list[int]) -> list[list[int]]:
    """Return the prompts that `pack_tokens` wrote at the beginning of the data, given their lengths."""
    tokens = array.array(_TOKEN)
    tokens.frombytes(data[: packed_bytes(counts)])
    found, start = tokens.tolist(), 0
    prompts = []
    for count in counts:
        prompts.append(found[start : start + count])
        start += count
    return prompts


def main(arguments: list[str]) -> int:
    """Read bodies until the server has ended."""
    _end_with_the_server()
    connection = socket.socket(fileno=int(arguments[0]))
    _, data = receive(connection)
    reader = _reader(bytes(data))
    send(connection, {}, [])
    reader.prepare()
    _take_no_more()
    with suppress(EOFError, OSError):
        while True:
            header, body = receive(connection)
            send(connection, *_reply(reader, header["path"], bytes(body)))
    return 0


def _reader(settings: bytes) -> BodyReader | NameReader:
    """Return the reader for these settings. That of names alone imports less."""
    if settings == NAMES_ONLY:
        return NameReader()
    from engine.server.reading.body_reader import BodyReader, ReadingSettings

    return BodyReader(ReadingSettings.of_json(settings))


def _reply(reader: Any, path: str, body: bytes) -> Reply:
    try:
        return _packed(reader.read(path, body))
    except MemoryError:
        return _refused(ApiError(400, "the body takes too much memory to read; send less at once", code="reading_failed"))
    except ApiError as error:
        return _refused(error)
    except Exception:  # a bug in this project; the server's log shows it
        return {"failed": traceback.format_exc()[-4000:]}, []
    except BaseException as error:
        if not is_panic(error):
            raise
        return _refused(ApiError(400, "the tokenizer fails on this text; change it", code="reading_failed"))


def _packed(read: Read | dict[str, Any]) -> Reply:
    if isinstance(read, dict):
        return {"answer": True}, [json.dumps(read, separators=(",", ":")).encode()]
    counts = [len(prompt) for prompt in read.prompts]
    images, parts = packed(read.images)
    header = {"read": asdict(replace(read, prompts=(), images={})), "counts": counts, "images": images}
    return header, [pack_tokens(read.prompts), *parts]


def _refused(error: ApiError) -> Reply:
    return {"refused": {"status": error.status, "message": error.message, "param": error.param, "code": error.code}}, []


def _end_with_the_server() -> None:
    """Ignore a terminal's signals, which are for the server; if the server is killed, Linux ends this process too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_no_more() -> None:
    """Forbid writing files from now on, and limit further memory."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
