"""Layers with a state, whose next position one compiled kernel computes, within a compiled step or layer by layer.

Shape suffixes: B batch, L new positions, D hidden, O columns of all projections side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.decoder.attention import Cache, Positions
from engine.kernels.kernel_choice import is_served
from engine.kernels.linear import as_bfloat16, expert_form, kernel_form, linear, linears, places_of
from engine.kernels.stored.quantized_weight import LowBitWeight


class Recurrence(nn.Module):
    """A layer with a state, whose size does not depend on the number of positions."""

    kernel: ClassVar[str]
    """Name of the compiled kernel of one position."""
    layer: int
    output: nn.Parameter | LowBitWeight

    @property
    def projections(self) -> tuple[nn.Parameter | LowBitWeight, ...]:
        """The projections of the layer's input."""
        raise NotImplementedError

    @property
    def results(self) -> int:
        """The kernel's results for one position: the inputs of the output projection."""
        raise NotImplementedError

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """The parameters that the kernel reads in bfloat16, by the names of its record's fields."""
        raise NotImplementedError

    @property
    def numbers(self) -> Mapping[str, Tensor]:
        """The parameters that it reads in float32."""
        return {}

    @property
    def kernel_sizes(self) -> Mapping[str, float]:
        """The record's further fields."""
        raise NotImplementedError

    @cached_property
    def columns_O(self) -> Tensor | None:
        """The column of the projections that each column of the kernel's inputs is, int64; None if they are the same."""
        return None

    def next_position(self, x_BLD: Tensor, positions: Positions, cache: Cache | None) -> Tensor | None:
        """Return the output for the next position of a few sequences; None if the compiled kernels do not compute it."""
        batch, length, _ = x_BLD.shape
        if cache is None or length > 1:
            return None
        kernels = positions.choice.for_few(batch, x_BLD[0], *self.vectors.values())  # products may need x contiguous
        if kernels is None:
            return None
        weights, states_2B = self.projections, cache.state_addresses(self.layer)
        made_BLO = torch.cat(linears(x_BLD, weights, (None,) * len(weights), positions.choice), dim=-1)
        if self.columns_O is not None:
            made_BLO = made_BLO.index_select(-1, self.columns_O)
        record, _parameters = self._record(kernels)
        made = kernels.recur(self.kernel, record, made_BLO.data_ptr(), states_2B, (batch, self.results))
        return linear(as_bfloat16(made).view(batch, 1, -1), self.output, choice=positions.choice)

    def is_known(self, kernels: Any) -> bool:
        """Return whether a compiled step computes this layer."""
        forms = expert_form(kernels, self.projections), kernel_form(kernels, [self.output])
        return None not in forms and all(is_served(vector) for vector in self.vectors.values())

    def table(self, kernels: Any) -> tuple[Any, Any, list[Any]]:
        """Return the kernel's record, what a compiled step needs beside it, and objects that must live as long as they."""
        record, parameters = self._record(kernels)
        weights, form = self.projections, expert_form(kernels, self.projections)
        assert form is not None, "only layers that the kernels know have tables"
        places, forms = places_of(kernels, weights, form)
        rows = [weight.shape[0] for weight in weights]
        sources_O = None if self.columns_O is None else self.columns_O.numpy()
        table, kept = kernels.recurrent_table(self.kernel, record, places, rows, form, sources_O, self.results)
        return record, table, [*kept, forms, *parameters]

    def _record(self, kernels: Any) -> tuple[Any, list[Tensor]]:
        """Return the kernel's record, and the parameters whose addresses it holds."""
        numbers = {name: number.float().contiguous() for name, number in self.numbers.items()}
        given = {**self.vectors, **numbers}
        fields = {name: tensor.data_ptr() for name, tensor in given.items()}
        return kernels.recurrent_record(self.kernel, **fields, **self.kernel_sizes), list(given.values())
