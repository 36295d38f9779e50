"""Requests to another name, as a page sends them whose name was made to lead to this machine."""

import asyncio
from contextlib import suppress
from itertools import cycle

HOSTS = (
    b"evil.example",
    b"localhost.evil.example:8000",
    b"[::1",
    b"0.0.0.0",
    b"127.0.0.1@evil.example",
    b"",
    b"\xff",
    b"a" * 9000,
)


async def attack(host: str, port: int) -> None:
    for name in cycle(HOSTS):
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"GET /v1/models HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n" % name)
                answer = await reader.read(65536)
                assert answer.split(b" ")[1] in (b"400", b"421"), answer
            finally:
                writer.close()
        await asyncio.sleep(0.05)
