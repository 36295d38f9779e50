"""Attention in blocks of queries equals the textbook."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import engine.decoder.attention
from engine.decoder.attention import attend_in_blocks, attention_mask, query_blocks


def naive(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = (query.double() @ key.mT) * query.shape[-1] ** -0.5
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [3, 128])
@pytest.mark.parametrize(
    ("new", "total", "window", "padding"),
    [(7, 7, None, 0), (7, 7, 3, 0), (5, 9, None, 0), (7, 7, None, 2), (4, 9, 3, 2), (1, 1, None, 0)],
)
def test_blocks_equal_the_textbook(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int, new: int, total: int, window: int | None, padding: int
) -> None:
    monkeypatch.setattr(engine.decoder.attention, "QUERY_BLOCK", block)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, n, 8).to(dtype) for heads, n in ((6, new), (3, total), (3, total)))
    real = None
    if padding:
        real = torch.ones(2, total, dtype=torch.bool)
        real[1, :padding] = False
    mask = attention_mask(real, new, total, window)
    causal = torch.ones(total, total, dtype=torch.bool).tril()[total - new :]
    got = attend_in_blocks(query, key, value, mask)
    expected = naive(query, key, value, causal if mask is None else mask)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert got.dtype == dtype and torch.allclose(got.double(), expected, atol=tolerance)


def test_blocks_cover_every_query_and_hold_few_scores() -> None:
    for rows, length, total in ((16, 1000, 1000), (64, 37, 8192), (2, 300, 40_000)):
        blocks = list(query_blocks(rows, length, total))
        assert [start for start, _, _ in blocks] == [0, *(end for _, end, _ in blocks[:-1])]
        assert blocks[-1][1:] == (length, total)
        assert all(seen == total - length + end for _, end, seen in blocks)
        assert max(rows * (end - start) * seen for start, end, seen in blocks) <= max(
            engine.decoder.attention.MAX_SCORES, 16 * rows * total
        )
