"""DiEP's search in families that transformers runs: gradients of α and β are those of our decoder, and of naive layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import others_slow
from diep_references import RELAXATIONS, gradients_of_steps, gradients_of_whole_model
from tiny_families import TOKENS_SL, by_name, save_tiny

from compress.methods.diep import search
from compress.options.prune import DiepOptions
from engine.adapted.adapted_block import AdaptedBlock
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_gradients import AdaptedLayerwiseDecoder
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.errors import UnsupportedError
from engine.passes.memory_budget import MemoryBudget

NATIVE = others_slow(("qwen3_moe", "gpt_oss", "minimax_m2"), "qwen3_moe")
"""Softmax; biases of logits and of experts; and sigmoid scores with a bias of the choice."""
EACH = pytest.mark.parametrize("relaxation", RELAXATIONS)


@EACH
@pytest.mark.parametrize("family", NATIVE)
def test_gradients_are_those_of_our_own_decoder(
    family: str, relaxation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In sweeps of two sequences and of one."""
    save_tiny(by_name(family), tmp_path)
    native, adapted = Checkpoint(tmp_path), AdaptedLayerwiseDecoder(AdaptedCheckpoint(tmp_path), torch.float32)
    own_decoder = Decoder(native.config, native.weights(torch.float32))
    expected_loss, expected = gradients_of_steps(own_decoder, TOKENS_SL, relaxation, MemoryBudget())
    for sequences in (2, 1):
        tokens = sequences * TOKENS_SL.shape[1]
        monkeypatch.setattr(adapted, "sweep_tokens", lambda budget, tokens=tokens: tokens)
        loss, own = gradients_of_steps(adapted, TOKENS_SL, relaxation, MemoryBudget(tokens_per_batch=tokens))
        assert torch.allclose(loss, expected_loss, rtol=1e-5)
        assert torch.allclose(own, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_scores_of_a_search_are_those_of_our_own_decoder(tmp_path: Path) -> None:
    """The search trains α and β in turn, and starts from gate Fisher of samples that both models draw alike."""
    save_tiny(by_name("qwen3_moe"), tmp_path)
    options, native = DiepOptions(epochs=2, batch_size=1), Checkpoint(tmp_path)
    expected = search(Decoder(native.config, native.weights(torch.float32)), TOKENS_SL, options)
    own = search(AdaptedLayerwiseDecoder(AdaptedCheckpoint(tmp_path), torch.float32), TOKENS_SL, options)
    assert own.keys() == expected.keys()
    for layer, scores_N in expected.items():
        assert float(scores_N.std()) > 1e-2
        assert torch.allclose(own[layer], scores_N, atol=1e-5)


@EACH
def test_gradients_are_those_of_a_whole_model_of_transformers(relaxation: str, tmp_path: Path) -> None:
    model = save_tiny(by_name("exaone_moe"), tmp_path)
    checkpoint = AdaptedCheckpoint(tmp_path)
    budget = MemoryBudget(tokens_per_batch=2 * TOKENS_SL.shape[1])
    decoder = AdaptedLayerwiseDecoder(checkpoint, torch.float32)
    losses, own = gradients_of_steps(decoder, TOKENS_SL, relaxation, budget)
    loss, expected = gradients_of_whole_model(model, checkpoint, TOKENS_SL, relaxation)
    assert float(expected.abs().median()) > 0
    assert torch.allclose(losses, loss.expand(2), rtol=1e-5)
    assert torch.allclose(own, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_routers_that_cannot_take_other_logits_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(by_name("exaone_moe"), tmp_path)
    decoder, before = AdaptedLayerwiseDecoder(AdaptedCheckpoint(tmp_path), torch.float32), AdaptedBlock._run_experts
    with monkeypatch.context() as patched:
        patched.setattr("engine.adapted.adapted_block._PRODUCTS", ())
        with pytest.raises(UnsupportedError, match=r"the logits of model\.layers\.1\.mlp\.\w+ are not one product"):
            gradients_of_steps(decoder, TOKENS_SL, "routed", MemoryBudget())
    monkeypatch.setattr(
        AdaptedBlock, "_run_experts", lambda self, x, indices, weights: before(self, x, indices, 2 * weights)
    )
    with pytest.raises(UnsupportedError, match=r"the weights of model\.layers\.1\.mlp\.\w+ change before they reach the"):
        gradients_of_steps(decoder, TOKENS_SL, "routed", MemoryBudget())


def test_a_head_that_does_not_see_all_positions_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(by_name("exaone_moe"), tmp_path)
    checkpoint = AdaptedCheckpoint(tmp_path)
    checkpoint.check_states()
    monkeypatch.setattr(checkpoint.model, "get_output_embeddings", lambda: None)
    with pytest.raises(
        UnsupportedError, match="the output head of a model of the family exaone_moe is not given the hidden"
    ):
        checkpoint.check_states()
