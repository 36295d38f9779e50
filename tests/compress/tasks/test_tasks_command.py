"""`compress evaluate --tasks`: its figures of several questions are those of a loop by hand, with skipping too."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from artifacts_for_tests import run
from packages_for_tests import needs_lm_eval
from safetensors.torch import load_file, save_file
from test_harness_model import by_hand

from engine.checkpoint.model_directory import DEMO_DIRECTORY

pytestmark = needs_lm_eval
QUESTIONS: list[tuple[str, list[str], int]] = [
    ("def main():\n    parser = argparse", [".ArgumentParser()", ".add_argument()", ".Namespace()", ".parse_args()"], 0),
    (
        "class Node:\n    def __init__(self, name):\n        self",
        [".node = None", ".name = name", ".value = 1", ".pop()"],
        1,
    ),
    ("def read(path):\n    with open(path", [", 'rb') as f:", ") as f:", "):", ", encoding='utf-8') as f:"], 3),
    (
        "    if not isinstance(other,",
        [" Fraction):", " self):", " type(self)):\n        return NotImplemented", " str):"],
        3,
    ),
    ("import unittest\n\nclass PathTest(unittest", [".main):", ".TestSuite):", ".TestCase):", ".TestLoader):"], 2),
    ("    def __len__(self):\n        return ", ["len(self.data)", "self.data", "0", "iter(self.data)"], 0),
    (
        "    @property\n    def name(self):\n        ",
        ["self._name = name", "return self._name", "yield", "del self._name"],
        1,
    ),
    ("    @classmethod\n    def create", ["(self, name):", "(cls, name):", "(name):", "(mcs, name):"], 1),
    (
        "    while True:\n        line = f.readline()\n        if not line:\n            ",
        ["continue", "pass", "yield", "break"],
        3,
    ),
    ("    while ", ["True:", "not self.closed:", "n > 0:", "i < len(names):"], 0),
    ("    for item in items:\n        seen", [".append(item)", ".add(item)", ".update(item)", ".remove(item)"], 1),
    ("from collections import ", ["OrderedDict", "namedtuple", "path", "Thread"], 1),
    ("    for name, value in ", ["self:", "kwargs.items():", "headers:", "result:"], 1),
    ("    lock = threading", [".Condition()", ".get_ident()", ".Barrier(2)", ".Semaphore()"], 3),
    ("    local = threading", [".get_ident()", ".local()", ".Timer()", ".Barrier(2)"], 1),
    ("    start = time", [".mktime()", ".clock()", ".gmtime()", ".strftime()"], 2),
    ("    now = datetime", [".datetime.now()", ".datetime()", ".today()", ".fromtimestamp(0)"], 0),
]
"""Contexts, continuations, and the place of the right one, none of which the tokenizer joins to the end of its context.

