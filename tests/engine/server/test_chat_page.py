"""The page of a server in a real browser: it continues a text, answers a chat, updates figures, and asks for a key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_for_tests import CHROMIUM, Browser
from scripted_loop import ScriptedLoop
from server_for_tests import scripted_state, served, wait_for

from engine.generation.generate import Engine
from engine.server.models import Loading, Models
from engine.server.reading.reading_pool import ReadingPool
from engine.server.server import Service, State

SOURCES = Path(__file__).resolve().parents[3] / "engine" / "server" / "page"
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


@pytest.fixture
def chats(tiny_engine: Engine) -> Iterator[None]:
    """Let the page take the model for one that chats. It is asked for before `state`, which looks for a template."""
    tiny_engine.tokenizer.chat_template = "{{ messages }}"
    yield
    tiny_engine.tokenizer.chat_template = None


def say_two(browser: Browser) -> None:
    """Say two things, each when the answer before is complete."""
    for said, turns in (("one", 2), ("two", 4)):
        say(browser, said)
        browser.wait_for(f"running === null && turns.length === {turns}")


def prompts_of(state: State, engine: Engine) -> list[str]:
    loop: Any = state.service.engine_loop
    return [engine.tokenizer.decode(request.prompt) for request in loop.requests]


@needs_browser
def test_a_chat_has_turns_and_can_be_stopped(browser: Browser, chats: None, state: State, tiny_engine: Engine) -> None:
    with served(state) as url:
        browser.open(url)
        wait_until_ready(browser, "Send")
        say_two(browser)
        assert shown(browser, ".turn") == ["one", ANSWER, "two", ANSWER]
        assert prompts_of(state, tiny_engine)[-1] == f"user: one\nassistant: {ANSWER}\nuser: two\nassistant:"
        loop: Any = state.service.engine_loop
        loop.seconds = 0.2
        browser.value("document.getElementById('tokens').value = 8")  # more would not fit
        say(browser, "three")
        wait_until_ready(browser, "Stop")
        browser.wait_for("turns.length === 6 && turns[5].text")
        browser.value("document.getElementById('go').click()")
        browser.wait_for("running === null")
        browser.value("document.getElementById('clear').click()")
        assert shown(browser, ".turn") == [] and shown(browser, "#conversations li") == []
        wait_for(lambda: loop.cancelled == [2])


@needs_browser
def test_messages_are_edited_and_answers_repeated(browser: Browser, chats: None, state: State, tiny_engine: Engine) -> None:
    with served(state) as url:
        browser.open(url)
        wait_until_ready(browser, "Send")
        say_two(browser)
        press(browser, "Repeat", 1)
        browser.wait_for("running === null && turns.length === 4")
        assert prompts_of(state, tiny_engine)[-1] == f"user: one\nassistant: {ANSWER}\nuser: two\nassistant:"
        press(browser, "Edit", 0)
        browser.value("document.querySelector('.message textarea').value = 'other'")
        press(browser, "Send", 0, ".message button")
        browser.wait_for("running === null && turns.length === 2")
        assert prompts_of(state, tiny_engine)[-1] == "user: other\nassistant:" and shown(browser, ".turn") == [
            "other",
            ANSWER,
        ]
        press(browser, "Edit", 0)
        press(browser, "Cancel", 0)
        assert shown(browser, ".turn") == ["other", ANSWER]


def press(browser: Browser, words: str, number: int, selector: str = "#log button") -> None:
    """Press one of the buttons with these words."""
    found = f"[...document.querySelectorAll({selector!r})].filter((each) => each.textContent === {words!r})"
    browser.value(f"{found}[{number}].click()")


@needs_browser
def test_conversations_are_kept_in_the_browser(browser: Browser, chats: None, state: State) -> None:
    with served(state) as url:
        browser.open(url)
        browser.value("localStorage.clear()")
        browser.open(url)
        wait_until_ready(browser, "Send")
        say(browser, "first")
        browser.wait_for("running === null && turns.length === 2")
        browser.value("document.getElementById('new').click()")
        assert shown(browser, ".turn") == []
        say(browser, "second")
        browser.wait_for("running === null && turns.length === 2")
        browser.open(url)
        wait_until_ready(browser, "Send")
        assert shown(browser, "#conversations .title") == ["second", "first"] and shown(browser, ".turn") == []
        press(browser, "first", 0, "#conversations .title")
        assert shown(browser, ".turn") == ["first", ANSWER]
        press(browser, "×", 1, "#conversations button")
        assert shown(browser, "#conversations .title") == ["second"] and shown(browser, ".turn") == []
        browser.value("localStorage.setItem('conversations', '{broken')")
        browser.open(url)
        wait_until_ready(browser, "Send")
        assert shown(browser, "#conversations li") == []


MARKDOWN = """# Title

