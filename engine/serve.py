"""`compress serve`: the process. The socket is bound first, the model loaded in a thread, and signals end it in order.

SIGTERM lets running requests end and takes no more; a second one, or SIGINT, ends at once.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from engine.errors import OptionError
from engine.generate import Engine

try:
    import uvicorn

    from engine.server import Service, State, create_app
except ModuleNotFoundError as error:
    raise OptionError(
        f"serving needs the package {error.name}, which is not installed: pip install 'moe-compress[serve]'"
    ) from error

from engine.kv_cache import position_bytes, state_bytes
from engine.loop import EngineLoop
from engine.paged_cache import BLOCK_SIZE

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
LAST_BYTES_SECONDS = 10
"""For clients to read the end of their answers before connections are closed."""
KEEP_ALIVE_SECONDS = 75
SMALL_CACHE = 1 << 30
"""Bytes that are taken for one sequence whatever is free."""
SPARE_MEMORY_SHARE = 0.25
"""Of what is free, for keys and values, where no size is given."""


@dataclass(frozen=True)
class ServeOptions:
    """What to serve, where and how much of it. Raises OptionError for values that cannot be."""

    model: str = "demo"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    max_queue: int = 256
    max_batch_size: int = 16
    max_model_length: int | None = None
    kv_cache_bytes: int | None = None
    request_timeout: float | None = None
    skip_threshold: float = 0.0
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise OptionError("the API key is empty or has characters that no header carries; use printable ASCII")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise OptionError("the served model name is empty; leave it out, or give a name")

    @property
    def name(self) -> str:
        """By which clients ask for the model."""
        path = Path(self.model)
        return self.served_model_name or (path.resolve().name if path.is_dir() else self.model)

    @property
    def is_exposed(self) -> bool:
        """Whether others than this machine may reach it without a key."""
        return self.host not in LOCAL_HOSTS and self.api_key is None


def serve(options: ServeOptions, ready: Callable[[str], None]) -> None:
    """Serve until a signal ends it; `ready` is called with the URL once requests are taken.

    Raises OptionError where nothing can be bound, what loading the model raises, and KeyboardInterrupt at SIGINT.
    """
    listening = bind(options.host, options.port)
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        _Process(options).run(listening, lambda: ready(url))
    finally:
        listening.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OptionError where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"host {host!r} cannot be listened on: {error.strerror or error}; give another --host") from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(2048)
    except OSError as error:
        made.close()
        raise OptionError(f"{host}:{port} cannot be listened on: {error.strerror or error}; give another --port") from error
    return made


def load(options: ServeOptions) -> Service:
    """The model, ready and running. Raises what opening it raises, and OptionError where its cache does not fit."""
    engine = Engine.open(
        options.model,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        skip_threshold=options.skip_threshold,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    engine.tokenizer("a")  # a tokenizer takes its settings at first use, and later ones come from several threads
    engine_loop = EngineLoop(
        engine,
        kv_cache_bytes=options.kv_cache_bytes or default_kv_cache_bytes(engine, options),
        max_batch_size=options.max_batch_size,
        max_queue=options.max_queue,
        max_model_length=options.max_model_length,
    )
    engine_loop.start()
    return Service(
        engine,
        engine_loop,
        model_name=options.name,
        skip_threshold=options.skip_threshold,
        max_queue=options.max_queue,
    )


def default_kv_cache_bytes(engine: Engine, options: ServeOptions) -> int:
    """Room for a full batch of the longest sequences, within a share of free memory, and for one of them if it fits there.

    Where not even one does, sequences are shorter than the model would take.
    """
    config = engine.checkpoint.config
    positions = (options.max_model_length or config.max_positions) + BLOCK_SIZE  # the last block may be almost empty
    sequence = position_bytes(config, engine.kv_cache_dtype) * positions
    on_gpu = engine.device.type == "cuda"
    states = options.max_batch_size * state_bytes(config, engine.kv_cache_dtype)
    free = torch.cuda.mem_get_info(engine.device)[0] if on_gpu else psutil.virtual_memory().available
    shared = max(0, min(options.max_batch_size * sequence, int(SPARE_MEMORY_SHARE * free) - states))
    return states + (max(sequence, shared) if sequence <= max(SMALL_CACHE, free - states) else shared)


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again at the end, and the exit status would not be 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


class _Process:
    """One server from its socket to its end. All but loading and draining happens in the event loop."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._state = State(options.api_key, options.request_timeout)
        config = uvicorn.Config(
            create_app(self._state),
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_BYTES_SECONDS,
        )
        self._server = _Server(config)
        self._failure: BaseException | None = None
        self._signals = 0
        self._interrupted = False

    def run(self, listening: socket.socket, ready: Callable[[], None]) -> None:
        """Until a signal ends it. Raises as `serve` does."""
        asyncio.run(self._run(listening, ready))
        if self._failure is not None:
            raise self._failure
        if self._interrupted:
            raise KeyboardInterrupt

    async def _run(self, listening: socket.socket, ready: Callable[[], None]) -> None:
        event_loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            event_loop.add_signal_handler(number, self._signalled, number)

        def load_and_tell() -> None:
            try:
                made: Service | BaseException = load(self._options)
            except BaseException as error:
                made = error
            with suppress(RuntimeError):  # a signal was faster, and there is no event loop any more
                event_loop.call_soon_threadsafe(self._loaded, made, ready)

        # A daemon: a signal does not wait for a large model to be loaded.
        threading.Thread(target=load_and_tell, name="load", daemon=True).start()
        try:
            await self._server.serve(sockets=[listening])
        finally:
            if self._state.loaded is not None:
                await asyncio.to_thread(self._state.loaded.engine_loop.stop)

    def _loaded(self, made: Service | BaseException, ready: Callable[[], None]) -> None:
        if isinstance(made, BaseException):
            self._failure = made
            self._server.should_exit = True
            return
        self._state.loaded = made
        if self._state.phase == "loading":
            self._state.phase = "ready"
            ready()

    def _signalled(self, number: int) -> None:
        self._signals += 1
        self._interrupted = self._interrupted or number == signal.SIGINT or self._signals > 1
        service = self._state.loaded
        if self._interrupted or service is None:
            self._server.should_exit = self._server.force_exit = True
            self._server.config.timeout_graceful_shutdown = 1
            if service is not None:
                threading.Thread(target=service.engine_loop.stop, daemon=True).start()
            return
        self._state.phase = "draining"
        self._draining = asyncio.ensure_future(self._drain(service))

    async def _drain(self, service: Service) -> None:
        await asyncio.to_thread(service.engine_loop.drain, threading.TIMEOUT_MAX)
        self._server.should_exit = True
