"""`--memory-limit` is obeyed as seen from outside the process, with the results of an unlimited run, or refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, make_workplace
from click.testing import CliRunner
from memory_limit import run_watched
from random_model import shape, write_random_weights, write_tokenizer

import cli
from engine.checkpoint.checkpoint import Checkpoint
from engine.files.safetensors_file import SafetensorsFile
from engine.kernels.torch_products import has_half_arithmetic
from engine.passes.activations import Activations
from engine.passes.memory_budget import UNLIMITED, MemoryBudget

LIMIT, ROUNDING_LIMIT = 800_000_000, 1_050_000_000
SEARCH_LIMIT = LIMIT if has_half_arithmetic() else 1_300_000_000
"""Limit of the search. If the processor only emulates half precision, gradients pass through a layer widened to float32.

All sequences of a step fit together, because batches of another size differ in the last bits."""
INTERPRETER = 350_000_000
"""Minimum memory of an interpreter with torch, transformers and other packages."""
TEXT = ["--data", "stdlib", "--samples", "4", "--sequence-length", "32", "--threads", "1", "--json"]
SEARCH = ["--method", "diep", "--start", "fisher", "--epochs", "2", "--batch-size", "2", "--sparsity", "0.5"]


@pytest.fixture(name="model", scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a mixture that does not fit beside the interpreter."""
    directory = tmp_path_factory.mktemp("limit") / "model"
    config = shape(hidden=512, layers=4, experts=8, width=6144) | {"vocab_size": 4096}
    assert write_random_weights(directory, config, alike=True) > LIMIT - INTERPRETER
    write_tokenizer(directory, 4096)
    return directory


def run(*command: str) -> tuple[dict[str, Any], int]:
    done, peak = run_watched([sys.executable, "-m", "cli", *command])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout), peak


@pytest.mark.slow
def test_a_search_within_a_limit_stays_below_it_and_finds_the_same(model: Path, tmp_path: Path) -> None:
    said = {}
    for name, limit in (("free", []), ("limited", ["--memory-limit", str(SEARCH_LIMIT)])):
        options = [*SEARCH, *TEXT, "--evaluation-samples", "2", "-o", str(tmp_path / name), *limit]
        said[name], peak = run("prune", str(model), *options)
        assert (peak <= SEARCH_LIMIT) == bool(limit), f"{name}: {peak / 1e6:.0f} MB"
    for key in ("experts_per_layer", "perplexity_before", "perplexity_after"):
        assert said["limited"][key] == said["free"][key], key
    scores = [json.loads((tmp_path / name / "diep_scores.json").read_text()) for name in said]
    assert torch.allclose(*(torch.tensor(_numbers(each)) for each in scores), rtol=1e-5, atol=1e-5)
    one, other = (Checkpoint(tmp_path / name) for name in said)
    assert all(torch.equal(one.tensor(name), other.tensor(name)) for name in one.shapes)


def _numbers(value: Any) -> list[float]:
    """Return all numbers in a JSON value, in order."""
    if isinstance(value, dict):
        return [number for each in value.values() for number in _numbers(each)]
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return [float(value)]


@pytest.mark.slow
def test_calibration_within_a_limit(model: Path, tmp_path: Path) -> None:
    files = []
    for name, limit in (("free", []), ("limited", ["--memory-limit", str(LIMIT)])):
        files.append(tmp_path / f"{name}.safetensors")
        _, peak = run("calibrate", str(model), "-o", str(files[-1]), *TEXT, *limit)
        assert not limit or peak <= LIMIT, f"{peak / 1e6:.0f} MB"
    with SafetensorsFile(files[0]) as free, SafetensorsFile(files[1]) as limited:
        assert free.metadata == limited.metadata
        assert all(torch.equal(free.tensor(name), limited.tensor(name)) for name in free.entries)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in files}, "nothing is left of the work"