The demo model answers the last five otherwise when it skips experts. Its best answers are further apart than any rounding
of float32 moves them.
"""
PAIRS = [(context, answer) for context, answers, _ in QUESTIONS for answer in answers]
Scores = dict[tuple[str, str], float]
"""The log-likelihood of each continuation, by its context and its text."""


@dataclass(frozen=True)
class Evaluated:
    """The results of one run of the command."""

    own: dict[str, float]
    """The task's figures."""
    scores: Scores
    """The log-likelihoods that the harness received, which the command does not print."""
    skipped_share: float | None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the task `own.yaml`, and `shuffled`: the demo model with its weights at other places."""
    path = tmp_path_factory.mktemp("tasks")
    rows = [{"context": context, "answers": answers, "right": right} for context, answers, right in QUESTIONS]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: dict[str, Any] = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(path / "rows.jsonl")},
    }
    task |= {"test_split": "train", "output_type": "multiple_choice", "target_delimiter": ""}
    task |= {"doc_to_text": "{{context}}", "doc_to_choice": "{{answers}}", "doc_to_target": "right"}
    task |= {"metric_list": [{"metric": name} for name in ("acc", "acc_norm", "brier_score")]}
    (path / "own.yaml").write_text(json.dumps(task))
    shutil.copytree(DEMO_DIRECTORY, path / "shuffled")
    draw = torch.Generator().manual_seed(0)
    weights = load_file(path / "shuffled" / "model.safetensors")
    moved = {
        name: weight.flatten()[torch.randperm(weight.numel(), generator=draw)].view(weight.shape)
        for name, weight in weights.items()
    }
    save_file(moved, path / "shuffled" / "model.safetensors", metadata={"format": "pt"})
    return path


def evaluated(monkeypatch: pytest.MonkeyPatch, place: Path, model: str | Path, *options: str) -> Evaluated:
    """Run the command on the task of `place`, and keep the log-likelihoods that the harness was given."""
    from compress.tasks.harness_model import HarnessModel

    scores: Scores = {}
    computed = HarnessModel._loglikelihood_tokens

    def kept(model: Any, requests: Any, *arguments: Any, **named: Any) -> Any:
        found = computed(model, requests, *arguments, **named)
        scores.update({request[0]: value for request, (value, _) in zip(requests, found, strict=True)})
        return found

    with monkeypatch.context() as patched:
        patched.setattr(HarnessModel, "_loglikelihood_tokens", kept)
        figures = run("evaluate", str(model), "--tasks", str(place / "own.yaml"), *options)
    return Evaluated(figures["value"]["own"], scores, figures["experts_skipped_share"])


@cache
def scores_by_hand(path: Path, threshold: float = 0.0, dtype: torch.dtype = torch.float32) -> Scores:
    values = by_hand(path, threshold, PAIRS, dtype)
    return {pair: value for pair, (value, _) in zip(PAIRS, values, strict=True)}


def expected_figures(scores: Scores) -> dict[str, float]:
    """Return the figures of the task, each from its definition.

    Accuracy takes the most probable answer, normalized accuracy the most probable one for each character, and the Brier
    score is the mean squared distance of the answers' probabilities, among the four, to the right answer.
    """
    right = normalized = distance = 0.0
    for context, answers, place in QUESTIONS:
        own = [scores[context, answer] for answer in answers]
        by_length = [value / len(answer) for value, answer in zip(own, answers, strict=True)]
        right += own[place] == max(own)
        normalized += by_length[place] == max(by_length)
        shares = torch.tensor(own, dtype=torch.float64).softmax(0)
        distance += float((shares - torch.eye(len(answers))[place]).square().sum())
    names = ("acc,none", "acc_norm,none", "brier_score,none")
    return {name: total / len(QUESTIONS) for name, total in zip(names, (right, normalized, distance), strict=True)}


def agrees(found: Evaluated, scores: Scores, within: float) -> bool:
    """Return whether every log-likelihood and every figure of a run is that of these scores."""
    expected = expected_figures(scores)
    return found.scores == pytest.approx(scores, abs=within) and all(
        found.own[name] == pytest.approx(value, abs=within if name.startswith("brier") else 1e-9)
        for name, value in expected.items()
    )


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_figures_of_the_demo_model_equal_a_loop_by_hand(
    place: Path, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--skip-threshold", f"{threshold:g}", "--dtype", "float32"]
    found = evaluated(monkeypatch, place, "demo", *options)
    expected, other = (scores_by_hand(DEMO_DIRECTORY, each) for each in (threshold, 1.0 - threshold))
    assert agrees(found, expected, 1e-4)
    assert max(abs(found.scores[pair] - other[pair]) for pair in PAIRS) > 0.1
    shuffled = evaluated(monkeypatch, place, place / "shuffled", *options)
    for name in ("acc,none", "acc_norm,none"):
        values = [found.own[name], expected_figures(other)[name], shuffled.own[name], 0.0, 1.0]
        assert len(set(values)) == len(values), (name, values)
    assert found.own["acc,none"] != found.own["acc_norm,none"]
    assert 0 < (found.skipped_share or 0.0) < 1 if threshold else not found.skipped_share


@pytest.mark.slow
def test_the_figures_in_the_own_dtype_are_near_a_loop_by_hand(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to bfloat16 may decide whether an expert is skipped, so one answer or two may differ, but not most."""
    found = evaluated(monkeypatch, place, "demo", "--skip-threshold", "1")
    skipping, whole = (scores_by_hand(DEMO_DIRECTORY, threshold, torch.bfloat16) for threshold in (1.0, 0.0))
    near, far = (median(abs(found.scores[pair] - scores[pair]) for pair in PAIRS) for scores in (skipping, whole))
    assert near < 0.1 and near < far / 3
    for name in ("acc,none", "acc_norm,none"):
        assert found.own[name] == pytest.approx(expected_figures(skipping)[name], abs=2.01 / len(QUESTIONS))


def test_the_model_of_the_harness_gives_the_same_figures(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = evaluated(monkeypatch, place, "demo", "--skip-threshold", "0", "--dtype", "float32")
    theirs = HFLM(pretrained=str(DEMO_DIRECTORY), device="cpu", dtype="float32")
    manager = TaskManager(include_defaults=False)
    made = lm_eval.simple_evaluate(model=theirs, tasks=[str(place / "own.yaml")], task_manager=manager)
    scores = {
        arguments: value
        for sample in made["samples"]["own"]
        for arguments, ((value, _),) in zip(sample["arguments"], sample["resps"], strict=True)
    }
    assert agrees(found, scores, 1e-3)
    for name in expected_figures(scores):
        assert found.own[name] == pytest.approx(made["results"]["own"][name], abs=1e-3)


def test_the_figures_of_four_bits_equal_a_loop_by_hand(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop multiplies plain matrices, dequantized before, and the command the low-bit ones as they are stored."""
    small = place / "small"
    run("quantize", "demo", "--bits", "4", "--evaluation-samples", "0", "-o", str(small))
    found = evaluated(monkeypatch, place, small, "--skip-threshold", "1", "--dtype", "float32")
    expected = scores_by_hand(small, 1.0)
    assert agrees(found, expected, 1e-3)
    for other in (scores_by_hand(small), scores_by_hand(DEMO_DIRECTORY, 1.0)):  # without skipping, with whole weights
        assert not agrees(found, other, 1e-2)
    assert found.skipped_share is not None and 0 < found.skipped_share < 1


def test_a_comparison_has_the_figures_with_and_without_skipping(place: Path) -> None:
    """Both are those of a loop by hand."""
    options = ["--tasks", str(place / "own.yaml"), "--skip-threshold", "1", "--dtype", "float32"]
    (row,) = run("compare", "demo", *options, "--no-speed", "--samples", "0")["rows"]
    for key, threshold in (("tasks", 1.0), ("tasks_without_skipping", 0.0)):
        expected = expected_figures(scores_by_hand(DEMO_DIRECTORY, threshold))
        for name in ("acc", "acc_norm"):
            assert row[key]["own"][name] == pytest.approx(expected[f"{name},none"], abs=1e-9)
    assert row["tasks"]["own"]["acc"] != row["tasks_without_skipping"]["own"]["acc"]
