"""Which weights of a checkpoint that transformers runs may be low-bit, and a whole model that keeps them as they are stored.

Start with `LowBitLayers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.low_bit_weights import LowBitLinear, stack_low_bit
from engine.checkpoint.stored_views import SAME_MODEL
from engine.errors import CheckpointError
from engine.families.tensor_names import NEVER_ROUNDED
from engine.kernels.kernel_choice import KernelChoice

FEW_OUTPUTS, FEW_SHARE = 64, 4
"""A matrix with at most FEW_OUTPUTS outputs, and more than FEW_SHARE times as many inputs, is never rounded: it gives a few
numbers for each token, such as a gate of the shared expert or of heads, on which much depends."""
_AROUND = -1
"""Stands for the number of a layer, for weights around the layers."""


def linear_matrices(checkpoint: AdaptedCheckpoint) -> dict[str, tuple[int, str]]:
    """Return decoder layer and module of every matrix that a low-bit weight can replace, by its name in the files.

    These are the weights of linear layers that are stored as transformers runs them, except those of routers and small ones.
    """
    modules, tied = dict(checkpoint.model.named_modules()), checkpoint.model.all_tied_weights_keys
    routers, found = tuple(f"{layer.router}." for layer in checkpoint.found.experts), {}
    for index in range(checkpoint.found.count):
        for name in checkpoint.names.by_layer[index]:
            target = checkpoint.names.targets[name]
            module = target.removesuffix(".weight")
            is_alone = module != target and name not in checkpoint.names.converted and target not in tied
            if is_alone and type(modules.get(module)) is nn.Linear and not f"{module}.".startswith(routers):
                outputs, inputs = modules[module].weight.shape
                is_small = outputs <= FEW_OUTPUTS and outputs * FEW_SHARE < inputs
                if not is_small and not target.endswith(NEVER_ROUNDED):
                    found[name] = index, module
    return found


def head_matrix(checkpoint: AdaptedCheckpoint) -> tuple[str, str] | None:
    """Return the name in the files and the module of the output head; None where it is no linear layer with a tensor."""
    head = checkpoint.model.get_output_embeddings()
    module = next((name for name, each in checkpoint.model.named_modules() if each is head and head is not None), None)
    if module is None or type(head) is not nn.Linear:
        return None
    names = [name for name in checkpoint.names.by_layer[None] if checkpoint.names.targets[name] == f"{module}.weight"]
    return (names[0], module) if len(names) == 1 and names[0] not in checkpoint.names.converted else None


class LowBitLayers:
    """The low-bit weights of a checkpoint, as a whole model keeps them in memory."""

    def __init__(self, checkpoint: AdaptedCheckpoint, choice: KernelChoice) -> None:
        """choice: kernels of the products. Raises UnsupportedError where experts are not found in the files."""
        self._checkpoint, self._choice = checkpoint, choice
        self._linears: dict[str, tuple[int, str]] = {}
        self._experts: dict[int, list[list[str]]] = {}
        """Names of the matrices of each expert, by layer; only of layers whose experts are all low-bit."""
        if checkpoint.low_bit:
            self._find_linears()
            self._find_experts()

    def _find_linears(self) -> None:
        head = head_matrix(self._checkpoint)
        around = {} if head is None else {head[0]: (_AROUND, head[1])}
        every = linear_matrices(self._checkpoint) | around
        self._linears = {name: place for name, place in every.items() if name in self._checkpoint.low_bit}

    def _find_experts(self) -> None:
        low_bit, stored = self._checkpoint.low_bit.keys(), self._checkpoint.stored_experts
        for layer in self._checkpoint.found.experts:
            names = [[*stored.matrices(layer.index, expert).values()] for expert in range(layer.count)]
            if all(low_bit >= set(own) for own in names):
                self._experts[layer.index] = names

    def names(self, layer: int | None) -> frozenset[str]:
        """Return the names of a layer's weights, or for None of those around the layers, that stay low-bit."""
        place = _AROUND if layer is None else layer
        own = [name for name, (index, _) in self._linears.items() if index == place]
        return frozenset([*own, *(name for each in self._experts.get(place, ()) for name in each)])

    def put_into(self, model: Any, layer: int | None, dtype: torch.dtype) -> None:
        """Put a layer's weights into a model without weights: linear layers, and stacks of experts.

        Raises CheckpointError for a weight of another shape than the model's.
        """
        place = _AROUND if layer is None else layer
        for name, (index, module) in self._linears.items():
            if index == place:
                whole = model.get_submodule(module)
                self._check(name, whole.weight.shape)
                weight = self._checkpoint.low_bit[name].weight()
                model.set_submodule(module, LowBitLinear(weight, whole.bias, dtype, self._choice))
        for found in self._checkpoint.found.experts:
            if found.index == place and place in self._experts:
                names = self._experts[place]
                for each in names:
                    for name in each[:-1]:
                        self._check(name, (found.width, found.hidden_size))
                    self._check(each[-1], (found.hidden_size, found.width))
                weights = [[self._checkpoint.low_bit[name].weight() for name in each] for each in names]
                stack_low_bit(model.get_submodule(found.experts), weights)

    def _check(self, name: str, shape: Sequence[int]) -> None:
        own = self._checkpoint.low_bit[name].shape
        if own != tuple(shape):
            raise CheckpointError(
                f"{self._checkpoint.directory}: tensor {name} has shape {list(own)} and config.json says {list(shape)}; "
                f"{SAME_MODEL}"
            )
