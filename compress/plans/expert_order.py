"""Where each tensor of a model lies in its files: the matrices of an expert adjacent, experts used together near each other.

Shape suffix: N experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from engine.files.safetensors_writer import PAGE_BYTES

_WIDTHS = (8, 4, 2, 1)  # bytes of elements


class Stored(NamedTuple):
    """A tensor in a file."""

    name: str
    nbytes: int
    itemsize: int


class Block(NamedTuple):
    """Tensors that lie one behind the other: those of one expert, or a single one."""

    tensors: tuple[Stored, ...]
    expert: tuple[int, int] | None = None
    """(decoder layer, expert), or None."""

    @property
    def nbytes(self) -> int:
        """The size of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def width(self) -> int | None:
        """The largest power of two, up to 8, that divides the size of every tensor; None if an element is wider than it.

        A block that begins at a multiple of its width has all elements aligned, and so has a block of this width after it.
        """
        fitting = (each for each in _WIDTHS if all(tensor.nbytes % each == 0 for tensor in self.tensors))
        width = next(fitting)
        return width if all(tensor.itemsize <= width for tensor in self.tensors) else None


def chained(co_use_NN: Tensor) -> list[int]:
    """Return all experts in an order in which those that tokens use together are neighbors.

    Pairs become neighbors from the most frequent one to the rarest, unless one of the two has two neighbors already or the
    pair would close a ring. This is the greedy heuristic for a longest path. Among equals, near numbers come first.
    """
    count = len(co_use_NN)
    counts = co_use_NN.tolist()
    pairs = sorted(
        ((first, second) for first in range(count) for second in range(first + 1, count)),
        key=lambda pair: (-counts[pair[0]][pair[1]], pair[1] - pair[0]),
    )
    neighbors: list[list[int]] = [[] for _ in range(count)]
    ends = list(range(count))  # of an expert at the end of a chain: the other end
    for first, second in pairs:
        if len(neighbors[first]) < 2 and len(neighbors[second]) < 2 and ends[first] != second:
            neighbors[first].append(second)
            neighbors[second].append(first)
            far = ends[first], ends[second]
            ends[far[0]], ends[far[1]] = far[1], far[0]
    order: list[int] = []
    place = next((expert for expert in range(count) if len(neighbors[expert]) < 2), None)
    while place is not None:
        order.append(place)
        place = next((other for other in neighbors[place] if other not in order[-2:]), None)
    return order


def neighbors_share(order: Sequence[int], co_use_NN: Tensor) -> float | None:
    """Return the share of neighbors among the pairs of experts that a token uses together; None without such pairs."""
    pairs = (int(co_use_NN.sum()) - int(co_use_NN.diagonal().sum())) // 2
    return sum(int(co_use_NN[first, second]) for first, second in pairwise(order)) / pairs if pairs else None


def blocks_of(
    tensors: Sequence[Stored], experts: Mapping[str, tuple[int, int]], orders: Mapping[int, Sequence[int]]
) -> list[Block]:
    """Return the tensors in blocks: those of each expert, and every other one alone.

    The experts of a layer are in `orders`, at the place where the first of them was. experts: (layer, expert) of the tensors
    that belong to one expert only, in the order of an expert's matrices.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    own: dict[tuple[int, int], list[Stored]] = {}
    for name, expert in experts.items():
        own.setdefault(expert, []).append(by_name[name])
    found, done = list[Block](), set[int]()
    for tensor in tensors:
        if tensor.name not in experts:
            found.append(Block((tensor,)))
            continue
        layer, _ = experts[tensor.name]
        if layer not in done:
            keys = ((layer, expert) for expert in orders[layer])
            found += [Block(tuple(own[key]), key) for key in keys if key in own]
        done.add(layer)
    return found


def sharded(blocks: Iterable[Block], shard_bytes: int) -> Iterator[list[Block]]:
    """Yield the blocks by file, in order. A file has at most `shard_bytes` of data, or only one block."""
    shard, filled = list[Block](), 0
    for block in blocks:
        if shard and filled + block.nbytes > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(block)
        filled += block.nbytes
    if shard:
        yield shard


def arranged(shard: Iterable[Block]) -> list[Block]:
    """Return the blocks of a file in the order in which they are written, so that all elements are aligned.

    Blocks of whole pages come first, so that each of them begins on a page. Others follow by their width, in their order. A
    block in which some elements would not be aligned is taken apart.
    """
    pages, others = list[Block](), dict[int, list[Block]]((width, []) for width in _WIDTHS)
    for block in shard:
        if (width := block.width) is None:
            for tensor in block.tensors:
                others[tensor.itemsize].append(Block((tensor,)))
        else:
            (others[width] if block.nbytes % PAGE_BYTES else pages).append(block)
    return [*pages, *(block for own in others.values() for block in own)]
