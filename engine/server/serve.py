"""The process of `compress serve`: it binds the socket, loads the model in a thread, and shuts down on signals.

SIGTERM lets running requests end and refuses new ones. A second SIGTERM, or SIGINT, ends the process at once, even if a
part of it hangs.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.server.options import ServeOptions

try:
    import uvicorn

    from engine.server.connections.access import allowed_hosts
    from engine.server.connections.connection_limits import Connections, limited_protocol
    from engine.server.server import Service, State, create_app
except ModuleNotFoundError as error:
    raise OptionError(
        f"serving needs the package {error.name}, which is not installed: pip install 'moe-compress[serve]'"
    ) from error

from engine.batching.disk_cache import DiskCache
from engine.batching.drafting import cache_sizes
from engine.batching.loop import PREFILL_CHUNK, EngineLoop
from engine.expert_cache.attach import MOST_TOKENS
from engine.passes.memory_budget import free_memory_bytes
from engine.server.connections.log_budget import limited_logging
from engine.server.model_memory import cache_bytes, left_for_cache, needed_bytes
from engine.server.model_names import check_local, model_names
from engine.server.models import Loading, Models
from engine.server.signals import Signals

BACKLOG = 2048
"""Length of the operating system's queue of connections that wait to be accepted."""
ACCEPTED_AT_ONCE = 16
"""Maximum number of connections accepted before the limits are checked again."""
LAST_BYTES_SECONDS = 10
"""Time for clients to read the end of their answers before connections are closed."""
LAST_WRITES_SECONDS = 1.0
"""Time for the KV cache to be written to disk when the server ends at once."""
KEEP_ALIVE_SECONDS = 75


def serve(options: ServeOptions, ready: Callable[[str, list[str]], None]) -> None:
    """Serve until a signal ends the server; `ready` gets the URL and the names of the models once requests are accepted.

    Raises OptionError if the address cannot be bound, any error of loading the model, and KeyboardInterrupt at SIGINT.
    """
    listening = bind(options.host, options.port)
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        with limited_logging():
            process = _Process(options)
            process.run(listening, lambda: ready(url, process.names))
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


def load(options: ServeOptions, limit: int | None = None, disk: DiskCache | None = None) -> Service:
    """Load the model and start its engine loop. Raises any error of opening, and OptionError if the cache does not fit.

    limit: maximum bytes of the model, from which a cache without a given size takes a share. disk: where blocks of the
    cache go that leave the memory; None for nowhere.
    """
    engine = Engine.open(
        options.model,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        skip_threshold=options.skip_threshold,
        skip_rule=options.skip_rule,
        kv_cache_dtype=options.kv_cache_dtype,
        images=options.images,
        memory_limit=options.memory_limit,
        miss_threshold=options.miss_threshold,
        load_mode=options.load_mode,
        draft=options.draft,
        draft_tokens=options.draft_tokens,
    )
    cache_bytes = options.kv_cache_bytes or default_kv_cache_bytes(engine, options, limit)
    if engine.expert_cache is not None:
        engine.expert_cache.reserve(cache_bytes + (disk.memory_bytes if disk is not None else 0))
    engine_loop = EngineLoop(
        engine,
        kv_cache_bytes=cache_bytes,
        max_batch_size=options.max_batch_size,
        max_queue=options.max_queue,
        max_model_length=options.max_model_length,
        disk=disk,
        prefill_chunk=PREFILL_CHUNK if engine.expert_cache is None else MOST_TOKENS,  # each piece reads all experts
    )
    engine_loop.start()
    service = Service(
        engine,
        engine_loop,
        model_name=options.name,
        skip_threshold=options.skip_threshold,
        max_queue=options.max_queue,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
    )
    service.reading.start()
    return service


