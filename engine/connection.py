"""What stands between the socket and the endpoints: keys, sizes, states of the server, and clients that go away."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Literal, TypeVar

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.openai_errors import ApiError

MOST_BODY_BYTES = 8_000_000
MOST_DISCARDED_BYTES = 64_000_000
"""Read and thrown away of a body that is too large: a client that is still sending does not read the answer."""
OPEN_PATHS = ("/", "/health")
"""Those that need no key."""
WRONG_KEY = "the API key is missing or wrong; send it as: Authorization: Bearer KEY"
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

    def __init__(self, app: ASGIApp, phase: Callable[[], Phase], api_key: str | None) -> None:
        self._app, self._phase = app, phase
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await _body(scope, receive)
            self._check_phase(scope)  # it may have taken its time
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        except Gone:
            return
        await self._app(scope, _replay(body, receive), send)

    def _check(self, scope: Scope) -> None:
        path = scope["path"]
        if self._key is not None and path not in OPEN_PATHS:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if not hmac.compare_digest(given.encode("latin-1"), self._key) or scheme.lower() != "bearer":
                raise ApiError(401, WRONG_KEY, code="invalid_api_key")
        self._check_phase(scope)

    def _check_phase(self, scope: Scope) -> None:
        phase = self._phase()
        if phase != "ready" and not (phase == "draining" and scope["path"] == "/metrics"):
            raise ApiError(503, CLOSED[phase], code=phase)


async def _body(scope: Scope, receive: Receive) -> bytes:
    """Raises ApiError for a body that is too large, whether or not its headers admit it, and Gone."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        size += len(message.get("body", b""))
        if size <= MOST_BODY_BYTES:
            parts.append(message.get("body", b""))
        else:
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
