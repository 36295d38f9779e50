"""What stands between the socket and the endpoints: hosts, keys, sizes, times, states of the server, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.access import LET_IN, OPEN_PATHS, check_host, check_key
from engine.server.errors import ApiError

MOST_BODY_BYTES = 8_000_000
MOST_DISCARDED_BYTES = 64_000_000
"""Read and thrown away of a body that is too large: a client that is still sending does not read the answer."""
BODY_SECONDS = 60.0
"""For the whole of a body to arrive."""
SMALL_BODY_BYTES = 65_536
MOST_BODY_BYTES_IN_ALL = 256_000_000
"""Of all bodies that are larger than small ones, until their requests are answered."""
NAMESPACE = "namespace"
"""In the state of a request: whose it is, where several keys are kept apart."""
T = TypeVar("T")
Phase = Literal["loading", "ready", "draining"]
CLOSED = {
    "loading": "the model is being loaded; try again",
    "draining": "the server is about to end and takes no more requests; ask another one",
}


class Gone(Exception):
    """The client went away before its answer."""


class Gate:
    """Lets a request through to the endpoints, or answers for them. A body is whole before any endpoint sees it."""

    def __init__(
        self,
        app: ASGIApp,
        phase: Callable[[], Phase],
        api_keys: Sequence[str] = (),
        hosts: Collection[str] | None = None,
    ) -> None:
        """api_keys: any of them opens; none for everybody. hosts: the names that requests may be for; None for any."""
        self._app, self._phase, self._hosts = app, phase, hosts
        self._keys = [key.encode() for key in api_keys]
        self._room = MOST_BODY_BYTES_IN_ALL

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        taken = _Taken(self)
        try:
            self._check(scope)
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive, taken)
            self._check_phase(scope)  # it may have taken its time
        except (ApiError, TimeoutError) as error:
            taken.give_back()
            await error_response(_late() if isinstance(error, TimeoutError) else error)(scope, receive, send)
            return
        except Gone:
            taken.give_back()
            return
        try:
            await self._app(scope, _replay(body, receive), send)
        finally:
            taken.give_back()

    def take(self, size: int) -> None:
        """Count bytes of a large body; a negative size gives them back. Raises ApiError where there are too many."""
        if size > self._room:
            message = f"the server holds {MOST_BODY_BYTES_IN_ALL} bytes of large bodies, the most that it takes; try again"
            raise ApiError(503, message, code="too_many_large_bodies")
        self._room -= size

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        check_host(headers, self._hosts)
        state = scope.setdefault("state", {})
        state[NAMESPACE] = check_key(headers, scope["path"], self._keys)
        self._check_phase(scope)
        if scope["path"] not in OPEN_PATHS:
            state[LET_IN] = True

    def _check_phase(self, scope: Scope) -> None:
        phase = self._phase()
        if phase != "ready" and not (phase == "draining" and scope["path"] == "/metrics"):
            raise ApiError(503, CLOSED[phase], code=phase)


class _Taken:
    """What one body takes of the gate's room for large ones."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._bytes = gate, 0

    def grow(self, size: int) -> None:
        """The body has so many bytes now. Raises ApiError where that is too much beside all others."""
        if size > SMALL_BODY_BYTES:
            self._gate.take(size - self._bytes)
            self._bytes = size

    def give_back(self) -> None:
        """All of it; once is enough."""
        self._gate.take(-self._bytes)
        self._bytes = 0


def _late() -> ApiError:
    return ApiError(
        408, f"the body was not complete within {BODY_SECONDS:g} seconds; send it faster", code="request_timeout"
    )


async def _body(receive: Receive, taken: _Taken) -> bytes:
    """Raises ApiError for a body that is too large, whether or not its headers admit it, and Gone."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        size += len(message.get("body", b""))
        if size <= MOST_BODY_BYTES:
            taken.grow(size)
            parts.append(message.get("body", b""))
        else:
            taken.give_back()
            parts.clear()
        if size > MOST_DISCARDED_BYTES or not message.get("more_body", False):
            break
    if size > MOST_BODY_BYTES:
        raise ApiError(413, f"the body is larger than {MOST_BODY_BYTES} bytes; send less at once", code="request_too_large")
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever else comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def error_response(error: ApiError) -> Response:
    """What the client gets."""
    return JSONResponse(error.body(), error.status, error.headers)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises Gone when the client goes away first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events; `end` is called when the last was sent or the client went away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._end = events, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await while_connected(receive, self._send(send))
        except Gone:
            pass
        finally:
            self._end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
