"""Low-bit weights on disk in the "pack-quantized" format of compressed-tensors, which vLLM reads too.

A weight X [O, D] is stored as three tensors. X_packed, int32 [O, W], holds each row's integers one after the other,
beginning at the lowest bit of the row's first word; each integer is stored as its value + 2^(bits−1). With 3 bits, integers
cross the borders of words and 32 of them fill three words, as compressed-tensors packs them since its pull request 732 (June
2026). Older versions put ten of them into a word and waste two bits; such tensors have other shapes and are refused.

X_scale [O, C] holds one scale for each group of a row. X_shape is int64 [2]. `quantization_config` in config.json gives the
bits and the group size, in one group of settings for each scheme of the model. A group's targets say for other programs
which weights it is for, by regular expressions; a model may have 2, 3, 4 and 8 bits by expert and projection, and `ignore`
lists what has kept its dtype. Here targets and the ignore list are not evaluated: the tensors show which weights are packed,
and each must match one of the config's groups.

Shape suffixes: O outputs, D inputs, W words of a row, C groups of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError, UnsupportedError
from engine.files.element_type import BFLOAT16, FLOAT16, FLOAT32, INT32, INT64
from engine.files.json_file import shown
from engine.files.mapped_file import MappedFile
from engine.kernels.stored.scheme import BITS, WHOLE_ROW, Scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.kernels.stored.quantized_weight import QuantizedWeight

CONFIG_KEY = "quantization_config"
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
"""Suffixes that the three tensors add to the weight's own name."""
_OF_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<projection>[^.]+)")
"""Name of the module of one matrix of one expert."""
_METHOD, _FORMAT = "compressed-tensors", "pack-quantized"
_SCALE_TYPES = (BFLOAT16, FLOAT16, FLOAT32)
_SHAPE_TYPES = (INT64, INT32)


def schemes_of(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Return the schemes in a raw config.json, one for each of its groups; empty if the format is not this one.

    Raises UnsupportedError naming the first setting that the engine does not read.
    """
    values = config.get(CONFIG_KEY)
    groups = check_entry(config)
    if not groups or not isinstance(values, dict):
        return ()
    return tuple(_scheme(group, f"config_groups.{name}.", values.get("format")) for name, group in groups.items())


def check_entry(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the groups of an entry of compressed-tensors in a raw config.json; empty if it has none.

    Raises UnsupportedError naming the first setting of the whole entry that the engine does not read, CheckpointError for an
    entry without groups.
    """
    values = config.get(CONFIG_KEY)
    if not isinstance(values, dict) or values.get("quant_method") != _METHOD:
        return {}
    honour(values, "", quantization_status=("compressed", None), kv_cache_scheme=(None,))
    sparsity = values.get("sparsity_config")
    if not isinstance(sparsity, dict) or sparsity.get("format") != "dense":
        honour(values, "", sparsity_config=(None, {}))
    honour(values, "", transform_config=(None, {}), moe_sparsity_config=(None,))
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"config.json: {CONFIG_KEY}.config_groups is {shown(groups)}; it must be an object of groups")
    return groups


def _scheme(group: Any, where: str, common_format: Any) -> Scheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError(f"config.json: {CONFIG_KEY}.{where}weights is {shown(weights)}; it must be an object")
    form = group.get("format")
    honour({"format": common_format if form is None else form}, "", format=(_FORMAT,))
    honour(group, where, input_activations=(None,), output_activations=(None,))
    where += "weights."
    honour(weights, where, type=("int",), num_bits=BITS, symmetric=(True,), strategy=("group", "channel"))
    honour(weights, where, dynamic=(False, None), actorder=(None, False, "weight", "static"), block_structure=(None,))
    size = weights.get("group_size")
    if weights["strategy"] == "channel":
        honour(weights, where, group_size=(None, WHOLE_ROW))
        size = WHOLE_ROW
    elif type(size) is not int or size < 1:
        raise CheckpointError(f"config.json: {CONFIG_KEY}.{where}group_size is {shown(size)}; it must be a number from 1")
    return Scheme(weights["num_bits"], size)


