"""Scores of hidden units against second implementations: autograd token by token, and least squares without the unit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from interruptions import Interruption, interrupting
from torch import Tensor

import compress.methods.gate_gradients
import engine.passes.layerwise
from calibrate.unit_statistics import Moments, collect_units, unit_sums
from compress.methods.gate_gradients import _sample_next
from compress.methods.least_squares import Narrowed
from compress.methods.unit_fisher import UnitGradients, unit_gradients
from compress.methods.unit_magnitude import magnitude_scores
from compress.methods.unit_obs import surgeon_scores
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.errors import DataError
from engine.passes.layerwise import LayerwiseDecoder
from engine.passes.memory_budget import MemoryBudget

TOKENS = torch.randint(3, 96, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(name="checkpoint", params=["mixtral", "qwen2_moe", "gpt_oss", "llama4_text"])
def tiny_checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    changes = {"mlp_only_layers": [1]} if request.param == "qwen2_moe" else {}
    save_reference(request.param, tmp_path, **changes)
    return Checkpoint(tmp_path)


@pytest.fixture(name="mixtral")
def mixtral_checkpoint(tmp_path: Path) -> Checkpoint:
    save_reference("mixtral", tmp_path)
    return Checkpoint(tmp_path)


def whole(checkpoint: Checkpoint, dtype: torch.dtype = torch.float64) -> Decoder:
    return Decoder(checkpoint.config, checkpoint.source(dtype))


# Magnitude


def test_magnitude_is_the_energy_that_a_unit_adds_to_the_output(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Observed in the full model, for each slot: w · h_f · D_f."""
    decoder, layer = whole(checkpoint), checkpoint.config.moe_layers[-1]
    block = decoder.layers[layer].feed_forward
    expected = [torch.zeros(expert.width, dtype=torch.float64) for expert in block.experts]

    def watch(x_TD: Tensor, logits_TN: Tensor, selection: Any) -> None:
        scales_TN = block.input_scales(logits_TN)
        for token, (experts, weights) in enumerate(zip(selection.experts.tolist(), selection.weights, strict=True)):
            for number, weight in zip(experts, weights, strict=True):
                own = x_TD[token] if scales_TN is None else x_TD[token] * scales_TN[token, number]
                h_F, down_DF = block.experts[number].units(own[None])[0], block.experts[number].down_DF
                expected[number] += (weight * h_F * down_DF).square().sum(0)

    block.observer = watch
    with torch.no_grad():
        decoder(TOKENS)
    directory = tmp_path / "units"
    collect_units(checkpoint, TOKENS, directory, moments=False, dtype=torch.float32)
    found = magnitude_scores(checkpoint, {layer: unit_sums(directory, layer)})[layer]
    scale = max(float(own.max()) for own in expected)
    assert all(torch.allclose(own, other, rtol=1e-4, atol=1e-6 * scale) for own, other in zip(found, expected, strict=True))


# Fisher


class TokenByToken:
    """Keeps the hidden units and the outputs of a block in the graph of autograd."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Tensor]] = []
        self.made: list[Tensor] = []

    def units(self, expert: int, h_RF: Tensor) -> Tensor:
        h_RF = h_RF if h_RF.requires_grad else h_RF.requires_grad_()
        self.seen.append((expert, h_RF))
        return h_RF

    def output(self, y_TD: Tensor) -> Tensor:
        self.made.append(y_TD)
        return y_TD


def naive_gradients(decoder: Decoder, targets_SL: Tensor) -> UnitGradients:
    """Return the sums from torch's own gradients by all h and y of a sequence, squared in a loop over tokens."""
    blocks = dict(zip(decoder.config.moe_layers, decoder.moe_blocks, strict=True))
    units = {
        layer: [torch.zeros(expert.width, dtype=torch.float64) for expert in block.experts]
        for layer, block in blocks.items()
    }
    outputs = {layer: torch.zeros(decoder.config.hidden_size, dtype=torch.float64) for layer in blocks}
    for row, targets in zip(TOKENS, targets_SL, strict=True):
        observers = {layer: TokenByToken() for layer in blocks}
        for layer, block in blocks.items():
            block.unit_observer = observers[layer]
        logits_LV = decoder(row[None])[0]
        loss = -sum(logits_LV[at].log_softmax(-1)[int(targets[at + 1])] for at in range(len(row) - 1))
        for layer, own in observers.items():
            seen = [(number, h_RF) for number, h_RF in own.seen if number < len(units[layer])]
            *gradients, output = torch.autograd.grad(loss, [*(h for _, h in seen), own.made[0]], retain_graph=True)
            for (expert, h_RF), gradient_RF in zip(seen, gradients, strict=True):
                for h, gradient in zip(h_RF.detach(), gradient_RF, strict=True):
                    units[layer][expert] += (h * gradient) ** 2
            for gradient in output:
                outputs[layer] += gradient**2
    for block in blocks.values():
        block.unit_observer = None
    return UnitGradients(units, outputs)


