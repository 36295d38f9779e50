"""Matrices in packed floats that a plan only copies, which the result keeps as they are stored: FP8 and NVFP4."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch import Tensor

from compress.plans.plan import Plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.pack_quantized import CONFIG_KEY
from engine.files.safetensors_writer import Layout

_ONE_EXPERT = re.compile(r"\.experts\.\d")


class KeptFloats:
    """The matrices in packed floats of a result, by their names on disk."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        """names: of matrices in the source, by their names on disk in the result."""
        self._checkpoint, self._names = checkpoint, names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the stored tensors of one matrix."""
        return self._checkpoint.float_parts(self._names[name], name)

    def layout(self) -> Layout:
        """Return the dtypes and shapes of the stored tensors of all matrices."""
        return layout_of_parts(part for name in self._names for part in self.parts(name).items())


def layout_of_parts(parts: Iterable[tuple[str, Tensor]]) -> Layout:
    """Return the dtypes and shapes of these tensors, by name."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in parts}


def stays_packed(plan: Plan, checkpoint: Checkpoint, replaced: Set[str]) -> bool:
    """Return whether the result of a plan stays in FP8 or NVFP4: it copies experts, and changes no other matrix.

    Otherwise the whole result is plain, because programs keep the experts of a model in one type. The result is also plain
    where the source's quantization config names single experts, because their numbers may change.
    """
    if plan.kind != "moe" or plan.common or replaced:
        return False
    if _ONE_EXPERT.search(str(checkpoint.raw_config.get(CONFIG_KEY))):
        return False
    return all(expert.is_copy for experts in plan.layers.values() for expert in experts)


def kept_floats(names: Mapping[str, str], checkpoint: Checkpoint) -> KeptFloats:
    """Return the matrices in packed floats among these. names: of tensors in the source, by those on disk in the result."""
    return KeptFloats(
        checkpoint, {on_disk: name for on_disk, name in names.items() if checkpoint.float_parts(name, on_disk)}
    )


def float_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization entry of such a result. Static scales of activations are not read, and so not written."""
    entry = dict(config[CONFIG_KEY])
    if entry.get("activation_scheme") == "static":
        entry["activation_scheme"] = "dynamic"
    if "config_groups" in entry:
        entry["config_groups"] = {name: _without_static(group) for name, group in entry["config_groups"].items()}
    return {CONFIG_KEY: entry}


def _without_static(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group of compressed-tensors' config, which rounds activations only where no stored scale is needed."""
    activations = group.get("input_activations")
    is_dynamic = isinstance(activations, dict) and activations.get("dynamic") is True
    return dict(group) | {"input_activations": activations if is_dynamic else None}
