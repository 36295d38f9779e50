"""The soak's clients call a request lost when its answer is missing, incomplete or wrong."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from serving_mix import DOORS, KINDS, Asking, Tally, asking, outcome

GOOD = '{"city_1": "Rome", "days": 3}'


def found(door: str, kind: str, answer: Any, stream: bool = False, status: int = 200, leave: int | None = None) -> str:
    """Return the outcome of a request that gets an answer, or a stream with these events."""
    asked = Asking(door, kind, {"stream": stream}, "city_1", leave, None)
    body = "".join(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n" for each in answer) if stream else ""

    def respond(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == DOORS[door]
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
    assert {(each.door, each.kind) for each in asked} == {(door, kind) for door, kinds in KINDS.items() for kind in kinds}
    assert any(each.leave_after for each in asked) and any(each.patience for each in asked)
