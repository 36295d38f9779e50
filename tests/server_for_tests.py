"""A server in a thread of this process, and one in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.generate import Engine
from engine.openai_requests import reading_settings
from engine.reading_pool import ReadingPool
from engine.serve import bind
from engine.server import State, create_app

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def served(state: State) -> Iterator[str]:
    """The URL of the application on a real socket."""
    import uvicorn

    listening = bind("127.0.0.1", 0)
    config = uvicorn.Config(create_app(state), lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
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


@contextmanager
def reading_for(engine: Engine) -> Iterator[ReadingPool]:
    """What reads bodies for a server of the model "tiny": for several tests, since its processes take a second to start."""
    settings = reading_settings(engine, model_name="tiny", max_model_length=128, max_queue=256, skip_threshold=0.0)
    made = ReadingPool(settings.to_json)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def process(
    model: str | Path, *options: str, wait: bool = True, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """`compress serve` on a free port, with its first line of JSON; None where it is not waited for."""
    command = [sys.executable, "-m", "cli", "serve", str(model), "--port", "0", "--json", "--threads", "1", *options]
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command, env=os.environ | paths | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    try:
        line = started.stdout.readline() if wait else ""
        assert line or not wait, started.communicate()[1]
        yield started, json.loads(line) if wait else None
    finally:
        started.kill()
        started.communicate()


def wait_for(condition: Any, seconds: float = 20) -> None:
    """Until it holds; fails where it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
