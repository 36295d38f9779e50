"""Experts that are nearly copies: the measure, and what `compress prune` says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from artifacts_for_tests import CALIBRATION, make_workplace
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import cli
from compress.report.likeness import likeness
from engine.checkpoint.checkpoint import Checkpoint
from engine.families.experts import DOWN
from engine.families.tensor_names import expert_tensor

NOTE = "nearly copies of each other"
PRUNE = ["prune", "model", "--sparsity", "0.5", "--method", "unit-magnitude", "--no-refit", "--evaluation-samples", "0"]


def said(tmp_path: Path, output: str) -> str:
    result = CliRunner().invoke(cli.main, [*PRUNE, *CALIBRATION[:2], "-o", output], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_copies_are_found_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    own = Checkpoint(tmp_path / "model")
    alike = likeness(own)
    assert alike is not None and abs(alike) < 0.5
    assert NOTE not in said(tmp_path, "apart")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    for layer in own.config.moe_layers:
        first, second = (expert_tensor(own.config.architecture, layer, expert, DOWN) for expert in (0, 1))
        tensors[second] = tensors[first] + 0.1 * tensors[first].std() * torch.randn_like(tensors[first])
    save_file(tensors, path, metadata={"format": "pt"})
    # A tenth of noise at right angles: the cosine is 1 / sqrt(1 + 0.01).
    assert likeness(Checkpoint(tmp_path / "model")) == pytest.approx(0.995, abs=2e-3)
    assert NOTE in said(tmp_path, "copies")