def drawn(decoder: Decoder, seed: int) -> Tensor:
    """Return the samples of the model for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        rows = [_sample_next(decoder.hidden_states(row[None]), decoder.head_VD, row[None], generator) for row in TOKENS]
    return torch.cat(rows)


def agree(found: UnitGradients, expected: UnitGradients, tolerance: float) -> bool:
    """Return whether all sums agree to a share of the layer's largest."""
    pairs = [(found.output[layer], expected.output[layer]) for layer in expected.output]
    pairs += [(torch.cat(found.units[layer]), torch.cat(expected.units[layer])) for layer in expected.units]
    assert found.units.keys() == expected.units.keys() and all(float(other.max()) > 0.0 for _, other in pairs)
    return all(
        torch.allclose(own, other, rtol=tolerance, atol=tolerance * 1e-2 * float(other.max())) for own, other in pairs
    )


@pytest.mark.parametrize("tokens_at_once", [4096, 18, 9])
def test_fisher_is_squared_for_each_token_of_the_model_s_own_samples(checkpoint: Checkpoint, tokens_at_once: int) -> None:
    decoder = whole(checkpoint)
    expected = naive_gradients(decoder, drawn(decoder, 4))
    found = unit_gradients(decoder, TOKENS, 4, budget=MemoryBudget(tokens_per_batch=tokens_at_once))
    assert agree(found, expected, 1e-5)
    assert not agree(found, naive_gradients(decoder, TOKENS), 0.01), "the text itself gives other gradients"


