"""Low-bit weights in the result of a plan on a checkpoint that transformers runs: what is rounded, and how it is stored.

The matrices of all experts, the linear layers of the decoder's layers and, on request, the output head are rounded. A matrix
that has a tensor of its own in the source keeps its name. Families that stack experts, or join gate and up, have no such
name for an expert's matrix; it gets one of ours (`expert_matrix`), and all experts of such a model are stored one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.options.quantize import HEAD, QuantiserOptions
from compress.rounding.quantizer import Quantiser
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.low_bit_layers import head_matrix, linear_matrices
from engine.adapted.low_bit_weights import expert_matrix
from engine.adapted.stored_experts import Layout, StoredResult
from engine.checkpoint.pack_quantized import CONFIG_KEY, config_of, layout_of, tensors_of
from engine.errors import OptionError
from engine.families.experts import DOWN
from engine.families.tensor_names import expert_tensor

Widths = Mapping[int, Sequence[int]]
"""Number of hidden units of each expert of a result, by decoder layer index."""


@dataclass(frozen=True)
class Matrix:
    """One matrix of a result that is rounded."""

    name: str
    """Name that it has in the families with a row, or one like it, with the number of the layer."""
    origin: str
    """Name of the tensor of the source that holds it."""
    shape: tuple[int, int]


def rounded_matrices(options: QuantiserOptions, checkpoint: AdaptedCheckpoint, widths: Widths) -> dict[str, Matrix]:
    """Return the matrices of a result that are rounded, by their names in its files.

    Raises UnsupportedError where projections are not found in the source's files, OptionError for options that do not fit.
    Linear layers whose inputs groups do not fill keep their dtype.
    """
    if options.quantize_head and head_matrix(checkpoint) is None:
        raise OptionError(
            f"{checkpoint.directory}: the output head of a model of the family {checkpoint.model_type} is no linear layer "
            "with a tensor of its own; leave out --quantize-head"
        )
    found = dict(_of_experts(checkpoint, widths))
    blocks = tuple(f"{layer.experts.rpartition('.')[0]}." for layer in checkpoint.found.experts)
    layers = {f"{checkpoint.found.layers}.{layer.index}." for layer in checkpoint.found.experts}
    inside = tuple(block for block in blocks if block not in layers)
    for name, (layer, module) in linear_matrices(checkpoint).items():
        shape = checkpoint.stored_shapes[name][1]
        if options.scheme.fits(shape[1]) and (not options.experts_only or module.startswith(inside)):
            found[name] = Matrix(f"model.layers.{layer}.{module}", name, (shape[0], shape[1]))
    if options.quantize_head and (head := head_matrix(checkpoint)) is not None:
        outputs, inputs = checkpoint.stored_shapes[head[0]][1]
        found[head[0]] = Matrix(HEAD, head[0], (outputs, inputs))
    return found


def check_rounding(options: QuantiserOptions, checkpoint: AdaptedCheckpoint, widths: Widths) -> None:
    """Raise the errors of `rounded_matrices`, and OptionError for a scheme that experts or the head do not support."""
    matrices = rounded_matrices(options, checkpoint, widths).values()
    options.check(checkpoint.config, {each.name: each.shape for each in matrices})


def _of_experts(checkpoint: AdaptedCheckpoint, widths: Widths) -> Iterator[tuple[str, Matrix]]:
    """Yield the matrices of all experts of a result with their names in its files."""
    stored, row = checkpoint.stored_experts, checkpoint.config.architecture
    are_alone = all(map(stored.is_alone, _holders(checkpoint, {layer.index: [0] for layer in checkpoint.found.experts})))
    for layer in checkpoint.found.experts:
        for number, width in enumerate(widths[layer.index]):
            for projection, origin in stored.matrices(layer.index, number).items():
                shape = (layer.hidden_size, width) if projection == DOWN else (width, layer.hidden_size)
                name = origin if are_alone else expert_matrix(layer.experts, number, projection)
                yield name, Matrix(expert_tensor(row, layer.index, number, projection), origin, shape)


def _holders(checkpoint: AdaptedCheckpoint, widths: Widths) -> set[str]:
    """Return the names of the tensors that hold the matrices of each layer's first experts, as many as `widths` lists."""
    stored = checkpoint.stored_experts
    every = ((layer, number) for layer, own in widths.items() for number in range(len(own)))
    return {name for layer, number in every for name in stored.matrices(layer, number).values()}


class RoundedResult:
    """The tensors of a StoredResult, with its matrices rounded."""

    def __init__(
        self,
        result: StoredResult,
        checkpoint: AdaptedCheckpoint,
        widths: Widths,
        quantiser: Quantiser,
        made: Mapping[str, Callable[[], Tensor]],
    ) -> None:
        """made: return the projections of the result's experts, by the names that they have in the families with a row."""
        self._result, self._checkpoint, self._quantiser, self._made = result, checkpoint, quantiser, made
        self._matrices = rounded_matrices(quantiser.options, checkpoint, widths)
        gone = _holders(checkpoint, widths) | self._matrices.keys()
        self._copies: Layout = {name: own for name, own in result.layout.items() if name not in gone}
        self.layout: Layout = dict(self._copies)
        for name, matrix in self._matrices.items():
            scheme = quantiser.options.scheme_of(matrix.name)
            self.layout |= layout_of(name, matrix.shape, scheme, self._dtype(matrix))

    @property
    def names(self) -> list[str]:
        """Names of all weights."""
        return [*self._copies, *self._matrices]

    def parts(self, name: str) -> Mapping[str, Iterator[Tensor]]:
        """Return the tensors that a weight is stored as, each in pieces along its first axis."""
        if name in self._copies:
            return {name: self._result.pieces(name)}
        matrix = self._matrices[name]
        read = self._made.get(matrix.name) or partial(self._checkpoint.stored_tensor, matrix.origin)
        weight = self._quantiser(matrix.name, read(), self._dtype(matrix))
        return {part: iter([tensor]) for part, tensor in tensors_of(name, weight).items()}

    def _dtype(self, matrix: Matrix) -> torch.dtype:
        """Return the dtype of the scales."""
        return self._checkpoint.stored_shapes[matrix.origin][0]

    @property
    def config(self) -> dict[str, Any]:
        """The quantization entry of config.json."""
        options = self._quantiser.options
        named = {name for name, matrix in self._matrices.items() if matrix.name == HEAD}
        ends = {id(self._checkpoint.model.get_input_embeddings()), id(self._checkpoint.model.get_output_embeddings())}
        outer = {f"{name}.weight" for name, module in self._checkpoint.model.named_modules() if id(module) in ends}
        kept = [
            name
            for name, (_, shape) in self._copies.items()
            if len(shape) == 2 and name.endswith(".weight") and self._checkpoint.names.targets.get(name) not in outer
        ]
        heads = {name: options.scheme_of(HEAD) for name in named}
        return {CONFIG_KEY: config_of(options.scheme, kept if heads else [HEAD, *kept], heads)}
