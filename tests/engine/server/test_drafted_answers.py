"""A server with a draft gives the answers of one without, and says how many drafted tokens were kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from conftest import save_reference
from drafts_for_tests import save_pair
from packages_for_tests import needs_llguidance
from server_for_tests import served
from serving_for_tests import AlwaysOn
from tokenizers_for_tests import VOCABULARY, add_tokenizer

import cli
from engine.errors import OptionError
from engine.server.options import ServeOptions
from engine.server.serve import load
from engine.server.server import State

PROMPT = "def größer(a):"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@contextmanager
def server(pair: tuple[Path, Path], **options: Any) -> Iterator[str]:
    own = ServeOptions(models=(str(pair[0]),), kv_cache_bytes=4_000_000, max_model_length=128, device="cpu", **options)
    service = load(own)
    drafting = service.engine_loop._scheduler.drafting
    if drafting is not None:
        drafting.switch = AlwaysOn()
    with served(State(phase="ready", loaded=service)) as address:
        yield address
    service.close()


@pytest.fixture(scope="module")
def urls(pair: tuple[Path, Path]) -> Iterator[tuple[str, str]]:
    with server(pair) as plain, server(pair, draft=str(pair[1]), draft_tokens=3) as drafted:
        yield plain, drafted


def answer(url: str, path: str, body: dict[str, Any]) -> Any:
    response = httpx2.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def figures(url: str) -> dict[str, float]:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"temperature": 1.0, "seed": 4, "top_p": 0.9, "n": 3},
        {"stop": ["e", "5"], "echo": True},
        {"logit_bias": {"70": 5, "71": -100}, "presence_penalty": 0.4, "min_p": 0.01, "temperature": 0.8, "seed": 1},
        pytest.param({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
                     marks=needs_llguidance),
    ],
)  # fmt: skip
def test_answers_are_those_without_a_draft(urls: tuple[str, str], body: dict[str, Any]) -> None:
    whole = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 2} | body
    before = figures(urls[1])["compress_draft_accepted_tokens_total"]
    plain, drafted = (answer(url, "completions", whole)["choices"] for url in urls)
    assert figures(urls[1])["compress_draft_accepted_tokens_total"] > before
    for own, other in zip(drafted, plain, strict=True):
        scores, expected = own.pop("logprobs"), other.pop("logprobs")
        assert own == other
        assert (scores["tokens"], scores["text_offset"]) == (expected["tokens"], expected["text_offset"])
        assert scores["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=1e-4)


def test_a_stream_is_the_whole_answer_in_pieces(urls: tuple[str, str]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "temperature": 0}
    whole = answer(urls[0], "chat/completions", body)["choices"][0]["message"]["content"]
    counts = []
    for url in urls:
        with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}, timeout=60) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        pieces = [piece for line in lines if (piece := content_of(line))]
        assert "".join(pieces) == whole
        counts.append(len(pieces))
    assert counts[1] < counts[0], "a step with kept tokens is one event"


def content_of(line: str) -> str:
    return str(json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or "")


def test_metrics_have_the_accepted_share(urls: tuple[str, str]) -> None:
    answer(urls[1], "completions", {"prompt": PROMPT, "max_tokens": 30})
    after, plain = figures(urls[1]), figures(urls[0])
    drafted, kept = after["compress_draft_tokens_total"], after["compress_draft_accepted_tokens_total"]
    assert 0 < kept < drafted and after["compress_draft_acceptance_rate"] == pytest.approx(kept / drafted)
    assert after["compress_draft_on"] == 1 and not any("draft" in name for name in plain)
    assert after["compress_weights_bytes"] == 2 * plain["compress_weights_bytes"]
    assert after["compress_kv_cache_bytes"] == pytest.approx(plain["compress_kv_cache_bytes"], rel=0.01)
    load = httpx2.get(f"{urls[1]}/v1/load").json()
    assert load["draft"]["accepted_tokens"] == kept and load["draft"]["is_on"]
    assert httpx2.get(f"{urls[0]}/v1/load").json()["draft"] is None


def test_drafts_that_a_server_cannot_have(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = map(str, pair)
    with pytest.raises(OptionError, match="server of one model"):
        ServeOptions(models=(target, draft), draft=draft)
    with pytest.raises(OptionError, match="--draft mtp is for one prompt at a time"):
        ServeOptions(models=(target,), draft="mtp")
    save_reference("qwen3_next", tmp_path, vocab_size=VOCABULARY)
    add_tokenizer(tmp_path)
    for model, own in ((str(tmp_path), draft), (target, str(tmp_path))):
        result = CliRunner().invoke(cli.main, ["serve", model, "--draft", own, "--port", "0"])
        assert result.exit_code == 1 and "layers with a state cannot undo tokens" in result.output
    with pytest.raises(OptionError, match="draft-tokens is 64"):
        ServeOptions(models=(target,), draft=draft, draft_tokens=64)
