"""The compiled attention of many new positions of each sequence, against the textbook in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels_for_tests import kernels
from packages_for_tests import needs_numba
from torch import Tensor

from engine.decoder.attention import Positions
from engine.decoder.kv_cache import Kept, Scaled, to_int8
from engine.decoder.text_attention import attend_texts
from engine.families.layer_config import Chunk
from engine.kernels.kernel_choice import DECODING, PROMPT, TORCH

Window = int | Chunk | None
SHAPES = {
    "one panel": (1, 4, 4, 64, 64, 5, 5),
    "a past": (2, 4, 2, 32, 32, 100, 331),
    "one position": (3, 6, 2, 16, 16, 1, 77),
    "odd sizes": (1, 6, 3, 10, 7, 130, 205),
    "all positions": (1, 3, 1, 80, 48, 257, 257),
    "two vectors": (1, 2, 1, 32, 32, 12, 40),
    "three vectors": (1, 4, 1, 32, 32, 10, 90),
}
"""B, H, G, E, V, L and P."""


def inputs(shape: tuple[int, int, int, int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries, whose heads lie side by side, keys, whose positions do, and values, whose heads do."""
    batch, heads, groups, size, value_size, new, total = shape
    torch.manual_seed(0)
    query = torch.randn(batch, new, heads, size).bfloat16().transpose(1, 2)
    value = torch.randn(batch, total, groups, value_size).bfloat16().transpose(1, 2)
    return query, (2 * torch.randn(batch, groups, total, size)).bfloat16(), value


def textbook(query: Tensor, key: Kept, value: Kept, scale: float, window: Window, sinks_H: Tensor | None) -> Tensor:
    key, value = (x.dequantized() if isinstance(x, Scaled) else x for x in (key, value))
    new, total, per_group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(per_group, 1) for x in (key, value))
    scores = query.double() @ key.mT * scale
    for row, position in enumerate(range(total - new, total)):
        for other in range(total):
            seen = other <= position
            if isinstance(window, Chunk):
                seen &= other // window.size == position // window.size
            elif window is not None:
                seen &= other > position - window
            if not seen:
                scores[:, :, row, other] = -torch.inf
    if sinks_H is not None:
        sinks = sinks_H.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


@needs_numba
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 70, Chunk(64), Chunk(50)], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_equals_the_textbook(
    shape: tuple[int, int, int, int, int, int, int], window: Window, has_sinks: bool, threads: int
) -> None:
    query, key, value = inputs(shape)
    sinks_H = torch.linspace(-1.0, 3.0, query.shape[1]) if has_sinks else None
    kernels.use_threads(threads)
    found = attend_texts(kernels, query, key, value, 0.2, window, sinks_H=sinks_H)
    expected = textbook(query, key, value, 0.2, window, sinks_H)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    assert float((found - expected).abs().max()) < 0.01 * float(expected.abs().max())


@needs_numba
@pytest.mark.parametrize("window", [None, 70], ids=str)
def test_keys_and_values_of_8_bits(window: Window) -> None:
    """The scales are a part of those of a larger cache."""
    query, key, value = inputs((2, 4, 2, 32, 24, 100, 331))
    kept = [
        Scaled(x.integers[:, :, :331], x.scales[:, :, :331]) for x in (to_int8(F.pad(y, (0, 0, 0, 9))) for y in (key, value))
    ]
    found, expected = attend_texts(kernels, query, *kept, 0.2, window), textbook(query, *kept, 0.2, window, None)
    assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())


@needs_numba
@pytest.mark.parametrize("window", [None, 70, Chunk(50)], ids=str)
def test_a_query_gets_the_same_bits_in_pieces_and_behind_a_window(window: Window) -> None:
    """The whole text at once, and pieces of 1, 63 and 193 positions, of which the last sees no key before its window."""
    query, key, value = inputs((1, 6, 2, 32, 24, 257, 257))
    whole, pieces, past = attend_texts(kernels, query, key, value, 0.2, window), [], 0
    for size in (1, 63, 193):
        end = past + size
        seen = {None: 0, 70: max(0, past - 69), Chunk(50): past // 50 * 50}[window]
        own = query[:, :, past:end], key[:, :, seen:end], value[:, :, seen:end]
        pieces.append(attend_texts(kernels, *own, 0.2, window, seen))
        past = end
    assert torch.equal(torch.cat(pieces, dim=2), whole)


@needs_numba
def test_queries_lie_anywhere() -> None:
    """Here they begin at no multiple of their size."""
    query, key, value = inputs((1, 4, 2, 32, 24, 50, 81))
    beside = F.pad(query, (0, 5))[..., :32]
    assert torch.equal(attend_texts(kernels, beside, key, value, 0.2), attend_texts(kernels, query, key, value, 0.2))


@needs_numba
def test_a_sink_that_is_none() -> None:
    query, key, value = inputs((1, 2, 1, 32, 32, 100, 331))
    sinks_H = torch.full((2,), -torch.inf)
    found = attend_texts(kernels, query, key, value, 0.2, 70, sinks_H=sinks_H)
    assert torch.equal(found, attend_texts(kernels, query, key, value, 0.2, 70))


@needs_numba
def test_what_is_not_finite_stays_so() -> None:
    """A NaN in a key reaches all queries that see it, so that the damage is noticed, and no query before it."""
    query, key, value = inputs((1, 2, 1, 32, 32, 100, 100))
    key[0, 0, 60, 3] = torch.nan
    found = attend_texts(kernels, query, key, value, 0.2)
    assert found[:, :, :60].isfinite().all() and found[:, :, 60:].isnan().all()


@needs_numba
def test_who_attends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of bfloat16 without padding and without gradients do, and nothing else."""
    monkeypatch.setenv("COMPRESS_KERNELS", "compiled")
    query, key, value = inputs((1, 2, 1, 32, 32, 100, 100))
    positions = Positions(query, query, False, {}, choice=PROMPT)
    assert positions.text_kernels(query, key, value) is not None
    assert positions.text_kernels(query, to_int8(key), to_int8(value)) is not None
    others: list[dict[str, Any]] = [{"is_padded": True}, {"one_by_one": True}, {"choice": TORCH}, {"choice": DECODING}]
    for other in others:
        assert positions._replace(**other).text_kernels(query, key, value) is None
    assert positions.text_kernels(query.float(), key.float(), value.float()) is None
    assert positions.text_kernels(query, key.half(), value.half()) is None
    assert positions.text_kernels(query[..., :31], key[..., :31], value) is None
    for place in range(4):
        tensors = [query.clone(), key.clone(), value.clone(), torch.zeros(2)]
        assert positions.text_kernels(*tensors) is not None
        tensors[place].requires_grad_()
        assert positions.text_kernels(*tensors) is None
        with torch.inference_mode():
            assert positions.text_kernels(*tensors) is not None
