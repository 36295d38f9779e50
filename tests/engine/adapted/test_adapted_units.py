"""Hidden units of experts that transformers runs: removing them equals multiplying them by zero in the whole model."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_references import naively, random_units, without_units
from conftest import others_slow
from tiny_families import TOKENS_SL, by_name, difference, loaded, logits_of, masked, save_tiny, through_layers
from torch import Tensor
from torch.nn.functional import cross_entropy

from calibrate.unit_statistics import collect_units, unit_moments, unit_sums
from compress.methods.gate_gradients import sampled_loss
from compress.methods.unit_fisher import unit_gradients
from compress.plans.apply import apply
from compress.plans.plan import Part, Plan, PlannedExpert, Source, kept_expert
from compress.plans.unit_selection import units_plan
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_gradients import AdaptedLayerwiseDecoder
from engine.adapted.expert_layers import PROJECTIONS

LAYOUTS = others_slow(("exaone_moe", "gpt_oss", "nemotron_h", "qwen3_vl_moe"), "exaone_moe", "gpt_oss")
"""Experts one by one beside a shared expert whose width is a multiple of theirs; gate and up in turn with biases,
transposed; experts without gate; and gate and up one after the other, stacked on disk."""


@pytest.fixture(scope="module", params=LAYOUTS)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, AdaptedCheckpoint]:
    path = tmp_path_factory.mktemp(request.param)
    return request.param, save_tiny(by_name(request.param), path), AdaptedCheckpoint(path)


def test_removing_units_equals_multiplying_them_by_zero(made: Any, tmp_path: Path) -> None:
    name, model, checkpoint = made
    kept, whole = random_units(checkpoint, 8), logits_of(model)
    apply(units_plan(kept, checkpoint.config.ffn_widths()), checkpoint, tmp_path)
    with without_units(model, checkpoint, kept):
        reference = logits_of(model)
    assert difference(reference, whole) > 1e-3
    assert difference(logits_of(loaded(by_name(name), tmp_path)), reference) < 1e-5
    result = AdaptedCheckpoint(tmp_path)
    assert difference(through_layers(result), reference) < 1e-5
    assert set(result.config.ffn_widths().values()) == {(8,) * 8}
    assert result.parameters < checkpoint.parameters


@torch.no_grad()
def test_statistics_of_units_are_those_of_the_whole_model(made: Any, tmp_path: Path) -> None:
    _, model, checkpoint = made
    with naively(model, checkpoint) as seen:
        logits_of(model)
    for directory, moments in ((tmp_path / "sums", False), (tmp_path / "moments", True)):
        collect_units(checkpoint, TOKENS_SL, directory, moments=moments, dtype=torch.float32)
    for layer, experts in seen.items():
        sums = unit_sums(tmp_path / "sums", layer)
        for expert, slots in experts.items():
            assert int(sums.tokens[expert]) == len(slots)
            if not slots:
                continue
            h_RF, weight_R = (torch.stack(each).double() for each in zip(*slots, strict=True))
            gram_FF = (weight_R[:, None] * h_RF).T @ (weight_R[:, None] * h_RF)
            assert close(sums.square_sum[expert], h_RF.square().sum(0))
            assert close(sums.weighted_square_sum[expert], gram_FF.diagonal())
            own = unit_moments(tmp_path / "moments", layer, expert)
            parts = [each if own.is_gram else each.T @ each for each in (own.fit.double(), own.held.double())]
            assert close(parts[0] + parts[1], gram_FF)


def close(own: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, and not all zero."""
    most = float(expected.abs().max())
    return most > 0.0 and torch.allclose(own, expected, rtol=1e-3, atol=1e-4 * most)


def test_fisher_of_units_is_that_of_the_whole_model(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ (h·∂L/∂h)² is Σ over tokens of (∂L/∂ε)², where the units of this token are multiplied by 1 + ε; L is of the text."""
    _, model, checkpoint = made
    monkeypatch.setattr(
        "compress.methods.unit_fisher.sampled_loss", lambda decoder, tokens, generator: sampled_loss(decoder, tokens, None)
    )
    found = unit_gradients(AdaptedLayerwiseDecoder(checkpoint, torch.float32), TOKENS_SL)
    width, factors = checkpoint.found.experts[0].width, defaultdict[tuple[int, int], list[Tensor]](list)

    def factor(layer: int, expert: int) -> Tensor:
        factors[layer, expert].append(torch.ones(width, requires_grad=True))
        return factors[layer, expert][-1]

    with naively(model, checkpoint, factor), torch.enable_grad():
        logits_SLV = model(input_ids=TOKENS_SL, use_cache=False).logits
        losses = cross_entropy(logits_SLV[:, :-1].flatten(0, 1), TOKENS_SL[:, 1:].flatten(), reduction="sum")
        losses.backward()
    for (layer, expert), own in factors.items():
        expected_F = sum(each.grad.double().square() for each in own)
        assert close(found.units[layer][expert], expected_F)


def test_merged_experts_are_averages_of_their_hidden_units(made: Any, tmp_path: Path) -> None:
    """The reference is the whole model with an average in the place of an expert; its routers cannot choose others."""
    name, model, checkpoint = made
    units = tuple(torch.randperm(16, generator=torch.Generator().manual_seed(5)).tolist())
    merged = PlannedExpert((Part((Source(1, 0.75), Source(6, 0.25, units))),), (Source(1),))
    rows, kept = {1: (1, 6)}, [0, 1, 2, 3, 4, 5]
    plan = Plan(
        {layer: tuple(merged if e in rows else kept_expert(e) for e in kept) for layer in checkpoint.config.moe_layers}
    )
    apply(plan, checkpoint, tmp_path)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with torch.no_grad():
        for layer in checkpoint.found.experts:
            _average(model.get_submodule(layer.experts), units)
    with masked(model, checkpoint, dict.fromkeys(checkpoint.config.moe_layers, kept)):
        reference = logits_of(model)
    for tensor, own in zip(model.state_dict().values(), before, strict=True):
        tensor.copy_(own)
    assert difference(reference, logits_of(model)) > 1e-3
    assert difference(logits_of(loaded(by_name(name), tmp_path)), reference) < 1e-5


def _average(module: Any, units: tuple[int, ...]) -> None:
    """Put ¾ of expert 1 and ¼ of expert 6, its hidden units permuted, in the place of expert 1."""
    width, order = len(units), torch.tensor(units)
    outputs = order
    if module.has_gate:
        outputs = torch.cat([order, order + width]) if module.is_concatenated else torch.stack([2 * order, 2 * order + 1], 1)
    outputs = outputs.flatten()
    for name in PROJECTIONS:
        weight = getattr(module, name, None)
        if weight is None:
            continue
        other = weight[6]
        if name == "down_proj":
            other = other[order] if module.is_transposed else other[:, order]
        elif name != "down_proj_bias":
            other = other[..., outputs] if module.is_transposed else other[outputs]
        weight[1] = 0.75 * weight[1] + 0.25 * other
