"""The gated delta rule, its convolution, gated attention and zero-centered norms: each against transformers' module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import save_reference
from torch import Tensor
from transformers import DynamicCache

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder import gated_delta
from engine.decoder.attention import Positions, attention_mask
from engine.decoder.convolution import causal_convolution
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, positions_for
from engine.decoder.norms import rms_norm
from engine.families.layer_config import GatedDeltaConfig

LENGTH = 2 * gated_delta.BLOCK + 9
DELTA_LAYER, ATTENTION_LAYER = 0, 1
ANYWHERE = Positions(torch.empty(0), torch.empty(0), False, {})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_recurrence(parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Compute the three equations of the module's docstring, one position after another."""
    query, key, value, decay, strength = parts
    state, given = torch.zeros(*key.shape[:2], key.shape[-1], value.shape[-1], dtype=key.dtype), []
    for t in range(key.shape[2]):
        state = decay[:, :, t].exp()[..., None, None] * state
        correction = strength[:, :, t, None] * (value[:, :, t] - (state * key[:, :, t, :, None]).sum(2))
        state = state + key[:, :, t, :, None] * correction[:, :, None]
        given.append((state * query[:, :, t, :, None]).sum(2))
    return torch.stack(given, dim=2), state


def random_parts(length: int) -> tuple[Tensor, ...]:
    query, key, value = (normal(2, 3, length, size, seed=seed) for seed, size in enumerate((5, 5, 7)))
    decay, strength = -2.0 * normal(2, 3, length, seed=4).square(), normal(2, 3, length, seed=5).sigmoid()
    return query, gated_delta.normalized(key), value, decay, strength


def test_blocks_are_the_recurrence() -> None:
    """Several blocks, the last one short, at once, from a state in the middle of a block, and one position alone."""
    parts = random_parts(LENGTH)
    expected, state = by_recurrence(parts)
    found, last = gated_delta.attend(*parts)
    assert torch.allclose(found, expected, atol=1e-10) and torch.allclose(last, state, atol=1e-10)
    carried, pieces = None, []
    for start, end in ((0, 70), (70, 71), (71, LENGTH)):
        piece, carried = gated_delta.attend(*(part[:, :, start:end] for part in parts), carried)
        pieces.append(piece)
    assert carried is not None
    assert torch.allclose(torch.cat(pieces, dim=2), expected, atol=1e-10) and torch.allclose(carried, state, atol=1e-10)


def test_a_memory_that_forgets_at_once_stays_finite() -> None:
    query, key, value, decay, strength = random_parts(LENGTH)
    found, state = gated_delta.attend(query, key, value, 100.0 * decay - 50.0, strength)
    alone = strength[..., None] * value * (query * key).sum(-1, keepdim=True)
    assert torch.allclose(found, alone, atol=1e-10) and bool(state.isfinite().all())


def test_gradients_flow_through_blocks_and_single_positions() -> None:
    for length in (1, 4):
        parts = tuple(part[:1, :2, :length].clone().requires_grad_() for part in random_parts(length))
        state = normal(1, 2, 5, 7, seed=9).requires_grad_()
        assert torch.autograd.gradcheck(gated_delta.attend, (*parts, state))


def test_a_convolution_in_pieces_is_one_convolution() -> None:
    x, filters = normal(2, 11, 6), normal(6, 4, seed=1)
    expected = F.conv1d(x.mT, filters[:, None], padding=3, groups=6)[..., :11].mT
    found, last = causal_convolution(x, filters)
    assert torch.allclose(found, expected) and torch.equal(last, x[:, -3:])
    carried, pieces = None, []
    for piece in x.split((5, 1, 1, 4), dim=1):
        y, carried = causal_convolution(piece, filters, carried)
        pieces.append(y)
    assert torch.allclose(torch.cat(pieces, dim=1), expected) and carried is not None and torch.equal(carried, last)


# Against transformers' modules


@pytest.fixture(name="both", scope="module", params=["qwen3_next", "qwen3_5_moe_text"])
def ours_and_theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """Return a transformers model in float64, and our decoder of the same weights.

    One family has all projections of a layer in two matrices, and the other has a matrix for each.
    """
    path: Path = tmp_path_factory.mktemp("model")
    model = save_reference(request.param, path).double()
    checkpoint = Checkpoint(path)
    return model, Decoder(checkpoint.config, checkpoint.source(torch.float64))


