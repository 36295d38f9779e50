"""The HTTP API of a running engine: OpenAI's endpoints, metrics, and a chat page. docs/serving.md describes it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from engine.batching.loop import EngineLoop
from engine.batching.options import QueueOptions
from engine.errors import BusyError, CompressError
from engine.generation.generate import Engine
from engine.generation.options import OpenOptions
from engine.generation.token_text import TokenText
from engine.onnx.runtime import OnnxDecoder
from engine.server.body_reader import unknown_model
from engine.server.chat_page import chat_page
from engine.server.connection import NAMESPACE, EventStream, Gone, Phase, RequestGate, error_response, while_connected
from engine.server.errors import ApiError, api_error, no_object
from engine.server.exchange import Exchange
from engine.server.metrics import Metrics
from engine.server.reading_pool import ReadingPool
from engine.server.reading_process import Frame
from engine.server.requests import Asked, asked, reading_settings
from engine.server.responses import Answer, ChatAnswer, CompletionAnswer
from engine.server.schema import Body, ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

DONE = b"data: [DONE]\n\n"
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""Responses of the OpenAPI schema: JSON, or server-sent events."""
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

    def card(self) -> dict[str, Any]:
        """Return the model's entry in the format of /v1/models."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "moe-compress",
            "max_model_len": self.engine_loop.max_model_length,
            "chat_template": self.chats,
            "skip_threshold": self.skip_threshold,
        }

    def close(self) -> None:
        """End the engine's thread and the processes that read bodies."""
        self.reading.close()
        self.engine_loop.stop()


@dataclass
class State:
    """State of the server: `loading`, then `ready` with a service, then `draining`."""

    api_keys: tuple[str, ...] = ()
    """Accepted API keys; empty for no access control."""
    hosts: frozenset[str] | None = None
    """Accepted host names; None for any."""
    request_timeout: float | None = None
    phase: Phase = "loading"
    loaded: Service | None = None

    @property
    def service(self) -> Service:
        """The loaded service; the gate refuses all requests before it exists."""
        assert self.loaded is not None
        return self.loaded

    def check_model(self, name: str | None) -> Service:
        """Return the service. Raises ApiError if `name` is another model."""
        if name is not None and name != self.service.model_name:
            raise unknown_model(name, self.service.model_name)
        return self.service


def create_app(state: State) -> FastAPI:
    """Return the application; `state` may change while it runs."""
    app = FastAPI(title="compress serve", docs_url=None, redoc_url=None)
    app.add_middleware(RequestGate, phase=lambda: state.phase, api_keys=state.api_keys, hosts=state.hosts)
    _handle_errors(app, state)
    _add_completions(app, state)
    _add_tokens(app, state)
    _add_figures(app, state)
    _add_pages(app)
    # Validation errors have status 400 here, but FastAPI documents 422 by itself.
    make_schema = app.openapi
    app.openapi = cache(lambda: _with_errors(make_schema()))  # type: ignore[method-assign]
    return app


def _handle_errors(app: FastAPI, state: State) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(CompressError)
    async def failed(request: Request, error: CompressError) -> Response:
        if isinstance(error, BusyError) and state.phase == "draining":
            return error_response(ApiError(503, str(error), code="draining"))
        return error_response(api_error(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        said = {404: f"there is no {request.url.path}; see /docs", 405: f"{request.method} is not for {request.url.path}"}
        response = error_response(ApiError(error.status_code, said.get(error.status_code, str(error.detail))))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "the server failed on this request; its log has the reason"))


