"""The HTTP API of a running engine: its endpoints, metrics, and a chat page. docs/serving.md describes it."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from engine.batching.loop import EngineLoop
from engine.batching.options import QueueOptions
from engine.errors import BusyError, CompressError
from engine.generation.generate import Engine
from engine.generation.options import OpenOptions
from engine.generation.token_text import TokenText
from engine.onnx.runtime import OnnxDecoder
from engine.server.chat_page import chat_page
from engine.server.connections.connection import (
    NAMESPACE,
    EventStream,
    Gone,
    Phase,
    RequestGate,
    error_response,
    while_connected,
)
from engine.server.errors import ApiError, api_error, no_object, unknown_model
from engine.server.exchange import Exchange
from engine.server.interfaces.form import AnswerForm, ChatForm
from engine.server.interfaces.messages_answer import MessagesForm
from engine.server.interfaces.responses_answer import ResponsesForm
from engine.server.interfaces.table import INTERFACES
from engine.server.metrics import Metrics, text_of_several
from engine.server.model_memory import MODEL_BYTES
from engine.server.models import Models, Taken
from engine.server.openapi import STREAMED, described_body, endpoint_list, with_error_responses
from engine.server.reading.name_reader import SETTINGS as NAMES_ONLY
from engine.server.reading.reading_pool import ReadingPool
from engine.server.reading.reading_process import Frame
from engine.server.reading.schema import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from engine.server.requests import Asked, asked, reading_settings
from engine.server.responses import Answer, ChatAnswer, CompletionAnswer

CLIENT_GONE = 499
"""Status for a disconnected client, used in logs only."""


class Service:
    """A loaded model and the objects that its endpoints share."""

    def __init__(
        self,
        engine: Engine,
        engine_loop: EngineLoop,
        *,
        model_name: str,
        skip_threshold: float = OpenOptions.skip_threshold,
        max_queue: int = QueueOptions.max_queue,
        reading: ReadingPool | None = None,
        **parsers: str,
    ) -> None:
        """`reading`: the pool that reads bodies; created here by default, with `parsers` as for `reading_settings`."""
        self.engine_loop, self.model_name = engine_loop, model_name
        self.reading = reading or ReadingPool(
            lambda: reading_settings(
                engine,
                model_name=model_name,
                max_model_length=engine_loop.max_model_length,
                max_queue=max_queue,
                skip_threshold=skip_threshold,
                **parsers,
            ).to_json()
        )
        _ = engine.images_refusal  # loads what reads images before any request
        self.words = TokenText(engine.tokenizer)
        self.skip_threshold = 0.0 if isinstance(engine.decoder, OnnxDecoder) else skip_threshold
        """Largest threshold that a request may ask for; 0 for an export, whose own threshold is part of it."""
        self.chats = bool(engine.tokenizer.chat_template)
        """Whether the model has its own chat template."""
        self.metrics = Metrics(engine_loop.load)
        self.created = int(time.time())

    @property
    def memory_bytes(self) -> int:
        """Bytes that the model takes of a limit: weights, cache, and an allowance for the rest."""
        load = self.engine_loop.load()
        return load.weights_bytes + load.kv_cache_bytes + MODEL_BYTES

    def card(self) -> dict[str, Any]:
        """Return the model's entry in the format of /v1/models."""
        return plain_card(self.model_name, self.created) | {
            "max_model_len": self.engine_loop.max_model_length,
            "chat_template": self.chats,
            "skip_threshold": self.skip_threshold,
        }

    def close(self) -> None:
        """End the engine's thread and the processes that read bodies."""
        self.reading.close()
        self.engine_loop.stop()


def plain_card(name: str, created: int) -> dict[str, Any]:
    """Return what an entry of /v1/models says of every model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "moe-compress"}


@dataclass
class State:
    """State of the server: `loading`, then `ready` with a service or several models, then `draining`."""

    api_keys: tuple[str, ...] = ()
    """Accepted API keys; empty for no access control."""
    hosts: frozenset[str] | None = None
    """Accepted host names; None for any."""
    request_timeout: float | None = None
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Secret that the namespaces of keys are derived with; that of the cache on disk, if there is one."""
    phase: Phase = "loading"
    loaded: Service | None = None
    models: Models[Service] | None = None
    """Several models; None for a server of one."""
    names: ReadingPool = field(default_factory=lambda: ReadingPool(lambda: NAMES_ONLY))
    """Reads the names of models in bodies if there are several. Its processes have no model."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def service(self) -> Service:
        """The loaded service of one model; the gate refuses all requests before it exists."""
        assert self.loaded is not None
        return self.loaded

    @property
    def services(self) -> list[Service]:
        """All loaded services."""
        if self.models is not None:
            return list(self.models.loaded.values())
        return [] if self.loaded is None else [self.loaded]

    def deadline(self) -> float | None:
        """Return the time of the event loop's clock at which a request that begins now is given up."""
        return None if self.request_timeout is None else asyncio.get_running_loop().time() + self.request_timeout

    async def take(self, path: str, body: bytes, deadline: float | None) -> Taken[Service]:
        """Return the service for a body. With several models, it is loaded if necessary.

        The name is read in a process without a model, because no body is parsed here. Raises ApiError, BusyError and
        TimeoutError.
        """
        if self.models is None:
            return Taken(self.service, lambda: None)
        _, answer = await self.names.read(path, body, deadline)
        return await self.models.take(json.loads(bytes(answer))["model"], deadline)

    async def find(self, name: str | None) -> tuple[str, Service | None]:
        """Return a model's name, and its service if it is loaded; None for the first model. Raises ApiError."""
        if self.models is None:
            if name is not None and name != self.service.model_name:
                raise unknown_model(name, [self.service.model_name])
            return self.service.model_name, self.service
        return await self.models.find(name)

    def card(self, name: str, service: Service | None) -> dict[str, Any]:
        """Return a model's entry in the format of /v1/models."""
        if self.models is None:
            return self.service.card()
        about = plain_card(name, self.created) if service is None else service.card()
        return about | {"loaded": service is not None}


