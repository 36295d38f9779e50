"""Hundreds of requests at once on each connection, whose answers the client reads: one would have all turns."""

import asyncio
from contextlib import suppress

CONNECTIONS = 8
REQUESTS = 100


async def attack(host: str, port: int) -> None:
    async def one() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * REQUESTS)
                    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                    while await reader.read(65536):
                        pass
                finally:
                    writer.close()
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(one())