def open_disk(options: ServeOptions) -> DiskCache | None:
    """Open the cache on disk; None without --kv-cache-disk. Raises OptionError for a directory that cannot be used."""
    if options.kv_cache_disk is None:
        return None
    try:
        place = options.kv_cache_directory or _user_caches() / "moe-compress" / "kv-cache"
    except RuntimeError as error:
        raise OptionError("this user has no home directory for --kv-cache-disk; give --kv-cache-directory") from error
    return DiskCache(place, options.kv_cache_disk)


def _user_caches() -> Path:
    """Return the user's cache directory. Raises RuntimeError for a user without a home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def models_of(options: ServeOptions, disk: DiskCache | None = None) -> Models[Service]:
    """Return the models of a server with several; none is loaded. Raises OptionError and CheckpointError.

    disk: as for `load`; all models share it.
    """
    check_local(options.models)
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError as error:  # Numba's own threads end the process when two engines compute at the same time
        raise OptionError("several models need OpenMP, which Numba does not find here; serve one model") from error
    limit = options.memory_limit
    return Models(
        Loading(
            names=lambda: model_names(options.models, options.models_dir),
            load=lambda name, model: load(options.of_one(name, model), limit, disk),
            needed=lambda name, model: needed_bytes(options.of_one(name, model), limit or 0),
            limit=limit,
        )
    )


def default_kv_cache_bytes(engine: Engine, options: ServeOptions, limit: int | None = None) -> int:
    """Return the size of a cache for a full batch of the longest sequences, limited to a share of free memory.

    limit: maximum bytes of the model with its weights.
    """
    on_gpu = engine.device.type == "cuda"
    free = torch.cuda.mem_get_info(engine.device)[0] if on_gpu else free_memory_bytes()
    if engine.expert_cache is not None:
        free = min(free, engine.expert_cache.spare_bytes)
    if limit is not None:
        free = min(free, left_for_cache(limit, engine.weights_bytes))
    positions = options.max_model_length or engine.checkpoint.config.max_positions
    return cache_bytes(cache_sizes(engine), positions, options.max_batch_size, free)


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
        self._disk = open_disk(options)
        if self._disk is not None:
            self._state.secret = self._disk.secret
        if options.is_several:
            self._state.models = models_of(options, self._disk)
        self._server = Server(self._state)
        self._failure: BaseException | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._signals = Signals(self._pass_on)

    @property
    def names(self) -> list[str]:
        """Names of the models."""
        return [self._options.name] if self._state.models is None else list(self._state.models.services)

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
                made: Service | BaseException = load(self._options, disk=self._disk)
            except BaseException as error:
                made = error
            self._in_event_loop(self._loaded, made, ready)

        if self._state.models is not None:
            self._state.names.start()
            self._begin(ready)
        else:
            # A daemon thread: a signal does not wait until a large model is loaded.
            threading.Thread(target=load_and_tell, name="load", daemon=True).start()
        try:
            await self._server.serve(sockets=[listening])
        finally:
            self._state.names.close()
            for service in self._state.services:
                await asyncio.to_thread(service.close)
            if self._disk is not None:
                await asyncio.to_thread(self._disk.close)

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
        self._begin(ready)

    def _begin(self, ready: Callable[[], None]) -> None:
        if self._state.phase == "loading":
            self._state.phase = "ready"
            ready()

    def _signalled(self) -> None:
        services, is_loading = self._state.services, self._state.models is None and self._state.loaded is None
        if self._signals.at_once or is_loading:
            self._server.should_exit = self._server.force_exit = True
            self._server.config.timeout_graceful_shutdown = 1
            if self._disk is not None:
                self._disk.hurry(LAST_WRITES_SECONDS)
            for service in services:
                threading.Thread(target=service.engine_loop.stop, daemon=True).start()
            return
        self._state.phase = "draining"
        if self._state.models is not None:
            self._state.models.refuse_arrivals()
        self._draining = asyncio.ensure_future(self._drain(services))

    async def _drain(self, services: list[Service]) -> None:
        for service in services:
            await asyncio.to_thread(service.engine_loop.drain, threading.TIMEOUT_MAX)
        self._server.should_exit = True
