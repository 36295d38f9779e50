"""The soak's clients call a request lost when its answer is missing, incomplete or wrong."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import httpx2
import pytest
from serving_interfaces import broken_interfaces
from serving_mix import INTERFACES, KINDS, Asking, Tally, asking, outcome

GOOD = '{"city_1": "Rome", "days": 3}'


def found(interface: str, kind: str, answer: Any, stream: bool = False, status: int = 200, leave: int | None = None) -> str:
    """Return the outcome of a request that gets an answer, or a stream with these events."""
    asked = Asking(interface, kind, {"stream": stream}, "city_1", leave, None)
    body = "".join(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n" for each in answer) if stream else ""

    def respond(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == INTERFACES[interface]
        return httpx2.Response(status, content=body or json.dumps(answer))

    async def ask() -> str:
        async with httpx2.AsyncClient(base_url="http://x", transport=httpx2.MockTransport(respond)) as client:
            return await outcome(client, asked, Tally())

    return asyncio.run(ask())


def chat(text: str, *calls: str, end: str = "stop") -> dict[str, Any]:
    made = [{"function": {"name": "weather", "arguments": arguments}} for arguments in calls]
    return {"choices": [{"message": {"content": text, "tool_calls": made}, "finish_reason": end}]}


def chunks(text: str, end: str | None = "stop") -> list[Any]:
    pieces = [{"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]} for piece in text]
    return [*pieces, {"choices": [{"index": 0, "delta": {}, "finish_reason": end}]}]


@pytest.mark.parametrize(
    ("kind", "answer", "expected"),
    [
        ("free", chat("a"), "answered"),
        ("free", chat("a", end=""), "lost: 200 no reason of the end"),
        ("schema", chat(GOOD), "answered"),
        ("schema", chat(GOOD[:-1], end="length"), "answered"),
        ("schema", chat(GOOD[:-1]), "lost: .* no JSON"),
        ("schema", chat(GOOD.replace("Rome", "Bonn")), "lost: .* does not follow its schema"),
        ("regex", chat("abc-12"), "answered"),
        ("regex", chat("abc-12 "), "lost: .* does not follow"),
        ("forced", chat("", GOOD, GOOD), "answered"),
        ("forced", chat(""), "lost: the calls are"),
        ("forced", chat("", GOOD, "{}"), "lost: {} does not follow"),
        ("bad schema", chat("a"), "lost: 200 where 400 is due"),
    ],
)
def test_whole_answers(kind: str, answer: Any, expected: str) -> None:
    assert re.match(expected, found("chat", kind, answer))


def test_streams() -> None:
    whole = [*chunks(GOOD), "[DONE]"]
    assert found("chat", "schema", whole, stream=True) == "answered"
    assert found("chat", "schema", whole[:-1], stream=True) == "lost: 200 the stream had no end"
    assert found("chat", "schema", [*chunks(GOOD[1:]), "[DONE]"], stream=True).startswith("lost: ")
    assert found("chat", "schema", whole, stream=True, leave=3) == "left"
    broken = [*chunks(GOOD, None)[:-1], {"error": {"message": "the engine failed (RuntimeError: injected fault)"}}, "[DONE]"]
    assert found("chat", "schema", broken, stream=True) == "faulted"
    assert found("messages", "free", [{"type": "error", "error": {"message": "other"}}], stream=True).startswith("lost: ")


def test_statuses() -> None:
    refusal = {"error": {"message": "no"}}
    assert found("chat", "no call", refusal, status=400) == "refused"
    assert found("chat", "no call", refusal, status=500).startswith("lost: 500 where 400 is due")
    assert found("chat", "free", refusal, status=400).startswith("lost: 400")
    assert found("chat", "free", {"error": {"message": "injected fault"}}, status=500) == "faulted"


def test_every_kind_is_asked() -> None:
    rng = random.Random(0)
    asked = [asking("m", rng) for _ in range(2000)]
    assert {(each.interface, each.kind) for each in asked} == {
        (interface, kind) for interface, kinds in KINDS.items() for kind in kinds
    }
    assert any(each.leave_after for each in asked) and any(each.patience for each in asked)


def sent(ended: float = 90.0, lost: int = 0, last: dict[str, float] | None = None) -> dict[str, Any]:
    """Return figures of 2,000 requests in eight rounds, of which the last one ended with other values than the rest."""
    held = {"resident_bytes": 100.0, "descriptors": 9, "left_running": 0, "cache_free_share": 1.0}
    counts = {"answered": 80, "faulted": 5, "refused": 1905, "left": 10 - lost, "lost": lost}
    figures = {"request_success_total": ended, "preemptions_total": 0.0}
    rounds = [held] * 7 + [held | (last or {})]
    return {"rounds": rounds, "outcomes": counts, "sent": 2000, "server": figures, "losses": ["one"] * lost}


def test_broken_promises_of_the_interfaces_are_found() -> None:
    assert broken_interfaces(sent()) == [] == broken_interfaces(sent(last={"resident_bytes": 102.0}))
    for figures, said in (
        (sent(lost=1), "one"),
        (sent(ended=84.0), "84 requests ended"),
        (sent(ended=96.0), "96 requests ended"),
        (sent(last={"resident_bytes": 104.0}), "memory grew"),
        (sent(last={"cache_free_share": 0.99}), "blocks of the cache"),
        (sent(last={"left_running": 1}), "still running"),
    ):
        (problem,) = broken_interfaces(figures)
        assert said in problem
