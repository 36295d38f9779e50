"""Agent programs from PyPI work through a task against a scripted model, and what they sent is replayed without them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_for_tests import Sent
from test_tools import Scripted, make  # noqa: F401 (make is a fixture)

SUPPORT = Path(__file__).resolve().parents[3] / "support"
RECORDED = SUPPORT / "recorded_agents.json"
"""The requests of each run: those of mini-swe-agent 2.4.6 and of openai-agents 0.24.0."""
RUNS: dict[str, list[Sent]] = json.loads(RECORDED.read_text(encoding="utf-8"))
LONGEST = 200
"""Characters of the longest text that is recorded whole. Others are recorded to the end of their first line."""


def call(name: str, **arguments: str) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


SHELL = (
    "<think>A file first.</think>I write the file.\n" + call("bash", command="printf 'Käse\\n' > list.txt; cat list.txt"),
    "Two looks at once.\n" + call("bash", command="wc -l < list.txt") + "\n" + call("bash", command="cat missing.txt"),
    "It is there.\n" + call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)
NOTES = (
    "<think>Two notes.</think>I note both.\n" + call("add_note", text="Brot") + "\n" + call("add_note", text="Käse"),
    "<think>Done.</think>Brot and Käse are noted.",
)


def scripted(*replies: str) -> Any:
    """Return a chooser of the reply that has as many turns of the assistant before it."""
    return lambda prompt: replies[prompt.count("\nassistant:") - 1]


def agent_python(package: str) -> str:
    """Return the Python that has the package. Skips the test if there is none."""
    python = os.environ.get("AGENT_PYTHON", "")
    if not python or subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False).returncode:
        pytest.skip(f"AGENT_PYTHON names no Python with the package {package}")
    return python


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Return what a program prints."""
    own = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    own |= {"HOME": str(folder), "PYTHONWARNINGS": "ignore"} | environment
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trimmed(bodies: list[Sent]) -> list[Any]:
    """Return what was sent with short texts, and with ids that are numbered in the order in which they come first."""
    numbers: dict[str, str] = {}

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: short(own) for name, own in value.items()}
        if isinstance(value, list):
            return [short(own) for own in value]
        if not isinstance(value, str):
            return value
        if re.fullmatch("(call|rs|msg|fc)_[0-9a-f]+", value):
            return numbers.setdefault(value, f"{value.partition('_')[0]}_{len(numbers)}")
        return value if len(value) <= LONGEST else value.partition("\n")[0]

    return [[path, short(body)] for path, body in bodies]


def check_recorded(name: str, bodies: list[Sent]) -> None:
    """Check that a run sent what is recorded. With AGENT_RECORD in the environment, record it."""
    found = trimmed(bodies)
    if "AGENT_RECORD" in os.environ:
        recorded = json.loads(RECORDED.read_text(encoding="utf-8")) | {name: found}
        RECORDED.write_text(json.dumps(recorded, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    else:
        assert found == RUNS[name], "another version of the package may send other bodies: record them with AGENT_RECORD=1"


@pytest.mark.slow
def test_mini_swe_agent(make: Any, tmp_path: Path) -> None:  # noqa: F811
    """The test runs if AGENT_PYTHON names a Python with mini-swe-agent."""
    python, bodies = agent_python("minisweagent"), []
    with make(scripted(*SHELL), bodies=bodies) as server:
        settings = ("mini.yaml", f"model.model_kwargs.api_base={server.url}/v1", "model.model_kwargs.api_key=none")
        options = [word for setting in settings for word in ("-c", setting)]
        task = ["-m", "openai/tiny", "-t", "Write a list.", "-y", "--exit-immediately", "-o", "trajectory.json"]
        run(
            [python, "-m", "minisweagent.run.mini", *options, *task],
            tmp_path,
            MSWEA_CONFIGURED="true",
            MSWEA_COST_TRACKING="ignore_errors",
            MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path / "settings"),
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )
    trajectory = json.loads((tmp_path / "trajectory.json").read_text(encoding="utf-8"))
    assert trajectory["info"]["exit_status"] == "Submitted" and trajectory["info"]["model_stats"]["api_calls"] == 3
    assert (tmp_path / "list.txt").read_text(encoding="utf-8") == "Käse\n"
    check_recorded("mini", bodies)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["whole", "stream"])
