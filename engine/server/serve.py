"""The process of `compress serve`: it binds the socket, loads the model in a thread, and shuts down on signals.

SIGTERM lets running requests end and refuses new ones. A second SIGTERM, or SIGINT, ends the process at once, even if a
part of it hangs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.errors import OptionError
from engine.generation.generate import Engine

try:
    import uvicorn

    from engine.server.access import allowed_hosts, is_local, plain_host
    from engine.server.connection_limits import Connections, limited_protocol
    from engine.server.server import Service, State, create_app
except ModuleNotFoundError as error:
    raise OptionError(
        f"serving needs the package {error.name}, which is not installed: pip install 'moe-compress[serve]'"
    ) from error

from engine.batching.loop import EngineLoop
from engine.decoder.kv_cache import position_bytes, state_bytes
from engine.decoder.paged_cache import BLOCK_SIZE
from engine.server.log_budget import limited_logging
from engine.server.signals import Signals

KEY_VARIABLE = "COMPRESS_API_KEY"
BACKLOG = 2048
"""Length of the operating system's queue of connections that wait to be accepted."""
ACCEPTED_AT_ONCE = 16
"""Maximum number of connections accepted before the limits are checked again."""
LAST_BYTES_SECONDS = 10
"""Time for clients to read the end of their answers before connections are closed."""
KEEP_ALIVE_SECONDS = 75
SMALL_CACHE = 1 << 30
"""Size in bytes up to which one sequence's cache is allocated, regardless of free memory."""
SPARE_MEMORY_SHARE = 0.25
"""Share of free memory for the KV cache if no size is given."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server: model, address and limits. Raises OptionError for invalid values."""

    model: str = "demo"
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Accepted API keys; empty for no access control. Cached prompts are not shared between keys."""
    allow_anonymous: bool = False
    """Whether other machines may reach the server without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names of the server besides its own; see `engine.server.access.allowed_hosts`."""
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
        if not all(key.strip() and key.isascii() and key.isprintable() for key in self.api_keys):
            raise OptionError("an API key is empty or has characters that a header cannot hold; use printable ASCII")
        for host in self.allowed_hosts:
            if not plain_host(host):
                raise OptionError(
                    f"the allowed host {host!r:.80} is neither a name nor an address; give one, without a port"
                )
        if self.is_exposed and not self.allow_anonymous:
            raise OptionError(
                f"other machines can reach {self.host}, and without a key anybody may use the server; give --api-key "
                f"(or {KEY_VARIABLE}), or --allow-anonymous"
            )
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise OptionError("the served model name is empty; leave it out, or give a name")

    @property
    def name(self) -> str:
        """Name by which clients request the model."""
        path = Path(self.model)
        return self.served_model_name or (path.resolve().name if path.is_dir() else self.model)

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can reach the server without a key."""
        return not is_local(self.host) and not self.api_keys