@torch.no_grad()
def test_a_layer_of_the_gated_delta_rule(both: tuple[Any, Decoder]) -> None:
    """Whole, in pieces with one position at a time after a prefix, and with padding; the states are equal too.

    transformers computes the rule in float32, whatever the model's dtype.
    """
    model, decoder = both
    theirs, ours = model.model.layers[DELTA_LAYER].linear_attn, decoder.layers[DELTA_LAYER].attention
    x = normal(2, LENGTH, 32)
    expected = theirs(x)
    assert float((ours(x, ANYWHERE) - expected).abs().max()) < 1e-4 < float(expected.abs().max())
    cache, reference = KeyValueCache(decoder.config, 2, LENGTH, torch.float64), DynamicCache(config=model.config)
    for piece in x.split((LENGTH - 12, 7, *[1] * 5), dim=1):
        found, wanted = ours(piece, ANYWHERE, cache), theirs(piece, cache_params=reference)
        assert float((found - wanted).abs().max()) < 1e-4
    state, last = cache.state(DELTA_LAYER)
    assert float((state - reference.get_recurrent_state(DELTA_LAYER)).abs().max()) < 1e-5
    assert float((last.mT - reference.get_conv_state(DELTA_LAYER)[..., -3:]).abs().max()) < 1e-12
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, :70] = False
    padded = ours(x, ANYWHERE._replace(is_padded=True, real_BL=real))
    assert float((padded - theirs(x, attention_mask=real))[real].abs().max()) < 1e-4
    assert float((padded[1:, 70:] - ours(x[1:, 70:], ANYWHERE)).abs().max()) < 1e-12, "padding leaves no trace"


@torch.no_grad()
def test_a_layer_of_attention_with_an_output_gate(both: tuple[Any, Decoder]) -> None:
    """Whole and step by step: the gate, norms of queries and keys, and the rotated half of each head."""
    model, decoder = both
    theirs, ours = model.model.layers[ATTENTION_LAYER].self_attn, decoder.layers[ATTENTION_LAYER].attention
    x, tokens = normal(2, 12, 32), torch.zeros(2, 12, dtype=torch.long)
    angles = model.model.rotary_emb(x, torch.arange(12)[None, None])
    angles = tuple(each.reshape(1, 12, -1) for each in angles)
    allowed = attention_mask(torch.ones(2, 12, dtype=torch.bool), 12, 12, None)
    assert allowed is not None
    mask = torch.zeros(2, 1, 12, 12, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    expected, _ = theirs(x, angles, mask)
    whole = ours(x, positions_for(decoder.config, decoder.rotary, tokens, None, 0, torch.float64))
    assert float((whole - expected).abs().max()) < 1e-6 < float(expected.abs().max())
    cache = KeyValueCache(decoder.config, 2, 12, torch.float64)
    for place in range(12):
        piece = slice(place, place + 1)
        positions = positions_for(decoder.config, decoder.rotary, tokens[:, piece], None, place, torch.float64)
        assert float((ours(x[:, piece], positions, cache) - expected[:, piece]).abs().max()) < 1e-6
        cache.advance(1)


def test_weights_of_zero_centered_norms_are_not_rounded_with_their_one(both: tuple[Any, Decoder]) -> None:
    """In bfloat16, 1 + w has 8 bits and w has 8 bits of its own."""
    norm = both[0].model.norm.bfloat16()
    x = normal(3, 32).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(1e-3 * normal(32, seed=1))
        assert torch.equal(rms_norm(x, norm.weight, norm.eps, zero_centered=True), norm(x))
        assert not torch.equal(rms_norm(x, 1.0 + norm.weight, norm.eps), norm(x))
    norm.double()


def test_a_state_has_one_size_whatever_the_length(both: tuple[Any, Decoder]) -> None:
    """The bytes are counted by hand: two layers, four heads of 8 x 12, and three positions of 80 channels."""
    config = both[1].config
    sizes = config.linear_layers[DELTA_LAYER]
    assert isinstance(sizes, GatedDeltaConfig) and sizes.channels == 2 * 2 * 8 + 4 * 12
    assert [len(config.linear_layers), config.caching_layers] == [2, (1,)]
    short, long = (KeyValueCache(config, 2, length, torch.bfloat16) for length in (1, 100))
    states = 2 * 2 * 4 * (4 * 8 * 12 + 3 * 80)
    per_position = 2 * 2 * 2 * 16 * 2  # sequences, keys and values, groups, dimensions, bytes of a bfloat16
    assert (short.bytes, long.bytes) == (states + per_position, states + 100 * per_position)