@pytest.mark.parametrize(
    "command",
    [
        ["prune", "model", "--sparsity", "0.5", "--method", "reap", "--evaluation-samples", "2", "-o", "out"],
        ["prune", "model", "--sparsity", "0.5", "--method", "naee", "--evaluation-samples", "2", "-o", "out"],
        ["prune", "model", "--sparsity", "0.5", "--method", "taylor", "--evaluation-samples", "2", "-o", "out"],
        ["prune", "model", "--sparsity", "0.5", *SEARCH[:-2], "--evaluation-samples", "2", "-o", "out"],
        ["calibrate", "model", "-o", "statistics.safetensors"],
        ["evaluate", "model"],
    ],
    ids=lambda command: " ".join(command[:1] + command[5:6]),
)
def test_every_pass_of_a_job_is_given_its_budget(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    seen: dict[str, set[MemoryBudget]] = {"batches": set(), "relieve": set(), "kept": set()}

    def noted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: MemoryBudget, *arguments: Any, **options: Any) -> Any:
            seen[name].add(self)
            return own(self, *arguments, **options)

        return called

    monkeypatch.setattr(MemoryBudget, "batches", noted("batches", MemoryBudget.batches))
    monkeypatch.setattr(MemoryBudget, "relieve", noted("relieve", MemoryBudget.relieve))
    begin = Activations.__init__

    def begun(self: Activations, *arguments: Any, **options: Any) -> None:
        if arguments[2:3] == () and options.get("path") is None:  # a file that is kept needs no budget
            seen["kept"].add(options.get("budget", UNLIMITED))
        begin(self, *arguments, **options)

    monkeypatch.setattr(Activations, "__init__", begun)
    result = CliRunner().invoke(cli.main, [*command, *CALIBRATION, "--memory-limit", "1000GB"])
    assert result.exit_code == 0, result.output
    (budget,) = seen["batches"]
    assert budget.limit == 1000 * 10**9
    assert seen["relieve"] == {budget} and seen["kept"] <= {budget}


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["prune", "demo", "--sparsity", "0.5", "--memory-limit", "100MB"], "needs .*GB at least"),
        (["calibrate", "demo", "-o", "statistics", "--memory-limit", "100MB"], "needs .*GB at least"),
        (["evaluate", "demo", "--memory-limit", "100MB"], "needs .*GB at least"),
        (["prune", "demo", "--sparsity", "0.5", "--recover-steps", "3", "--memory-limit", "8GB"], "hold two models"),
        (["prune", "demo", "--sparsity", "0.25,0.5", "--memory-limit", "8GB"], "one artifact at a time"),
        (["evaluate", "demo", "--metric", "rouge-l", "--memory-limit", "8GB"], "for perplexity"),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else value,
)
def test_what_cannot_be_obeyed_is_refused_before_any_work(
    command: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} of a text to read" for number in range(1500)))
    text = ["--data", "text.txt", "--samples", "2", "--sequence-length", "16"]
    result = CliRunner().invoke(cli.main, [*command, *text])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert re.search(reason, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["nearest", "gptq"])
def test_rounding_within_a_limit(way: str, tmp_path: Path) -> None:
    """The weights alone exceed the limit less an interpreter. One matrix has moments of 8 MB, and a layer 32 experts."""
    config = shape(hidden=1024, layers=4, experts=32, width=1024) | {"vocab_size": 4096}
    assert write_random_weights(tmp_path / "model", config, alike=True) > ROUNDING_LIMIT - INTERPRETER
    write_tokenizer(tmp_path / "model", 4096)
    text = ["--data", "stdlib", "--samples", "4", "--sequence-length", "64", "--threads", "1", "--json"]
    options = ["--bits", "8", "--rounding", way, "--evaluation-samples", "2", "-o", str(tmp_path / "out"), *text]
    _, peak = run("quantize", str(tmp_path / "model"), *options, "--memory-limit", str(ROUNDING_LIMIT))
    assert peak <= ROUNDING_LIMIT