@pytest.mark.parametrize("interface", ["chat", "responses"])
def test_openai_agents(make: Any, tmp_path: Path, interface: str, stream: str) -> None:  # noqa: F811
    """The test runs if AGENT_PYTHON names a Python with openai-agents."""
    python, bodies = agent_python("agents"), []
    with make(scripted(*NOTES), bodies=bodies) as server:
        said = json.loads(run([python, str(SUPPORT / "agents_sdk.py"), server.url, interface, stream], tmp_path))
    assert said == {"output": "Brot and Käse are noted.", "called": ["Brot", "Käse"]}
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "Brot\nKäse\n"
    check_recorded(f"{interface} {stream}", bodies)


# The recorded requests, without the packages

Said = tuple[str, list[tuple[str, str]]]
"""A text, and the name and the arguments of each call."""


def said_in_chat(messages: list[dict[str, Any]]) -> Said:
    """Return what the last message of the assistant says."""
    message = [each for each in messages if each["role"] == "assistant"][-1]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return message["content"] or "", [(each["name"], each["arguments"]) for each in calls]


def said_in_items(items: list[dict[str, Any]]) -> Said:
    """Return what the assistant's items say."""
    texts = [each["content"][0]["text"] for each in items if each.get("type") == "message"]
    calls = [(each["name"], each["arguments"]) for each in items if each.get("type") == "function_call"]
    return "".join(texts), calls


def events(stream: str) -> list[Any]:
    """Return the events of a stream that has ended."""
    found = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert found[-1] == "[DONE]" or json.loads(found[-1])["type"] == "response.completed"
    return [json.loads(each) for each in found if each != "[DONE]"]


def put_together(chunks: list[Any]) -> dict[str, Any]:
    """Return the message of a streamed chat."""
    text, calls = "", []
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]):
        text += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(calls):
                calls.append({"function": {"name": part["function"]["name"], "arguments": ""}})
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def answer_of(path: str, body: Any, answer: str) -> Said:
    """Return what an answer says."""
    if path == "/v1/responses":
        whole = events(answer)[-1]["response"] if body.get("stream") else json.loads(answer)
        return said_in_items(whole["output"])
    if body.get("stream"):
        return said_in_chat([put_together(events(answer))])
    return said_in_chat([json.loads(answer)["choices"][0]["message"]])


def results_in(body: Any) -> list[str]:
    """Return what the tools have returned."""
    if "input" in body:
        return [each["output"] for each in body["input"] if each.get("type") == "function_call_output"]
    return [each["content"] for each in body["messages"] if each["role"] == "tool"]


@pytest.fixture(scope="module")
def servers(make: Any) -> Iterator[tuple[Scripted, Scripted]]:  # noqa: F811
    with make(scripted(*SHELL)) as shell, make(scripted(*NOTES)) as notes:
        yield shell, notes


@pytest.mark.parametrize("name", RUNS)
def test_the_requests_of_agents_are_answered(servers: tuple[Scripted, Scripted], name: str) -> None:
    """Each answer says what the agent repeats of it in its next request, and the last one what its script says."""
    server, bodies = servers[name != "mini"], RUNS[name]
    last = ("It is there.\n", [("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}')])
    expected = [said_in_items(own["input"]) if "input" in own else said_in_chat(own["messages"]) for _, own in bodies[1:]]
    expected.append(last if name == "mini" else ("Brot and Käse are noted.", []))
    assert len(bodies) == (3 if name == "mini" else 2) and len(expected[0][1]) == (1 if name == "mini" else 2)
    for (path, body), said in zip(bodies, expected, strict=True):
        answer = httpx2.post(f"{server.url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer_of(path, body, answer.text) == said
        prompt = server.prompt()
        assert '<tools>[{"type": "function"' in prompt and all(result in prompt for result in results_in(body))
    assert results_in(bodies[-1][1])