def honour(values: Mapping[str, Any], where: str, **known: tuple[Any, ...]) -> None:
    """Raise UnsupportedError for the first of these settings whose value is not among the known ones."""
    for key, choices in known.items():
        value = values.get(key)
        # JSON's true and 1 are equal in Python.
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            readable = " or ".join("null" if choice is None else shown(choice) for choice in choices)
            raise UnsupportedError(
                f"config.json: {CONFIG_KEY}.{where}{key} is {shown(value)}, and the engine reads {readable}; quantize the "
                "original model with `compress quantize`"
            )


def config_of(
    scheme: Scheme, ignored: Iterable[str], others: Mapping[str, Scheme] | None = None, apart: Collection[str] = ()
) -> dict[str, Any]:
    """Return the `quantization_config` of a model whose linear layers all use `scheme`, except `ignored` and `others`.

    Each scheme of the others is a group of its own, which finds its weights by regular expressions. Programs that read such
    files take the group with the class `Linear` for the rest. apart: those of the others that are no linear layers.
    """
    by_scheme: dict[Scheme, list[str]] = {}
    for name, own in (others or {}).items():
        if own != scheme or name in apart:
            by_scheme.setdefault(own, []).append(name.removesuffix(".weight"))
    groups = {"group_0": _group(scheme, ["Linear"])}
    for place, (own, names) in enumerate(by_scheme.items(), start=1):
        groups[f"group_{place}"] = _group(own, [f"re:.*{pattern}$" for pattern in _patterns(names)])
    return {
        "quant_method": _METHOD,
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _ignored(name.removesuffix(".weight") for name in ignored),
        "kv_cache_scheme": None,
    }


def _patterns(names: Iterable[str]) -> list[str]:
    """Return regular expressions that match these names of modules and no other ones.

    Experts of a layer with the same projections share one expression, which is little longer than their numbers.
    """
    alone: list[str] = []
    projections: dict[tuple[str, str], list[str]] = {}
    for name in names:
        found = _OF_EXPERT.fullmatch(name)
        if found is None:
            alone.append(re.escape(name))
        else:
            projections.setdefault((found["experts"], found["number"]), []).append(found["projection"])
    numbers: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (experts, number), own in projections.items():
        numbers.setdefault((experts, tuple(sorted(own))), []).append(number)
    return alone + [
        rf"{re.escape(experts)}\.{_one_of(each)}\.{_one_of(map(re.escape, own))}" for (experts, own), each in numbers.items()
    ]


def _ignored(names: Iterable[str]) -> list[str]:
    """Return names of modules, those of experts as regular expressions."""
    every = [*names]
    of_experts = [name for name in every if _OF_EXPERT.fullmatch(name)]
    plain = [name for name in every if not _OF_EXPERT.fullmatch(name)]
    return plain + [f"re:.*{pattern}$" for pattern in _patterns(of_experts)]


def _one_of(choices: Iterable[str]) -> str:
    every = [*choices]
    return every[0] if len(every) == 1 else f"({'|'.join(every)})"


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    whole = scheme.group_size == WHOLE_ROW
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else scheme.group_size,
        "dynamic": False,
    }
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}


