"""Weights that compressed-tensors stores in 8- and 4-bit floating point: FP8 with scales, and NVFP4.

FP8 weights keep their names and have scales beside them (block_float8.py). An NVFP4 weight is stored as three tensors
(nvfp4.py). As in packed integers, the tensors show which weights are quantized; targets and the ignore list are not
evaluated. The rounding of activations, which config.json may ask for, is left out: activations stay in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.block_float8 import Float8, float8_of
from engine.checkpoint.mxfp4 import is_packed
from engine.checkpoint.nvfp4 import FORMAT as NVFP4_FORMAT
from engine.checkpoint.nvfp4 import GROUP
from engine.checkpoint.pack_quantized import CONFIG_KEY, check_entry, honour, schemes_of
from engine.errors import UnsupportedError
from engine.files.json_file import shown
from engine.kernels.stored.scheme import Scheme

_FLOAT8_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True)
class StoredFormats:
    """The formats of a model's weights, as config.json describes them."""

    schemes: tuple[Scheme, ...] = ()
    """Schemes of packed integers."""
    float8: Float8 | None = None
    """Scales of FP8 weights."""
    nvfp4: bool = False
    """Whether weights may be in NVFP4."""


def formats_of(config: Mapping[str, Any]) -> StoredFormats:
    """Return the formats that a raw config.json describes. Raises UnsupportedError naming a setting that is not read."""
    if (floats := _compressed_floats(config)) is not None:
        return floats
    schemes = schemes_of(config)
    return StoredFormats(schemes, None if schemes or is_packed(config) else float8_of(config))


def _compressed_floats(config: Mapping[str, Any]) -> StoredFormats | None:
    """Return the formats of compressed-tensors' floats; None unless all groups of the config are of such."""
    groups = check_entry(config)
    values = config.get(CONFIG_KEY)
    if not groups or not isinstance(values, dict):
        return None
    common = values.get("format")
    forms = {name: _form(group, common) for name, group in groups.items()}
    if not all(form in (*_FLOAT8_FORMATS, NVFP4_FORMAT) for form in forms.values()):
        return None
    blocks = set()
    for name, form in forms.items():
        where = f"config_groups.{name}."
        honour(groups[name], where, output_activations=(None,))
        weights = groups[name]["weights"]
        if form == NVFP4_FORMAT:
            _check(weights, where, num_bits=(4,), strategy=("tensor_group",), group_size=(GROUP,))
        else:
            _check(weights, where, num_bits=(8,), strategy=("tensor", "channel", "block"))
            blocks.add(_block(weights, where))
    if len(blocks) > 1:
        raise UnsupportedError(
            f"config.json: {CONFIG_KEY} has FP8 weights with scales of several kinds, and the engine reads one; take the "
            "model's weights in bfloat16"
        )
    return StoredFormats(float8=Float8(*blocks) if blocks else None, nvfp4=NVFP4_FORMAT in forms.values())


def _form(group: Any, common: Any) -> Any:
    """Return the format of a group of float weights; None for other groups."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("type") != "float":
        return None
    return common if group.get("format") is None else group["format"]


def _check(weights: Mapping[str, Any], where: str, **known: tuple[Any, ...]) -> None:
    honour(weights, f"{where}weights.", symmetric=(True,), dynamic=(False, None), **known)


def _block(weights: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    if weights["strategy"] != "block":
        return None
    block = weights.get("block_structure")
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise UnsupportedError(
            f"config.json: {CONFIG_KEY}.{where}weights.block_structure is {shown(block)}, and the engine reads two numbers; "
            "take the model's weights in bfloat16"
        )
    return sizes[0], sizes[1]
