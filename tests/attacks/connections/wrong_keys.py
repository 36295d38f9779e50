"""Requests with wrong keys, and bodies of megabytes behind them that nobody ought to keep."""

import asyncio
import random
from contextlib import suppress

CONNECTIONS = 4
BODY = b" " * 1_000_000


async def attack(host: str, port: int) -> None:
    chosen = random.Random(0)

    async def one() -> None:
        while True:
            key = bytes(chosen.choices(range(33, 127), k=chosen.randrange(1, 200)))
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(head + b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n" % (key, len(BODY)) + BODY)
                    await writer.drain()
                    await reader.read(65536)
                finally:
                    writer.close()
            await asyncio.sleep(0.25)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(one())
