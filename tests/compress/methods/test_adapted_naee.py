"""NAEE in families that transformers runs: losses of subsets are those of the whole model with a masked router."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import others_slow
from tiny_families import TOKENS_SL, by_name, logits_of, masked, save_tiny
from torch import Tensor, nn

from compress.methods.naee import SubsetLosses, SubsetSearch, best_subset, naee
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.passes.memory_budget import MemoryBudget

FAMILIES = others_slow(("exaone_moe", "minimax_m2", "qwen3_moe", "zaya", "gpt_oss"), "minimax_m2")
"""A bias of the choice, also outside of the router; softmax; states between routers and a slot that may be empty; a bias of
logits."""


def _outputs(model: Any, names: dict[int, str]) -> dict[int, Tensor]:
    """Return what the experts of each layer add up to in the whole model, [S · L, D]."""
    found: dict[int, Tensor] = {}

    def see(layer: int) -> Any:
        def hook(module: nn.Module, given: Any, made: Tensor) -> None:
            found[layer] = made.detach().reshape(-1, made.shape[-1]).clone()

        return hook

    handles = [model.get_submodule(name).register_forward_hook(see(layer)) for layer, name in names.items()]
    logits_of(model)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_masked_routers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All subsets of six experts, and some of three, which the greedy search meets; in batches of one sequence."""
    model = save_tiny(by_name(family), tmp_path)
    checkpoint = AdaptedCheckpoint(tmp_path)
    names = {layer.index: layer.experts for layer in checkpoint.found.experts}
    every = {layer: list(range(8)) for layer in names}
    full = _outputs(model, names)
    subsets = [*combinations(range(8), 6), (0, 1, 2), (1, 4, 6), (2, 5, 7)]
    found: list[list[float]] = []

    def watched(block: Any, x_TD: Tensor, choice: Any, **options: Any) -> list[int]:
        found.append(SubsetLosses(block, x_TD, choice)(subsets))
        return best_subset(block, x_TD, choice, **options)

    monkeypatch.setattr("compress.methods.naee.best_subset", watched)
    options: dict[str, Any] = {"dtype": torch.float32, "budget": MemoryBudget(tokens_per_batch=TOKENS_SL.shape[1])}
    kept = naee(checkpoint, TOKENS_SL, dict.fromkeys(names, 6), **options)
    greedy = naee(checkpoint, TOKENS_SL, dict.fromkeys(names, 6), search=SubsetSearch(limit=0), **options)
    for place, layer in enumerate(names):
        expected = []
        for subset in subsets:
            with masked(model, checkpoint, every | {layer: list(subset)}):
                expected.append(float((_outputs(model, {layer: names[layer]})[layer] - full[layer]).square().sum()))
        assert found[place] == pytest.approx(expected, rel=2e-3, abs=1e-6)
        assert max(expected) > 1e-4
        losses = dict(zip(subsets, expected, strict=True))
        assert losses[tuple(kept[layer])] == pytest.approx(min(expected[:28]), rel=1e-3, abs=1e-6)
        assert losses[tuple(greedy[layer])] >= losses[tuple(kept[layer])] - 1e-6
