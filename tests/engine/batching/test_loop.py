"""The engine's thread: from submit to the last update, with a full queue, a drain, a stop and a step that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import save_reference
from packages_for_tests import needs_llguidance
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from engine.batching.loop import EngineLoop
from engine.batching.request import Request, Update
from engine.errors import BusyError, OptionError
from engine.generation.generate import Engine
from engine.generation.grammar_matcher import Grammars, Matcher

PROMPT = (40, 41, 42, 43)
GRAMMAR = 'start: "yes" | "no"'


class Listener:
    """Records its updates. Others can wait for the end."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.threads: set[str] = set()
        self._ended = threading.Event()

    def __call__(self, update: Update) -> None:
        self.updates.append(update)
        self.threads.add(threading.current_thread().name)
        if update.finish_reason:
            self._ended.set()

    def end(self) -> str:
        assert self._ended.wait(60)
        return self.updates[-1].finish_reason

    def first(self) -> None:
        deadline = time.monotonic() + 60
        while not self.updates:
            assert time.monotonic() < deadline
            time.sleep(0.002)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("model")
    save_reference("mixtral", path, vocab_size=VOCABULARY, max_position_embeddings=4096)
    add_tokenizer(path)
    return Engine.open(path, device="cpu")


@pytest.fixture
def loops(engine: Engine) -> Iterator[Any]:
    """Yield a function that makes loops, and stop them at the end."""
    made: list[EngineLoop] = []

    def make(start: bool = True, **options: Any) -> EngineLoop:
        loop = EngineLoop(engine, **{"kv_cache_bytes": 8 << 20} | options)
        made.append(loop)
        if start:
            loop.start()
        return loop

    yield make
    for loop in made:
        loop.stop()


def endless(tokens: int = 4000) -> Request:
    return Request(PROMPT, tokens, ignore_end_tokens=True)


def test_requests_of_many_threads_get_what_generate_gives(engine: Engine, loops: Any) -> None:
    texts = ["one", "two two", "three three three", "größer"]
    expected = [engine.generate(text, max_new_tokens=25)[0] for text in texts]
    loop = loops(max_batch_size=3)
    listeners = [Listener() for _ in range(12)]

    def submit(number: int) -> None:
        loop.submit(Request(tuple(engine.encode(texts[number % 4])), 25), listeners[number])

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for number, listener in enumerate(listeners):
        assert listener.end() == expected[number % 4].finish_reason
        assert "".join(update.text for update in listener.updates) == expected[number % 4].text
        assert listener.threads == {"engine"}
    load = loop.load()
    assert load.generated_tokens == 3 * sum(each.generated_tokens for each in expected)
    assert (load.running, load.waiting, load.kv_cache_used_share) == (0, 0, 0.0)
    assert load.tokens_per_second > 0 and load.weights_bytes == engine.weights_bytes and load.resident_bytes > 0
    assert 0 < load.kv_cache_bytes <= 8 << 20


def test_the_queue_has_a_limit(loops: Any) -> None:
    loop = loops(start=False, max_queue=2)
    listeners = [Listener() for _ in range(2)]
    numbers = [loop.submit(Request(PROMPT, 3), listener) for listener in listeners]
    assert numbers[0] != numbers[1] and loop.load().waiting == 2
    with pytest.raises(BusyError, match="2 requests are waiting"):
        loop.submit(Request(PROMPT, 3), Listener())
    loop.start()
    assert [listener.end() for listener in listeners] == ["length", "length"]
    loop.submit(Request(PROMPT, 3), Listener())


def test_cancelling(loops: Any) -> None:
    loop = loops(max_batch_size=1)
    running, waiting, after = Listener(), Listener(), Listener()
    first, second = loop.submit(endless(), running), loop.submit(endless(), waiting)
    running.first()
    third = loop.submit(Request(PROMPT, 3), after)
    loop.cancel(second)
    assert waiting.end() == "cancelled" and len(waiting.updates) == 1
    loop.cancel(first)
    assert running.end() == "cancelled" and after.end() == "length"
    for number in (first, third, 999):
        loop.cancel(number)
    assert loop.drain(60) and loop.load().kv_cache_used_share == 0
    assert [sum(bool(update.finish_reason) for update in each.updates) for each in (running, waiting, after)] == [1, 1, 1]


def test_drain_waits_for_the_last_and_takes_no_more(loops: Any) -> None:
    loop = loops()
    listener = Listener()
    number = loop.submit(endless(), listener)
    listener.first()
    assert not loop.drain(0.01)
    with pytest.raises(BusyError, match="shutting down"):
        loop.submit(Request(PROMPT, 3), Listener())
    loop.cancel(number)
    assert loop.drain(60) and listener.end() == "cancelled"


