"""Gate gradients against central finite differences in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import save_reference
from torch import Tensor

import compress.methods.gate_gradients
from compress.methods.gate_fisher import fisher_scores
from compress.methods.gate_gradients import _sample_next, gate_gradients
from compress.methods.gate_taylor import taylor_scores
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder, own_routing, routed_by
from engine.decoder.routing import Gated
from engine.errors import DataError
from engine.passes.memory_budget import MemoryBudget

TOKENS = torch.randint(3, 96, (3, 9), generator=torch.Generator().manual_seed(1))
STEP = 1e-5


@pytest.fixture(name="decoder", params=["mixtral", "qwen2_moe"])
def float64_decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    changes = {"mlp_only_layers": [1]} if request.param == "qwen2_moe" else {}
    save_reference(request.param, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)
    return Decoder(checkpoint.config, checkpoint.source(torch.float64))


@torch.no_grad()
def naive_loss(decoder: Decoder, tokens_1L: Tensor, targets_1L: Tensor, gates: list[Tensor]) -> float:
    moes = [layer.moe for layer in decoder.config.layers if layer.moe is not None]
    with routed_by(decoder, [Gated(own_routing(moe), gate) for moe, gate in zip(moes, gates, strict=True)]):
        probabilities = decoder(tokens_1L).log_softmax(-1)[0]
    return -sum(float(probabilities[i, targets_1L[0, i + 1]]) for i in range(tokens_1L.shape[1] - 1))


def finite_differences(decoder: Decoder, targets_SL: Tensor) -> Tensor:
    """Return ∂L_s/∂g, [S, all experts of all layers]."""
    counts = list(decoder.config.experts_per_layer)
    result = torch.zeros(len(TOKENS), sum(counts), dtype=torch.float64)
    for row in range(len(TOKENS)):
        for i in range(sum(counts)):
            losses = []
            for sign in (1, -1):
                gates = torch.ones(sum(counts), dtype=torch.float64)
                gates[i] += sign * STEP
                losses.append(
                    naive_loss(decoder, TOKENS[row : row + 1], targets_SL[row : row + 1], list(gates.split(counts)))
                )
            result[row, i] = (losses[0] - losses[1]) / (2 * STEP)
    return result


@pytest.mark.parametrize("tokens_at_once", [4096, 18, 9])
def test_taylor_and_its_squares_equal_finite_differences(decoder: Decoder, tokens_at_once: int) -> None:
    budget = MemoryBudget(tokens_per_batch=tokens_at_once)
    sums, squares = gate_gradients(decoder, TOKENS, own_samples=False, budget=budget)
    expected = finite_differences(decoder, TOKENS)
    assert tuple(sums) == tuple(squares) == decoder.config.moe_layers
    assert torch.allclose(torch.cat(list(sums.values())), expected.sum(0), atol=1e-5)
    assert torch.allclose(torch.cat(list(squares.values())), expected.square().sum(0), atol=1e-5), "per sequence"
    assert not torch.allclose(expected.square().sum(0), expected.sum(0).square(), rtol=0.1)
    for layer, score in taylor_scores(decoder, TOKENS, budget=budget).items():
        assert torch.equal(score, sums[layer].abs())


def test_fisher_is_of_tokens_that_the_model_itself_draws(decoder: Decoder) -> None:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        drawn = [_sample_next(decoder.hidden_states(row[None]), decoder.head_VD, row[None], generator) for row in TOKENS]
    expected = finite_differences(decoder, torch.cat(drawn))
    got = fisher_scores(decoder, TOKENS, seed=4)
    assert torch.allclose(torch.cat(list(got.values())), expected.square().sum(0), atol=1e-5)


def test_draws_follow_the_model_s_prediction_and_keep_the_first_token() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    hidden = probabilities.log().expand(1, 5001, 3)  # the head is the identity: these are the logits
    tokens = torch.full((1, 5001), 2)
    drawn = _sample_next(hidden, torch.eye(3), tokens, torch.Generator().manual_seed(0))
    assert drawn.shape == tokens.shape and int(drawn[0, 0]) == 2
    assert torch.allclose(drawn[0, 1:].bincount() / 5000, probabilities, atol=0.03)
    nothing, bias = torch.zeros_like(hidden), probabilities.log()
    assert torch.equal(_sample_next(nothing, torch.eye(3), tokens, torch.Generator().manual_seed(0), bias), drawn)


def test_only_gates_get_gradients_and_the_model_routes_as_before(decoder: Decoder) -> None:
    before = [block.routing for block in decoder.moe_blocks]
    decoder.checkpoint_activations = True
    checkpointed = fisher_scores(decoder, TOKENS)
    decoder.checkpoint_activations = False
    plain = fisher_scores(decoder, TOKENS)
    assert all(torch.allclose(checkpointed[layer], plain[layer]) for layer in plain)
    assert [block.routing for block in decoder.moe_blocks] == before
    assert all(p.grad is None and not p.requires_grad for p in decoder.parameters())


@pytest.mark.parametrize("own_samples", [True, False])
def test_an_interrupted_pass_ends_in_the_same_sums(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_samples: bool
) -> None:
    monkeypatch.setattr(compress.methods.gate_gradients, "SAVE_EVERY_SECONDS", 0.0)
    budget = MemoryBudget(tokens_per_batch=9)  # a batch for each sequence
    passes = partial(gate_gradients, decoder, TOKENS, own_samples=own_samples, seed=3, budget=budget)
    whole = passes()

    def stop(batches: list[slice]) -> Iterator[slice]:
        yield batches[0]
        yield batches[1]
        raise KeyboardInterrupt

    state = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        passes(state_path=state, progress=stop)
    left: list[slice] = []
    resumed = passes(state_path=state, progress=lambda b: left.extend(b) or b)
    assert left == [slice(2, 3)]
    for expected, got in zip(whole, resumed, strict=True):
        assert all(torch.equal(expected[layer], got[layer]) for layer in expected)


def test_the_state_of_something_else_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the state of this pass"):
        fisher_scores(decoder, TOKENS, state_path=next(tmp_path.glob("*.safetensors")))
