"""The process that reads bodies: it equals transformers, and no tokenizer or template blocks the server."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_for_tests import process, wait_for
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from transformers import AutoTokenizer, ByT5Tokenizer

from engine.checkpoint.chat_template import render
from engine.errors import BusyError, OptionError
from engine.server.errors import ApiError
from engine.server.reading import reading_pool
from engine.server.reading.body_reader import BodyReader, ReadingSettings
from engine.server.reading.reading_pool import ReadingPool
from engine.server.reading.reading_process import unpack_tokens
from engine.server.reading.text_reader import TextReader, TokenizerSettings, tokenizer_settings

SAID = [{"role": "user", "content": "größer"}, {"role": "assistant", "content": "b", "tool_calls": None}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}{{ messages | tojson }}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Collect no garbage during a test: torch's callbacks for collected objects fail in the middle of a deep recursion."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settings(made: Any, directory: Path, **changes: Any) -> ReadingSettings:
    own = replace(tokenizer_settings(made, directory, VOCABULARY), **changes)
    return ReadingSettings(own, model_name="tiny", max_model_length=128, max_queue=16, most_skip_threshold=0.0)


@contextmanager
def pool(asked: ReadingSettings, seconds: float = 10.0) -> Iterator[ReadingPool]:
    made = ReadingPool(asked.to_json, seconds)
    try:
        yield made
    finally:
        made.close()


def ask(reading: ReadingPool, body: Any, path: str = "/v1/completions", deadline: float | None = None) -> Any:
    return asyncio.run(reading.read(path, json.dumps(body).encode(), deadline))


def chat(reading: ReadingPool) -> Any:
    return ask(reading, {"messages": [{"role": "user", "content": "a"}]}, "/v1/chat/completions")


def prompts(frame: Any) -> list[list[int]]:
    header, tokens = frame
    return unpack_tokens(tokens, header["counts"])


def changed(tokenizer: Any, change: Callable[[dict[str, Any]], Any]) -> str:
    """Return tokenizer.json with one change."""
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    change(values)
    return json.dumps(values)


# Reading


def test_texts_are_read_as_transformers_reads_them(tokenizer: Any, directory: Path) -> None:
    texts = TextReader(settings(tokenizer, directory, chat_template=TEMPLATE).tokenizer)
    for text in ("größer als €5", "", "<s> a </s>", "a" * 300):
        for special in (True, False):
            assert texts.encode(text, special) == tokenizer(text, add_special_tokens=special)["input_ids"]
        ids = tokenizer(text)["input_ids"]
        assert texts.text(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    theirs = tokenizer.apply_chat_template(SAID, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
    assert texts.conversation(SAID) == theirs
    assert texts.conversation_ids(theirs) == tokenizer(theirs, add_special_tokens=False)["input_ids"]
    assert texts.longest_token_bytes == max(len(token.encode()) for token in tokenizer.get_vocab())


def test_a_tokenizer_that_only_transformers_reads(tmp_path: Path) -> None:
    own = ByT5Tokenizer(extra_ids=0)
    own.save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")  # the loader needs to see a vocabulary, which the tokenizer's files lack
    made = tokenizer_settings(own, tmp_path, len(own))
    assert made.tokenizer is None
    texts = TextReader(made)
    assert texts.encode("größer") == own("größer")["input_ids"] and texts.text(own("größer")["input_ids"]) == "größer"


def test_a_body_is_read_in_the_process_as_in_this_one(tokenizer: Any, directory: Path) -> None:
    body = {"prompt": ["ab", "größer"], "n": 2, "max_tokens": 3, "stop": "x", "seed": -1, "echo": True, "logprobs": 1}
    own = settings(tokenizer, directory)
    here = BodyReader(own).read("/v1/completions", json.dumps(body).encode())
    assert not isinstance(here, dict)
    with pool(own) as reading:
        header, tokens = ask(reading, body)
        assert unpack_tokens(tokens, header["counts"]) == [list(ids) for ids in here.prompts]
        assert header["read"] == json.loads(json.dumps(vars(here) | {"prompts": []}))
        assert here.echoes == ["ab", "größer"] and here.seed == 2**63 - 1 and here.request["prompt_logprobs"]
        _, answer = ask(reading, {"tokens": list(here.prompts[1])}, "/detokenize")
        assert json.loads(answer) == {"prompt": "größer"}


# Refusals, and requests after them


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOP, "takes longer than 0.5 s"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ 10.0 ** 1000 }}", "out of range"),
        ("{{ 10 ** 5000 }}", "4300"),
        ("{{ 'a' * 10 ** 13 }}", "MemoryError"),
        ("{{ messages[7].content.x.y }}", "no element"),
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{% for", "template"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ '\\ud800' }}", "surrogate"),
        ("{{ none() }}", "not callable"),
    ],
)
def test_a_template_is_a_program_with_limits(template: str, said: str, without_collection: None) -> None:
    with pytest.raises(OptionError, match=f"the model's chat template .*{said}") as caught:
        render(template, SAID, {})
    assert "\n" not in str(caught.value)
    assert render("{{ messages[0].content }}", SAID, {}) == "größer", "and the next one is rendered"


def test_a_conversation_that_its_template_refuses_is_400(tokenizer: Any, directory: Path) -> None:
    with pool(settings(tokenizer, directory, chat_template=LOOP)) as reading:
        with pytest.raises(ApiError, match=r"takes longer than 0\.5 s") as caught:
            chat(reading)
        assert caught.value.status == 400
        assert prompts(ask(reading, {"prompt": "ab"})) == [tokenizer("ab")["input_ids"]]


def test_a_tokenizer_that_does_not_end_is_ended(tokenizer: Any, directory: Path) -> None:
    bomb = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 4096}
    pattern = {"type": "Sequence", "normalizers": [bomb] * 3}
    own = settings(tokenizer, directory, tokenizer=changed(tokenizer, lambda values: values.update(normalizer=pattern)))
    with pool(own, seconds=1.0) as reading:
        assert len(prompts(ask(reading, {"prompt": "xyz"}))[0]) >= 3
        with pytest.raises(ApiError, match="takes longer than 1 seconds to read") as caught:
            ask(reading, {"prompt": "a"})
        assert caught.value.status == 400
        assert len(prompts(ask(reading, {"prompt": "xyz"}))[0]) >= 3


def test_a_tokenizer_that_ends_its_process(tokenizer: Any, directory: Path) -> None:
    """The tokenizers library aborts if memory is exhausted."""
    bomb = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 2_000_000}
    own = settings(tokenizer, directory, tokenizer=changed(tokenizer, lambda values: values.update(normalizer=bomb)))
    with pool(own) as reading:
        with pytest.raises(ApiError, match="exceeds the memory limit") as caught:
            ask(reading, {"prompt": "a" * 100})
        assert caught.value.status == 400
        assert len(prompts(ask(reading, {"prompt": "xyz"}))[0]) >= 3


def test_a_tokenizer_that_panics(tokenizer: Any, directory: Path) -> None:
    """The tokenizers library gives up on an expression with too many attempts, and raises no subclass of Exception."""
    pattern = {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b"}
    own = settings(tokenizer, directory, tokenizer=changed(tokenizer, lambda values: values.update(normalizer=pattern)))
    with pool(own) as reading:
        with pytest.raises(ApiError, match="the tokenizer fails on this text") as caught:
            ask(reading, {"prompt": "a" * 100 + "!"})
        assert caught.value.status == 400


def test_the_time_of_a_request_counts_while_it_is_read(tokenizer: Any, directory: Path) -> None:
    with pool(settings(tokenizer, directory)) as reading:
        reading.start()
        os.kill(child(reading), signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            ask(reading, {"prompt": "ab"}, deadline=time.monotonic() + 0.2)


def test_small_bodies_do_not_wait_for_large_ones(tokenizer: Any, directory: Path) -> None:
    with pool(settings(tokenizer, directory)) as reading:

        async def both() -> Any:
            large = asyncio.ensure_future(reading.read("/tokenize", json.dumps({"prompt": "a" * 100_000}).encode()))
            await asyncio.sleep(0)
            wait_for(lambda: reading._large._process._process is not None)
            os.kill(reading._large._process._process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
            small = await reading.read("/tokenize", b'{"prompt": "ab"}')
            os.kill(reading._large._process._process.pid, signal.SIGCONT)  # type: ignore[union-attr]
            with pytest.raises(ApiError, match="prompt has 100000 bytes"):
                await large
            return small

        assert json.loads(asyncio.run(both())[1])["count"] == len(tokenizer("ab")["input_ids"])


def test_more_than_may_wait_is_told_to_come_back(tokenizer: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_pool, "MOST_WAITING_BYTES", 20)
    with pool(settings(tokenizer, directory)) as reading:
        assert ask(reading, {"prompt": "ab"})
        with pytest.raises(BusyError, match="large bodies"):
            ask(reading, {"prompt": "a" * 100})


def child(reading: ReadingPool) -> int:
    wait_for(lambda: reading._small._process._process is not None)
    running = reading._small._process._process
    assert running is not None
    return running.pid


# The process itself


@pytest.mark.slow
def test_the_process_ends_with_the_server_and_has_no_key(directory: Path) -> None:
    with process("demo", COMPRESS_API_KEY="sesame") as (server, _):
        wait_for(lambda: psutil.Process(server.pid).children())
        (child,) = psutil.Process(server.pid).children()
        wait_for(lambda: "engine.server.reading.reading_process" in child.cmdline())
        assert "COMPRESS_API_KEY" not in child.environ()
        server.kill()
        server.wait()
        wait_for(lambda: not child.is_running())


def test_settings_survive_the_way_to_the_process(tokenizer: Any, directory: Path) -> None:
    own = settings(tokenizer, directory, chat_template="größer", special_tokens={"bos_token": "<s>"})
    assert ReadingSettings.of_json(own.to_json()) == own and isinstance(own.tokenizer, TokenizerSettings)
