"""The protocol of benchmarks/published.py: its page, its steps, and how it goes on after an interruption."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import published
import pytest
from published import Protocol, accuracy, parsed
from results import ROOT
from tokenizers_for_tests import VOCABULARY, add_tokenizer

PERPLEXITY = {"value": 20.0, "value_stderr": 0.5}
TASKS = {"value": {"arc": {"acc,none": 0.5, "acc_stderr,none": 0.01}}}
SPEED = {
    "rows": [
        {"test": test, "tokens_per_second_mean": rate, "weights_bytes": 2e9, "peak_memory_bytes": 3e9}
        for test, rate in (("pp512", 300.0), ("tg128", 30.0))
    ]
}
COST = {"seconds": 3600.0, "peak_memory_bytes": 4e9}


def answer(words: list[str]) -> dict[str, Any]:
    """Return what a command of `compress` prints."""
    if words[0] == "evaluate":
        return TASKS if "--tasks" in words else PERPLEXITY
    return SPEED if words[0] == "bench" else COST


def arguments(output: Path, *more: str) -> list[str]:
    words = ["model", "--data", "text", "--tasks", "arc", "--methods", "reap,unit-obs", "--sparsity", "0.5"]
    return [*words, "--output", str(output), *more]


def test_a_run_goes_on_with_the_first_step_that_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    failing = [9]

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        words = command[3:]
        ran.append(words)
        if len(ran) in failing:
            failing.clear()
            return subprocess.CompletedProcess(command, 1, b"")
        if words[0] == "prune":
            Path(words[words.index("-o") + 1]).mkdir()
        return subprocess.CompletedProcess(command, 0, json.dumps(answer(words)).encode() + b"\n")

    made = {"machine": {"processor": "a processor", "cores": 2}, "date": "2026-01-01", "commit": "0123456"}
    monkeypatch.setattr(published, "record", lambda: made)
    monkeypatch.setattr(published.subprocess, "run", run)
    protocol = Protocol(parsed(arguments(tmp_path)))
    with pytest.raises(SystemExit, match=r"reap-0\.5: perplexity failed"):
        protocol.run(only_plan=False)
    first, ran[:] = list(ran), []
    whole = ["evaluate", "evaluate", "bench", "calibrate"]
    assert [words[0] for words in first] == [*["plan-run"] * 3, *whole, "prune", "evaluate"]
    assert "reap-0.5" not in protocol.page().partition("## Results")[2]

    protocol = Protocol(parsed(arguments(tmp_path)))
    protocol.run(only_plan=False)
    assert [words[0] for words in ran] == ["evaluate", "evaluate", "bench", *["prune", "evaluate", "evaluate", "bench"] * 2]
    prunes = [words for words in (*first, *ran) if words[0] == "prune"]
    assert ["--statistics" in words for words in prunes] == [True, False, False], "units need moments of their own"
    assert ["--uniform" in words for words in prunes] == [False, False, True]
    page = (tmp_path / "README.md").read_text()
    assert page == protocol.page()
    assert page.count("| 20.00 ± 0.50 | 50.0 ± 1.0 | 300.0 | 30.0 | 2.00 | 3.00 |") == 4
    assert page.count("| 1.00 | 1.00 | 4.0 | 4.0 |") == 3
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "a result is removed once it is measured"

    ran.clear()
    Protocol(parsed(arguments(tmp_path))).run(only_plan=False)
    assert not ran
    with pytest.raises(SystemExit, match="belongs to a run with other arguments"):
        Protocol(parsed(arguments(tmp_path, "--samples", "64")))


def test_files_of_quantized_blocks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["model.gguf", "--data", "text"])
    assert "give a directory or an id on the hub" in capsys.readouterr().err


def test_paths_are_those_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "text", "task.yaml"):
        Path(name).touch()
    words = ["model", "--data", "text", "--tasks", "task.yaml,arc", "-o", "made"]
    protocol = Protocol(parsed(words))
    assert protocol.model == str(tmp_path / "model") and protocol.text[1] == str(tmp_path / "text")
    assert protocol.tasks == f"{tmp_path / 'task.yaml'},arc" and protocol.output == tmp_path / "made"


def test_a_task_shows_its_normalized_accuracy() -> None:
    scores = {"alias": "arc", "acc,none": 0.5, "acc_norm,none": 0.25, "acc_norm_stderr,none": 0.125}
    assert accuracy(scores) == "25.0 ± 12.5"
    assert accuracy({"word_perplexity,none": 12.0, "word_perplexity_stderr,none": "N/A"}) == "12.0"  # type: ignore[dict-item]
    assert accuracy(None) == "–"


@pytest.mark.slow
def test_the_protocol_runs_on_a_model_in_the_hub_s_layout(tmp_path: Path) -> None:
    """The model is found by its id in a cache without a network; all commands are real."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    snapshot = tmp_path / "cache" / "models--somebody--tiny" / "snapshots" / ("0" * 40)
    (snapshot.parent.parent / "refs").mkdir(parents=True)
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64}
    MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(snapshot)
    add_tokenizer(snapshot)
    words = ["somebody/tiny", "--data", "stdlib", "--methods", "reap,unit-magnitude", "--sparsity", "0.5", "--samples", "4"]
    words += ["--sequence-length", "32", "-p", "16", "-n", "4", "-r", "1", "-o", str(tmp_path / "made")]
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    script = [sys.executable, str(ROOT / "benchmarks" / "published.py"), *words]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ")[0] for line in done.stdout.partition("## Results")[2].strip().splitlines()[2:]]
    assert rows == ["| whole model", "| reap-0.5", "| unit-magnitude-0.5", "| unit-magnitude-uniform-0.5"]
    assert "–" not in done.stdout.partition("## Results")[2]
    other = subprocess.run([*script, "--limit", "3"], env=environment, capture_output=True, text=True)
    assert other.returncode and "belongs to a run with other arguments" in other.stderr
