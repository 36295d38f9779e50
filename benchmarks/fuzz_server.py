"""Sends the requests that Schemathesis makes from a running server's schema, and checks the answers.

    compress serve demo --port 8000 --max-model-len 32 --request-timeout 5 &
    python benchmarks/fuzz_server.py http://127.0.0.1:8000 [--examples 300] [--seed 0]

Every answer must have a status, a content type and a body that /openapi.json names, and none may be a failure of the server.
Some bodies are allowed by the schema and some are not. The script prints a line for each operation, and exits with 1 if
anything fails. tests/engine/server/test_server_limits.py runs a few examples.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

CHECKS = (status_code_conformance, content_type_conformance, response_schema_conformance)
SECONDS = 60
STREAM = "text/event-stream"
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")
"""Names of the last events of streams that do not end in `[DONE]`."""
MOST_EVENTS = 10_000
"""Events of a stream that are read. Schemathesis leaves a stream after 20 by itself, before most streams here end."""
GATEWAY_TIMEOUT = 504
"""Status that is no failure, because a request may take long."""


def fuzz(url: str, *, examples: int = 100, start: int = 0) -> dict[str, Any]:
    """Run so many examples of each operation in each mode. Returns counts of cases and statuses, and the failures."""
    load_all_checks()
    failures: list[str] = []
    statuses: dict[str, Counter[int]] = {}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.max_stream_events = MOST_EVENTS
    for operation in schema.get_all_operations():
        one = operation.ok()
        name = f"{one.method.upper()} {one.path}"
        counted = statuses.setdefault(name, Counter())
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _try_operation(one, mode, examples, start, counted, failures)
    cases = sum(sum(counted.values()) for counted in statuses.values())
    return {"cases": cases, "statuses": {name: dict(counted) for name, counted in statuses.items()}, "failures": failures}


def _try_operation(
    operation: Any, mode: GenerationMode, examples: int, start: int, counted: Counter[int], failures: list[str]
) -> None:
    try:
        strategy = operation.as_strategy(generation_mode=mode)
    except Exception as error:  # an operation without parameters has no invalid values
        failures.append(f"{operation.path} {mode}: {error}")
        return

    @seed(start)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def try_case(case: Any) -> None:
        response = case.call(timeout=SECONDS)
        counted[response.status_code] += 1
        problem = _problem(case, response)
        if problem:
            failures.append(f"{operation.method.upper()} {operation.path}: {problem}; {case.as_curl_command()[:500]}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hypothesis warns that some kinds of invalid input are rare and need many tries
        try:
            try_case()
        except Exception as error:
            if "Unsatisfiable" not in type(error).__name__:
                raise


def _problem(case: Any, response: Any) -> str:
    """Return the problem of an answer, or an empty text if there is none."""
    if response.status_code >= 500 and response.status_code != GATEWAY_TIMEOUT:
        return f"status {response.status_code}: {response.text[:200]}"
    kind = str(response.headers.get("content-type", [""])[0])
    if kind.startswith(STREAM):
        return "" if _has_ended(response.text) else "the stream has no end"
    try:
        case.validate_response(response, checks=list(CHECKS))
    except (Exception, BaseExceptionGroup) as error:  # every exception of a check is a finding
        return " ".join(str(error).split())[:300]
    return ""


def _has_ended(stream: str) -> bool:
    last = stream.split("\n\n")[-2:-1]
    ends = ("data: [DONE]", *(f"event: {name}\n" for name in LAST_EVENTS))
    return stream.endswith("\n\n") and bool(last) and last[0].startswith(ends)


def main() -> None:
    """Parse the arguments, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = fuzz(options.url, examples=options.examples, start=options.seed)
    for name, counted in figures["statuses"].items():
        print(f"{name:<28}", json.dumps(counted))
    print(f"{figures['cases']} cases, {len(figures['failures'])} failures")
    for failure in figures["failures"][:20]:
        print(failure)
    sys.exit(1 if figures["failures"] else 0)


if __name__ == "__main__":
    main()
