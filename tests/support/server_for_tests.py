"""A server in a thread of this process, and one in a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripted_loop import ScriptedLoop

from engine.generation.generate import Engine
from engine.server.connections.connection_limits import Connections
from engine.server.reading.reading_pool import ReadingPool
from engine.server.requests import reading_settings
from engine.server.serve import Server, bind
from engine.server.server import Service, State

ROOT = Path(__file__).resolve().parents[2]
Sent = tuple[str, Any]
"""The path and the body of a request."""


@contextmanager
def served(state: State, connections: Connections | None = None, app: Any = None) -> Iterator[str]:
    """Yield the URL of the application, or another, on a real socket, with the limits of `compress serve` or given ones."""
    listening = bind("127.0.0.1", 0)
    server = Server(state, connections)
    server.config.timeout_graceful_shutdown = 1
    server.config.app = app or server.config.app
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def recording(app: Any, bodies: list[Sent]) -> Any:
    """Return an application that notes the path and the body of each POST, and passes all on to another."""

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        parts: list[bytes] = []

        async def heard() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body") and scope["method"] == "POST":
                    bodies.append((scope["path"], json.loads(b"".join(parts))))
            return message

        await app(scope, heard, send)

    return noting


@contextmanager
def reading_for(engine: Engine) -> Iterator[ReadingPool]:
    """Yield the pool that reads bodies for a server of the model "tiny"."""
    settings = reading_settings(engine, model_name="tiny", max_model_length=128, max_queue=256, skip_threshold=0.0)
    made = ReadingPool(settings.to_json)
    try:
        yield made
    finally:
        made.close()


def scripted_state(engine: Engine, reading: ReadingPool, answer: str, seconds: float = 0.0) -> State:
    """Return the state of a server of the model "tiny" that gives one answer to everything, a token every `seconds`."""
    script = tuple(engine.encode(answer))
    loop: Any = ScriptedLoop(script, lambda token: str(engine.tokenizer.decode([token])), seconds)
    return State(phase="ready", loaded=Service(engine, loop, model_name="tiny", reading=reading))


@contextmanager
def process(
    model: str | Path,
    *options: str,
    wait: bool = True,
    program: Sequence[str] = ("-m", "cli"),
    open_files: int | None = None,
    log: Any = subprocess.PIPE,
    **environment: str,
) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Start `compress serve` on a free port. Yields its first line of JSON, or None if the start is not waited for."""
    command = [sys.executable, *program, "serve", str(model), "--port", "0", "--json", "--threads", "1", *options]
    if open_files is not None:
        command = ["sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh", *command]
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, env=os.environ | paths | environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert started.stdout is not None
    try:
        line = started.stdout.readline() if wait else ""
        assert line or not wait, started.communicate()[1]
        yield started, json.loads(line) if wait else None
    finally:
        started.kill()
        started.communicate()


def wait_for(condition: Any, seconds: float = 20) -> None:
    """Wait until the condition holds. Fails if it does not become true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
