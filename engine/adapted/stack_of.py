"""How the stored tensors of a model that transformers runs hold the projections of experts.

One expert of the first MoE layer is read from the files and from the loaded layer, and its values are compared. A stored
tensor holds gate, up or down, or gate and up one after the other or in turn, [outputs, inputs] or transposed.

Shape suffixes: P outputs of the first product of an expert, F width, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.adapted.config_keys import CountKey
from engine.adapted.expert_layers import FoundLayers
from engine.adapted.stored_names import StoredNames
from engine.checkpoint.stacks import joined
from engine.errors import UnsupportedError
from engine.families.experts import DOWN, DOWN_BIAS, GATE, GATE_BIAS, UP, UP_BIAS, Stack

SAMPLED_EXPERT = 1
"""The expert whose values are compared."""
_PAIRS = ((GATE, UP), (UP, GATE))


class StoredModel(Protocol):
    """A checkpoint that transformers runs (AdaptedCheckpoint), as functions see it that find experts in its files."""

    @property
    def directory(self) -> Path: ...
    @property
    def model_type(self) -> str: ...
    @property
    def raw_config(self) -> dict[str, Any]: ...
    @property
    def model_dtype(self) -> torch.dtype: ...
    @property
    def model(self) -> Any: ...
    @property
    def found(self) -> FoundLayers: ...
    @property
    def count_key(self) -> CountKey: ...
    @property
    def names(self) -> StoredNames: ...
    @property
    def stored_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]: ...
    @property
    def stored_experts(self) -> Any: ...
    def build(self, raw: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Any: ...
    def loaded(
        self, model: Any, layer: int | None, dtype: torch.dtype, device: torch.device | str
    ) -> AbstractContextManager[None]: ...
    def stored_tensor(self, name: str) -> Tensor: ...
    def parts(self, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]: ...


def generic(name: str) -> str:
    """Return a name in the files without the numbers of layers and experts."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def stacks_of(checkpoint: StoredModel, samples: Mapping[str, Callable[[], Tensor]]) -> dict[str, Stack]:
    """Return how stored tensors hold projections, by their generic names.

    samples: functions that return the part of the sampled expert in each such tensor. Raises UnsupportedError for a tensor
    that holds something else, and for experts whose hidden units do not have one gate and one up each.
    """
    layer, dtype = checkpoint.found.sampled, checkpoint.model_dtype
    if layer.count <= SAMPLED_EXPERT:
        raise UnsupportedError(f"{checkpoint.directory}: every layer has one expert, which can only be kept as a whole")
    model = checkpoint.build(checkpoint.raw_config, dtype)
    with checkpoint.loaded(model, layer.index, dtype, "cpu"):
        module: Any = model.get_submodule(layer.experts)
        _check_gate(checkpoint, module, layer.width)
        projections = _projections(module)
        return {key: _stack_of(checkpoint, key, sample(), projections) for key, sample in samples.items()}


def _stack_of(checkpoint: StoredModel, key: str, stored: Tensor, projections: Mapping[int, Tensor]) -> Stack:
    found, layer = [], checkpoint.found.sampled.index
    for stack in _candidates(key, projections):
        expected = joined(stack, [projections[each] for each in stack.projections])
        if stored.shape == expected.shape and torch.equal(stored.to(expected.dtype), expected):
            found.append(stack)
    if len(found) > 1:
        raise UnsupportedError(
            f"{checkpoint.directory}: expert {SAMPLED_EXPERT} of layer {layer} has equal projections, so "
            f"that {key} could hold one or another of them; experts of this model can only be kept or removed as a whole"
        )
    if found:
        return found[0]
    raise UnsupportedError(
        f"{checkpoint.directory}: {key} holds something else than the projections of experts as transformers runs them, so "
        f"the experts of a model of the family {checkpoint.model_type} can only be kept or removed as a whole"
    )


def _candidates(key: str, projections: Mapping[int, Tensor]) -> Iterator[Stack]:
    """Yield the layouts that are known, the usual ones first."""
    for projection, tensor in projections.items():
        yield from (
            Stack(key, (projection,), transposed) for transposed in ((False, True) if tensor.dim() > 1 else (False,))
        )
    for pair in (*_PAIRS, *(tuple(each + GATE_BIAS for each in own) for own in _PAIRS)):
        if projections.keys() >= set(pair):
            for interleaved in (False, True):
                is_matrix = projections[pair[0]].dim() > 1
                yield from (Stack(key, pair, each, interleaved) for each in ((False, True) if is_matrix else (False,)))


def _projections(module: Any) -> dict[int, Tensor]:
    """Return the projections of one expert of a module: gate and up [F, D], down [D, F], and biases."""
    down, first = (
        module.down_proj[SAMPLED_EXPERT],
        (module.gate_up_proj if module.has_gate else module.up_proj)[SAMPLED_EXPERT],
    )
    if module.is_transposed:
        down, first = down.T, first.T
    found = _split(module, first, GATE, UP) | {DOWN: down}
    if module.has_bias:
        own = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[SAMPLED_EXPERT]
        found |= _split(module, own, GATE_BIAS, UP_BIAS) | {DOWN_BIAS: module.down_proj_bias[SAMPLED_EXPERT]}
    return found


def _split(module: Any, first: Tensor, gate: int, up: int) -> dict[int, Tensor]:
    if not module.has_gate:
        return {up: first}
    parts = first.chunk(2) if module.is_concatenated else (first[::2], first[1::2])
    return dict(zip((gate, up), parts, strict=True))


def _check_gate(checkpoint: StoredModel, module: Any, width: int) -> None:
    """Raise UnsupportedError unless a hidden unit depends on those outputs of the first product that `_split` gives it."""
    outputs = 2 * width if module.has_gate else width
    with torch.enable_grad():
        made_P = torch.full((1, outputs), 0.5, requires_grad=True)
        units_F = (module._apply_gate if module.has_gate else module.act_fn)(made_P)
        (gradient_P,) = torch.autograd.grad(units_F[0, width - 1], made_P)
    expected = {int(own[-1]) for own in _split(module, torch.arange(outputs), GATE, UP).values()}
    if units_F.shape[-1] != width or set(gradient_P[0].nonzero().flatten().tolist()) != expected:
        raise UnsupportedError(
            f"{checkpoint.directory}: the hidden units of experts of the family {checkpoint.model_type} do not have one "
            "gate and one up each; remove whole experts"
        )