def layout_of(
    name: str, shape: tuple[int, ...], scheme: Scheme, scale_dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtypes and shapes of the three tensors of a weight [O, D]."""
    import torch  # here: headers are read without it

    packed, scales = scheme.shapes(shape)
    return {name + PACKED: (torch.int32, packed), name + SCALE: (scale_dtype, scales), name + SHAPE: (torch.int64, (2,))}


def tensors_of(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the three tensors of a weight, by name."""
    import torch  # here: headers are read without it

    return {
        name + PACKED: weight.packed_OB.view(torch.int32),
        name + SCALE: weight.scales_OC,
        name + SHAPE: torch.tensor(weight.shape),
    }


class QuantizedView:
    """Location of a packed weight."""

    def __init__(
        self, name: str, shape: tuple[int, ...], by_name: Mapping[str, MappedFile], schemes: Iterable[Scheme]
    ) -> None:
        """Raises CheckpointError unless the three tensors are present and match one of the schemes."""
        self.name, self.shape = name, shape
        self.stored_names = (name + PACKED, name + SCALE, name + SHAPE)
        missing = [stored for stored in self.stored_names if stored not in by_name]
        if missing:
            raise CheckpointError(f"tensor {missing[0]} is missing, which belongs to {self.stored_names[0]}")
        self._files = tuple(by_name[stored] for stored in self.stored_names)
        packed, scales, stored_shape = (
            file.entries[stored] for file, stored in zip(self._files, self.stored_names, strict=True)
        )
        self.element = scales.element
        """Element type to which the weight is dequantized by default."""
        self.bytes = packed.nbytes + scales.nbytes + stored_shape.nbytes
        if packed.element != INT32 or scales.element not in _SCALE_TYPES or stored_shape.element not in _SHAPE_TYPES:
            raise CheckpointError(
                f"tensors {', '.join(self.stored_names)} are {packed.element}, {scales.element} and {stored_shape.element}; "
                "packed weights are int32, their scales bfloat16, float16 or float32, their shapes int64"
            )
        fitting = [scheme for scheme in schemes if self._is_as(scheme, packed.shape, scales.shape)]
        if not fitting or stored_shape.shape != (2,):
            raise CheckpointError(
                f"tensors {', '.join(self.stored_names)} have shapes {list(packed.shape)}, {list(scales.shape)} and "
                f"{list(stored_shape.shape)}, which match no group of {CONFIG_KEY} for a weight {list(shape)}"
            )
        if len({scheme.bits for scheme in fitting}) > 1:  # rows so short that several widths take as many words
            bits = " and of ".join(str(scheme.bits) for scheme in fitting)
            raise UnsupportedError(
                f"tensor {self.stored_names[0]} may be of {bits} bits by the groups of {CONFIG_KEY}, whose targets are not "
                "evaluated; quantize the original model with `compress quantize`"
            )
        self.scheme = fitting[0]

    @property
    def floats(self) -> tuple[MappedFile, str]:
        """The stored numbers that are finite if the weight is: its scales. The integers cannot be anything else."""
        return self._files[1], self.stored_names[1]

    def _is_as(self, scheme: Scheme, packed: tuple[int, ...], scales: tuple[int, ...]) -> bool:
        divides = scheme.group_size == WHOLE_ROW or self.shape[-1] % scheme.group_size == 0
        return len(self.shape) == 2 and divides and scheme.shapes(self.shape) == (packed, scales)

    def weight(self) -> QuantizedWeight:
        """Return the weight, memory-mapped. Raises CheckpointError if its stored shape differs from the config's."""
        import torch  # here: headers are read without it

        from engine.kernels.stored.quantized_weight import QuantizedWeight

        packed, scales, shape = (file.tensor(name) for file, name in zip(self._files, self.stored_names, strict=True))
        if tuple(shape.tolist()) != self.shape:
            raise CheckpointError(
                f"{self._files[2].path}: tensor {self.stored_names[2]} holds {shape.tolist()}, and config.json says "
                f"{list(self.shape)}; config.json and the weights must be of the same model"
            )
        return QuantizedWeight(packed.view(torch.uint8), scales, self.scheme.bits, self.shape[1])

    def read(self) -> Tensor:
        """Return the weight as a plain tensor, dequantized."""
        return self.weight().dequantised(self.element.torch)


def counted_by_bits(views: Iterable[QuantizedView]) -> dict[int, int]:
    """Return the number of weights in packed tensors, by their bits."""
    counts: dict[int, int] = {}
    for view in views:
        counts[view.scheme.bits] = counts.get(view.scheme.bits, 0) + math.prod(view.shape)
    return dict(sorted(counts.items()))
