"""Blocks of GGUF files become the numbers that the format's own library makes of them."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch
from gguf_for_tests import q8_0

from engine.checkpoint.gguf_blocks import dequantized
from engine.files.gguf_types import BLOCK_TYPES, BlockType

RECORDED = {
    "Q4_0": "5d647a3be2694a3f",
    "Q4_1": "e0929230a7a384ce",
    "Q5_0": "5bcabea8b38d3caa",
    "Q5_1": "f46392ce0b585208",
    "Q8_0": "d798351a5977ef7e",
    "Q2_K": "28296e7c79825f33",
    "Q3_K": "b480bfd44a0740a4",
    "Q4_K": "4e1e76eb8839e28e",
    "Q5_K": "cce1d3dd348b0014",
    "Q6_K": "a6b0db4b90edaed6",
    "IQ4_NL": "98d38a92a3d66486",
    "IQ4_XS": "fedd984ff6091245",
    "MXFP4": "7fb79795d6af4923",
}
"""The beginning of the SHA-256 of the numbers that `gguf.quants.dequantize` (gguf 0.19) returns for random bytes."""
QUANTIZED = {number: kind for number, kind in BLOCK_TYPES.items() if kind.element is None}


def random_blocks(number: int, kind: BlockType) -> torch.Tensor:
    """Return 20 rows of three blocks; the number of the type is the seed."""
    data = random.Random(number).randbytes(kind.bytes * 60)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(20, -1)


@pytest.mark.parametrize("number", QUANTIZED, ids=[kind.name for kind in QUANTIZED.values()])
def test_every_type_is_dequantized_as_recorded(number: int) -> None:
    kind = QUANTIZED[number]
    found = dequantized(random_blocks(number, kind), kind)
    assert found.shape == (20, 3 * kind.numbers) and found.dtype == torch.float32
    digest = hashlib.sha256(np.nan_to_num(found.numpy(), nan=0.0).tobytes()).hexdigest()
    assert digest.startswith(RECORDED[kind.name])


def test_one_expert_is_dequantized_alone() -> None:
    kind = QUANTIZED[12]
    stack = random_blocks(12, kind).view(4, 5, -1)
    whole = dequantized(stack, kind)
    assert torch.equal(dequantized(stack[2], kind).nan_to_num(), whole[2].nan_to_num())


def test_rounding_to_eight_bits_changes_no_number_by_more_than_half_a_step() -> None:
    tensor = torch.randn(6, 64)
    _, shape, data = q8_0(tensor)
    found = dequantized(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(6, -1), QUANTIZED[8])
    assert found.shape == shape
    assert float((found - tensor).abs().max()) <= float(tensor.abs().max()) / 127
