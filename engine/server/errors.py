"""Error responses in OpenAI's format: the error object and its HTTP status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import BusyError, CompressError, OptionError

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}
"""Error types by status; any other status below 500 is invalid_request_error, and the rest are server_error."""
SHOWN_PROBLEMS = 4
SHOWN_CHARACTERS = 300
SHOWN_PARAM = 80
SHOWN_MODELS = 5
RETRY_SECONDS = 1


class ApiError(Exception):
    """A refused request with its HTTP status; `param` names the field of the body with the problem."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, printable(message), code
        self.param = None if param is None else printable(param)[:SHOWN_PARAM]

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers for this status: retry-after, connection, or www-authenticate."""
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_SECONDS)}
        if self.status == 408:
            return {"connection": "close"}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: CompressError) -> ApiError:
    """Return the error of the API for an error of the engine."""
    message = " ".join(str(error).split())
    if isinstance(error, BusyError):
        return ApiError(429, message, code="queue_full")
    if isinstance(error, OptionError):
        return ApiError(400, message)
    return ApiError(500, message, code="engine_error")


def no_object() -> ApiError:
    """Return the error for a body that is not a JSON object, or whose content type is not JSON."""
    return ApiError(400, "the body is not a JSON object; send one, with content-type: application/json")


def not_json(place: int) -> ApiError:
    """Return the error for a body that is not valid JSON at this character."""
    return ApiError(400, f"the body is not valid JSON at character {place}") if place else no_object()


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    """Return the error for a model that is not served; `known`: names of the models that are."""
    names = ", ".join(f"{each!r:.80}" for each in known[:SHOWN_MODELS]) or "no model"
    others = f" and {len(known) - SHOWN_MODELS} more (/v1/models)" if len(known) > SHOWN_MODELS else ""
    message = f"the model {name!r:.80} is not served here; this server has {names}{others}"
    return ApiError(404, message, param="model", code="model_not_found")


def body_error(problems: Sequence[Any]) -> ApiError:
    """Return the error for the validation problems of the first invalid field; values are not repeated."""
    param = str(problems[0]["loc"][0]) if problems[0]["loc"] else None
    if param is None:
        return ApiError(400, f"the body is not valid: {problems[0]['msg']}"[:SHOWN_CHARACTERS])
    messages = [problem["msg"] for problem in problems if str(problem["loc"][0]) == param]
    said = " or ".join(dict.fromkeys(messages[:SHOWN_PROBLEMS]))[:SHOWN_CHARACTERS]
    return ApiError(400, f"{param}: {said}", param=param)


def printable(text: str) -> str:
    """Return the text with halves of surrogate pairs replaced, because no encoding accepts them."""
    return text.encode("utf-8", "replace").decode("utf-8")
