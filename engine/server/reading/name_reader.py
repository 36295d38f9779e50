"""The name of the model in a body, read before the process of that model is chosen. It needs no model and no tokenizer."""

from __future__ import annotations

import json
from typing import Any

from engine.server.errors import ApiError, no_object, not_json
from engine.server.reading.nesting import nested_field

SETTINGS = b"null"
"""Settings of a process that reads names only (`reading_process.py`)."""


def body_values(data: bytes) -> dict[str, Any]:
    """Return the fields of a body. Raises ApiError unless it is one JSON object."""
    try:
        values = json.loads(data)
    except json.JSONDecodeError as error:
        raise not_json(error.pos) from error
    except ValueError as error:  # not UTF-8, or a number with thousands of digits
        raise no_object() from error
    if not isinstance(values, dict):
        raise no_object()
    return values


class NameReader:
    """Reads the field `model` of bodies, in the process that reads requests, within its limits on time and memory."""

    def prepare(self) -> None:
        """Do nothing: all modules are there."""

    def read(self, path: str, data: bytes) -> dict[str, Any]:
        """Return the field `model` of a body, or None for it. Raises ApiError for a body without a readable name."""
        try:
            name = body_values(data).get("model")
        except RecursionError as error:
            raise ApiError(400, "the body is nested too deeply; send a flatter one", param=nested_field(data)) from error
        if name is not None and not isinstance(name, str):
            raise ApiError(400, "model: Input should be a valid string", param="model")
        return {"model": name}
