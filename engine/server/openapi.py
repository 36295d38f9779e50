"""The description of the endpoints: /openapi.json, and the list at /docs. Both work without a network."""

from __future__ import annotations

from html import escape
from typing import Any

from pydantic.json_schema import models_json_schema

from engine.server.interfaces.error_forms import is_anthropic
from engine.server.interfaces.table import INTERFACES
from engine.server.reading.schema import Body, ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""Responses of the OpenAPI schema: JSON, or server-sent events."""
TEXT, TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(fields), "properties": fields}


OPENAI_ERROR = _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL))
ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT))
BODIES: tuple[type[Body], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    *(interface.body for interface in INTERFACES.values()),
)


def described_body(body: type[Body]) -> dict[str, Any]:
    """Return the OpenAPI entry for a request body that the endpoint itself does not parse."""
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def endpoint_list(schema: dict[str, Any]) -> str:
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


def with_error_responses(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI schema with this server's errors in place of FastAPI's own."""
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
    for path, methods in schema["paths"].items():
        content = {"application/json": {"schema": ANTHROPIC_ERROR if is_anthropic(path) else OPENAI_ERROR}}
        for about in methods.values():
            about["responses"].pop("422", None)
            about["responses"] |= {code: {"description": said, "content": content} for code, said in statuses.items()}
    _, own = models_json_schema([(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}")
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas |= own["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return schema
