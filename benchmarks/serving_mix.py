"""Requests of all kinds through all interfaces, and the check of each answer, for benchmarks/serving_soak.py.

Every request ends in one of OUTCOMES. An answer that follows a schema, an expression or a forced call is checked if it is
complete. Clients that leave close the connection, in the middle of a stream or while they wait.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

INTERFACES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
KINDS = {
    "chat": ("free", "tools", "forced", "schema", "regex", "bad schema", "no call"),
    "completions": ("free", "schema", "regex", "bad schema"),
    "responses": ("free", "tools", "forced", "schema", "bad schema", "no call"),
    "messages": ("free", "tools", "forced", "schema", "bad schema", "no call"),
}
REFUSED = ("bad schema", "no call")
"""Kinds of requests that must get 400."""
REFUSED_SHARE = 0.1
OUTCOMES = ("answered", "refused", "left", "faulted", "lost")
PROMPTS = ("def read(path):", "How warm is it?", "import os", "class Point:", "List three colors.")
REGEX = r"[a-f]{2,6}-[0-9]{1,3}"
CITIES = ["Rome", "Oslo", "Köln"]
NEW_TOKENS = 64
LEAVES, LEAVES_EARLY = 0.1, 0.03
"""Shares of clients that leave a stream in the middle, and that leave within PATIENCE seconds."""
PATIENCE = 0.2
MARKS = ("injected fault", "NaN or infinite")
"""Texts of errors that faults in the engine's thread cause."""
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}assistant:"
)


@dataclass(frozen=True)
class Asking:
    """One request."""

    interface: str
    kind: str
    body: dict[str, Any]
    name: str
    """Name of the schema's first field."""
    leave_after: int | None
    """Events of a stream after which the client leaves."""
    patience: float | None
    """Seconds after which the client leaves whatever it has."""


