"""The correction after the refit, against a second implementation with whole models in memory and numpy's least squares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import save_reference
from interruptions import Interruption, interrupting
from torch import Tensor

import compress.refit.correction
from calibrate.ffn_inputs import HELD_OUT_ONE_IN
from compress.methods.least_squares import RIDGES
from compress.options.refit import RefitOptions
from compress.plans.apply import planned_decoder
from compress.plans.plan import Part, Plan, PlannedExpert, Source, pruning_plan
from compress.plans.unit_selection import units_plan
from compress.refit.correction import Corrected, _Products, _Rows, corrected
from compress.refit.narrowed import CorrectedFfn, corrected_ffns
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import MoeBlock
from engine.decoder.model import Decoder
from engine.passes.memory_budget import UNLIMITED, MemoryBudget

TOKENS = torch.randint(3, 96, (18, 9), generator=torch.Generator().manual_seed(11))
IS_HELD = (torch.arange(len(TOKENS)) % HELD_OUT_ONE_IN == 1).repeat_interleave(TOKENS.shape[1]).numpy()
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "granitemoeshared": {},
    "minimax": {},
    "qwen3_next": {},
}
"""Families with a shared expert and a dense layer, with stacks and multipliers, and with their own residuals or norms."""


def narrowed(family: str, path: Path) -> tuple[Checkpoint, Plan]:
    """Return a model, and a plan that keeps a third of every FFN's units; one expert stays whole and one leaves."""
    save_reference(family, path / "model", **FAMILIES[family])
    checkpoint = Checkpoint(path / "model")
    config, generator = checkpoint.config, torch.Generator().manual_seed(1)
    kept = {
        layer: [sorted(torch.randperm(width, generator=generator)[: width // 3].tolist()) for width in widths]
        for layer, widths in config.ffn_widths(("shared", "dense")).items()
    }
    for layer in config.moe_layers:
        kept[layer][0], kept[layer][1] = list(range(config.ffn_widths()[layer][0])), []
    return checkpoint, units_plan(kept, config.ffn_widths(), config.common_widths)


def job(checkpoint: Checkpoint, plan: Plan, work: Path, ridge: float | None, budget: MemoryBudget = UNLIMITED) -> Any:
    """Return what `corrected` reads of a run."""
    work.mkdir(exist_ok=True)
    prepared = SimpleNamespace(checkpoint=checkpoint, dtype=torch.float32, tokens_SL=TOKENS, plan=plan, budget=None)
    options = SimpleNamespace(device="cpu", refit=RefitOptions(ridge=ridge))
    return SimpleNamespace(
        prepared=prepared,
        options=options,
        memory_budget=budget,
        work=SimpleNamespace(path=work),
        bar=lambda title: iter,
    )


def correct(checkpoint: Checkpoint, plan: Plan, work: Path, ridge: float | None = None, **options: Any) -> Corrected:
    return corrected(job(checkpoint, plan, work, ridge, **options), plan, {})


@torch.no_grad()
def naive(checkpoint: Checkpoint, plan: Plan, ridge: float | None) -> tuple[dict[str, Tensor], list[float]]:
    """Return the corrected projections and the drift after each layer, from whole models and rows of an augmented system."""
    full = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    small = planned_decoder(plan, checkpoint, torch.float32)
    networks, found, drifts = corrected_ffns(plan, checkpoint.config), {}, []
    for index, layer in enumerate(small.layers):
        if index not in networks:
            continue
        target = output_of(full, index)
        seen: list[Any] = []
        block = layer.feed_forward
        hook = block.register_forward_pre_hook(lambda _, arguments, seen=seen: seen.append(arguments[0]))
        residual = target - output_of(small, index)
        hook.remove()
        for network in networks[index]:
            token, rows = uses(block, network, seen[-1], layer.feed_forward_weight)
            delta = best(rows, residual[token], IS_HELD[token], ridge)
            if delta is None:
                continue
            residual[token] -= rows @ delta.T
            expert = block if not isinstance(block, MoeBlock) else [*block.experts, block.shared][network.number]
            expert.down_DF.data = expert.down_DF.data + torch.from_numpy(delta).float()  # not the full model's
            found[network.name] = expert.down_DF.data.clone()
        difference = (target - output_of(small, index))[IS_HELD]
        drifts.append(float((difference**2).sum() / (target[IS_HELD] ** 2).sum()))
    return found, drifts


def output_of(decoder: Decoder, index: int) -> Any:
    """Return the output of a layer on all tokens, [tokens, hidden] in float64."""
    seen: list[Tensor] = []
    hook = decoder.layers[index].register_forward_hook(lambda module, given, output: seen.append(output))
    decoder(TOKENS)
    hook.remove()
    return seen[0].flatten(0, 1).double().numpy()


def uses(block: Any, network: CorrectedFfn, x_TD: Tensor, factor: float) -> tuple[Any, Any]:
    """Return the tokens that use an FFN, and its weighted hidden units for them."""
    if not isinstance(block, MoeBlock):
        return np.arange(len(x_TD)), factor * block.units(x_TD).double().numpy()
    if network.number == len(block.experts):
        weights = block.shared_weights(x_TD)
        rows = block.shared.units(x_TD) * (1.0 if weights is None else weights)
        return np.arange(len(x_TD)), factor * rows.double().numpy()
    kept: list[Any] = []
    block.observer = lambda x_TD, logits_TN, selection: kept.append(selection)
    block(x_TD)
    block.observer = None
    token, slot = (kept[0].experts == network.number).nonzero(as_tuple=True)
    rows = block.experts[network.number].units(x_TD[token]) * kept[0].weights[token, slot, None]
    return token.numpy(), factor * rows.double().numpy()


def best(rows: Any, residual: Any, is_held: Any, ridge: float | None) -> Any:
    """Return the ΔD of the ridge with the smallest held-out error, fitted to all rows; None where none helps."""
    if not (~is_held).any():
        return None
    fit = rows[~is_held]
    absolute = [each * (fit**2).sum(0).mean() for each in (RIDGES if ridge is None else (ridge,))]
    if ridge is None and is_held.any():
        errors = [((residual - rows @ ridged(fit, residual[~is_held], each).T)[is_held] ** 2).sum() for each in absolute]
        if min(errors) >= (residual[is_held] ** 2).sum():
            return None
        chosen = RIDGES[int(np.argmin(errors))]
    else:
        chosen = 1e-2 if ridge is None else ridge
    return ridged(rows, residual, chosen * (rows**2).sum(0).mean())


def ridged(rows: Any, residual: Any, absolute: float) -> Any:
    """Return argmin ‖residual − rows·ΔDᵀ‖² + absolute·‖ΔD‖², by least squares with a row for each coefficient."""
    width, hidden = rows.shape[1], residual.shape[1]
    wide = np.concatenate([rows, np.sqrt(absolute) * np.eye(width)])
    return np.linalg.lstsq(wide, np.concatenate([residual, np.zeros((width, hidden))]), rcond=None)[0].T


@pytest.mark.parametrize("ridge", [None, 0.1])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_correction_equals_the_naive_implementation(family: str, ridge: float | None, tmp_path: Path) -> None:
    checkpoint, plan = narrowed(family, tmp_path)
    found = correct(checkpoint, plan, tmp_path / "work", ridge, budget=MemoryBudget(tokens_per_batch=27))
    expected, drifts = naive(checkpoint, plan, ridge)
    assert found.tensors.keys() == expected.keys() and expected
    for name, down in expected.items():
        assert torch.allclose(found.tensors[name].float(), down, rtol=1e-3, atol=1e-3 * float(down.abs().max()))
    assert found.drift == pytest.approx(drifts, rel=1e-3)
    pairs = list(zip(found.drift, found.drift_before, strict=True))
    assert all(after is not None and before is not None and after <= before for after, before in pairs)


def merging_plan(kept: Mapping[int, list[int]]) -> Plan:
    """Return a plan in which every expert that stays is mixed with the one before it."""

    def merged(expert: int) -> PlannedExpert:
        return PlannedExpert((Part((Source(expert - 1, 0.25), Source(expert, 0.75))),), (Source(expert),))

    return Plan({layer: tuple(map(merged, own)) for layer, own in kept.items()})


@pytest.mark.parametrize("family", ["mixtral", "granitemoeshared"])
@pytest.mark.parametrize("made", [pruning_plan, merging_plan], ids=["pruned", "merged"])
def test_results_without_whole_experts_are_corrected(family: str, made: Callable[..., Plan], tmp_path: Path) -> None:
    save_reference(family, tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    counts = checkpoint.config.experts_by_layer
    kept = {layer: list(range(1, count, 2)) for layer, count in counts.items()}
    plan = made(kept)
    found = correct(checkpoint, plan, tmp_path / "work", budget=MemoryBudget(tokens_per_batch=27))
    expected, drifts = naive(checkpoint, plan, None)
    assert found.tensors.keys() == expected.keys() and len(expected) > 2
    for name, down in expected.items():
        assert torch.allclose(found.tensors[name].float(), down, rtol=1e-3, atol=1e-3 * float(down.abs().max()))
    assert found.drift == pytest.approx(drifts, rel=1e-3)


def test_an_interrupted_correction_resumes_at_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, plan = narrowed("mixtral", tmp_path)
    expected = correct(checkpoint, plan, tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(compress.refit.correction, "one_layer", interrupting(compress.refit.correction.one_layer, 2))
        with pytest.raises(Interruption):
            correct(checkpoint, plan, tmp_path / "work")
    layers: list[int] = []
    one_layer = compress.refit.correction.one_layer
    monkeypatch.setattr(
        compress.refit.correction, "one_layer", lambda c, index, *rest: layers.append(index) or one_layer(c, index, *rest)
    )
    found = correct(checkpoint, plan, tmp_path / "work")
    assert layers == list(range(2, len(checkpoint.config.layers)))
    assert found.drift == expected.drift and found.drift_before == expected.drift_before
    assert all(torch.equal(found.tensors[name], own) for name, own in expected.tensors.items())


def test_without_held_out_sequences_there_is_a_ridge_and_no_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_correction.TOKENS", TOKENS[:1])
    checkpoint, plan = narrowed("mixtral", tmp_path)
    found = correct(checkpoint, plan, tmp_path / "work")
    assert found.tensors and set(found.drift) == {None}


def test_wide_ffns_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, plan = narrowed("mixtral", tmp_path)
    monkeypatch.setattr(compress.refit.correction, "WIDEST_GRAM", 1)
    found = correct(checkpoint, plan, tmp_path / "work")
    assert not found.tensors and found.drift == found.drift_before


def test_rows_of_tokens_and_sums_of_products_are_one_problem() -> None:
    generator = torch.Generator().manual_seed(0)
    fit, held = ([torch.randn(8, size, generator=generator) for size in (5, 3)] for _ in range(2))

    def equations(own: _Rows | _Products, part: list[Tensor]) -> Any:
        for a_RK, r_RD in zip(part[0].split(3), part[1].split(3), strict=True):
            own.add(a_RK, r_RD)
        return own.equations()

    rows, products = ([equations(kind(5, 3), part) for part in (fit, held)] for kind in (_Rows, _Products))
    pairs = [*zip(rows, products, strict=True), (rows[0].joined(rows[1]), products[0].joined(products[1]))]
    for by_rows, by_products in pairs:
        assert by_rows.scale == pytest.approx(by_products.scale)
        delta_DK = by_products.solved(0.01)
        assert torch.allclose(by_rows.solved(0.01), delta_DK, atol=1e-5)
        assert by_rows.change(delta_DK) == pytest.approx(by_products.change(delta_DK), rel=1e-4)
