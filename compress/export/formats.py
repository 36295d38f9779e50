"""Formats and precisions of exported language models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from compress.export.genai import check_genai, tokenizer_problem, write_genai_config
from compress.export.parity import Allowed
from compress.options.export import FORMAT_PACKAGES, PRECISION_BITS, ExportOptions
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import UnsupportedError
from engine.onnx.quantize import BLOCKS, block_size


class Precision(NamedTuple):
    """Dtype and bit width of an exported model."""

    dtype: torch.dtype
    """Dtype of activations, and of weights where `bits` is None."""
    bits: int | None
    """Bits of the weights of matrix products; None for the dtype."""
    allowed: Allowed
    """Allowed difference of logits from the engine's in float32 with equal weights, rounded to the same number of bits."""


@dataclass(frozen=True)
class ExportFormat:
    """One row of FORMATS; the checkpoint's own files are in every format."""

    check: Callable[[Checkpoint, bool], None] = lambda checkpoint, portable: None
    """Raises an error for a model that the format cannot represent. portable: standard operators only."""
    write: Callable[[Checkpoint, Path], None] = lambda checkpoint, directory: None
    """Writes the format's own files."""
    tokenizer_problem: Callable[[Path], str | None] = lambda directory: None
    """Returns why the format's runtime cannot read the tokenizer, or None where it can."""
    runs_encoder_decoders: bool = True


FORMATS: dict[str, ExportFormat] = {
    "onnx": ExportFormat(),
    "onnx-genai": ExportFormat(check_genai, write_genai_config, tokenizer_problem, runs_encoder_decoders=False),
}
"""Formats; FORMAT_PACKAGES (compress/options/export.py) has the packages that each needs."""
assert tuple(FORMATS) == tuple(FORMAT_PACKAGES)
PRECISIONS: dict[str, Precision] = {
    "float32": Precision(torch.float32, PRECISION_BITS["float32"], Allowed(1e-4, 1e-4)),
    "float16": Precision(torch.float16, PRECISION_BITS["float16"], Allowed(math.inf, 0.02)),
    "int8": Precision(torch.float32, PRECISION_BITS["int8"], Allowed(math.inf, 0.1)),
    "int4": Precision(torch.float32, PRECISION_BITS["int4"], Allowed(math.inf, 0.1)),
}
assert tuple(PRECISIONS) == tuple(PRECISION_BITS)


def check_blocks(options: ExportOptions, sizes: Mapping[str, int]) -> None:
    """Raise UnsupportedError where low-bit weights cannot be divided into blocks, before any work."""
    odd = [f"{name} {size}" for name, size in sizes.items() if block_size(size) is None]
    if odd and PRECISIONS[options.precision].bits is not None:
        raise UnsupportedError(
            f"{options.model}: {options.precision} weights share scales in blocks of {min(BLOCKS)}, and {odd[0]} is "
            "not a multiple; export it in float32 or float16"
        )
