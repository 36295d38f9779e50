"""Attack a running server with everything in tests/attacks, at a steady pace, until it is stopped.

    python benchmarks/serving_attacks.py URL [--bodies 2] [--seconds 2]

The script sends so many bodies of tests/attacks/requests a second, one after another, and runs each file of
tests/attacks/connections for so many seconds. SIGTERM ends it. Then it prints one JSON object: how often each
body got which status, and which attacks on connections failed by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # before `tests`, which has folders of the same names

import httpx2
from attacks_for_tests import attack_files, load_attack

MOST_AT_ONCE = 16
"""Maximum number of bodies without an answer, because an attacker has limits too."""


def modules(folder: str) -> list[ModuleType]:
    """Return the attacks of a folder of tests/attacks."""
    return [load_attack(path) for path in attack_files(folder)]


def bodies() -> dict[str, tuple[str, bytes]]:
    """Return the path and body of each attack by its name."""
    return {module.__name__: (module.PATH, module.body()) for module in modules("requests")}


async def send_bodies(url: str, pace: float, statuses: defaultdict[str, Counter[str]]) -> None:
    """Send one body after another, so many a second, until cancelled."""
    if not pace:
        await asyncio.Event().wait()
    room, sending = asyncio.Semaphore(MOST_AT_ONCE), set()
    head = {"content-type": "application/json"}
    async with httpx2.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:

        async def send(name: str, path: str, body: bytes) -> None:
            async with room:
                try:
                    status = str((await client.post(path, content=body, headers=head)).status_code)
                except httpx2.HTTPError as error:
                    status = type(error).__name__
            statuses[name][status] += 1

        for name, (path, body) in cycle(bodies().items()):
            task = asyncio.create_task(send(name, path, body))
            sending.add(task)
            task.add_done_callback(sending.discard)
            await asyncio.sleep(1 / pace)


async def use_sockets(url: str, seconds: float, ended: Counter[str]) -> None:
    """Run one attack on connections after another, each for so long, until cancelled."""
    address = urlsplit(url)
    for module in cycle(modules("connections")):
        try:
            await asyncio.wait_for(module.attack(str(address.hostname), int(address.port or 80)), seconds)
        except TimeoutError:
            ended[module.__name__] += 0
        except Exception as error:
            ended[f"{module.__name__}: {error!r:.200}"] += 1
            await asyncio.sleep(seconds)


async def leave(url: str) -> None:
    """Request a stream and disconnect in the middle, once a second, until cancelled."""
    body = {"prompt": "import os\n", "max_tokens": 200, "stream": True, "ignore_eos": True}
    async with httpx2.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        while True:
            with suppress(httpx2.HTTPError):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line:
                            break
            await asyncio.sleep(1)


async def attack(url: str, pace: float, seconds: float) -> dict[str, Any]:
    """Run all attacks until SIGTERM, and return the outcome."""
    statuses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    ended: Counter[str] = Counter()
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    print("attacking", flush=True)
    started = time.monotonic()
    tasks = [
        asyncio.create_task(each)
        for each in (send_bodies(url, pace, statuses), use_sockets(url, seconds, ended), leave(url))
    ]
    await told.wait()
    failures = [repr(task.exception()) for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "seconds": time.monotonic() - started,
        "statuses": {name: dict(counts) for name, counts in statuses.items()},
        "connections": dict(ended),
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--bodies", type=float, default=2.0, help="Of tests/attacks/requests, a second.")
    parser.add_argument("--seconds", type=float, default=2.0, help="For each file of tests/attacks/connections.")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(attack(arguments.url, arguments.bodies, arguments.seconds))), flush=True)


if __name__ == "__main__":
    main()
