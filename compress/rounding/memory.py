"""Upper bounds of the memory that rounding takes besides layers and batches of text, for `--memory-limit`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from compress.options.quantize import AWQ, GPTQ, OUTSIDE, QuantiserOptions
from compress.rounding.activation_scales import SAMPLE_TOKENS
from compress.rounding.feedback_pass import MOMENT_BYTES_WITHIN_LIMIT
from compress.rounding.gptq import MOST_WEIGHTS, factoring_bytes
from engine.files.mapped_file import RELEASE_EVERY_BYTES
from engine.kernels.stored.quantized_weight import ROUND_ELEMENTS

_PIECE = 12 * 4 * ROUND_ELEMENTS
"""Temporary values while some rows are rounded."""


def rounding_bytes(matrices: Mapping[str, tuple[int, ...]], options: QuantiserOptions, way: str) -> int:
    """Return the bytes of the largest matrix while it is rounded, and of what a pass over text keeps for `awq` and `gptq`.

    matrices: shapes [O, D] of the matrices that are rounded, by name. way: of rounding, one of ROUNDINGS.
    """
    largest = max((math.prod(shape) for shape in matrices.values()), default=0)
    # In float32: the matrix, what it was rounded to, and the difference. Pages of matrices before it are still mapped.
    needed = 3 * 4 * largest + _PIECE + 2 * RELEASE_EVERY_BYTES
    if way == AWQ:
        widest = max((max(shape) for shape in matrices.values()), default=0)
        needed += 3 * 4 * largest + 4 * 4 * SAMPLE_TOKENS * widest
    if way == GPTQ:
        inputs = max((shape[1] for name, shape in matrices.items() if name not in OUTSIDE), default=0)
        of_layer: dict[str, float] = {}
        for name, shape in matrices.items():
            layer = name.split(".")[2] if name not in OUTSIDE else name
            scheme = options.scheme_of(name)
            of_layer[layer] = of_layer.get(layer, 0.0) + math.prod(shape) * (scheme.bits / 8 + 4 / max(8, scheme.group_size))
        needed += factoring_bytes(inputs) + 2 * 8 * inputs**2 + MOMENT_BYTES_WITHIN_LIMIT + 3 * 8 * MOST_WEIGHTS
        needed += math.ceil(max(of_layer.values(), default=0.0))  # the layer's rounded matrices, until its file is written
    return needed
