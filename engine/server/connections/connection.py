"""Middleware between the socket and the endpoints: hosts, keys, size and time limits, server phases, client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.connections.access import LET_IN, OPEN_PATHS, check_host, check_key, namespaces
from engine.server.errors import ApiError
from engine.server.interfaces.error_forms import error_body

MOST_BODY_BYTES = 8_000_000
MOST_DISCARDED_BYTES = 64_000_000
"""Bytes of a too large body that are read and discarded: a client that is still sending does not read the answer."""
BODY_SECONDS = 60.0
"""Time limit for the whole body to arrive."""
SMALL_BODY_BYTES = 65_536
MOST_BODY_BYTES_IN_ALL = 256_000_000
"""Limit on the bytes of all bodies that are not small, until their requests are answered."""
NAMESPACE = "namespace"
"""Name in a request's state of its namespace, which separates the clients of different keys."""
T = TypeVar("T")
Phase = Literal["loading", "ready", "draining"]
CLOSED = {
    "loading": "the model is being loaded; try again",
    "draining": "the server is shutting down and accepts no more requests; try another one",
}


class Gone(Exception):
    """The client disconnected before its answer."""


class RequestGate:
    """ASGI middleware that passes a request on or refuses it. An endpoint runs only after the whole body has arrived."""

    def __init__(
        self,
        app: ASGIApp,
        phase: Callable[[], Phase],
        api_keys: Sequence[str] = (),
        hosts: Collection[str] | None = None,
        secret: bytes = b"",
    ) -> None:
        """api_keys: accepted keys; empty for no access control. hosts: accepted host names; None for any.

        secret: that the namespaces of keys are derived with.
        """
        self._app, self._phase, self._hosts = app, phase, hosts
        self._keys = namespaces(api_keys, secret)
        self._room = MOST_BODY_BYTES_IN_ALL

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        taken = _Taken(self)
        try:
            self._check(scope)
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive, taken)
            self._check_phase(scope)  # the phase may have changed while the body arrived
        except (ApiError, TimeoutError) as error:
            taken.give_back()
            refused = _late() if isinstance(error, TimeoutError) else error
            await error_response(refused, scope["path"])(scope, receive, send)
            return
        except Gone:
            taken.give_back()
            return
        try:
            await self._app(scope, _replay(body, receive), send)
        finally:
            taken.give_back()

    def take(self, size: int) -> None:
        """Reserve bytes for a large body; a negative size frees them. Raises ApiError if the total would be too large."""
        if size > self._room:
            message = f"the server holds {MOST_BODY_BYTES_IN_ALL} bytes of large bodies, its maximum; try again"
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
    """Bytes that one body reserves of the gate's room for large bodies."""

    def __init__(self, gate: RequestGate) -> None:
        self._gate, self._bytes = gate, 0

    def grow(self, size: int) -> None:
        """Reserve room for a body that now has `size` bytes. Raises ApiError if all bodies together are too large."""
        if size > SMALL_BODY_BYTES:
            self._gate.take(size - self._bytes)
            self._bytes = size

    def give_back(self) -> None:
        """Free all reserved bytes; repeated calls have no effect."""
        self._gate.take(-self._bytes)
        self._bytes = 0


def _late() -> ApiError:
    return ApiError(
        408, f"the body was not complete within {BODY_SECONDS:g} seconds; send it faster", code="request_timeout"
    )


async def _body(receive: Receive, taken: _Taken) -> bytes:
    """Return the whole body. Raises ApiError for a too large body, with or without a true length header, and Gone."""
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
    """Return a `receive` that yields the body as one message, followed by the original messages."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def error_response(error: ApiError, path: str) -> Response:
    """Return the HTTP response for an error of a request for `path`."""
    return JSONResponse(error_body(error, path), error.status, error.headers)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise Gone if the client disconnects first."""
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
    """Server-sent events; `end` is called after the last event or when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._end = events, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response as an ASGI application."""
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
