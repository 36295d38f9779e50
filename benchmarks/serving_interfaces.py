"""All kinds of requests through all interfaces while the engine's thread fails: the last part of benchmarks/serving_soak.py.

The server runs the demo model with a chat template that takes tools and with a small cache, by benchmarks/faulty_server.py.
No request may be lost: each is answered, refused with 400 where that is due, left by its client, or ended by an injected
fault.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
from results import ROOT
from serving_mix import OUTCOMES, TEMPLATE, send_mix
from serving_process import at_rest, counted, server

from engine.checkpoint.model_directory import DEMO_DIRECTORY

FAULT_EVERY = 400
"""Calls of the model for decoding from one fault to the next."""
SMALL_CACHE = ("--max-model-len", "512", "--kv-cache-memory", "1.2MB")
"""Options of a cache for fewer requests than there are, so that some are preempted."""
MOST_GROWTH = 0.03
"""Maximum growth of resident memory from the first quarter to the end."""
WARM = 500
"""Requests after which memory must no longer grow. Fewer do not use every grammar and every length of a batch."""


@contextmanager
def model() -> Iterator[str]:
    """Yield the directory of a copy of the demo model with a chat template that takes tools."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "demo"
        shutil.copytree(DEMO_DIRECTORY, directory)
        (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        yield str(directory)


def interfaces(requests: int, concurrency: int, rounds: int, *options: str) -> dict[str, Any]:
    """Send so many requests in rounds. Returns counts of outcomes, losses, and each round's memory."""
    found: dict[str, Any] = {"interfaces": {}, "checked": {}, "losses": [], "rounds": []}
    totals = dict.fromkeys(OUTCOMES, 0)
    program = (str(ROOT / "benchmarks" / "faulty_server.py"), str(FAULT_EVERY))
    with model() as directory, server(*SMALL_CACHE, *options, model=directory, program=program) as (url, process):
        for number in range(rounds):
            count = requests * (number + 1) // rounds - requests * number // rounds
            tally = asyncio.run(send_mix(url, count, concurrency, number))
            for kept, new in (
                (totals, tally.outcomes),
                (found["interfaces"], tally.interfaces),
                (found["checked"], tally.checked),
            ):
                for name, value in new.items():
                    kept[name] = kept.get(name, 0) + value
            found["losses"] += tally.losses[: max(0, 20 - len(found["losses"]))]
            found["rounds"].append({**tally.outcomes, **_held_at_rest(url, process)})
            print(json.dumps(found["rounds"][-1]), flush=True)
        figures = counted(url)
        found["server"] = {name: figures[name] for name in ("request_success_total", "preemptions_total")}
    return found | {"sent": sum(totals.values()), "outcomes": totals}


def _held_at_rest(url: str, process: psutil.Process) -> dict[str, float]:
    resident, descriptors = at_rest(url, process)
    load = httpx2.get(f"{url}/v1/load", trust_env=False).json()
    going = load["running"] + load["waiting"]
    free = 1 - load["kv_cache_used_share"]
    return {"resident_bytes": resident, "descriptors": descriptors, "left_running": going, "cache_free_share": free}


def after_a_quarter(found: dict[str, Any]) -> dict[str, float]:
    """Return what the server held after the first quarter of the rounds."""
    held: dict[str, float] = found["rounds"][(len(found["rounds"]) - 1) // 4]
    return held


def broken_interfaces(found: dict[str, Any]) -> list[str]:
    """Return the checks that failed."""
    problems = [f"interfaces: {loss}" for loss in found["losses"]]
    quarter, end = after_a_quarter(found), found["rounds"][-1]
    if any(each["left_running"] for each in found["rounds"]):
        problems.append("interfaces: requests were still running at rest")
    if min(each["cache_free_share"] for each in found["rounds"]) < 1:
        problems.append(f"interfaces: blocks of the cache were not returned: {found['rounds']}")
    if end["resident_bytes"] > (1 + MOST_GROWTH) * quarter["resident_bytes"]:
        problems.append(
            f"interfaces: memory grew from {quarter['resident_bytes'] / 1e6:.0f} to {end['resident_bytes'] / 1e6:.0f} MB"
        )
    counts, ended = found["outcomes"], found["server"]["request_success_total"]
    begun = counts["answered"] + counts["faulted"]
    if not begun <= ended + counts["lost"] or not ended <= begun + counts["left"] + counts["lost"]:
        problems.append(f"interfaces: {ended:.0f} requests ended, and the clients count {counts}")
    if len(found["rounds"]) > 4 and not found["outcomes"]["faulted"]:
        problems.append("interfaces: no request met a fault")
    return problems


def interface_rows(found: dict[str, Any]) -> list[list[str]]:
    """Return rows of the table."""
    counts, checked = found["outcomes"], sum(found["checked"].values())
    held = {"after a quarter": after_a_quarter(found), "at the end": found["rounds"][-1]}
    return [
        ["requests of all kinds through all interfaces, with faults in the engine's thread: sent", f"{found['sent']:,}"],
        ["… answered", f"{counts['answered']:,}"],
        ["… of these complete, and checked against a schema, an expression or a forced call", f"{checked:,}"],
        ["… refused, as they must be", f"{counts['refused']:,}"],
        ["… left by their clients", f"{counts['left']:,}"],
        ["… ended by an injected fault", f"{counts['faulted']:,}"],
        ["… lost", str(counts["lost"])],
        ["… preempted, because the cache is small", f"{found['server']['preemptions_total']:,.0f}"],
        *([f"… resident memory {when}, MB", f"{own['resident_bytes'] / 1e6:.0f}"] for when, own in held.items()),
        *([f"… free share of the cache {when}", f"{own['cache_free_share']:.0%}"] for when, own in held.items()),
    ]
