"""Images in messages of a chat: answers equal Engine.generate, and every other kind of image is refused in one line."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_for_tests import served
from tiny_images import data_url, encoded, picture, save_images

from engine.batching import loop
from engine.batching.loop import EngineLoop
from engine.batching.request import Request, Update
from engine.errors import BusyError
from engine.generation.generate import Engine
from engine.server.errors import ApiError
from engine.server.reading import image_parts
from engine.server.reading.image_parts import image_files, packed, unpacked
from engine.server.server import Service, State

TOKENS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("qwen3_vl_moe")
    save_images("qwen3_vl_moe", path)
    return Engine.open(path)


def _service(engine: Engine) -> Service:
    engine_loop = EngineLoop(
        engine, kv_cache_bytes=4 * (256 * engine.cache_sizes[0]), max_batch_size=4, max_model_length=256
    )
    engine_loop.start()
    return Service(engine, engine_loop, model_name="tiny")


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    service = _service(engine)
    with served(State(phase="ready", loaded=service)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-") as made:
        yield made
    service.close()


def _messages(text: str, *urls: str) -> Any:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def _ask(client: openai.OpenAI, *urls: str, text: str = "what?", **options: Any) -> Any:
    return client.chat.completions.create(
        model="tiny",
        messages=_messages(text, *urls),
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
        **options,
    )


@pytest.mark.slow
def test_answers_are_those_of_generate(
    client: openai.OpenAI, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    own = Engine.open(engine.checkpoint.directory, images=True)
    own.end_tokens = frozenset()
    for images in ([picture(0)], [picture(1)], [picture(0), picture(2)]):
        (expected,) = own.generate("what?", max_new_tokens=TOKENS, images=images)
        answer = _ask(client, *map(data_url, images))
        assert answer.choices[0].message.content == expected.text
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.prompt_tokens, TOKENS)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        pieces = list(_ask(client, *map(data_url, images), stream=True, stream_options={"include_usage": True}))
        assert "".join(each.choices[0].delta.content or "" for each in pieces if each.choices) == expected.text
        assert pieces[-1].usage.prompt_tokens == expected.prompt_tokens
    (text,) = own.generate("<s>user:what?<s>assistant:", max_new_tokens=TOKENS)
    assert _ask(client).choices[0].message.content == text.text


def _png(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1/a.png", "fetches nothing and opens no files"),
        ("file:///etc/passwd", "fetches nothing and opens no files"),
        ("/etc/passwd", "fetches nothing and opens no files"),
        ("data:image/svg+xml;base64,AAAA", "must be data:image/png;base64"),
        ("data:image/png;base64,%%%", "not valid base64"),
        (_png(b"text"), "image 1 of messages: is no image in PNG"),
        (_png(encoded(picture())[:2000]), "image 1 of messages: the image cannot be decoded"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, url: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as error:
        _ask(client, url)
    assert error.value.body is not None and "\n" not in error.value.message


def test_text_cannot_bring_image_tokens(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="image tokens in the prompt: 2"):
        _ask(client, data_url(picture()), text="<img>")


def test_models_of_text_refuse_images(tmp_path: Path) -> None:
    engine = Engine.open("demo")
    assert engine.images_refusal is not None and "reads text only" in engine.images_refusal
    service = _service(engine)
    with served(State(phase="ready", loaded=service)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        with pytest.raises(
            openai.BadRequestError, match="messages have images, and this server reads text only: a model of"
        ):
            _ask(client, data_url(picture()))
        content: Any = [{"role": "user", "content": [{"type": "input_audio"}]}]
        with pytest.raises(openai.BadRequestError, match="part of type 'input_audio'; only text and image_url can be read"):
            client.chat.completions.create(model="tiny", messages=content)
    service.close()


def test_the_number_and_the_size_of_images_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (100, 101, 102):
        monkeypatch.setattr(image_parts, "MOST_SENT_BYTES", size)
        assert image_files([_png(bytes(size))])[0][1] == bytes(size)
        with pytest.raises(ApiError, match=f"larger than {size} bytes"):
            image_files([_png(bytes(size + 1))])
    monkeypatch.undo()
    assert image_files([data_url(picture())] * 2)[1] == ("image 2 of messages", encoded(picture()))
    monkeypatch.setattr(image_parts, "MOST_IMAGES", 1)
    with pytest.raises(ApiError, match="more than 1 images"):
        image_files([data_url(picture())] * 2)


def test_inputs_of_images_go_from_process_to_process(engine: Engine) -> None:
    assert engine.images_refusal is None and engine.image_reader is not None
    inputs = engine.image_reader.prompt("x", [picture()]).inputs
    rows, parts = packed(inputs)
    found = unpacked(rows, memoryview(b"".join(parts)))
    assert found.keys() == inputs.keys()
    assert all(found[name].equal(inputs[name]) and found[name].dtype == inputs[name].dtype for name in inputs)


def test_a_prompt_that_the_model_cannot_read_ends_alone(engine: Engine) -> None:
    assert engine.images_refusal is None and engine.image_reader is not None
    ids, inputs = engine.image_reader.prompt("x", [picture()])
    broken = {name: value for name, value in inputs.items() if name != "image_grid_thw"}
    updates: dict[str, list[Update]] = {"text": [], "image": []}
    running = EngineLoop(engine, kv_cache_bytes=4 * 256 * engine.cache_sizes[0], max_model_length=128)
    running.submit(Request(tuple(ids[:2]), 8, ignore_end_tokens=True), updates["text"].append)
    running.submit(Request(tuple(ids), 8, images=broken), updates["image"].append)
    running.start()
    assert running.drain(60)
    running.stop()
    assert [updates[name][-1].finish_reason for name in ("text", "image")] == ["length", "error"]
    assert sum(len(update.tokens) for update in updates["text"]) == 8


def test_images_that_wait_are_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices of one answer share the inputs, and one request may always have them."""
    assert engine.images_refusal is None and engine.image_reader is not None
    monkeypatch.setattr(loop, "MOST_HELD_BYTES", 1)
    waiting = EngineLoop(engine, kv_cache_bytes=256 * engine.cache_sizes[0], max_model_length=128)
    ids, inputs = engine.image_reader.prompt("x", [picture()])
    for _ in range(2):
        waiting.submit(Request(tuple(ids), 1, images=inputs), lambda update: None)
    with pytest.raises(BusyError, match="too many images are waiting"):
        waiting.submit(Request(tuple(ids), 1, images=dict(inputs)), lambda update: None)
    waiting.submit(Request(tuple(ids), 1), lambda update: None)
    waiting.stop()
