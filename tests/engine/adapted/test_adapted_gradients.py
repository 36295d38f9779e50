"""Gradients through models that transformers runs, layer by layer, compared with autograd over the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapted_references import text_gradients
from conftest import others_slow
from tiny_families import TOKENS_SL, by_name, save_tiny
from torch import Tensor

from compress.methods.gate_fisher import fisher_scores
from compress.methods.gate_gradients import gate_gradients
from compress.methods.gate_taylor import taylor_scores
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_gradients import AdaptedLayerwiseDecoder
from engine.passes.memory_budget import MemoryBudget

ROUTERS = others_slow(("exaone_moe", "gemma4", "gpt_oss", "hy_v4"), "exaone_moe", "gemma4")
"""Sigmoid scores with a bias of the choice; softmax with a scale of each expert; biases of stacked, transposed experts; and
layers that share what an indexer selects."""


@pytest.fixture(scope="module", params=ROUTERS)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, AdaptedCheckpoint]:
    path = tmp_path_factory.mktemp(request.param)
    return save_tiny(by_name(request.param), path), AdaptedCheckpoint(path)


def test_gate_gradients_equal_those_of_the_whole_model(made: Any) -> None:
    """In batches of one and of three sequences, and in one sweep or several."""
    model, checkpoint = made
    first, second = text_gradients(model, checkpoint, TOKENS_SL)
    for budget in (MemoryBudget(tokens_per_batch=16), MemoryBudget()):
        decoder = AdaptedLayerwiseDecoder(checkpoint, torch.float32)
        own_first, own_second = gate_gradients(decoder, TOKENS_SL, own_samples=False, budget=budget)
        assert all(is_close(own_first[layer], expected_N) for layer, expected_N in first.items())
        assert all(is_close(own_second[layer], expected_N) for layer, expected_N in second.items())
    scores = taylor_scores(AdaptedLayerwiseDecoder(checkpoint, torch.float32), TOKENS_SL)
    assert all(is_close(scores[layer], expected_N.abs()) for layer, expected_N in first.items())


def is_close(own_N: Tensor, expected_N: Tensor) -> bool:
    """Return whether two rows of numbers are equal up to rounding, and not all zero."""
    most = float(expected_N.abs().max())
    return most > 1e-4 and torch.allclose(own_N, expected_N, rtol=1e-4, atol=1e-4 * most)


def test_samples_do_not_depend_on_batches(made: Any) -> None:
    """Tokens that the model draws itself are the same ones in any batch, so that gate Fisher is."""
    _, checkpoint = made
    budgets = MemoryBudget(tokens_per_batch=16), MemoryBudget()
    alone, together = (
        fisher_scores(AdaptedLayerwiseDecoder(checkpoint, torch.float32), TOKENS_SL, 3, budget=budget) for budget in budgets
    )
    assert all(is_close(scores_N, together[layer]) for layer, scores_N in alone.items())
