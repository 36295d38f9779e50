"""Changes that conversion to GGUF makes to the numbers of a tensor: order of rows and columns, other tensors, other values.

The rules are those of llama.cpp (github.com/ggml-org/llama.cpp, conversion/qwen.py). A form is applied in both directions.
A form that moves whole rows, or columns in whole blocks, is applied to blocks as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_NEAR = 2.0**-22
"""Relative difference of numbers that were computed in float32 from one number."""


@dataclass(frozen=True)
class Order:
    """The order in which files have the rows or columns of a tensor."""

    def stored(self) -> Iterator[int]:
        """Yield the index in the tensor of each row or column of the file."""
        raise NotImplementedError


@dataclass(frozen=True)
class HeadsInTurns(Order):
    """Heads that share a key head stand together; files have the first head of each key head, then the second of each.

    `before` rows or columns stay at their places.
    """

    before: int
    key_heads: int
    shared: int
    """Number of heads that share a key head."""
    size: int
    """Rows or columns of a head."""

    def stored(self) -> Iterator[int]:
        """Yield the index in the tensor of each row or column of the file."""
        yield from range(self.before)
        for number in range(self.shared):
            for key_head in range(self.key_heads):
                start = self.before + (key_head * self.shared + number) * self.size
                yield from range(start, start + self.size)

    def of_blocks(self, size: int) -> HeadsInTurns | None:
        """Return the order of blocks of so many numbers, or None if a block has numbers of several heads."""
        if self.before % size or self.size % size:
            return None
        return replace(self, before=self.before // size, size=self.size // size)


@dataclass(frozen=True)
class PartByPart(Order):
    """Each of several groups has some rows of every part, and files have the parts one after the other."""

    groups: int
    sizes: tuple[int, ...]
    """Rows of each part in one group."""

    def stored(self) -> Iterator[int]:
        """Yield the index in the tensor of each row of the file."""
        group = sum(self.sizes)
        for part, size in enumerate(self.sizes):
            for number in range(self.groups):
                start = number * group + sum(self.sizes[:part])
                yield from range(start, start + size)


class Values:
    """Numbers that files have in the place of a tensor's own; both are float32."""

    def stored(self, own: Tensor) -> Tensor:
        """Return the file's numbers."""
        raise NotImplementedError

    def own(self, stored: Tensor) -> Tensor:
        """Return the tensor's own numbers."""
        raise NotImplementedError


class OneMore(Values):
    """1 + w, which a norm multiplies by, in the place of its difference w from 1."""

    def stored(self, own: Tensor) -> Tensor:
        """Return 1 + w."""
        return own.float() + 1

    def own(self, stored: Tensor) -> Tensor:
        """Return w."""
        return stored.float() - 1


class Rate(Values):
    """The rate of decay -exp(A) in the place of A."""

    def stored(self, own: Tensor) -> Tensor:
        """Return -exp(A)."""
        return -own.float().exp()

    def own(self, stored: Tensor) -> Tensor:
        """Return A: the number in bfloat16 if its rate is this one, so that such models get their own numbers back."""
        exact = (-stored.double()).log()
        near = exact.bfloat16().double()
        is_near = (near.exp() + stored.double()).abs() <= _NEAR * stored.double().abs()
        return near.where(is_near, exact).float()


@dataclass(frozen=True)
class Form:
    """The form of one tensor in files. Dimensions of 1 after the first two are left out there."""

    rows: Order | None = None
    columns: HeadsInTurns | None = None
    parts: tuple[int, ...] = ()
    """Rows of each of the stored tensors that the reordered rows are divided among; empty for one tensor."""
    values: Values | None = None
    row: int = 0
    """Numbers of each row into which files divide a list; 0 for no division."""

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shape of each stored tensor."""
        if self.row:
            return [(math.prod(shape) // self.row, self.row)]
        inner = (math.prod(shape[1:]),) if len(shape) > 1 else ()
        return [(rows, *inner) for rows in self.parts or shape[:1]]

    def stored(self, own: Tensor) -> tuple[Tensor, ...]:
        """Return the stored tensors, of a tensor with its own shape."""
        own = own.flatten(1) if own.dim() > 1 else own
        if self.values is not None:
            own = self.values.stored(own)
        for dimension, order in self._orders():
            own = own.index_select(dimension, _indices(order))
        if self.row:
            own = own.view(-1, self.row)
        return own.split(self.parts) if self.parts else (own,)

    def own(self, *stored: Tensor) -> Tensor:
        """Return the tensor of which `stored` makes these. Dimensions after those of the file stay as they are."""
        import torch

        own = torch.cat(stored) if self.parts else stored[0].flatten() if self.row else stored[0]
        for dimension, order in self._orders():
            own = own.index_select(dimension, _indices(order).argsort())
        return own if self.values is None else self.values.own(own)

    def of_blocks(self, size: int) -> Form | None:
        """Return the form of rows of blocks of so many numbers, or None if its numbers must be computed."""
        columns = None if self.columns is None else self.columns.of_blocks(size)
        is_cut = columns is None and self.columns is not None
        return None if is_cut or self.values is not None else replace(self, columns=columns)

    def by_column(self, numbers: Tensor) -> Tensor:
        """Return one number for each column of the tensor, in the order of the file."""
        return numbers if self.columns is None else numbers[_indices(self.columns)]

    def _orders(self) -> Iterator[tuple[int, Order]]:
        yield from ((dimension, order) for dimension, order in enumerate((self.rows, self.columns)) if order is not None)


def _indices(order: Order) -> Tensor:
    import torch  # here: headers are read without it

    return torch.tensor(list(order.stored()))


AS_IT_IS = Form()
"""The form of what is only written without its dimensions of 1."""
ONE_MORE = Form(values=OneMore())
Places = Mapping[str, tuple[tuple[str, ...], Form | None]]
"""Names within a layer's block of a file, and the form there, by the family's names within the layer."""