def keys_from(given: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of the command line, or else of the environment. Raises OptionError for an empty variable."""
    if given or KEY_VARIABLE not in os.environ:
        return tuple(given)
    keys = os.environ[KEY_VARIABLE].splitlines()
    if not all(keys) or not keys:
        raise OptionError(f"{KEY_VARIABLE} is set and has no key, or an empty line; unset it to serve without a key")
    return tuple(keys)


def serve(options: ServeOptions, ready: Callable[[str], None]) -> None:
    """Serve until a signal ends the server; `ready` is called with the URL once requests are accepted.

    Raises OptionError if the address cannot be bound, any error of loading the model, and KeyboardInterrupt at SIGINT.
    """
    listening = bind(options.host, options.port)
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        with limited_logging():
            _Process(options).run(listening, lambda: ready(url))
    finally:
        listening.close()


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 selects a free port. Raises OptionError if the address cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"host {host!r} cannot be listened on: {error.strerror or error}; give another --host") from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise OptionError(f"{host}:{port} cannot be listened on: {error.strerror or error}; give another --port") from error
    return made


def load(options: ServeOptions) -> Service:
    """Load the model and start its engine loop. Raises any error of opening, and OptionError if the cache does not fit."""
    engine = Engine.open(
        options.model,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        skip_threshold=options.skip_threshold,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    engine_loop = EngineLoop(
        engine,
        kv_cache_bytes=options.kv_cache_bytes or default_kv_cache_bytes(engine, options),
        max_batch_size=options.max_batch_size,
        max_queue=options.max_queue,
        max_model_length=options.max_model_length,
    )
    engine_loop.start()
    service = Service(
        engine,
        engine_loop,
        model_name=options.name,
        skip_threshold=options.skip_threshold,
        max_queue=options.max_queue,
    )
    service.reading.start()
    return service


def default_kv_cache_bytes(engine: Engine, options: ServeOptions) -> int:
    """Return the size of a cache for a full batch of the longest sequences, limited to a share of free memory.

    The size is enough for at least one such sequence, if that fits into memory. Otherwise sequences are shorter than
    the model's limit.
    """
    config = engine.checkpoint.config
    positions = (options.max_model_length or config.max_positions) + BLOCK_SIZE  # the last block may be almost empty
    sequence = position_bytes(config, engine.kv_cache_dtype) * positions
    on_gpu = engine.device.type == "cuda"
    states = options.max_batch_size * state_bytes(config, engine.kv_cache_dtype)
    free = torch.cuda.mem_get_info(engine.device)[0] if on_gpu else psutil.virtual_memory().available
    shared = max(0, min(options.max_batch_size * sequence, int(SPARE_MEMORY_SHARE * free) - states))
    return states + (max(sequence, shared) if sequence <= max(SMALL_CACHE, free - states) else shared)


class Server(uvicorn.Server):
    """A uvicorn server with limits on connections and without uvicorn's signal handling."""

    def __init__(self, state: State, connections: Connections | None = None) -> None:
        """connections: None for as many as the process may have."""
        super().__init__(
            uvicorn.Config(
                create_app(state),
                http=limited_protocol(connections or Connections()),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=ACCEPTED_AT_ONCE,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=LAST_BYTES_SECONDS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals: uvicorn would raise them again at the end, and the exit status would not be 0."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server with a longer listen queue: asyncio would use one value for queueing and for accepting."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)


class _Process:
    """One server from its socket to its end. Everything except loading and draining runs in the event loop."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        hosts = allowed_hosts(options.host, options.allowed_hosts)
        self._state = State(options.api_keys, hosts, options.request_timeout)
        self._server = Server(self._state)
        self._failure: BaseException | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._signals = Signals(self._pass_on)

    def run(self, listening: socket.socket, ready: Callable[[], None]) -> None:
        """Run until a signal ends the server. Raises as `serve` does."""
        with self._signals.handled():
            asyncio.run(self._run(listening, ready))
        if self._failure is not None:
            raise self._failure
        if self._signals.at_once:
            raise KeyboardInterrupt

    async def _run(self, listening: socket.socket, ready: Callable[[], None]) -> None:
        self._event_loop = asyncio.get_running_loop()
        if self._signals.count:  # the signal came before the event loop existed
            self._signalled()

        def load_and_tell() -> None:
            try:
                made: Service | BaseException = load(self._options)
            except BaseException as error:
                made = error
            self._in_event_loop(self._loaded, made, ready)

        # A daemon thread: a signal does not wait until a large model is loaded.
        threading.Thread(target=load_and_tell, name="load", daemon=True).start()
        try:
            await self._server.serve(sockets=[listening])
        finally:
            if self._state.loaded is not None:
                await asyncio.to_thread(self._state.loaded.close)

    def _in_event_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            if self._event_loop is not None:
                self._event_loop.call_soon_threadsafe(function, *arguments)

    def _pass_on(self) -> None:
        self._in_event_loop(self._signalled)

    def _loaded(self, made: Service | BaseException, ready: Callable[[], None]) -> None:
        if isinstance(made, BaseException):
            self._failure = made
            self._server.should_exit = True
            return
        self._state.loaded = made
        if self._state.phase == "loading":
            self._state.phase = "ready"
            ready()

    def _signalled(self) -> None:
        service = self._state.loaded
        if self._signals.at_once or service is None:
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
