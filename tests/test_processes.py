"""Two processes train as one does with twice the batch, with the model whole in each or in pieces over them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, make_workplace
from click.testing import CliRunner
from conftest import save_reference
from safetensors import safe_open
from safetensors.torch import load_file
from training_in_processes import OPTIONS, TOKENS, train

import cli
from calibrate.collect import collect
from compress.dense_plan import choose, dense_plan
from compress.plan import plan_to_json
from compress.training import Trainer, TrainingOptions
from engine import processes
from engine.checkpoint import Checkpoint
from engine.errors import DataError, OptionError

TESTS = Path(__file__).resolve().parent
DENSIFY = ["densify", "model", *CALIBRATION, "--evaluation-samples", "2", "-o", "out", "--dtype", "float32", "--json"]
DENSIFY += ["--distill-steps", "4", "--validate-every", "2", "--learning-rate", "0.01", "--validation-samples", "2"]


def torchrun(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Two processes of the command (a script, or `-m` and a module)."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def history(path: Path) -> dict[str, list[float]]:
    """Every term of the loss and its sum, step by step, and what validation gave."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["training"])
    terms = {name: [step[name] for step in header["history"]] for name in header["history"][0]}
    return terms | {"validation": [value for _, value in header["validations"]]}


def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path) -> None:
    """The same losses and weights to 1e-5, in both parts of the training; also sharded, and sharded and resumed."""
    save_reference("qwen2_moe", tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    statistics = collect(checkpoint, TOKENS, dtype=torch.float32)
    plan = dense_plan(choose("usage", statistics, 2), statistics, dict.fromkeys(range(3), 0.5), checkpoint)
    (tmp_path / "dense.json").write_text(json.dumps(plan_to_json(plan)))
    train(tmp_path, "alone", replace(OPTIONS, batch_size=2 * OPTIONS.batch_size))
    done = torchrun(str(TESTS / "training_in_processes.py"), str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part, steps in (("distill", 6), ("finetune", 4)):
        expected, tensors = (
            history(tmp_path / "alone" / f"{part}.safetensors"),
            load_file(tmp_path / "alone" / f"{part}.safetensors"),
        )
        assert len(expected["loss"]) == steps and len(expected["validation"]) >= 2
        for run in ("together", "sharded", "resumed"):
            path = tmp_path / run / f"{part}.safetensors"
            for name, values in history(path).items():
                assert values == pytest.approx(expected[name], rel=1e-5), (run, part, name)
            found = load_file(path)
            assert set(found) == set(tensors)
            for name, tensor in tensors.items():
                assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-5), (run, part, name)
    assert [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 1)] == [{"from": 0}] * 2


def test_the_command_runs_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = torchrun("-m", "cli", *DENSIFY, "--batch-size", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    together: dict[str, Any] = json.loads(done.stdout)
    result = CliRunner().invoke(cli.main, [*DENSIFY, "--batch-size", "6", "-o", "alone"])
    alone = json.loads(result.stdout)
    for name in ("loss_first", "loss_last"):
        assert together["training"]["distill"][name] == pytest.approx(alone["training"]["distill"][name], rel=1e-5)
    assert together["perplexity_after"] == pytest.approx(alone["perplexity_after"], rel=1e-5)
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"


def test_what_needs_one_process_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli.main, ["prune", "--sparsity", "0.5", "-o", str(tmp_path / "out")])
    assert result.exit_code == 1 and not result.output, "the first process says it for all"
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(cli.main, ["prune", "--sparsity", "0.5", "-o", str(tmp_path / "out")])
    assert result.exit_code == 1 and "compress prune runs in one process" in result.output
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(OptionError, match="lower --nproc-per-node"):
        processes.join("cuda")


def test_what_needs_several_processes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.main, [*DENSIFY, "--shard"])
    assert result.exit_code == 1 and "torchrun" in result.output
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(DataError, match="3 sequences to train on are fewer than the 8"):
        Trainer({}, lambda batch: {}, TrainingOptions(1, 1e-3, batch_size=4), 3, 16)
