"""Attention of whole texts, or of pieces of them, by the compiled kernels for many new positions.

Shape suffixes: B batch, L new positions, P all positions so far, H query heads, G key-value heads, E head dimension,
V a value's dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.decoder.kv_cache import Kept, Scaled
from engine.families.layer_config import Chunk
from engine.kernels.linear import as_bfloat16


def takes_texts(query_BHLE: Tensor, key_BGPE: Kept, value_BGPV: Kept) -> bool:
    """Return whether `attend_texts` reads these queries, keys and values."""
    kept = (key_BGPE, value_BGPV)
    return query_BHLE.shape[-1] % 2 == 0 and all(isinstance(x, Scaled) or x.dtype == torch.bfloat16 for x in kept)


def attend_texts(
    kernels: Any,
    query_BHLE: Tensor,
    key_BGPE: Kept,
    value_BGPV: Kept,
    scale: float,
    window: int | Chunk | None = None,
    first: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return softmax attention of the last L of P positions, [B, H, L, V], where no position is padding.

    first: number of the first key's position in its text. scale, window, sinks_H: as in `attention.attend`. A query's result
    depends neither on how many others are read with it, nor on finite keys and values that it may not attend to.
    """
    query_BHLE = query_BHLE if _has_rows(query_BHLE) else query_BHLE.contiguous()
    (key, key_scales), (value, value_scales) = _parts(key_BGPE), _parts(value_BGPV)
    steps = (0, 0) if key_scales is None else key_scales.stride()[:2]
    assert value_scales is None or value_scales.stride()[:2] == steps
    batch, heads, new, size = query_BHLE.shape
    mixed_BLHV = kernels.attend_texts(
        [each.data_ptr() for each in (query_BHLE, key, value)],
        [each.stride()[:3] for each in (query_BHLE, key, value)],
        (*(0 if each is None else each.data_ptr() for each in (key_scales, value_scales)), *steps),
        (batch, heads, key.shape[1], size, value.shape[3], new, key.shape[2]),
        first,
        window_number(window),
        scale,
        sinks_array(sinks_H),
    )
    return as_bfloat16(mixed_BLHV).view(batch, new, heads, -1).transpose(1, 2)


def window_number(window: int | Chunk | None) -> int | None:
    """Return a window as the kernels take it: the size of chunks is negative."""
    return -window.size if isinstance(window, Chunk) else window


def sinks_array(sinks_H: Tensor | None) -> Any:
    """Return sinks as the kernels take them: a NumPy array of float32."""
    return None if sinks_H is None else sinks_H.detach().float().numpy()


def _has_rows(query_BHLE: Tensor) -> bool:
    """Return whether the vectors of all positions begin at multiples of their size."""
    return query_BHLE.stride(-1) == 1 and all(step % query_BHLE.shape[-1] == 0 for step in query_BHLE.stride()[:3])


def _parts(kept: Kept) -> tuple[Tensor, Tensor | None]:
    """Return vectors, each contiguous, and their scales, contiguous for each group, or None."""
    if isinstance(kept, Scaled):
        return _rows(kept.integers), _rows(kept.scales)
    return _rows(kept), None


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
