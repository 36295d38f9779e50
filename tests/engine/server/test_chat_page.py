"""The page of a server in a real browser: it continues a text, answers a chat, updates figures, and asks for a key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_for_tests import CHROMIUM, Browser
from server_for_tests import scripted_state, served, wait_for

from engine.generation.generate import Engine
from engine.server.reading_pool import ReadingPool
from engine.server.server import State

SOURCE = Path(__file__).resolve().parents[3] / "engine" / "server" / "chat_page.html"
ANSWER = "an answer, <b>in pieces</b>"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture
def state(tiny_engine: Engine, reading_pool: ReadingPool) -> State:
    return scripted_state(tiny_engine, reading_pool, ANSWER, seconds=0.01)


def say(browser: Browser, text: str) -> None:
    browser.value(f"document.getElementById('box').value = {text!r}; document.getElementById('go').click()")


def wait_until_ready(browser: Browser, button: str) -> None:
    """Wait until the page knows the model, because its button is disabled before."""
    browser.wait_for(f"!document.getElementById('go').disabled && document.getElementById('go').textContent === {button!r}")


def shown(browser: Browser, selector: str) -> Any:
    return browser.value(f"Array.from(document.querySelectorAll({selector!r}), (each) => each.textContent)")


@needs_browser
def test_a_base_model_continues_text_and_the_figures_move(browser: Browser, state: State) -> None:
    with served(state) as url:
        browser.open(url)
        wait_until_ready(browser, "Continue")
        assert shown(browser, "#written") == ["7"] and "base model" in shown(browser, "#about")[0]
        browser.value(
            "window.seen = new Set(); new MutationObserver(() => seen.add(document.getElementById('log').textContent))"
            ".observe(document.getElementById('log'), { childList: true, subtree: true, characterData: true })"
        )
        say(browser, "one")
        browser.wait_for("running === null && turns.length === 2")
        assert shown(browser, ".turn") == ["one", ANSWER] and browser.value("seen.size") > 5, "it came in pieces"
        assert re.fullmatch(
            r"last answer: 27 tokens at [\d.]+ tokens/s, the first after [\d.]+ s", shown(browser, "#answer")[0]
        )
        say(browser, "")
        browser.wait_for(f"running === null && turns.length === 2 && turns[1].text === {ANSWER + ANSWER!r}")
        prompts = [request.prompt for request in state.service.engine_loop.requests]  # type: ignore[attr-defined]
        assert [len(prompt) for prompt in prompts] == [3, 3 + len(ANSWER)]
        browser.wait_for("document.getElementById('read').textContent === '33'")
        assert shown(browser, "#memory dd") == ["1.0 MB", "2.0 MB", "7.0 MB", "25.0 %"]
        heights = "Array.from(document.querySelectorAll('#layers div'), (bar) => bar.title + ' ' + bar.style.height)"
        assert browser.value(heights) == ["layer 0: 25.0 % 100%", "layer 1: 0.0 % 0%"]


@needs_browser
def test_a_chat_has_turns_and_can_be_stopped(browser: Browser, state: State, tiny_engine: Engine) -> None:
    tiny_engine.tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    try:
        with served(state) as url:
            browser.open(url)
            wait_until_ready(browser, "Send")
            for said, turns in (("one", 2), ("two", 4)):
                say(browser, said)
                browser.wait_for(f"running === null && turns.length === {turns}")
            assert shown(browser, ".turn") == ["one", ANSWER, "two", ANSWER]
            loop: Any = state.service.engine_loop
            prompt = tiny_engine.tokenizer.decode(loop.requests[-1].prompt)
            assert prompt == f"[one][{ANSWER}][two]"
            loop.seconds = 0.2
            say(browser, "three")
            wait_until_ready(browser, "Stop")
            browser.wait_for("turns.length === 6 && turns[5].text")
            browser.value("document.getElementById('go').click()")
            browser.wait_for("running === null")
            browser.value("document.getElementById('clear').click()")
            assert shown(browser, ".turn") == []
            wait_for(lambda: loop.cancelled == [2])
    finally:
        tiny_engine.tokenizer.chat_template = None


@needs_browser
def test_a_key_is_asked_for(browser: Browser, state: State) -> None:
    state.api_keys = ("sesame",)
    with served(state) as url:
        browser.open(url)
        browser.wait_for("!document.getElementById('key-form').hidden")
        browser.value("document.getElementById('key').value = 'sesame'; document.getElementById('key-form').requestSubmit()")
        wait_until_ready(browser, "Continue")
        assert browser.value("document.getElementById('key-form').hidden")


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(400, False), (1600, True)])
def test_it_fits_the_screen(browser: Browser, state: State, width: int, dark: bool) -> None:
    with served(state) as url:
        browser.look(width, 800, dark=dark)
        browser.open(url)
        browser.wait_for("info !== null")
        say(browser, "a word " * 40 + "x" * 300)
        browser.wait_for("turns.length > 1")
        assert browser.value("document.documentElement.scrollWidth <= window.innerWidth")
        paper = browser.value("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")


def test_it_needs_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|src=", SOURCE.read_text(encoding="utf-8"))
