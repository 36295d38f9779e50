"""The recorder's comparison finds every kind of difference, and nothing else."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from recorder import IGNORED, compare, gathered, machine, main, table

FIGURES = {
    "perplexity_after": 25.236,
    "experts_per_layer": [4, 5],
    "nothing": None,
    "seconds": 5.6,
    "versions": {"torch": "2"},
}
RECORDING: dict[str, Any] = {
    "machine": {"processor": "one", "versions": {"torch": "2"}},
    "entries": {"figures": {"prune": FIGURES}, "files": {"prune/model.safetensors": "ab12"}},
}


def differences(new: dict[str, Any], **options: Any) -> list[str]:
    return [line for own in compare(RECORDING, new, **options).values() for line in own.differences]


def changed(**figures: Any) -> dict[str, Any]:
    recording = deepcopy(RECORDING)
    recording["entries"]["figures"]["prune"] |= figures
    return recording


def test_equal_recordings_have_no_difference() -> None:
    compared = compare(RECORDING, deepcopy(RECORDING))
    assert {kind: own.count for kind, own in compared.items()} == {"figures": 4, "files": 1}
    assert not differences(RECORDING)
    assert "| figures | 4 | 0 |" in table(compared) and "| all | 5 | 0 |" in table(compared)


def test_a_changed_value_is_found() -> None:
    assert differences(changed(perplexity_after=25.2360001)) == ["figures prune perplexity_after: 25.236 became 25.2360001"]
    assert differences(changed(experts_per_layer=[5, 4])) == [
        "figures prune experts_per_layer 0: 4 became 5",
        "figures prune experts_per_layer 1: 5 became 4",
    ]
    assert differences(changed(nothing=0)) == ["figures prune nothing: null became 0"]


def test_a_missing_and_an_additional_entry_are_found() -> None:
    recording = changed(added=1)
    del recording["entries"]["figures"]["prune"]["nothing"], recording["entries"]["files"]
    assert differences(recording) == [
        "figures prune nothing: missing, was null",
        "figures prune added: additional, 1",
        'files prune/model.safetensors: missing, was "ab12"',
    ]


def test_ignored_keys_and_kinds_that_are_left_out_are_not_compared() -> None:
    assert not differences(changed(**dict.fromkeys(IGNORED, "another")))
    assert not differences(changed(nothing=0), leave_out=["figures"])


def test_recordings_of_different_machines_are_refused() -> None:
    with pytest.raises(ValueError, match="different machines"):
        compare(RECORDING, RECORDING | {"machine": RECORDING["machine"] | {"processor": "another"}})
    assert machine() == machine() and machine()["versions"]["torch"]


@pytest.mark.parametrize(("new", "status"), [(RECORDING, 0), (changed(nothing=0), 1)])
def test_the_exit_status_says_whether_there_is_a_difference(
    new: dict[str, Any], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, recording in zip(paths, (RECORDING, new), strict=True):
        path.write_text(json.dumps(recording))
    monkeypatch.setattr(sys, "argv", ["recorder.py", "compare", *map(str, paths)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert capsys.readouterr().out.startswith("figures prune nothing: null became 0" if status else "| kind |")


def test_a_stream_is_recorded_without_where_it_was_cut() -> None:
    def stream(*texts: str) -> str:
        events = [
            {"object": "chunk", "choices": [{"text": text, "logprobs": None, "finish_reason": None}]} for text in texts
        ]
        events[-1]["choices"][0]["finish_reason"] = "stop"
        return "".join(f"data: {line}\n\n" for line in (*map(json.dumps, events), "[DONE]"))

    assert gathered(stream("a", "b", "c")) == gathered(stream("ab", "c"))
    assert gathered(stream("a", "b", "c")) != gathered(stream("ab", "d"))
