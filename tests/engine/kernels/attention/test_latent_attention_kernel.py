"""The compiled latent attention of one new position of each sequence, against the textbook in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels_for_tests import kernels
from packages_for_tests import needs_numba
from torch import Tensor

from engine.decoder.attention import half_by_half, rotate
from engine.decoder.kv_cache import to_int8
from engine.kernels.linear import as_bfloat16

BLOCK_SIZE = 64
SHAPES = {
    "pairs of bfloat16": (20, 16, 32, 64, 24),
    "sizes of a real model": (18, 16, 64, 512, 8),
    "keys that are no pairs": (9, 4, 6, 32, 5),
    "odd sizes": (3, 5, 6, 9, 7),
    "one head": (1, 8, 2, 32, 4),
}
"""H, N, R, C and V."""


def textbook(query_HE: Tensor, latents_PC: Tensor, keys_PR: Tensor, up_HEC: Tensor, plain: int, scale: float) -> Tensor:
    """Return the values [H, V] of one query of each head over all positions: keys and values are made of latent vectors."""
    mixed = []
    for query_E, up_EC in zip(query_HE, up_HEC, strict=True):
        key_PE = torch.cat((latents_PC @ up_EC[:plain].T, keys_PR), dim=1)
        mixed.append((key_PE @ query_E * scale).softmax(0) @ (latents_PC @ up_EC[plain:].T))
    return torch.stack(mixed)


@needs_numba
@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("past", "owners"), [([0], [0]), ([1100, 3, 511], [0, 1, 2]), ([512, 513, 7], [0, 0, 1])])
def test_it_equals_the_textbook(
    past: list[int],
    owners: list[int],
    shape: tuple[int, int, int, int, int],
    threads: int,
    pairs: bool,
    in_bytes: bool,
) -> None:
    """Blocks lie anywhere in the cache, texts have up to five pieces, and two rows may be positions of one text."""
    torch.manual_seed(0)
    (heads, plain, rotated, rank, value), count, scale = shape, len(past), 0.2
    kernels.use_threads(threads)
    query, latent = torch.randn(count, heads, plain + rotated).bfloat16(), torch.randn(count, rank).bfloat16()
    beside = torch.randn(count, rotated + 3).bfloat16()  # keys lie beside other projections
    key, up = beside[:, 3:], (torch.randn(heads, plain + value, rank) * 0.3).bfloat16()
    angles = torch.randn(count, rotated // 2).repeat(1, 2)
    cosine, sine = angles.cos().bfloat16(), angles.sin().bfloat16()
    most = max(past) // BLOCK_SIZE + 1
    blocks = torch.randperm(len(set(owners)) * most).view(-1, most)[owners].contiguous()
    latents = torch.randn(len(set(owners)) * most * BLOCK_SIZE, rank).bfloat16()
    keys = torch.randn(len(latents), rotated).bfloat16()
    inputs = query, latent, key, cosine, sine
    stored, scales = [latents, keys], []
    if in_bytes:
        stored, scales = map(list, zip(*(to_int8(part) for part in stored), strict=True))
    made = kernels.attend_latent(
        [tensor.data_ptr() for tensor in inputs],
        [tensor.stride(0) for tensor in inputs[:3]],
        [part.data_ptr() for part in (*stored, *scales)],
        up.data_ptr(),
        (count, heads, plain, rotated, rank, value),
        (blocks.numpy(), np.array(past), BLOCK_SIZE, len(set(owners)) < count),
        scale,
        pairs=pairs,
    )
    if in_bytes:
        new = to_int8(latent)
        slots_of_new = [
            int(own[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            for own, position in zip(blocks, past, strict=True)
        ]
        assert torch.equal(stored[0][slots_of_new], new.integers) and torch.equal(scales[0][slots_of_new], new.scales)
        latents, keys = (part.double() * own[:, None] for part, own in zip(stored, scales, strict=True))
    for row, position in enumerate(past):
        slots = [int(blocks[row, place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE for place in range(position + 1)]
        turned = [
            rotate(half_by_half(x, rotated) if pairs else x, cosine[row].double(), sine[row].double())
            for x in (query[row, :, plain:].double()[None, None], key[row].double()[None, None, None])
        ]
        assert in_bytes or torch.equal(latents[slots[-1]], latent[row])
        nearest = float(turned[1].abs().max()) / 250 if in_bytes else 1e-6  # half a step of 127, and bfloat16's rounding
        assert torch.allclose(keys[slots[-1]].double(), turned[1][0, 0, 0], rtol=2**-8, atol=nearest)
        whole = torch.cat((query[row, :, :plain].double(), turned[0][0, 0]), dim=-1)
        expected = textbook(whole, latents[slots].double(), keys[slots].double(), up.double(), plain, scale)
        found = as_bfloat16(made)[row].double()
        assert float((found - expected).abs().max()) <= 0.02 * float(expected.abs().max())
