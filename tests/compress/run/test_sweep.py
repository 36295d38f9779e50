"""A sweep's artifacts equal those of single runs, calibration runs once, and an interrupted sweep resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from artifacts_for_tests import CALIBRATION, listing, make_workplace
from click.testing import CliRunner

import cli
import compress.methods.gate_fisher
import compress.run.job
import compress.run.result
import compress.sweep

MODEL = ["prune", "model", *CALIBRATION, "--evaluation-samples", "2", "--epochs", "1"]
SWEEP = [*MODEL, "--sparsity", "0.25,0.5", "--method", "reap,diep,fisher,naee", "-o", "sweep", "--json"]


@pytest.fixture(name="place")
def workplace(tmp_path: Path, pictures: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compress.run.result, "draw", lambda *given: [])  # only the comparison of a sweep is drawn
    return tmp_path


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.main, list(arguments))
    assert result.exit_code == code, result.output
    return result


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Return the first argument of each call of a function of compress.run.job."""
    own, calls = getattr(compress.run.job, name), []

    def count(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[0])
        return own(*arguments, **options)

    monkeypatch.setattr(compress.run.job, name, count)
    return calls


@pytest.mark.slow
def test_artifacts_are_those_of_single_runs_from_one_calibration(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collected = counted(monkeypatch, "collect")
    gradients = []
    own = compress.methods.gate_fisher.gate_gradients

    def counted_gradients(*arguments: Any, **options: Any) -> Any:
        gradients.append(1)
        return own(*arguments, **options)

    monkeypatch.setattr(compress.methods.gate_fisher, "gate_gradients", counted_gradients)
    values = json.loads(run(*SWEEP).stdout)
    assert [Path(figures["artifact"]).name for figures in values["runs"]] == [
        f"{method}-{sparsity}" for method in ("reap", "diep", "fisher", "naee") for sparsity in ("0.25", "0.5")
    ]
    assert len(values["rows"]) == 9
    assert sum(checkpoint.directory.name == "model" for checkpoint in collected) == 1
    assert len(gradients) == 1
    assert (place / "sweep" / "comparison" / "index.html").is_file()
    assert not list(place.glob(".*")) and not list((place / "sweep").glob(".*")), "nothing temporary is left"
    for method in ("reap", "diep", "fisher", "naee"):
        run(*MODEL, "--sparsity", "0.5", "--method", method, "-o", method)
        single, swept = place / method, place / "sweep" / f"{method}-0.5"
        assert (single / "model.safetensors").read_bytes() == (swept / "model.safetensors").read_bytes()
        assert (swept / "diep_scores.json").exists() == (method == "diep")


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = compress.sweep.prune

    def stop(options: Any, *rest: Any) -> Any:
        if options.method == "fisher":
            raise KeyboardInterrupt
        return own(options, *rest)

    monkeypatch.setattr(compress.sweep, "prune", stop)
    run(*SWEEP, code=130)
    done = {name: entry for name, entry in listing(place / "sweep").items() if name.startswith(("reap", "diep"))}
    assert done
    monkeypatch.setattr(compress.sweep, "prune", own)
    refused = run(*SWEEP, "--samples", "5", "--resume", code=1)
    assert "other options" in refused.output
    assert len(json.loads(run(*SWEEP, "--resume").stdout)["runs"]) == 8
    now = listing(place / "sweep")
    assert all(now[name] == entry for name, entry in done.items()), "what was done is not done again"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--sparsity", "0.5,1.5"], "strictly between 0 and 1"),
        (["--sparsity", "0.5,0.5"], "named twice"),
        (["--method", "reap,reap"], "named twice"),
        (["--plan-output", "plan2.json"], "plan-output"),
        (["--scope", "global"], "naee"),
    ],
)
def test_bad_input_writes_nothing(place: Path, changes: list[str], message: str) -> None:
    before = listing(place)
    assert message in run(*SWEEP, *changes, code=1).output
    assert listing(place) == before


def test_an_existing_directory_is_refused(place: Path) -> None:
    (place / "sweep").mkdir()
    (place / "sweep" / "notes.txt").write_text("mine")
    assert "exists already" in run(*SWEEP, code=1).output
    assert "holds something else" in run(*SWEEP, "--overwrite", code=1).output


@pytest.mark.parametrize("value", ["reap,unknown", ""])
def test_unknown_methods_are_wrong_usage(place: Path, value: str) -> None:
    run(*MODEL, "--sparsity", "0.5", "--method", value, code=2)