@dataclass
class Heard:
    """The content of an answer."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """The name and the arguments of each call."""
    ended: str = ""
    """The reason of the end."""
    error: str = ""


@dataclass
class Tally:
    """Counts of outcomes."""

    outcomes: Counter[str] = field(default_factory=Counter)
    interfaces: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    """Complete answers that had to follow something, by kind."""
    losses: list[str] = field(default_factory=list)


def schema_of(name: str) -> dict[str, Any]:
    """Return the schema of an object with a city and a number. name: that of the field of the city."""
    fields = {name: {"enum": CITIES}, "days": {"type": "integer", "minimum": 0, "maximum": 9}}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def asking(model: str, rng: random.Random) -> Asking:
    """Return a random request."""
    interface = rng.choice(list(INTERFACES))
    is_refused = rng.random() < REFUSED_SHARE
    kind = rng.choice([kind for kind in KINDS[interface] if (kind in REFUSED) == is_refused])
    stream = rng.random() < 0.5
    name = f"city_{rng.randrange(200)}"
    body: dict[str, Any] = {"model": model, "stream": stream, "temperature": rng.choice((0, 1)), "seed": rng.randrange(1000)}
    if interface == "messages":
        del body["seed"]
    body["max_output_tokens" if interface == "responses" else "max_tokens"] = NEW_TOKENS
    schema = {"type": "nothing"} if kind == "bad schema" else schema_of(name)
    prompt = rng.choice(PROMPTS)
    body |= {"prompt": prompt} if interface == "completions" else _turns(interface, prompt, kind)
    if kind in ("tools", "forced"):
        body |= _tools(interface, schema, kind == "forced")
    elif kind in ("schema", "bad schema"):
        body |= _format(interface, schema)
    elif kind == "regex":
        body |= {"structured_outputs": {"regex": REGEX}}
    leaves = rng.random()
    after = rng.randint(1, 12) if stream and leaves < LEAVES else None
    return Asking(interface, kind, body, name, after, rng.random() * PATIENCE if leaves > 1 - LEAVES_EARLY else None)


def _turns(interface: str, prompt: str, kind: str) -> dict[str, Any]:
    turns: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    if kind == "no call":  # the result of a call that nobody made
        result: dict[str, dict[str, Any]] = {
            "chat": {"role": "tool", "tool_call_id": "call_1", "content": "21"},
            "responses": {"type": "function_call_output", "call_id": "call_1", "output": "21"},
            "messages": {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "21"}]},
        }
        turns.append(result[interface])
    return {"input" if interface == "responses" else "messages": turns}


def _tools(interface: str, schema: dict[str, Any], forced: bool) -> dict[str, Any]:
    if interface == "messages":
        tool = {"name": "weather", "input_schema": schema}
        return {"tools": [tool], "tool_choice": {"type": "any" if forced else "auto"}}
    function = {"name": "weather", "parameters": schema}
    given = {"type": "function", "function": function} if interface == "chat" else {"type": "function", **function}
    return {"tools": [given], "tool_choice": "required" if forced else "auto"}


def _format(interface: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "own", "schema": schema}}},
        "completions": {"structured_outputs": {"json": schema}},
        "responses": {"text": {"format": {"type": "json_schema", "name": "own", "schema": schema}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }[interface]


# Answers


def hear(interface: str, answer: dict[str, Any], heard: Heard) -> None:
    """Take over a whole answer."""
    if interface == "completions":
        heard.text, heard.ended = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
    elif interface == "chat":
        (choice,) = answer["choices"]
        message = choice["message"]
        heard.text, heard.ended = message["content"] or "", choice["finish_reason"]
        heard.calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or ()]
    elif interface == "responses":
        items = answer["output"]
        heard.text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
        heard.calls = [[item["name"], item["arguments"]] for item in items if item["type"] == "function_call"]
        heard.ended = "length" if answer["status"] == "incomplete" else "stop"
    else:
        blocks = answer["content"]
        heard.text = "".join(block["text"] for block in blocks if block["type"] == "text")
        heard.calls = [[block["name"], json.dumps(block["input"])] for block in blocks if block["type"] == "tool_use"]
        heard.ended = "length" if answer["stop_reason"] == "max_tokens" else "stop"


def hear_event(interface: str, event: dict[str, Any], heard: Heard) -> bool:
    """Take over an event of a stream. Returns whether it is the last one."""
    kind = event.get("type")
    if "error" in event and (kind in (None, "error") or interface in ("chat", "completions")):
        heard.error = json.dumps(event["error"], ensure_ascii=False)
    elif kind in ("response.completed", "response.incomplete"):
        hear(interface, event["response"], heard)
    elif kind == "response.failed":
        heard.error = json.dumps(event["response"]["error"], ensure_ascii=False)
    elif kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
        heard.calls.append([event["content_block"]["name"], ""])
    elif kind == "content_block_delta":
        heard.text += event["delta"].get("text", "")
        if "partial_json" in event["delta"]:
            heard.calls[-1][1] += event["delta"]["partial_json"]
    elif kind == "message_delta":
        heard.ended = "length" if event["delta"]["stop_reason"] == "max_tokens" else "stop"
    elif kind is None:
        for choice in event["choices"]:
            _hear_choice(choice, heard)
    return kind in ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")


def _hear_choice(choice: dict[str, Any], heard: Heard) -> None:
    delta = choice.get("delta", choice)
    heard.text += delta.get("content") or delta.get("text") or ""
    for part in delta.get("tool_calls") or ():
        if part["index"] == len(heard.calls):
            heard.calls.append([part["function"]["name"], ""])
        heard.calls[part["index"]][1] += part["function"].get("arguments") or ""
    heard.ended = choice.get("finish_reason") or heard.ended


def problem(asked: Asking, heard: Heard) -> str | None:
    """Return what is wrong with a complete answer: an empty text for nothing, None for an answer that is free."""
    if heard.ended == "length" or asked.kind in ("free", "tools"):
        return None
    if asked.kind == "regex":
        return "" if re.fullmatch(REGEX, heard.text) else f"{heard.text!r} does not follow {REGEX}"
    if asked.kind == "forced" and [name for name, _ in heard.calls] != ["weather"] * max(1, len(heard.calls)):
        return f"the calls are {heard.calls}"
    for text in [arguments for _, arguments in heard.calls] if asked.kind == "forced" else [heard.text]:
        try:
            value = json.loads(text)
        except ValueError:
            return f"{text!r} is no JSON"
        if set(value) != {asked.name, "days"} or value[asked.name] not in CITIES or value["days"] not in range(10):
            return f"{text} does not follow its schema"
    return ""


async def send(client: httpx2.AsyncClient, asked: Asking) -> tuple[int, Heard, bool]:
    """Return the status, the answer, and whether the client left before its end."""
    heard = Heard()
    async with client.stream("POST", INTERFACES[asked.interface], json=asked.body) as answer:
        if answer.status_code != 200:
            heard.error = (await answer.aread()).decode()
            return answer.status_code, heard, False
        if not asked.body["stream"]:
            hear(asked.interface, json.loads(await answer.aread()), heard)
            return 200, heard, False
        events = 0
        async for line in answer.aiter_lines():
            if line == "data: [DONE]" or (
                line.startswith("data: ") and hear_event(asked.interface, json.loads(line.removeprefix("data: ")), heard)
            ):
                return 200, heard, False
            events += line.startswith("data: ")
            if asked.leave_after is not None and events >= asked.leave_after:
                return 200, heard, True
    heard.error = heard.error or "the stream had no end"
    return 200, heard, False


async def outcome(client: httpx2.AsyncClient, asked: Asking, tally: Tally) -> str:
    """Send one request. Returns its outcome, and a description of what was lost after a colon."""
    try:
        status, heard, left = await asyncio.wait_for(send(client, asked), asked.patience)
    except TimeoutError:
        return "left"
    except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        return f"lost: {type(error).__name__}: {error}"
    if left:
        return "left"
    if any(mark in heard.error for mark in MARKS):
        return "faulted"
    if asked.kind in REFUSED:
        return "refused" if status == 400 else f"lost: {status} where 400 is due {heard.error[:300]}"
    if status != 200 or heard.error or not heard.ended:
        return f"lost: {status} {heard.error[:300] or 'no reason of the end'}"
    wrong = problem(asked, heard)
    if wrong is not None:
        tally.checked[asked.kind] += 1
    return f"lost: {wrong}" if wrong else "answered"


async def send_mix(url: str, count: int, concurrency: int, seed: int) -> Tally:
    """Send so many random requests through all interfaces, so many at once."""
    rng, tally = random.Random(seed), Tally()
    async with httpx2.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        left = iter([asking(model, rng) for _ in range(count)])

        async def work() -> None:
            for asked in left:
                found = await outcome(client, asked, tally)
                tally.outcomes[found.partition(":")[0]] += 1
                tally.interfaces[asked.interface] += 1
                if found.startswith("lost"):
                    tally.losses.append(
                        f"{asked.interface} {asked.kind} {'stream' if asked.body['stream'] else 'whole'}: {found}"
                    )

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return tally
