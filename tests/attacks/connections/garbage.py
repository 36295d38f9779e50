"""Bytes that are no HTTP, before a request, in its body or after it: each would be a line of the log, or a traceback."""

import asyncio
import random
from contextlib import suppress
from itertools import cycle

CHUNKED = (
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)
BEGINNINGS = (
    b"",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET /health HTTP/1.1\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    CHUNKED,
    CHUNKED + b"1\r\n{\r\n",
)


async def attack(host: str, port: int) -> None:
    chosen = random.Random(0)
    for beginning in cycle(BEGINNINGS):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(beginning + chosen.randbytes(chosen.randrange(2000)) + b"\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
            finally:
                writer.close()