def _described(body: type[Body]) -> dict[str, Any]:
    """Return the OpenAPI entry for a request body that the endpoint itself does not parse."""
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _add_completions(app: FastAPI, state: State) -> None:
    @app.post("/v1/chat/completions", responses=STREAMED, openapi_extra=_described(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        return await _answer(state, request, ChatAnswer)

    @app.post("/v1/completions", responses=STREAMED, openapi_extra=_described(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or several texts."""
        return await _answer(state, request, CompletionAnswer)


async def _read(state: State, request: Request, deadline: float | None) -> Frame:
    """Return the reply of the process that reads bodies. Raises ApiError, BusyError and Gone."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise no_object()
    reading = state.service.reading.read(request.url.path, await request.body(), deadline)
    try:
        return await while_connected(request.receive, reading)
    except TimeoutError as error:
        raise _timeout(state) from error


async def _answer(state: State, request: Request, form: type[Answer]) -> Response:
    service = state.service
    deadline = None if state.request_timeout is None else asyncio.get_running_loop().time() + state.request_timeout
    try:
        wanted: Asked = asked(*await _read(state, request, deadline))
        answer = form(wanted, service.model_name, service.words, include_usage=wanted.include_usage)
        own = [replace(each, namespace=getattr(request.state, NAMESPACE)) for each in wanted.requests]
        exchange = Exchange(service.engine_loop, own, service.metrics)
        if wanted.stream:
            return EventStream(_events(exchange, answer, deadline, state), exchange.cancel)
        try:
            return JSONResponse(await while_connected(request.receive, _collected(exchange, answer, deadline, state)))
        finally:
            exchange.cancel()
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


async def _events(exchange: Exchange, answer: Answer, deadline: float | None, state: State) -> AsyncIterator[bytes]:
    for chunk in answer.opening():
        yield _event(chunk)
    try:
        async for index, update in exchange.updates(deadline):
            _check_end(update.finish_reason, update.error)
            chunk_of_update = answer.chunk(index, answer.take(index, update))
            if chunk_of_update is not None:
                yield _event(chunk_of_update)
        for chunk in answer.usage_chunk():
            yield _event(chunk)
    except ApiError as error:
        yield _event(error.body())
    except TimeoutError:
        yield _event(_timeout(state).body())
    yield DONE


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _check_end(reason: str, error: str) -> None:
    if reason == "error":
        raise ApiError(500, error or "the engine failed on this request", code="engine_error")
    if reason == "cancelled":
        raise ApiError(503, "the server is shutting down and cancelled this request; try another one", code="cancelled")


def _timeout(state: State) -> ApiError:
    message = f"the answer took longer than {state.request_timeout:g} seconds, the limit here; ask for fewer tokens"
    return ApiError(504, message, code="timeout")


def _add_tokens(app: FastAPI, state: State) -> None:
    async def answered(request: Request) -> Response:
        try:
            _, answer = await _read(state, request, None)
        except Gone:
            return Response(status_code=CLIENT_GONE)
        return Response(bytes(answer), media_type="application/json")

    @app.post("/tokenize", response_model=dict[str, Any], openapi_extra=_described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of messages."""
        return await answered(request)

    @app.post("/detokenize", response_model=dict[str, Any], openapi_extra=_described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await answered(request)


def _add_figures(app: FastAPI, state: State) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Status 200 while requests are accepted, 503 before and after."""
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the format of Prometheus."""
        return PlainTextResponse(await run_in_threadpool(state.service.metrics.text))

    @app.get("/v1/load")
    async def load() -> dict[str, Any]:
        """Current load and statistics of the server."""
        return state.service.card() | asdict(state.service.engine_loop.load())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List of models, with one entry."""
        return {"object": "list", "data": [state.service.card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Description of the model."""
        return state.check_model(name).card()


def _add_pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(chat_page())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_docs(app.openapi()))


def _docs(schema: dict[str, Any]) -> str:
    """Return an HTML list of the endpoints without external resources."""
    rows = [
        f"<tr><td>{escape(method.upper())}</td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(str(about.get('description') or about.get('summary', '')))}</td></tr>"
        for path, methods in schema["paths"].items()
        for method, about in methods.items()
    ]
    return (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark"><title>compress serve</title>'
        "<style>body { font: 16px/1.5 system-ui, sans-serif; margin: 16px } td { padding: 4px 16px 4px 0 }</style>"
        f'<h1>compress serve</h1><table>{"".join(rows)}</table><p><a href="/openapi.json">openapi.json</a></p></html>'
    )


def _with_errors(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI schema with this server's errors in place of FastAPI's own."""
    text = {"type": "string"}
    fields = {"message": text, "type": text, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}
    error = {"type": "object", "required": list(fields), "properties": fields}
    form = {"type": "object", "required": ["error"], "properties": {"error": error}}
    content = {"application/json": {"schema": form}}
    statuses = {
        "400": "Not valid, or not available",
        "401": "No key",
        "404": "Another model",
        "408": "Not complete in time",
        "413": "Too large",
        "421": "Another host",
        "429": "The queue is full",
        "500": "The engine failed",
        "503": "Loading, or shutting down",
        "504": "The time is over",
    }
    for methods in schema["paths"].values():
        for about in methods.values():
            about["responses"].pop("422", None)
            about["responses"] |= {code: {"description": said, "content": content} for code, said in statuses.items()}
    bodies = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    _, own = models_json_schema([(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}")
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas |= own["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return schema
