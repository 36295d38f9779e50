"""A server in a process of its own, and what it holds and counts, for benchmarks/serving_soak.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2
import psutil
from results import ROOT

SETTLING_SECONDS = 30
OPEN_FILES = 512
"""The server's limit, which the attackers would exceed."""


@contextmanager
def server(
    *options: str, model: str = "demo", program: tuple[str, ...] = ("-m", "cli")
) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the URL of `compress serve` in a process of its own. It must exit cleanly when it is stopped."""
    command = [sys.executable, *program, "serve", model, "--port", "0", "--json", *options]
    command = ["sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "sh", *command]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    try:
        yield json.loads(started.stdout.readline())["url"], psutil.Process(started.pid)
        started.terminate()
        code = started.wait(60)
        assert code == 0, f"the server ended with {code}"
    finally:
        started.kill()


def counted(url: str) -> dict[str, float]:
    """Return the server's own counts."""
    text = httpx2.get(f"{url}/metrics", trust_env=False).text
    found = re.findall(r"^compress_(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, flags=re.M)
    totals: Counter[str] = Counter()
    for name, value in found:
        totals[name] += float(value)
    return dict(totals)


def held(process: psutil.Process) -> tuple[int, int]:
    """Return resident bytes and descriptors of the server and of the processes that it has started."""
    resident = descriptors = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            resident += each.memory_info().rss
            descriptors += each.num_fds()
    return resident, descriptors


def at_rest(url: str, process: psutil.Process) -> tuple[int, int]:
    """Return resident bytes and descriptors once nothing is running and no more connections are being closed."""
    before = held(process)
    for _ in range(SETTLING_SECONDS):
        time.sleep(1)
        load = httpx2.get(f"{url}/v1/load", trust_env=False).json()
        now = held(process)
        if not load["running"] and not load["waiting"] and now[1] == before[1]:
            return now
        before = now
    return before
