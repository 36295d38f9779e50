"""Blocks of MXFP4 are those of the package `gguf`, to the byte, and numbers that are in MXFP4 already keep their values."""

from __future__ import annotations

import gguf
import pytest
import torch

from engine.checkpoint.gguf.blocks import dequantized
from engine.checkpoint.gguf.mxfp4_blocks import rounded_to_mxfp4
from engine.files.gguf_types import BLOCK_TYPES

KIND = next(kind for kind in BLOCK_TYPES.values() if kind.name == "MXFP4")


@pytest.mark.parametrize("scale", [1.0, 1e-3, 2.0**-100, 2.0**60])
def test_blocks_are_those_of_the_package(scale: float) -> None:
    numbers = torch.randn(6, 96, generator=torch.Generator().manual_seed(0)) * scale
    numbers[1, :32] = 0
    numbers[2, :32] = torch.tensor([0.25, -0.25, 0.75, 1.25, -2.5, 5.0, 6.0, 7.9] * 4) * scale
    expected = gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(rounded_to_mxfp4(numbers), torch.from_numpy(expected))


def test_numbers_of_the_type_keep_their_values() -> None:
    """Whatever the largest number of a block is."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for most in range(8):
        numbers = sizes[torch.arange(32) % (most + 1)] * torch.tensor([1.0, -1.0] * 16) * 2.0**-9
        assert torch.equal(dequantized(rounded_to_mxfp4(numbers[None]), KIND), numbers[None])
