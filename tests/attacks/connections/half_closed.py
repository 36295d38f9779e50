"""Clients that shut down their side in the middle of headers or of a body, or after a request, and keep the socket."""

import asyncio
from contextlib import suppress
from itertools import cycle

BEGINNINGS = (
    b"",
    b"GET /health HTTP/1.1\r\nhost: loc",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
)
KEPT = 100


async def attack(host: str, port: int) -> None:
    opened = []
    try:
        for beginning in cycle(BEGINNINGS):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                opened.append(writer)
                writer.write(beginning)
                writer.write_eof()
            if len(opened) > KEPT:
                opened.pop(0).close()
            await asyncio.sleep(0.01)
    finally:
        for each in opened:
            each.close()
