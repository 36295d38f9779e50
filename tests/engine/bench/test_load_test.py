"""The load test: its figures computed by hand, and a run against a server; and the benchmark of the scheduler itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from server_for_tests import scripted_state, served

import cli
from engine.bench.load_test import Outcome, figures, load_test, result_block
from engine.bench.options import LoadOptions
from engine.errors import CompressError, OptionError
from engine.generation.generate import Engine
from engine.server.reading.reading_pool import ReadingPool
from engine.server.server import State


@pytest.fixture
def state(tiny_engine: Engine, reading_pool: ReadingPool) -> State:
    return scripted_state(tiny_engine, reading_pool, "abcdefghij")


@pytest.fixture
def url(state: State) -> Iterator[str]:
    with served(state) as address:
        yield address


def test_figures_by_hand() -> None:
    outcomes = [
        Outcome(10, 3, sent=1.0, pieces=[1.5, 1.6, 1.9]),
        Outcome(20, 5, sent=2.0, pieces=[2.1, 2.5]),
        Outcome(30, 1, sent=2.0, pieces=[2.3]),
        Outcome(error="500: no", sent=2.0),
    ]
    found = figures(outcomes, 4.0)
    assert (found["completed"], found["failed"], found["errors"]) == (3, 1, ["500: no"])
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (60, 9)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (0.75, 2.25, 17.25)
    assert found["mean_ttft_ms"] == pytest.approx(300) and found["median_ttft_ms"] == pytest.approx(300)
    assert found["p99_ttft_ms"] == pytest.approx(496), "between 300 and 500, at 1.98 of 2"
    assert found["mean_tpot_ms"] == pytest.approx(150), "0.4 s over 2 tokens, and over 4"
    assert found["mean_itl_ms"] == pytest.approx(800 / 3) and found["median_itl_ms"] == pytest.approx(300)
    assert figures([Outcome(1, 1, error="x")], 1.0)["mean_ttft_ms"] is None


def test_the_block_has_a_line_for_each_figure() -> None:
    block = result_block(figures([Outcome(10, 3, sent=1.0, pieces=[1.5, 1.6, 1.9])], 2.0))
    lines = block.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    assert "Successful requests:                     1" in lines and "Output token throughput (tok/s):         1.50" in lines
    assert "Median TTFT (ms):                        500.00" in lines and "P99 ITL (ms):" in block
    assert [line.strip("-") for line in lines if line.startswith("--")] == [
        "Time to First Token",
        "Time per Output Token (excl. 1st token)",
        "Inter-token Latency",
    ]


def test_a_run_sends_what_was_asked_for(url: str, state: State) -> None:
    loop: Any = state.service.engine_loop
    arguments = ["--num-prompts", "6", "--max-concurrency", "2", "--random-input-len", "12", "--random-output-len", "4"]
    rate = ["--request-rate", "1000", "--ignore-eos", "--json"]
    result = CliRunner().invoke(cli.main, ["bench", "--server", url, *arguments, *rate], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["completed"] == 6 and found["failed"] == 0
    assert found["total_input_tokens"] == 72 and found["total_output_tokens"] == 24
    assert found["mean_ttft_ms"] > 0 and "Total token throughput" in result.stderr
    requests = loop.requests
    assert len(requests) == 7, "one to warm up"
    assert {len(request.prompt) for request in requests} == {12} and len({request.prompt for request in requests}) == 7
    assert all(request.max_new_tokens == 4 and request.ignore_end_tokens for request in requests)
    load_test(LoadOptions(url, num_prompts=6, random_input_len=12, random_output_len=1))
    assert {request.prompt for request in requests[7:]} == {request.prompt for request in requests[:7]}, "by seed"


def test_failures_are_counted_and_said(url: str, state: State) -> None:
    loop: Any = state.service.engine_loop
    loop.failure = "broken"
    with pytest.raises(CompressError, match="answered none of 3 requests: broken"):
        load_test(LoadOptions(url, num_prompts=3, random_input_len=3, random_output_len=3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"server": "localhost:1"}, "give its URL"),
        ({"server": "http://127.0.0.1:1"}, "cannot be reached"),
        ({"server": "http://a", "num_prompts": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_measured(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        load_test(LoadOptions(**options))


def test_a_key_is_sent(state: State) -> None:
    state.api_keys = ("sesame",)
    with served(state) as url:
        with pytest.raises(OptionError, match="answers 401"):
            load_test(LoadOptions(url))
        assert (
            load_test(LoadOptions(url, api_key="sesame", num_prompts=1, random_input_len=3, random_output_len=2))[
                "completed"
            ]
            == 1
        )


def test_the_scheduler_at_several_numbers_of_requests(tiny_model: Path) -> None:
    arguments = [
        "bench",
        str(tiny_model),
        "--concurrency",
        "1,3",
        "-p",
        "8",
        "-n",
        "24",
        "-r",
        "2",
        "--json",
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
    rows = json.loads(result.stdout)["rows"]
    assert [row["concurrency"] for row in rows] == [1, 3] and rows[0]["ratio_to_first"] == 1
    assert all(row["tokens_per_second"] > 0 and row["prefill_tokens_per_second"] > 0 for row in rows)
    assert rows[1]["ratio_to_first"] == pytest.approx(rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"])
    for wrong in (["--server", "http://a", str(tiny_model)], ["--concurrency", "2", "-n", "1"], ["--concurrency", "0"]):
        assert CliRunner().invoke(cli.main, ["bench", *wrong]).exit_code in (1, 2)