def test_fisher_layer_by_layer_equals_that_of_the_whole_model(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.passes.layerwise.SWEEP_TOKENS", 18)
    budget = MemoryBudget(tokens_per_batch=9)
    models = whole(checkpoint, torch.float32), LayerwiseDecoder(checkpoint, torch.float32)
    expected, found = (unit_gradients(model, TOKENS, 3, budget=budget) for model in models)
    assert agree(found, expected, 1e-3)


@pytest.fixture(name="dense_first")
def checkpoint_with_a_dense_layer(tmp_path: Path) -> Checkpoint:
    save_reference("qwen2_moe", tmp_path, num_hidden_layers=3, mlp_only_layers=[0])
    return Checkpoint(tmp_path)


def test_fisher_of_shared_experts_and_dense_ffns_is_that_of_a_change_of_their_units(dense_first: Checkpoint) -> None:
    """Σ (h·∂L/∂h)² of a unit is Σ over tokens of (∂L/∂ε)², where the unit of this token is multiplied by 1 + ε."""
    decoder, kinds = whole(dense_first), ("shared", "dense")
    targets_SL, found = drawn(decoder, 4), unit_gradients(decoder, TOKENS, 4, include=kinds)
    for layer, width in dense_first.config.common_widths.items():
        block = decoder.layers[layer].feed_forward
        network = getattr(block, "shared", block)
        expected = torch.zeros(width, dtype=torch.float64)
        for row, targets in zip(TOKENS, targets_SL, strict=True):
            change = torch.ones(len(row), width, dtype=torch.float64, requires_grad=True)
            own, network.units = network.units, lambda x_TD, *rest, own=network.units, c=change: own(x_TD, *rest) * c
            network.unit_observer = TokenByToken()  # so that the FFN is computed from its units
            logits_LV = decoder(row[None])[0]
            network.units, network.unit_observer = own, None
            loss = -sum(logits_LV[at].log_softmax(-1)[int(targets[at + 1])] for at in range(len(row) - 1))
            expected += torch.autograd.grad(loss, [change])[0].square().sum(0)
        assert torch.allclose(found.units[layer][-1], expected, rtol=1e-5, atol=1e-9 * float(expected.max()))
    alone = unit_gradients(decoder, TOKENS, 4)
    assert all(torch.equal(alone.output[layer], found.output[layer]) for layer in alone.output)
    layerwise = unit_gradients(LayerwiseDecoder(dense_first, torch.float32), TOKENS, 4, include=kinds)
    assert agree(layerwise, unit_gradients(whole(dense_first, torch.float32), TOKENS, 4, include=kinds), 1e-3)
    assert 0 in layerwise.output and float(layerwise.output[0].min()) > 0.0


def test_checkpointed_layers_count_once_and_the_model_stays_as_it_was(mixtral: Checkpoint) -> None:
    decoder = whole(mixtral)
    plain = unit_gradients(decoder, TOKENS, 3)
    decoder.checkpoint_activations = True
    assert agree(unit_gradients(decoder, TOKENS, 3), plain, 1e-6)
    assert all(block.unit_observer is None for block in decoder.moe_blocks)
    assert all(p.grad is None and not p.requires_grad for p in decoder.parameters())


def same(found: UnitGradients, expected: UnitGradients) -> bool:
    """Return whether all sums are bit for bit equal."""
    every = [(found.output[layer], expected.output[layer]) for layer in expected.output]
    every += [pair for layer in expected.units for pair in zip(found.units[layer], expected.units[layer], strict=True)]
    return all(torch.equal(*pair) for pair in every)


def test_an_interrupted_pass_ends_in_the_same_sums(
    mixtral: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress.methods.gate_gradients, "SAVE_EVERY_SECONDS", 0.0)
    passes = partial(unit_gradients, whole(mixtral), TOKENS, 3, budget=MemoryBudget(tokens_per_batch=9))
    expected = passes()

    def stop(batches: list[slice]) -> Iterator[slice]:
        yield from batches[:2]
        raise KeyboardInterrupt

    state = tmp_path / "units" / "state.safetensors"
    state.parent.mkdir()
    with pytest.raises(KeyboardInterrupt):
        passes(state_path=state, progress=stop)
    left: list[slice] = []
    assert same(passes(state_path=state, progress=lambda b: left.extend(b) or b), expected)
    assert left == [slice(2, 3)]
    with pytest.raises(DataError, match="not the state of this pass"):
        passes(state_path=next(tmp_path.glob("*.safetensors")))


def test_a_pass_layer_by_layer_resumes_at_its_layer(
    mixtral: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.passes.layerwise.SWEEP_TOKENS", 18)
    passes = partial(unit_gradients, LayerwiseDecoder(mixtral, torch.float32), TOKENS, 3)
    expected, path = passes(), tmp_path / "state.safetensors"
    for at in (4, 4):  # in the backward pass of the first sweep, and in the second
        with monkeypatch.context() as patched:
            patched.setattr(engine.passes.layerwise, "one_layer", interrupting(engine.passes.layerwise.one_layer, at))
            with pytest.raises(Interruption):
                passes(state_path=path)
    assert same(passes(state_path=path), expected)


# Optimal brain surgeon

WIDTH, HIDDEN = 10, 4


def draws(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(name="rows")
def weighted_units() -> Tensor:
    return draws(60, 5, seed=1) @ draws(5, WIDTH, seed=2) + 0.4 * draws(60, WIDTH, seed=3)


@pytest.fixture(name="down")
def down_projection() -> Tensor:
    return draws(HIDDEN, WIDTH, seed=4)


def refit_error(rows: Tensor, down: Tensor, kept: list[int], weight: Tensor) -> float:
    """Return half the squared error, weighted by output dimension, of torch's least squares on the kept units."""
    fitted = torch.linalg.lstsq(rows[:, kept], rows @ down.T, driver="gelsd").solution.T
    residual = rows @ down.T - rows[:, kept] @ fitted.T
    return 0.5 * float((weight * residual.square()).sum())


@pytest.mark.parametrize("weight", [torch.ones(HIDDEN).double(), torch.tensor([0.1, 3.0, 0.0, 1.0]).double()])
def test_the_cost_of_a_unit_is_the_error_of_the_refit_without_it(rows: Tensor, down: Tensor, weight: Tensor) -> None:
    costs = surgeon_scores(rows.T @ rows, down, weight, ridge=1e-13, steps=1)  # in one step: all by the first H⁻¹
    expected = [refit_error(rows, down, [k for k in range(WIDTH) if k != f], weight) for f in range(WIDTH)]
    assert costs.tolist() == pytest.approx(expected, rel=1e-6)


def test_units_leave_one_by_one_and_each_costs_what_it_adds_to_the_error(rows: Tensor, down: Tensor) -> None:
    weight = torch.ones(HIDDEN).double()
    scores = surgeon_scores(rows.T @ rows, down, weight, ridge=1e-13, steps=WIDTH)
    left, before, highest, order = list(range(WIDTH)), 0.0, 0.0, []
    for _ in range(WIDTH - 1):
        errors = {f: refit_error(rows, down, [k for k in left if k != f], weight) for f in left}
        cheapest = min(errors, key=errors.__getitem__)
        highest = max(highest, errors[cheapest] - before)
        assert float(scores[cheapest]) == pytest.approx(highest, rel=1e-5)
        before = errors[cheapest]
        left.remove(cheapest)
        order.append(cheapest)
    assert scores[order].diff().min() >= 0.0 and float(scores[left[0]]) >= highest
    assert order != surgeon_scores(rows.T @ rows, down, weight, ridge=1e-13, steps=1).argsort().tolist()[: WIDTH - 1]


def test_the_surgeon_removes_what_others_make_up_for(rows: Tensor, down: Tensor) -> None:
    """The twin of a unit is free, however large it is; magnitude would keep both."""
    twins = rows.clone()
    twins[:, 6] = 5.0 * twins[:, 2]
    gram = twins.T @ twins
    scores = surgeon_scores(gram, down, torch.ones(HIDDEN).double(), ridge=1e-9, steps=WIDTH)
    first = int(scores.argmin())
    assert first in (2, 6)
    magnitudes = gram.diagonal() * down.square().sum(0)
    assert int(magnitudes.argmax()) == 6
    kept = [unit for unit in range(WIDTH) if unit != first]
    own = Narrowed(Moments(gram, gram, True), down, tuple(kept))
    equations = own.equations(gram)
    assert own.lost(gram) + equations.change(equations.solved(1e-9)) < 1e-6 * own.lost(gram)


def test_blocks_cover_every_unit_and_keep_the_order(rows: Tensor, down: Tensor) -> None:
    gram, weight = rows.T @ rows, torch.ones(HIDDEN).double()
    for steps in (1, 3, 4, WIDTH, 100):
        scores = surgeon_scores(gram, down, weight, steps=steps)
        assert bool((scores > 0.0).all()) and len(scores) == WIDTH


def test_an_expert_without_tokens_is_worth_nothing(down: Tensor) -> None:
    assert not surgeon_scores(torch.zeros(WIDTH, WIDTH), down, torch.ones(HIDDEN).double()).any()


def test_a_gram_matrix_that_rounding_made_indefinite_has_scores(down: Tensor) -> None:
    rows = draws(60, WIDTH, seed=6)
    rows[:, 2] *= 1e4
    rows[:, 3] = rows[:, 2] * 3.1
    gram = (rows.T @ rows).float()
    gram[2, 3] = gram[3, 2] = gram[2, 3] * (1 + 2e-7)  # one unit in the last place
    assert float(torch.linalg.eigvalsh(gram.double())[0]) < 0.0
    assert bool(surgeon_scores(gram, down, torch.ones(HIDDEN).double(), ridge=1e-9).isfinite().all())


def test_pages_of_down_projections_are_released_after_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference("mixtral", tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    collect_units(checkpoint, TOKENS, tmp_path / "units", moments=False, dtype=torch.float32)
    layers = checkpoint.config.moe_layers
    sums, order = {layer: unit_sums(tmp_path / "units", layer) for layer in layers}, list[str]()
    read, release = Checkpoint.tensor, Checkpoint.release
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: order.append(name.split(".")[2]) or read(self, name))
    monkeypatch.setattr(Checkpoint, "release", lambda self: order.append("release") or release(self))
    magnitude_scores(checkpoint, sums)
    experts = checkpoint.config.experts_by_layer
    assert order == [each for layer in layers for each in (*[str(layer)] * experts[layer], "release")]
