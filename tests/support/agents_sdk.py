"""Runs an agent of the package openai-agents: python agents_sdk.py URL INTERFACE STREAM, in a Python that has the package.

INTERFACE is "chat" or "responses", and STREAM "whole" or "stream". The agent's tool writes what it is given into notes.txt
and returns how many lines the file has. The script prints one JSON object: the final output, and the tool's calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

called: list[str] = []


@function_tool
async def add_note(text: str) -> str:
    """Add a line to the notes.

    Args:
        text: The line.
    """
    called.append(text)
    with Path("notes.txt").open("a", encoding="utf-8") as notes:
        notes.write(f"{text}\n")
    return f"{len(called)} lines"


async def main(url: str, interface: str, stream: bool) -> None:
    """Run the agent once."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[interface](
        model="tiny", openai_client=client
    )
    agent = Agent("notes", instructions="You keep notes.", model=model, tools=[add_note], model_settings=ModelSettings())
    if stream:
        result = Runner.run_streamed(agent, "Note what to buy.")
        events = [event async for event in result.stream_events()]
        assert len(events) > len(called)
    else:
        result = await Runner.run(agent, "Note what to buy.")
    print(json.dumps({"output": result.final_output, "called": called}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] == "stream"))