def create_app(state: State) -> FastAPI:
    """Return the application; `state` may change while it runs."""
    app = FastAPI(title="compress serve", docs_url=None, redoc_url=None)
    app.add_middleware(
        RequestGate, phase=lambda: state.phase, api_keys=state.api_keys, hosts=state.hosts, secret=state.secret
    )
    _handle_errors(app, state)
    _add_completions(app, state)
    _add_interfaces(app, state)
    _add_tokens(app, state)
    _add_figures(app, state)
    _add_pages(app)
    # Validation errors have status 400 here, but FastAPI documents 422 by itself.
    make_schema = app.openapi
    app.openapi = cache(lambda: with_error_responses(make_schema()))  # type: ignore[method-assign]
    return app


def _handle_errors(app: FastAPI, state: State) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error, request.url.path)

    @app.exception_handler(CompressError)
    async def failed(request: Request, error: CompressError) -> Response:
        if isinstance(error, BusyError) and state.phase == "draining":
            return error_response(ApiError(503, str(error), code="draining"), request.url.path)
        return error_response(api_error(error), request.url.path)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        said = {404: f"there is no {path}; see /docs", 405: f"{request.method} is not for {path}"}
        response = error_response(ApiError(error.status_code, said.get(error.status_code, str(error.detail))), path)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        failure = ApiError(500, "the server failed on this request; its log has the reason")
        return error_response(failure, request.url.path)


