"""Errors in the form of the interface that a path belongs to. Paths of no interface have OpenAI's form."""

from __future__ import annotations

from typing import Any

from engine.server.errors import ApiError

ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types by status; any other status below 500 is invalid_request_error, and the rest are api_error."""


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's interface."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """Return the JSON object of an error's response to a request for `path`."""
    return anthropic_body(error) if is_anthropic(path) else error.body()


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON object of an error in Anthropic's form, which names fields in its message only.

    Clients read the code from `details`, where there is one.
    """
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": {"error_code": error.code}} if error.code else {}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}}
