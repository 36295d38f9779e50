"""Several models in one server: their names, which of them are loaded, who uses them, and which leaves for another one.

Everything runs in the event loop, except loading and closing, which have threads. One model is loaded at a time.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from engine.errors import CompressError
from engine.passes import heap
from engine.server.errors import ApiError, unknown_model

ROOM_SECONDS = 30.0
"""Time for which a model waits until others have no requests and can leave for it."""
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Held(Protocol):
    """A loaded model."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that count for the limit."""

    def close(self) -> None:
        """End its threads and processes."""


Loaded = TypeVar("Loaded", bound=Held)


@dataclass(frozen=True)
class Loading(Generic[Loaded]):
    """How models are found and loaded. The functions are called in threads and may raise CompressError."""

    names: Callable[[], Mapping[str, str]]
    """Returns the models by name, the default one first."""
    load: Callable[[str, str], Loaded]
    """Loads a model, given its name and where it is."""
    needed: Callable[[str, str], int]
    """Returns the bytes that a model will need, without loading it. Called only with a limit."""
    limit: int | None = None
    """Maximum bytes of all loaded models together."""


@dataclass
class _Entry(Generic[Loaded]):
    """One model that is served."""

    name: str
    model: str
    service: Loaded | None = None
    arriving: asyncio.Future[None] | None = None
    """Ends when the model is loaded, or cannot be; None while nobody loads it."""
    users: int = 0
    """Requests that use the model, or wait for it."""
    last_used: int = 0


class Taken(Generic[Loaded]):
    """The use of a model by one request. The model stays loaded until `give_back`."""

    def __init__(self, service: Loaded, end: Callable[[], None]) -> None:
        self.service = service
        self._end: Callable[[], None] | None = end

    def give_back(self) -> None:
        """End the use. Further calls have no effect."""
        if self._end is not None:
            end, self._end = self._end, None
            end()