@pytest.mark.parametrize("started", [True, False])
def test_stop_tells_everybody(started: bool, loops: Any) -> None:
    loop = loops(start=started, max_batch_size=1)
    listeners = [Listener() for _ in range(3)]
    for listener in listeners:
        loop.submit(endless(), listener)
    if started:
        listeners[0].first()
    loop.stop()
    assert [listener.end() for listener in listeners] == ["cancelled"] * 3
    assert loop.load().running == loop.load().waiting == 0
    with pytest.raises(BusyError):
        loop.submit(Request(PROMPT, 3), Listener())
    loop.stop()


def test_a_failing_step_is_told_and_the_next_request_served(
    engine: Engine, loops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loops()
    own, fails = engine.decoder.last_logits, threading.Event()

    def last_logits(*arguments: Any) -> torch.Tensor:
        if fails.is_set():
            fails.clear()
            raise MemoryError("no room\nfor 3 GB")
        return own(*arguments)

    monkeypatch.setattr(engine.decoder, "last_logits", last_logits)
    listener = Listener()
    loop.submit(endless(), listener)
    listener.first()
    fails.set()
    assert listener.end() == "error" and "MemoryError: no room for 3 GB" in listener.updates[-1].error
    again = Listener()
    loop.submit(Request(PROMPT, 5, ignore_end_tokens=True), again)
    assert again.end() == "length"


def test_a_listener_that_raises_ends_its_request_alone(loops: Any) -> None:
    loop = loops()
    calls: list[Update] = []

    def raises(update: Update) -> None:
        calls.append(update)
        raise ValueError("nobody is there")

    good = Listener()
    loop.submit(endless(), raises)
    loop.submit(Request(PROMPT, 20, ignore_end_tokens=True), good)
    assert good.end() == "length" and loop.drain(60) and len(calls) == 1


def test_with_nothing_to_do_it_sleeps(loops: Any) -> None:
    loop = loops()
    listener = Listener()
    loop.submit(Request(PROMPT, 3), listener)
    listener.end()
    assert loop.drain(60)
    steps = []
    loop._scheduler.step = lambda: steps.append(1)
    time.sleep(0.05)
    assert not steps


def test_what_can_never_fit_is_refused_at_once(engine: Engine, loops: Any) -> None:
    loop = loops(max_model_length=64)
    assert loop.max_model_length == 64
    with pytest.raises(OptionError, match="4 tokens and 61 new ones make 65, and 64"):
        loop.submit(Request(PROMPT, 61), Listener())
    with pytest.raises(OptionError, match="holds"):
        EngineLoop(engine, kv_cache_bytes=1 << 16, max_model_length=4096)
    with pytest.raises(OptionError, match="queue"):
        EngineLoop(engine, kv_cache_bytes=1 << 20, max_queue=0)


@needs_llguidance
def test_a_grammar_is_compiled_while_others_run(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free requests overtake one whose grammar is still being compiled; it counts as waiting, and runs afterwards."""
    compiled = Grammars.matcher
    begun, go = threading.Event(), threading.Event()

    def slowly(self: Grammars, grammar: str) -> Matcher:
        begun.set()
        assert go.wait(60)
        return compiled(self, grammar)

    monkeypatch.setattr(Grammars, "matcher", slowly)
    loop = loops(max_queue=1)
    held, free = Listener(), Listener()
    loop.submit(Request(PROMPT, 20, grammar=GRAMMAR), held)
    assert begun.wait(60)
    with pytest.raises(BusyError):
        loop.submit(Request(PROMPT, 3), free)
    assert loop.load().waiting == 1 and not held.updates
    loop._max_queue = 2
    loop.submit(Request(PROMPT, 3), free)
    assert free.end() == "length" and not held.updates
    go.set()
    assert held.end() == "stop" and held.threads == {"engine"}
    assert "".join(update.text for update in held.updates) in ("yes", "no")


def test_a_request_is_cancelled_while_its_grammar_is_compiled(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(Grammars, "matcher", lambda self, grammar: go.wait(60))
    loop = loops()
    held = Listener()
    loop.cancel(loop.submit(Request(PROMPT, 20, grammar=GRAMMAR), held))
    assert held.end() == "cancelled"
    go.set()
    assert loop.drain(60) and len(held.updates) == 1
    again = Listener()
    with pytest.raises(BusyError):
        loop.submit(Request(PROMPT, 3), again)


def test_a_failure_to_compile_ends_its_request_alone(
    loops: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Grammars, grammar: str) -> Matcher:
        raise RuntimeError("broken")

    monkeypatch.setattr(Grammars, "matcher", fail)
    loop = loops()
    held, free = Listener(), Listener()
    loop.submit(Request(PROMPT, 20, grammar=GRAMMAR), held)
    loop.submit(Request(PROMPT, 3), free)
    assert held.end() == "error" and "grammar" in held.updates[-1].error and free.end() == "length"
    assert "broken" in caplog.text
