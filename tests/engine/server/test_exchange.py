"""A client's updates: in order, at once for a stream, rarely for a whole answer, and with one waking for all that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.batching.request import Listener, Request, Update
from engine.errors import BusyError
from engine.server.exchange import MOST_HELD, Exchange, wakes_of

REQUEST = Request((1, 2), 4)


class Loop:
    """An engine's loop whose requests are told what the test says."""

    def __init__(self, most: int = 10) -> None:
        self.listeners: list[Listener] = []
        self.cancelled: list[int] = []
        self._most = most

    def submit(self, request: Request, listener: Listener) -> int:
        if len(self.listeners) == self._most:
            raise BusyError("full")
        self.listeners.append(listener)
        return len(self.listeners) - 1

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


class Counts:
    """Metrics that nobody reads."""

    def tokens(self, count: int, waited: float) -> None: ...

    def first_token(self, waited: float) -> None: ...

    def ended(self, reason: str, timings: object) -> None: ...


def run(tell: Callable[[Loop], object], streams: bool = True, count: int = 1, within: float | None = None) -> list[Any]:
    """Return (index, update) of each update."""

    async def read() -> list[Any]:
        loop: Any = Loop()
        metrics: Any = Counts()
        exchange = Exchange(loop, [REQUEST] * count, metrics, streams=streams)
        asyncio.get_running_loop().run_in_executor(None, tell, loop)
        deadline = None if within is None else asyncio.get_running_loop().time() + within
        return [each async for each in exchange.updates(deadline)]

    return asyncio.run(read())


def updates(count: int, last: str = "stop") -> Sequence[Update]:
    return [Update(tokens=(number,)) for number in range(count)] + [Update(finish_reason=last)]


@pytest.mark.parametrize("streams", [True, False])
def test_all_updates_come_in_order(streams: bool) -> None:
    own = updates(3 * MOST_HELD)

    def tell(loop: Loop) -> None:
        for update in own:
            for listener in loop.listeners:
                listener(update)

    found = run(tell, streams, count=2)
    assert [update for index, update in found if index == 0] == own
    assert [update for index, update in found if index == 1] == own


def test_a_whole_answer_wakes_the_event_loop_at_its_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []

    def told(streams: bool, count: int) -> int:
        async def read() -> int:
            loop: Any = Loop()
            metrics: Any = Counts()
            exchange = Exchange(loop, [REQUEST], metrics, streams=streams)
            made = asyncio.get_running_loop().call_soon_threadsafe

            def noted(*given: Any, **options: Any) -> Any:
                woken.append(1)
                return made(*given, **options)

            monkeypatch.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", noted)
            reading = asyncio.ensure_future(anext(exchange.updates(None)))
            for update in updates(count):
                await asyncio.sleep(0)
                loop.listeners[0](update)
            await reading
            return len(woken)

        woken.clear()
        return asyncio.run(read())

    assert told(False, 20) == 1
    assert told(False, 2 * MOST_HELD) > 1, "but its updates are not held without end"
    assert told(True, 20) == 21


def test_several_that_wait_are_woken_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wake() -> tuple[list[int], int]:
        event_loop, called, asked = asyncio.get_running_loop(), list[int](), 0
        made = event_loop.call_soon_threadsafe

        def noted(*given: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            return made(*given, **options)

        monkeypatch.setattr(event_loop, "call_soon_threadsafe", noted)
        for number in range(5):
            wakes_of(event_loop).call(lambda number=number: called.append(number))  # type: ignore[misc]
        await asyncio.sleep(0.01)
        wakes_of(event_loop).call(lambda: called.append(5))
        await asyncio.sleep(0.01)
        return called, asked

    assert asyncio.run(wake()) == ([0, 1, 2, 3, 4, 5], 2)


@pytest.mark.parametrize("streams", [True, False])
def test_the_deadline_ends_the_wait(streams: bool) -> None:
    with pytest.raises(TimeoutError):
        run(lambda loop: loop.listeners[0](Update(tokens=(1,))), streams, within=0.05)


def test_if_one_request_is_refused_the_others_are_cancelled() -> None:
    async def submit() -> list[int]:
        loop: Any = Loop(most=2)
        metrics: Any = Counts()
        with pytest.raises(BusyError):
            Exchange(loop, [REQUEST] * 3, metrics)
        cancelled: list[int] = loop.cancelled
        return cancelled

    assert asyncio.run(submit()) == [0, 1]


def test_an_update_after_the_end_of_the_event_loop_is_dropped() -> None:
    async def begin() -> Any:
        loop: Any = Loop()
        metrics: Any = Counts()
        Exchange(loop, [REQUEST], metrics)
        return loop

    loop = asyncio.run(begin())
    loop.listeners[0](Update(tokens=(1,)))
    loop.listeners[0](Update(finish_reason="stop"))
