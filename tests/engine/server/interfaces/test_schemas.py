"""Schemas through the interfaces: the demo model's text follows them, for the official clients."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel
from test_official_clients import MESSAGES, anthropic_client, openai_client, url  # noqa: F401 (url is a fixture)


class Degrees(BaseModel):
    city: bool
    degrees: bool


def test_a_schema_is_followed(url: str) -> None:  # noqa: F811
    with openai_client(url) as client:
        answer = client.responses.parse(
            model="demo",
            input=MESSAGES,
            text_format=Degrees,
            max_output_tokens=200,
            extra_body={"temperature": 0.2, "seed": 1},
        )
        assert isinstance(answer.output_parsed, Degrees) and answer.status == "completed"
        plain = client.responses.create(
            model="demo", input=MESSAGES, text={"format": {"type": "json_object"}}, max_output_tokens=60
        )
        assert plain.output_text.lstrip().startswith("{")
        bad: Any = {
            "type": "json_schema",
            "name": "a",
            "schema": {"type": "object", "unheard_of_keyword_x": 1, "$ref": "#/b"},
        }
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="demo", input=MESSAGES, text={"format": bad})
        assert caught.value.param == "text.format"
    with anthropic_client(url) as other:
        message = other.messages.parse(
            model="demo",
            messages=MESSAGES,
            max_tokens=200,
            output_format=Degrees,
            extra_body={"temperature": 0.2, "seed": 1},
        )
        assert isinstance(message.parsed_output, Degrees) and message.stop_reason == "end_turn"
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
            other.messages.create(
                model="demo",
                messages=MESSAGES,
                max_tokens=9,
                output_config={"format": {"type": "json_schema", "schema": {"$ref": "#/b"}}},
            )