A *word*, a **bold one**, `code`, [a link](https://example.org/a) and [a bad one](javascript:alert(1)).

```python
def f():
    return "<script>alert(1)</script>"
```

- one
- two
  - nested

3. three

> quoted <img src=x onerror=alert(1)>

| a | b |
| - | - |
| 1 | 2 |

---
last **unfinished"""


@needs_browser
def test_markdown_becomes_elements_and_never_markup(browser: Browser, chats: None, state: State) -> None:
    with served(state) as url:
        browser.open(url)
        wait_until_ready(browser, "Send")
        browser.value("window.alerted = false; window.alert = () => { alerted = true; }")
        browser.value(f"add({{ role: 'assistant', text: {MARKDOWN!r} }})")
        for selector, texts in {
            ".turn h1": ["Title"],
            ".turn em": ["word"],
            ".turn strong": ["bold one"],
            ".turn pre": ['def f():\n    return "<script>alert(1)</script>"'],
            ".turn p code": ["code"],
            ".turn a": ["a link"],
            ".turn ul li": ["one", "two", "nested"],
            ".turn ol li": ["three"],
            ".turn blockquote": ["quoted <img src=x onerror=alert(1)>"],
            ".turn th": ["a", "b"],
            ".turn td": ["1", "2"],
            ".turn img, .turn script": [],
        }.items():
            assert shown(browser, selector) == texts, selector
        assert "[a bad one](javascript:alert(1))" in shown(browser, ".turn p")[0]
        assert shown(browser, ".turn p")[-1] == "last **unfinished"
        assert browser.value("document.querySelector('.turn ol').start") == 3
        assert browser.value("document.querySelectorAll('.turn hr').length") == 1 and not browser.value("alerted")
        hostile = "'*'.repeat(30000) + '`'.repeat(30000) + '['.repeat(30000) + '> '.repeat(3000)"
        browser.value(f"started = performance.now(); add({{ role: 'assistant', text: {hostile} }})")
        assert browser.value("performance.now() - started") < 5000, "no text takes longer than its length times a constant"


@needs_browser
def test_reasoning_and_calls_of_tools_are_shown(browser: Browser, chats: None, state: State) -> None:
    with served(state) as url:
        browser.open(url)
        wait_until_ready(browser, "Send")
        deltas = """[
            { reasoning_content: 'I must ' }, { reasoning_content: 'look.' },
            { tool_calls: [{ index: 0, id: 'c1', function: { name: 'weather', arguments: '' } }] },
            { tool_calls: [{ index: 0, function: { arguments: '{"city": ' } }] },
            { tool_calls: [{ index: 0, function: { arguments: '"Oslo"}' } }] },
        ]"""
        browser.value(
            "add({ role: 'user', text: 'Is it cold?' }); asked = add({ role: 'assistant', text: '' });"
            f"for (const delta of {deltas}) take(asked, delta); show(asked)"
        )
        assert shown(browser, ".reasoning") == ["ReasoningI must look."]
        assert shown(browser, ".call pre") == ['{\n  "city": "Oslo"\n}']
        assert browser.value("request().messages") == [
            {"role": "user", "content": "Is it cold?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
                ],
            },
        ]
        browser.value("document.querySelector('.call textarea').value = '-3'")
        browser.value("answered = false; answer = () => { answered = true; }")
        press(browser, "Give the result", 0)
        assert browser.value("answered") and browser.value("request().messages.at(-1)") == {
            "role": "tool",
            "tool_call_id": "c1",
            "content": "-3",
        }
        tools = '[{"name": "weather", "parameters": {"type": "object"}}]'
        browser.value(f"document.getElementById('tools').value = {tools!r}")
        browser.value("document.getElementById('system').value = 'Be brief.'")
        body = browser.value("request()")
        assert body["tools"] == [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}


@needs_browser
def test_the_skip_threshold_has_a_slider(browser: Browser, chats: None, state: State) -> None:
    with served(state) as url:
        browser.open(url)
        wait_until_ready(browser, "Send")
        assert browser.value("document.getElementById('skip').hidden && !('skip_threshold' in request())")
        state.service.skip_threshold = 1.5
        browser.open(url)
        wait_until_ready(browser, "Send")
        assert browser.value("request().skip_threshold") == 1.5
        browser.value("skip = document.getElementById('skip'); skip.value = 0.3; skip.dispatchEvent(new Event('input'))")
        assert shown(browser, "#skip-value") == ["0.30"] and browser.value("request().skip_threshold") == 0.3


@needs_browser
def test_the_model_is_chosen_where_there_are_several(browser: Browser, tiny_engine: Engine) -> None:
    loads: list[str] = []

    def load(name: str, model: str) -> Service:
        loads.append(name)
        script: Any = ScriptedLoop(
            tuple(tiny_engine.encode(f"answer of {name}")), lambda token: tiny_engine.tokenizer.decode([token])
        )
        return Service(tiny_engine, script, model_name=name)

    models = Models(Loading(lambda: {"one": "", "two": ""}, load, lambda name, model: 0))
    state = State(phase="ready", models=models)
    try:
        with served(state) as url:
            browser.open(url)
            wait_until_ready(browser, "Continue")
            assert loads == ["one"] and shown(browser, "#models option") == ["one", "two"]
            assert browser.value("at('model').hidden && !at('models').hidden && at('models').value === 'one'")
            say(browser, "x")
            browser.wait_for("running === null && turns.length === 2")
            browser.value("at('models').value = 'two'; at('models').dispatchEvent(new Event('change'))")
            browser.wait_for("info !== null && info.id === 'two'")
            say(browser, "y")
            browser.wait_for("running === null && turns.length === 4")
            assert shown(browser, ".turn") == ["x", "answer of one", "y", "answer of two"] and loads == ["one", "two"]
    finally:
        state.names.close()
        for each in state.services:
            each.close()


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
    found = {
        path.name: re.findall(r"https?:(?!\|\\)|//[a-z]+\.|@import|url\(|src=|innerHTML", path.read_text(encoding="utf-8"))
        for path in SOURCES.iterdir()
    }
    assert len(found) == 8 and not any(found.values()), found