class Models(Generic[Loaded]):
    """The models of one server. Not for several threads."""

    def __init__(self, loading: Loading[Loaded]) -> None:
        """Raises CompressError if the models cannot be found."""
        self._loading = loading
        self._entries = {name: _Entry[Loaded](name, model) for name, model in loading.names().items()}
        self._turn = asyncio.Lock()
        """Held by the one that loads."""
        self._freed = asyncio.Event()
        self._clock = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    @property
    def services(self) -> dict[str, Loaded | None]:
        """The models by name; None for a model that is not loaded."""
        return {name: entry.service for name, entry in self._entries.items()}

    @property
    def loaded(self) -> dict[str, Loaded]:
        """The loaded models by name."""
        return {name: service for name, service in self.services.items() if service is not None}

    async def refresh(self) -> None:
        """Look again which models there are. A model that is gone stays while it is loaded or awaited."""
        try:
            named = await _in_thread(self._loading.names)
        except CompressError:
            _LOG.exception("the models cannot be listed; those that were found before stay")
            return
        kept = {name: each for name, each in self._entries.items() if each.service or each.arriving or each.users}
        found = {name: self._entries.get(name) or _Entry[Loaded](name, model) for name, model in named.items()}
        self._entries = found | kept

    async def find(self, name: str | None) -> tuple[str, Loaded | None]:
        """Return a model's name, and the model if it is loaded; None for the first model. Raises ApiError for others."""
        entry = await self._entry(name)
        return entry.name, entry.service

    async def take(self, name: str | None, deadline: float | None) -> Taken[Loaded]:
        """Return a model for one request, loaded if necessary; None for the first model.

        `deadline`: time of the event loop's clock. A caller that leaves does not end the loading. Raises ApiError for an
        unknown name, and for a model that cannot be loaded or has no room.
        """
        entry = await self._entry(name)
        entry.users += 1
        try:
            while entry.service is None:
                arriving = entry.arriving or self._begin(entry)
                async with asyncio.timeout_at(deadline):
                    await asyncio.shield(arriving)
        except TimeoutError as error:
            self._release(entry)
            message = f"the model {entry.name!r:.80} was not loaded within the time of a request; try again"
            raise ApiError(504, message, code="timeout") from error
        except BaseException:
            self._release(entry)
            raise
        entry.last_used = next(self._clock)
        return Taken(entry.service, lambda: self._release(entry))

    def refuse_arrivals(self) -> None:
        """Load no more, and refuse the requests that wait for a model."""
        self._draining = True
        for entry in self._entries.values():
            if entry.arriving is not None and not entry.arriving.done():
                entry.arriving.set_exception(_shutting_down())

    async def _entry(self, name: str | None) -> _Entry[Loaded]:
        if name is not None and name not in self._entries:
            await self.refresh()
        if not self._entries or (name is not None and name not in self._entries):
            raise unknown_model(name or "", list(self._entries))
        return next(iter(self._entries.values())) if name is None else self._entries[name]

    def _release(self, entry: _Entry[Loaded]) -> None:
        entry.users -= 1
        self._freed.set()

    def _begin(self, entry: _Entry[Loaded]) -> asyncio.Future[None]:
        if self._draining:
            raise _shutting_down()
        entry.arriving = arriving = asyncio.get_running_loop().create_future()
        arriving.add_done_callback(lambda ended: ended.exception())  # all that wait for it may have left
        task = asyncio.create_task(self._arrive(entry, arriving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return arriving

    async def _arrive(self, entry: _Entry[Loaded], arriving: asyncio.Future[None]) -> None:
        """Load a model, and tell those that wait for it."""
        failure: ApiError | None = None
        try:
            async with self._turn:
                await self._load(entry)
        except ApiError as error:
            failure = error
        except Exception as error:
            failure = _not_loaded(entry, error)
        entry.arriving = None  # a failed model is tried again by the next request
        self._freed.set()
        if arriving.done():
            return
        if failure is None:
            arriving.set_result(None)
        else:
            arriving.set_exception(failure)

    async def _load(self, entry: _Entry[Loaded]) -> None:
        loading = self._loading
        if loading.limit is not None:
            await self._make_room(entry.name, await _in_thread(lambda: loading.needed(entry.name, entry.model)))
        service = await _in_thread(lambda: loading.load(entry.name, entry.model))
        try:
            await self._make_room(entry.name, service.memory_bytes)  # what was needed may be more than what was expected
        except BaseException:
            held = [service]
            del service
            await _in_thread(lambda: _close(held))
            raise
        entry.service, entry.last_used = service, next(self._clock)

    async def _make_room(self, name: str, needed: int) -> None:
        """Close models until so many bytes are free, the least recently used ones first, and none that has requests.

        Raises ApiError if the limit is too small, or if the others have requests for too long.
        """
        limit = self._loading.limit
        if limit is None:
            return
        if needed > limit:
            message = (
                f"the model {name!r:.80} needs {_size(needed)}, and --memory-limit is {_size(limit)}; ask for another one, "
                "or start the server with a higher --memory-limit, or a smaller --kv-cache-memory"
            )
            raise ApiError(400, message, param="model", code="model_too_large")
        until = asyncio.get_running_loop().time() + ROOM_SECONDS
        while sum(each.memory_bytes for each in self.loaded.values()) + needed > limit:
            self._freed.clear()
            idle = [each for each in self._entries.values() if each.service is not None and not each.users]
            if idle:
                await self._leave(min(idle, key=lambda each: each.last_used))
                continue
            try:
                async with asyncio.timeout_at(until):
                    await self._freed.wait()
            except TimeoutError as error:
                message = f"the other models are busy, and there is no room for {name!r:.80} beside them; try again later"
                raise ApiError(503, message, code="models_busy") from error

    async def _leave(self, entry: _Entry[Loaded]) -> None:
        """Close a model and give its memory back. Requests that name it from now on load it again."""
        held, entry.service = [entry.service], None
        await _in_thread(lambda: _close(held))


def _close(held: list[Any]) -> None:
    """Close the only model of a list, and give its memory back: the list must have the last reference."""
    held.pop().close()
    gc.collect()  # an engine and its loop refer to each other
    heap.give_back()


def _size(count: int) -> str:
    return f"{count / 1e9:.2f}GB"


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down and loads no more models; try another one", code="draining")


def _not_loaded(entry: _Entry[Any], error: Exception) -> ApiError:
    """Return the error for a model that cannot be loaded, without the path of the model."""
    if isinstance(error, CompressError):
        reason = " ".join(str(error).split()).removeprefix(f"{entry.model}: ").replace(entry.model, entry.name)
    else:
        _LOG.error("the model %s cannot be loaded", entry.name, exc_info=error)
        reason = "the server's log has the reason"
    return ApiError(503, f"the model {entry.name!r:.80} cannot be loaded: {reason}", code="model_not_loaded")


async def _in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work` in a thread that does not keep the process alive: loading may take minutes."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it from now on

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="models", daemon=True).start()
    return await asyncio.wrap_future(future)
