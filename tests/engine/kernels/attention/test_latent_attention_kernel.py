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


@needs_numba
@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("shape", [(18, 4, 32, 64, 8), (3, 5, 6, 9, 7)])
def test_it_has_the_same_bits_in_blocks_of_any_size_in_any_company(
    shape: tuple[int, int, int, int, int], in_bytes: bool
) -> None:
    past = [700, 3, 255, 256]
    together = attended(past, shape, 1024, 1, in_bytes=in_bytes)
    for block_size, threads in ((4, 2), (32, 1)):
        assert torch.equal(attended(past, shape, block_size, threads, in_bytes=in_bytes), together)
    for row, position in enumerate(past):
        assert torch.equal(attended([position], shape, 64, 2, in_bytes=in_bytes)[0], together[row])


def attended(
    past: list[int], shape: tuple[int, int, int, int, int], block_size: int, threads: int, *, in_bytes: bool
) -> Tensor:
    """Return the kernel's result for texts that are drawn by their numbers of positions."""
    heads, plain, rotated, rank, value = shape
    kernels.use_threads(threads)
    most = max(past) // block_size + 1
    blocks = torch.arange(len(past) * most).view(len(past), most).flip(1).contiguous()
    slots_of_all = len(past) * most * block_size
    stored = [torch.zeros(slots_of_all, size, dtype=torch.int8 if in_bytes else torch.bfloat16) for size in (rank, rotated)]
    scales = [torch.zeros(slots_of_all) for _ in range(2 if in_bytes else 0)]
    inputs = [torch.empty(len(past), *sizes).bfloat16() for sizes in ((heads, plain + rotated), (rank,), (rotated,))]
    for row, position in enumerate(past):
        generator = torch.Generator().manual_seed(position)
        for own in inputs:
            own[row] = torch.randn(own.shape[1:], generator=generator)
        slots = [int(blocks[row, place // block_size]) * block_size + place % block_size for place in range(position)]
        for part, size in enumerate((rank, rotated)):
            drawn = torch.randn(position, size, generator=generator).bfloat16()
            rounded = to_int8(drawn)
            stored[part][slots] = rounded.integers if in_bytes else drawn
            if in_bytes:
                scales[part][slots] = rounded.scales
    up = torch.randn(heads, plain + value, rank, generator=torch.Generator().manual_seed(0)).bfloat16()
    ones, zeros = torch.ones(len(past), rotated).bfloat16(), torch.zeros(len(past), rotated).bfloat16()
    made = kernels.attend_latent(
        [tensor.data_ptr() for tensor in (*inputs, ones, zeros)],
        [tensor.stride(0) for tensor in inputs],
        [part.data_ptr() for part in (*stored, *scales)],
        up.data_ptr(),
        (len(past), heads, plain, rotated, rank, value),
        (blocks.numpy(), np.array(past), block_size, False),
        0.2,
        pairs=False,
    )
    return as_bfloat16(made)