def _add_completions(app: FastAPI, state: State) -> None:
    @app.post("/v1/chat/completions", responses=STREAMED, openapi_extra=described_body(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        return await _answer(state, request, ChatAnswer)

    @app.post("/v1/completions", responses=STREAMED, openapi_extra=described_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or several texts."""
        return await _answer(state, request, CompletionAnswer)


def _add_interfaces(app: FastAPI, state: State) -> None:
    def described(path: str) -> dict[str, Any]:
        return described_body(INTERFACES[path].body)

    @app.post("/v1/responses", responses=STREAMED, openapi_extra=described("/v1/responses"))
    async def responses(request: Request) -> Response:
        """Continue a conversation, in the form of OpenAI's Responses."""
        return await _answer(state, request, ChatAnswer, ResponsesForm)

    @app.post("/v1/messages", responses=STREAMED, openapi_extra=described("/v1/messages"))
    async def messages(request: Request) -> Response:
        """Continue a conversation, in the form of Anthropic's Messages."""
        return await _answer(state, request, ChatAnswer, MessagesForm)

    for path in ("/v1/responses/input_tokens", "/v1/messages/count_tokens"):

        @app.post(path, response_model=dict[str, Any], openapi_extra=described(path), name=path)
        async def count(request: Request) -> Response:
            """Number of tokens of a prompt."""
            return await _read_only(state, request)

    @app.api_route("/v1/responses/{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored(name: str) -> Response:
        raise ApiError(404, "responses are not stored here; send the whole conversation to /v1/responses")


async def _take(state: State, request: Request, deadline: float | None) -> Taken[Service]:
    """Return the service for a request. Raises ApiError, BusyError and Gone."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise no_object()
    taking = state.take(request.url.path, await request.body(), deadline)
    try:
        return await while_connected(request.receive, taking)
    except TimeoutError as error:
        raise _timeout(state) from error


async def _read(state: State, service: Service, request: Request, deadline: float | None) -> Frame:
    """Return the reply of the process that reads bodies. Raises ApiError, BusyError and Gone."""
    reading = service.reading.read(request.url.path, await request.body(), deadline)
    try:
        return await while_connected(request.receive, reading)
    except TimeoutError as error:
        raise _timeout(state) from error


async def _answer(state: State, request: Request, kind: type[Answer], form: type[ChatForm] | None = None) -> Response:
    """Return the answer to a request for text. `form`: that of another interface; None for `kind` as it is."""
    deadline = state.deadline()
    try:
        with ExitStack() as held:
            taken = await _take(state, request, deadline)
            held.callback(taken.give_back)
            service = taken.service
            wanted: Asked = asked(*await _read(state, service, request, deadline))
            answer = kind(wanted, service.model_name, service.words, include_usage=wanted.include_usage)
            shown = form(wanted.repeated, service.model_name, len(wanted.requests[0].prompt)) if form else AnswerForm()
            own = [replace(each, namespace=getattr(request.state, NAMESPACE)) for each in wanted.requests]
            exchange = Exchange(service.engine_loop, own, service.metrics, streams=wanted.stream)
            held.callback(exchange.cancel)
            if wanted.stream:
                return EventStream(_events(_chunks(exchange, answer, deadline), shown, state), held.pop_all().close)
            whole = await while_connected(request.receive, _collected(exchange, answer, deadline, state))
            return JSONResponse(shown.whole(whole))
    except Gone:
        return Response(status_code=CLIENT_GONE)


async def _collected(exchange: Exchange, answer: Answer, deadline: float | None, state: State) -> dict[str, Any]:
    try:
        async for index, update in exchange.updates(deadline):
            _check_end(update.finish_reason, update.error)
            answer.take(index, update)
    except TimeoutError as error:
        raise _timeout(state) from error
    return answer.whole()


async def _chunks(exchange: Exchange, answer: Answer, deadline: float | None) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a stream. Raises ApiError if the engine ends a request early, and TimeoutError."""
    for chunk in answer.opening():
        yield chunk
    async for index, update in exchange.updates(deadline):
        _check_end(update.finish_reason, update.error)
        chunk_of_update = answer.chunk(index, answer.take(index, update))
        if chunk_of_update is not None:
            yield chunk_of_update
    for chunk in answer.usage_chunk():
        yield chunk


async def _events(chunks: AsyncIterator[dict[str, Any]], form: AnswerForm, state: State) -> AsyncIterator[bytes]:
    """Yield the events of a stream as bytes; an error is its last event."""
    for event in form.opening():
        yield form.encoded(event)
    try:
        async for chunk in chunks:
            for event in form.take(chunk):
                yield form.encoded(event)
        for event in form.ending():
            yield form.encoded(event)
    except (ApiError, TimeoutError) as error:
        for event in form.failure(error if isinstance(error, ApiError) else _timeout(state)):
            yield form.encoded(event)
    if form.closing:
        yield form.closing


def _check_end(reason: str, error: str) -> None:
    if reason == "error":
        raise ApiError(500, error or "the engine failed on this request", code="engine_error")
    if reason == "cancelled":
        raise ApiError(503, "the server is shutting down and cancelled this request; try another one", code="cancelled")


def _timeout(state: State) -> ApiError:
    message = f"the answer took longer than {state.request_timeout:g} seconds, the limit here; ask for fewer tokens"
    return ApiError(504, message, code="timeout")


async def _read_only(state: State, request: Request) -> Response:
    """Return the answer of an endpoint that needs no engine."""
    try:
        taken = await _take(state, request, state.deadline())
        try:
            _, answer = await _read(state, taken.service, request, None)
        finally:
            taken.give_back()
    except Gone:
        return Response(status_code=CLIENT_GONE)
    return Response(bytes(answer), media_type="application/json")


def _add_tokens(app: FastAPI, state: State) -> None:
    @app.post("/tokenize", response_model=dict[str, Any], openapi_extra=described_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of messages."""
        return await _read_only(state, request)

    @app.post("/detokenize", response_model=dict[str, Any], openapi_extra=described_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await _read_only(state, request)


def _add_figures(app: FastAPI, state: State) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Status 200 while requests are accepted, 503 before and after."""
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the format of Prometheus."""
        if state.models is None:
            return PlainTextResponse(await run_in_threadpool(state.service.metrics.text))
        own = {name: each.metrics if each else None for name, each in state.models.services.items()}
        return PlainTextResponse(await run_in_threadpool(text_of_several, own))

    @app.get("/v1/load")
    async def load(model: str | None = None) -> dict[str, Any]:
        """Current load and statistics of a model, by default the first one."""
        name, service = await state.find(model)
        return state.card(name, service) | (asdict(service.engine_loop.load()) if service is not None else {})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List of models."""
        if state.models is None:
            return {"object": "list", "data": [state.service.card()]}
        await state.models.refresh()
        return {"object": "list", "data": [state.card(*each) for each in state.models.services.items()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Description of a model."""
        return state.card(*await state.find(name))


def _add_pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(chat_page())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(endpoint_list(app.openapi()))
