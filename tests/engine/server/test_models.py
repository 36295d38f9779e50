"""Several models in one server, without engines: who is loaded, who waits, and who leaves for another one."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, OptionError
from engine.server import models
from engine.server.errors import ApiError
from engine.server.model_names import model_names
from engine.server.models import Loading, Models


class FakeModel:
    """A loaded model of a given size."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.memory_bytes, self.closed = name, size, False

    def close(self) -> None:
        self.closed = True


class Shelf:
    """Models of given sizes, and a record of what was loaded."""

    def __init__(self, limit: int | None = None, **sizes: int) -> None:
        self.sizes, self.loads = sizes, list[str]()
        self.made = list[weakref.ref[FakeModel]]()
        self.go = threading.Event()
        self.go.set()
        self.broken = set[str]()
        self.expected = dict[str, int]()
        self.models: Models[FakeModel] = Models(
            Loading(lambda: {name: f"/models/{name}" for name in self.sizes}, self.load, self.needed, limit)
        )

    def load(self, name: str, model: str) -> FakeModel:
        self.loads.append(name)
        assert self.go.wait(10)
        if name in self.broken:
            raise CheckpointError(f"{model}: config.json is damaged")
        made = FakeModel(name, self.sizes[name])
        self.made.append(weakref.ref(made))
        return made

    def needed(self, name: str, model: str) -> int:
        return self.expected.get(name, self.sizes[name])

    async def use(self, name: str | None, deadline: float | None = None) -> None:
        (await self.models.take(name, deadline)).give_back()

    @property
    def loaded(self) -> set[str]:
        return set(self.models.loaded)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 20))


async def refused(work: Coroutine[Any, Any, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await work
    return caught.value


def test_a_model_is_loaded_once_by_the_first_that_use_it() -> None:
    async def work() -> None:
        shelf = Shelf(a=1, b=1)
        shelf.go.clear()
        waiting = [asyncio.create_task(shelf.use(name)) for name in ("b", "b", "b")]
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in waiting) and not shelf.loaded
        waiting[0].cancel()  # who leaves does not end the loading
        shelf.go.set()
        await asyncio.gather(*waiting[1:])
        assert shelf.loads == ["b"] and shelf.loaded == {"b"}
        await shelf.use(None)
        assert shelf.loads == ["b", "a"], "the first model is the default"

    run(work)


def test_the_loading_goes_on_when_all_have_left() -> None:
    async def work() -> None:
        shelf = Shelf(a=1)
        shelf.go.clear()
        assert (await refused(shelf.use("a", asyncio.get_running_loop().time() + 0.05))).status == 504
        shelf.go.set()
        await shelf.use("a")
        assert shelf.loads == ["a"]

    run(work)


def test_the_least_recently_used_leaves_and_is_freed() -> None:
    async def work() -> None:
        shelf = Shelf(limit=10, a=4, b=4, c=4)
        for name in "aba":
            await shelf.use(name)
        a, b = (each() for each in shelf.made)
        assert a is not None and b is not None
        await shelf.use("c")
        assert shelf.loaded == {"a", "c"} and b.closed and not a.closed
        gone = shelf.made[1]
        del a, b
        assert gone() is None, "nothing holds what has left"
        await shelf.use("b")
        assert shelf.loaded == {"b", "c"} and shelf.loads == ["a", "b", "c", "b"]

    run(work)


def test_a_model_with_requests_stays_and_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        shelf = Shelf(limit=10, a=6, b=6)
        taken = await shelf.models.take("a", None)
        waiting = asyncio.create_task(shelf.use("b"))
        await asyncio.sleep(0.05)
        assert shelf.loaded == {"a"} and shelf.loads == ["a"]
        taken.give_back()
        taken.give_back()  # has no effect
        await waiting
        assert shelf.loaded == {"b"}
        monkeypatch.setattr(models, "ROOM_SECONDS", 0.05)
        taken = await shelf.models.take("b", None)
        error = await refused(shelf.use("a"))
        assert (error.status, error.code) == (503, "models_busy") and error.headers["retry-after"]
        taken.give_back()
        await shelf.use("a")

    run(work)


def test_a_model_that_exceeds_the_limit_is_refused_by_name() -> None:
    async def work() -> None:
        shelf = Shelf(limit=10, a=4, huge=11, hidden=11)
        await shelf.use("a")
        error = await refused(shelf.use("huge"))
        assert error.status == 400 and "'huge'" in error.message and shelf.loads == ["a"] and shelf.loaded == {"a"}
        shelf.expected["hidden"] = 5  # only the loaded model shows its size
        error = await refused(shelf.use("hidden"))
        assert error.code == "model_too_large" and shelf.loads == ["a", "hidden"] and shelf.made[1]() is None
        await shelf.use("a")

    run(work)


def test_what_needs_more_than_expected_makes_others_leave() -> None:
    async def work() -> None:
        shelf = Shelf(limit=10, a=4, b=8)
        shelf.expected["b"] = 2
        await shelf.use("a")
        await shelf.use("b")
        assert shelf.loaded == {"b"}

    run(work)


def test_a_failed_model_is_tried_again() -> None:
    async def work() -> None:
        shelf = Shelf(a=1)
        shelf.broken.add("a")
        error = await refused(shelf.use("a"))
        assert error.status == 503 and error.message == "the model 'a' cannot be loaded: config.json is damaged"
        shelf.broken.clear()
        await shelf.use("a")
        assert shelf.loads == ["a", "a"]

    run(work)


def test_at_the_end_nothing_is_loaded() -> None:
    async def work() -> None:
        shelf = Shelf(a=1, b=1)
        shelf.go.clear()
        waiting = asyncio.create_task(refused(shelf.use("a")))
        await asyncio.sleep(0.05)
        shelf.models.refuse_arrivals()
        assert (await waiting).code == "draining"
        assert (await refused(shelf.use("b"))).code == "draining"
        shelf.go.set()

    run(work)


def test_unknown_names_and_models_that_come_and_go() -> None:
    async def work() -> None:
        shelf = Shelf(**{f"m{number}": 1 for number in range(7)})
        error = await refused(shelf.use("other"))
        assert error.status == 404
        assert error.message.endswith("this server has 'm0', 'm1', 'm2', 'm3', 'm4' and 2 more (/v1/models)")
        shelf.sizes["new"] = 1
        await shelf.use("new")
        shelf.sizes.clear()
        shelf.sizes["last"] = 1
        await shelf.models.refresh()
        assert list(shelf.models.services) == ["last", "new"], "what is loaded stays"

    run(work)


def test_the_models_of_a_directory(tmp_path: Path) -> None:
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "no-model").mkdir()
    for name in ("c.gguf", "split-00001-of-00002.gguf", "split-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).touch()
    named = model_names(["owner/model@main", "elsewhere/b"], tmp_path)
    assert named == {
        "model": "owner/model@main",
        "b": "elsewhere/b",
        "a": str(tmp_path / "a"),
        "c.gguf": str(tmp_path / "c.gguf"),
        "split-00001-of-00002.gguf": str(tmp_path / "split-00001-of-00002.gguf"),
    }
    with pytest.raises(OptionError, match="two models have the name b: x/b and y/b"):
        model_names(["x/b", "y/b"], None)
    with pytest.raises(OptionError, match="no GGUF file"):
        model_names([], tmp_path / "no-model")
    with pytest.raises(OptionError, match="cannot be read"):
        model_names([], tmp_path / "nowhere")
