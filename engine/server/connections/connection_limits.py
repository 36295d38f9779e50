"""Limits on the number of connections and on their times, which uvicorn's protocol lacks.

A connection is waiting while none of its complete requests is being answered: its headers or its body are arriving, it
is idle, or its client does not read the answer. If there is no room, a new connection replaces the one that has waited
longest, and unauthenticated connections are replaced first. Therefore any number of unfinished requests keeps no new
client out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import resource
from collections import Counter, defaultdict
from http import HTTPStatus
from itertools import chain
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.server.connections.access import LET_IN
from engine.server.errors import ApiError

HEADER_SECONDS = 10.0
"""Time limit for the headers, from the first byte of a request or from the connection."""
SEND_SECONDS = 60.0
"""Time that a client may leave its answer unread."""
MOST_CONNECTIONS = 4096
OWN_DESCRIPTORS = 96
"""File descriptors reserved for the process itself and for connections accepted but not yet counted."""
LEAST_CONNECTIONS = 16
SWEEP_SECONDS = 0.5
NETWORK_BITS = 64
"""Length of the prefix that identifies the owner of an IPv6 address: one owner has the whole network."""
FULL = "the server has its maximum number of connections, and is answering all of them; try again"
NOT_HTTP = "this is not a valid HTTP request; its first line and its headers, of at most 16 KB, must be those of HTTP/1.1"


class _Waiting:
    """Connections in the order in which they began to wait, unauthenticated ones before those that the gate has let in."""

    def __init__(self) -> None:
        self._strangers: dict[LimitedProtocol, None] = {}
        self._known: dict[LimitedProtocol, None] = {}

    def add(self, connection: LimitedProtocol) -> None:
        if connection.known:
            self._strangers.pop(connection, None)
            self._known.setdefault(connection)
        else:
            self._strangers.setdefault(connection)

    def remove(self, connection: LimitedProtocol) -> None:
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def first(self) -> LimitedProtocol | None:
        return next(chain(self._strangers, self._known), None)

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)


class Connections:
    """All connections of a server, with a list of the waiting ones."""

    def __init__(
        self,
        most: int | None = None,
        most_per_address: int | None = None,
        header_seconds: float = HEADER_SECONDS,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        """most: None for the number that the limit of open files allows. most_per_address: None for half of `most`."""
        self.most = most_connections() if most is None else most
        self.most_per_address = max(1, self.most // 2) if most_per_address is None else most_per_address
        self.header_seconds, self.send_seconds = header_seconds, send_seconds
        self._all: set[LimitedProtocol] = set()
        self._per_address: Counter[str] = Counter()
        self._waiting = _Waiting()
        self._waiting_of: defaultdict[str, _Waiting] = defaultdict(_Waiting)
        self._sweeping = False

    def admit(self, connection: LimitedProtocol) -> bool:
        """Count a new connection, which may replace a waiting one. Returns False if all others are being answered."""
        too_many_of_address = self._per_address[connection.address] >= self.most_per_address
        if too_many_of_address or len(self._all) >= self.most:
            oldest = (self._waiting_of[connection.address] if too_many_of_address else self._waiting).first()
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.drop()
        self._all.add(connection)
        self._per_address[connection.address] += 1
        self.wait(connection)
        if not self._sweeping:
            self._sweeping = True
            connection.loop.call_later(SWEEP_SECONDS, self._sweep, connection.loop)
        return True

    def leave(self, connection: LimitedProtocol) -> None:
        """Remove a connection that has ended or is about to end; ignored if it is not counted."""
        if connection not in self._all:
            return
        self.answer(connection)
        self._all.remove(connection)
        self._per_address[connection.address] -= 1
        if not self._per_address[connection.address]:
            del self._per_address[connection.address]
            self._waiting_of.pop(connection.address, None)

    def wait(self, connection: LimitedProtocol) -> None:
        """Mark a connection as waiting."""
        if connection in self._all:
            self._waiting.add(connection)
            self._waiting_of[connection.address].add(connection)

    def answer(self, connection: LimitedProtocol) -> None:
        """Mark a connection as being answered: it has a complete request."""
        if connection in self._all:
            self._waiting.remove(connection)
            self._waiting_of[connection.address].remove(connection)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        for connection in list(self._all):
            connection.check_time(loop.time())
        self._sweeping = bool(self._all)
        if self._sweeping:
            loop.call_later(SWEEP_SECONDS, self._sweep, loop)


class LimitedProtocol(H11Protocol):
    """One connection. It reports its state to `Connections`, and ends when its time limit is exceeded."""

    register: ClassVar[Connections]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.address = ""
        self.known = False
        """Whether the gate has let in a request of this connection, with a key if there are keys."""
        self._heading_since: float | None = None
        """Time at which the incomplete headers began; None if there are none."""
        self._stuck_since: float | None = None
        """Time at which the client was first seen not to read; None if it reads."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Callback of asyncio: the connection is open."""
        super().connection_made(transport)
        self.address = network(self.client[0]) if self.client else ""
        self._heading_since = self.loop.time()
        if not self.register.admit(self):
            self._refuse(ApiError(503, FULL, code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Callback of asyncio: the connection is closed."""
        self.register.leave(self)
        self._unset_keepalive_if_required()  # otherwise uvicorn's timer keeps this object alive after a reset by the client
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Callback of asyncio: bytes have arrived."""
        if self._heading_since is None and not self._has_headers():
            self._heading_since = self.loop.time()
        super().data_received(data)
        if self._has_headers() and not self.cycle.more_body and self.conn.trailing_data[0]:
            # Pipelining is refused: with hundreds of pipelined requests, a connection would always have one being
            # answered.
            self.cycle.keep_alive = False
        self._tell()

    def on_response_complete(self) -> None:
        """Callback of uvicorn: the answer is written, and a request that arrived meanwhile may be next."""
        super().on_response_complete()
        self._tell()

    def pause_writing(self) -> None:
        """Callback of asyncio: the client reads more slowly than the server writes."""
        super().pause_writing()
        self._tell()

    def resume_writing(self) -> None:
        """Callback of asyncio: the client has read enough for writing to continue."""
        super().resume_writing()
        self._tell()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, in place of uvicorn's answer, with an error object of this API."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(ApiError(400, NOT_HTTP))
        else:  # an answer has begun, so no other can follow
            self.transport.close()

    def shutdown(self) -> None:
        """Callback of uvicorn for each connection when the server ends."""
        if not self.transport.is_closing():
            super().shutdown()

    def drop(self) -> None:
        """Close the connection now; bytes that the client has not read are lost."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def check_time(self, now: float) -> None:
        """Close the connection if its time limit is exceeded."""
        stuck = self.flow.write_paused or self.transport.is_closing()  # closing: the client has not read all bytes
        self._stuck_since = (self._stuck_since or now) if stuck else None
        if self._stuck_since is not None:
            if now - self._stuck_since > self.register.send_seconds:
                self.transport.abort()
        elif self._heading_since is not None and now - self._heading_since > self.register.header_seconds:
            seconds = self.register.header_seconds
            self._refuse(ApiError(408, f"the headers were not complete within {seconds:g} seconds", code="request_timeout"))

    def _has_headers(self) -> bool:
        """Return whether there is a request with complete headers and an incomplete answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _tell(self) -> None:
        has_headers = self._has_headers()
        self.known = self.known or (self.scope is not None and LET_IN in self.scope["state"])
        if has_headers:
            self._heading_since = None
        if has_headers and not self.cycle.more_body and not self.flow.write_paused:
            self.register.answer(self)
        else:
            self.register.wait(self)

    def _refuse(self, error: ApiError) -> None:
        """Write an error response and close, unless another response has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            fields = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
            fields["connection"] = "close"
            head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(": ".join(f) for f in fields.items())]
            self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()


def limited_protocol(connections: Connections) -> type[asyncio.Protocol]:
    """Return the protocol class of a server with these connections."""
    return type("LimitedProtocol", (LimitedProtocol,), {"register": connections})


def most_connections() -> int:
    """Return the maximum number of connections: the limit of open files minus the files of the process itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_CONNECTIONS + OWN_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return min(MOST_CONNECTIONS, max(LEAST_CONNECTIONS, files - OWN_DESCRIPTORS))


def network(address: str) -> str:
    """Return the key by which connections are counted: an IPv4 address, or the network of an IPv6 address."""
    try:
        read = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(read, ipaddress.IPv4Address):
        return str(read)
    return str(read.ipv4_mapped or ipaddress.ip_network((int(read), NETWORK_BITS), strict=False))
