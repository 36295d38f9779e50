"""Mamba-2 against transformers' module and against the recurrence written out, and the names of its family on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from torch import Tensor
from transformers import DynamicCache

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.attention import Positions
from engine.decoder.kv_cache import KeyValueCache, state_bytes
from engine.decoder.mamba2 import BLOCK, scan
from engine.decoder.model import Decoder
from engine.families.table import ARCHITECTURES
from engine.families.tensor_names import name_on_disk

LENGTH, LAYER = 19, 4
ANYWHERE = Positions(torch.empty(0), torch.empty(0), False, {})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(name="both", scope="module")
def ours_and_theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Checkpoint]:
    """Return a transformers model in float64, and its checkpoint."""
    path: Path = tmp_path_factory.mktemp("model")
    return save_reference("nemotron_h", path).double(), Checkpoint(path)


@torch.no_grad()
def test_a_layer_whole_in_pieces_and_padded(both: tuple[Any, Checkpoint]) -> None:
    """One position at a time follows a prefix. The states are equal too. transformers computes its scan in float32."""
    model, checkpoint = both
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float64))
    theirs, ours = model.model.layers[LAYER].mixer, decoder.layers[LAYER].attention
    x = normal(2, LENGTH, 32)
    expected = theirs(x)
    assert float((ours(x, ANYWHERE) - expected).abs().max()) < 1e-4 < 1e-2 < float(expected.abs().max())
    cache, reference = KeyValueCache(decoder.config, 2, LENGTH, torch.float64), DynamicCache(config=model.config)
    for piece in x.split((LENGTH - 8, 1, 4, 1, 1, 1), dim=1):
        found, wanted = ours(piece, ANYWHERE, cache), theirs(piece, cache_params=reference)
        assert float((found - wanted).abs().max()) < 1e-4
    state, last = cache.state(LAYER)
    assert float((state.mT - reference.get_recurrent_state(LAYER)).abs().max()) < 1e-4
    assert float((last.mT - reference.get_conv_state(LAYER)[..., -3:]).abs().max()) < 1e-12
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, :7] = False
    padded = ours(x, ANYWHERE._replace(is_padded=True, real_BL=real))
    assert float((padded - theirs(x, attention_mask=real))[real].abs().max()) < 1e-4
    assert float((padded[1:, 7:] - ours(x[1:, 7:], ANYWHERE)).abs().max()) < 1e-12, "padding leaves no trace"


def test_blocks_and_steps_are_the_recurrence() -> None:
    """Two groups of two heads, over two blocks and a part of a third, with a state before."""
    length = 2 * BLOCK + 5
    value, decay = normal(1, 4, length, 3), -normal(1, 4, length, seed=1).abs()
    into, out, state = normal(1, 2, length, 5, seed=2), normal(1, 2, length, 5, seed=3), normal(1, 4, 5, 3, seed=4)
    expected, own = [], state.clone()
    for place in range(length):
        for head in range(4):
            own[0, head] *= decay[0, head, place].exp()
            own[0, head] += into[0, head // 2, place][:, None] * value[0, head, place]
        expected.append(torch.stack([out[0, head // 2, place] @ own[0, head] for head in range(4)]))
    with torch.no_grad():
        whole, last = scan(value, decay, into, out, state)
        assert torch.allclose(whole[0].transpose(0, 1), torch.stack(expected)) and torch.allclose(last, own)
        steps, after = [], state.clone()
        for place in range(length):
            here = slice(place, place + 1)
            y, after = scan(value[:, :, here], decay[:, :, here], into[:, :, here], out[:, :, here], after)
            steps.append(y)
        assert torch.allclose(torch.cat(steps, 2), whole) and torch.allclose(after, own)


def test_gradients_pass_through_a_block_and_through_a_step() -> None:
    for length in (1, 3):
        given = normal(1, 4, length, 3), -normal(1, 4, length).abs(), normal(1, 2, length, 5), normal(1, 2, length, 5)
        given = tuple(each.requires_grad_() for each in (*given, normal(1, 4, 5, 3)))
        assert torch.autograd.gradcheck(scan, given)


@torch.no_grad()
def test_the_least_step_holds_for_texts_and_for_steps(both: tuple[Any, Checkpoint]) -> None:
    """Steps of single tokens equal the text read at once, also where Δ would be below its minimum."""
    model, checkpoint = both
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float64))
    theirs, ours, x = model.model.layers[LAYER].mixer, decoder.layers[LAYER].attention, normal(1, 9, 32)
    before = theirs.dt_bias.data.clone()
    try:
        theirs.dt_bias.data.fill_(-12.0)
        ours.step_bias_H.data.fill_(-12.0)
        whole = ours(x, ANYWHERE)
        assert float((whole - theirs(x)).abs().max()) < 1e-6
        cache = KeyValueCache(decoder.config, 1, 9, torch.float64)
        steps = torch.cat([ours(piece, ANYWHERE, cache) for piece in x.split(1, dim=1)], dim=1)
        assert torch.allclose(steps, whole)
    finally:
        theirs.dt_bias.data.copy_(before)


def test_layers_are_single_blocks(both: tuple[Any, Checkpoint]) -> None:
    """The bytes are counted by hand: two layers, 4 matrices of 8 × 12, and 3 positions of 48 + 2 · 2 · 8 channels."""
    config = both[1].config
    assert [(layer.attends, layer.feeds) for layer in config.layers] == [
        *((True, False), (False, True)) * 2,
        (True, False),
        (False, True),
    ]
    assert config.caching_layers == (2,) and config.moe_layers == (1, 5) and list(config.linear_layers) == [0, 4]
    assert config.common_widths == {1: 40, 3: 48, 5: 40}
    assert state_bytes(config, torch.bfloat16) == 2 * (4 * 8 * 12 + 3 * 80) * 4


def test_names_on_disk() -> None:
    row = ARCHITECTURES["nemotron_h"]
    on_disk = {
        "model.norm.weight": "backbone.norm_f.weight",
        "model.layers.12.input_layernorm.weight": "backbone.layers.12.norm.weight",
        "model.layers.7.post_attention_layernorm.weight": "backbone.layers.7.norm.weight",
        "model.layers.3.mlp.up_proj.weight": "backbone.layers.3.mixer.up_proj.weight",
        "model.layers.5.self_attn.q_proj.weight": "backbone.layers.5.mixer.q_proj.weight",
        "model.layers.0.mixer.A_log": "backbone.layers.0.mixer.A_log",
        "model.layers.1.mixer.experts.7.down_proj.weight": "backbone.layers.1.mixer.experts.7.down_proj.weight",
        "lm_head.weight": "lm_head.weight",
    }
    assert {name: name_on_disk(row, name) for name in on_disk} == on_disk
