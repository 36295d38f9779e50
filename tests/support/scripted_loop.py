"""An engine loop without an engine. It returns given answers at a given speed, and records its requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.batching.request import Listener, Load, Request, Timings, TokenLogprob, Update
from engine.errors import BusyError, OptionError
from engine.generation.text_stream import PlainText, TextStream


@dataclass
class ScriptedLoop:
    """Each request gets the first `max_new_tokens` tokens of `script`, one every `seconds`."""

    script: tuple[int, ...]
    decode: Callable[[int], str]
    seconds: float = 0.0
    max_queue: int = 256
    max_model_length: int = 128
    failure: str = ""
    requests: list[Request] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    going: dict[int, Listener] = field(default_factory=dict)
    draining: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Do nothing, because there is no thread to start."""

    def submit(self, request: Request, listener: Listener) -> int:
        with self.lock:
            if self.draining or len(self.going) >= self.max_queue:
                raise BusyError(f"{len(self.going)} requests are waiting, the most that this engine takes; try again")
            if len(request.prompt) + request.max_new_tokens > self.max_model_length:
                raise OptionError("it can never fit")
            number = len(self.requests)
            self.requests.append(request)
            self.going[number] = listener
        threading.Thread(target=self._answer, args=(number, request, listener, Timings()), daemon=True).start()
        return number

    def _answer(self, number: int, request: Request, listener: Listener, timings: Timings) -> None:
        timings.started = time.monotonic()
        timings.prompt_tokens, timings.cached_tokens = len(request.prompt), 1
        scored = tuple(self._scored(request, token) for token in request.prompt[1:]) if request.prompt_logprobs else None
        tokens = self.script[: request.max_new_tokens]
        if not tokens:
            self._end(number, Update(prompt_logprobs=scored, finish_reason="length", timings=self._ended(timings)))
        for place, token in enumerate(tokens):
            time.sleep(self.seconds)
            timings.first_token = timings.first_token or time.monotonic()
            timings.generated_tokens = place + 1
            last = place + 1 == len(tokens)
            logprobs = () if request.top_logprobs is None else (self._scored(request, token),)
            given: dict[str, Any] = {"text": self.decode(token), "tokens": (token,), "logprobs": logprobs}
            given["prompt_logprobs"] = None if place else scored
            if self.failure:
                self._end(number, Update(finish_reason="error", error=self.failure, timings=self._ended(timings)))
                return
            if last:
                self._end(number, Update(**given, finish_reason="length", timings=self._ended(timings)))
            elif number in self.going:
                listener(Update(**given))

    def _scored(self, request: Request, token: int) -> TokenLogprob:
        others = tuple((other, -0.5 - other) for other in range(request.top_logprobs or 0))
        return TokenLogprob(token, -token / 100, others)

    def _ended(self, timings: Timings) -> Timings:
        timings.finished = time.monotonic()
        return timings

    def _end(self, number: int, update: Update) -> None:
        with self.lock:
            listener = self.going.pop(number, None)
        if listener is not None:
            listener(update)

    def cancel(self, number: int) -> None:
        if number in self.going:
            self.cancelled.append(number)
            self._end(number, Update(finish_reason="cancelled", timings=self._ended(Timings())))

    def drain(self, timeout: float) -> bool:
        self.draining = True
        deadline = time.monotonic() + timeout
        while self.going and time.monotonic() < deadline:
            time.sleep(0.002)
        return not self.going

    def stop(self) -> None:
        self.draining = True
        for number in list(self.going):
            self.cancel(number)

    def load(self) -> Load:
        return Load(
            running=len(self.going),
            waiting=0,
            kv_cache_bytes=2_000_000,
            kv_cache_used_share=0.25,
            weights_bytes=1_000_000,
            resident_bytes=10_000_000,
            prompt_tokens=sum(len(request.prompt) for request in self.requests),
            generated_tokens=7,
            cached_tokens=1,
            preemptions=0,
            tokens_per_second=3.5,
            experts_evaluated_per_layer=(6, 8),
            experts_skipped_per_layer=(2, 0),
        )


@dataclass
class ReplyLoop(ScriptedLoop):
    """Each request gets the reply that `choose` returns for the text of its prompt, token by token, and ends after it."""

    tokenizer: Any = None
    choose: Callable[[str], str] = str

    def _answer(self, number: int, request: Request, listener: Listener, timings: Timings) -> None:
        prompt = self.tokenizer.decode(request.prompt, skip_special_tokens=False)
        tokens = self.tokenizer(self.choose(prompt), add_special_tokens=False)["input_ids"]
        end, decode = self.tokenizer.eos_token_id, partial(PlainText(self.tokenizer), shown=request.shown_special_tokens)
        stream = TextStream(list(request.prompt), request.max_new_tokens, frozenset({end}), request.stop, decode)
        timings.started = timings.first_token = time.monotonic()
        timings.prompt_tokens = len(request.prompt)
        for token in (*tokens, end):
            stream.append(token)
            timings.generated_tokens += 1
            logprobs = () if request.top_logprobs is None else (self._scored(request, token),)
            given: dict[str, Any] = {"text": stream.take(), "tokens": (token,), "logprobs": logprobs}
            if stream.finish_reason:
                self._end(number, Update(**given, finish_reason=stream.finish_reason, timings=self._ended(timings)))
                return
            if number in self.going:
                listener(Update(**given))
