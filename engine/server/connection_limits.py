"""How many connections there may be and how long each may take: uvicorn's protocol with limits that it lacks.

A connection waits while no complete request of it is being answered: its headers or its body are on their way, it is idle,
or its client does not read what it is sent. Where there is no room, a new connection takes the place of the one that has
waited longest, of strangers as long as there are any. So unfinished requests, however many, keep nobody out.
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

from engine.server.access import LET_IN
from engine.server.errors import ApiError

HEADER_SECONDS = 10.0
"""From the first byte of a request, or from the connection, to the end of its headers."""
SEND_SECONDS = 60.0
"""That a client may leave its answer unread."""
MOST_CONNECTIONS = 4096
OWN_DESCRIPTORS = 96
"""Files and pipes of the process itself, and connections that are accepted and not yet counted."""
LEAST_CONNECTIONS = 16
SWEEP_SECONDS = 0.5
NETWORK_BITS = 64
"""The part of an IPv6 address that tells owners apart: one owner has all the rest."""
FULL = "the server has as many connections as it takes, and answers all of them; try again"
NOT_HTTP = "this is not a valid HTTP request; its first line and its headers, of at most 16 KB, have to be those of HTTP/1.1"


class _Waiting:
    """Connections in the order in which they began to wait, strangers before those that the gate has let in."""

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
    """All connections of a server, and which of them wait."""

    def __init__(
        self,
        most: int | None = None,
        most_per_address: int | None = None,
        header_seconds: float = HEADER_SECONDS,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        """most: None for what the limit of open files allows. most_per_address: None for half of that."""
        self.most = most_connections() if most is None else most
        self.most_per_address = max(1, self.most // 2) if most_per_address is None else most_per_address
        self.header_seconds, self.send_seconds = header_seconds, send_seconds
        self._all: set[LimitedProtocol] = set()
        self._per_address: Counter[str] = Counter()
        self._waiting = _Waiting()
        self._waiting_of: defaultdict[str, _Waiting] = defaultdict(_Waiting)
        self._sweeping = False

    def admit(self, connection: LimitedProtocol) -> bool:
        """Count a new connection, which may cost another one its place; False where every one is being answered."""
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
        """It has ended, or is about to; nothing happens to one that is not counted."""
        if connection not in self._all:
            return
        self.answer(connection)
        self._all.remove(connection)
        self._per_address[connection.address] -= 1
        if not self._per_address[connection.address]:
            del self._per_address[connection.address]
            self._waiting_of.pop(connection.address, None)

    def wait(self, connection: LimitedProtocol) -> None:
        """It waits from now on, or goes on waiting."""
        if connection in self._all:
            self._waiting.add(connection)
            self._waiting_of[connection.address].add(connection)

    def answer(self, connection: LimitedProtocol) -> None:
        """It has a complete request, which is being answered."""
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
    """One connection. It keeps `Connections` informed, and ends when its time is over."""

    register: ClassVar[Connections]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.address = ""
        self.known = False
        """The gate has let a request of it in, with a key where there are keys."""
        self._heading_since: float | None = None
        """When the headers began that are not complete."""
        self._stuck_since: float | None = None
        """When it was first seen that the client reads nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's."""
        super().connection_made(transport)
        self.address = network(self.client[0]) if self.client else ""
        self._heading_since = self.loop.time()
        if not self.register.admit(self):
            self._refuse(ApiError(503, FULL, code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        self.register.leave(self)
        self._unset_keepalive_if_required()  # uvicorn leaves the timer, and so all of this, where the client has reset it
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        if self._heading_since is None and not self._has_headers():
            self._heading_since = self.loop.time()
        super().data_received(data)
        if self._has_headers() and not self.cycle.more_body and self.conn.trailing_data[0]:
            # Pipelined: with hundreds of requests at once each connection would always have one that is being answered.
            self.cycle.keep_alive = False
        self._tell()

    def on_response_complete(self) -> None:
        """uvicorn's: the answer is written, and a request that came meanwhile may be next."""
        super().on_response_complete()
        self._tell()

    def pause_writing(self) -> None:
        """asyncio's: the client reads more slowly than it is answered."""
        super().pause_writing()
        self._tell()

    def resume_writing(self) -> None:
        """asyncio's."""
        super().resume_writing()
        self._tell()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, for bytes that are not HTTP; here in the form of all errors."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(ApiError(400, NOT_HTTP))
        else:  # an answer has begun, and there can be no other
            self.transport.close()

    def shutdown(self) -> None:
        """uvicorn's, for each connection when the server ends."""
        if not self.transport.is_closing():
            super().shutdown()

    def drop(self) -> None:
        """End it now; what the client has not read by then is lost."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def check_time(self, now: float) -> None:
        """End it where its time is over."""
        stuck = self.flow.write_paused or self.transport.is_closing()  # the latter with bytes that nobody fetches
        self._stuck_since = (self._stuck_since or now) if stuck else None
        if self._stuck_since is not None:
            if now - self._stuck_since > self.register.send_seconds:
                self.transport.abort()
        elif self._heading_since is not None and now - self._heading_since > self.register.header_seconds:
            seconds = self.register.header_seconds
            self._refuse(ApiError(408, f"the headers were not complete within {seconds:g} seconds", code="request_timeout"))

    def _has_headers(self) -> bool:
        """Whether there is a request whose headers are complete and whose answer is not."""
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
        """Write an answer of our own and close. Only where no other has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            fields = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
            fields["connection"] = "close"
            head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(": ".join(f) for f in fields.items())]
            self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()


def limited_protocol(connections: Connections) -> type[asyncio.Protocol]:
    """The protocol of a server with these connections."""
    return type("LimitedProtocol", (LimitedProtocol,), {"register": connections})


def most_connections() -> int:
    """How many the process may have: its limit of open files less what it needs itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_CONNECTIONS + OWN_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return min(MOST_CONNECTIONS, max(LEAST_CONNECTIONS, files - OWN_DESCRIPTORS))


def network(address: str) -> str:
    """Whose connections are counted together: an IPv4 address, or the network of an IPv6 address."""
    try:
        read = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(read, ipaddress.IPv4Address):
        return str(read)
    return str(read.ipv4_mapped or ipaddress.ip_network((int(read), NETWORK_BITS), strict=False))
