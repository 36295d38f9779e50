"""Block accounting of a paged cache: which sequences use which blocks. No tensors are involved.

A block is a run of positions of one sequence. A full block is identified by a digest of its own tokens and of
everything before them, so that a later prompt with the same beginning can share it. An unused block keeps its content
until the block is needed; the block that was unused for longest is reused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol


class OutOfBlocksError(Exception):
    """No block is unused, and a sequence must release some. The scheduler catches this error."""


@dataclass(eq=False)
class BlockTable:
    """Blocks that hold one sequence's positions."""

    kind: bytes = b""
    """Kind of the sequence; sequences of different kinds share nothing, whatever their tokens."""
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    """Number of filled positions."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of the full blocks."""


class Keeper(Protocol):
    """Keeps the content of blocks beyond the pool."""

    def keep(self, digest: bytes, block: int) -> None:
        """Copy the content of a block that is about to be used for something else."""

    def forget(self, digest: bytes) -> None:
        """Delete what was kept of a block, because its content may be wrong."""


class BlockPool:
    """Blocks 0 to `count` - 1, each unused or used by one or more sequences."""

    def __init__(self, count: int, block_size: int, shares: bool = True) -> None:
        """shares: whether blocks can be found again; False if sequences have states besides their blocks."""
        self.count, self.block_size, self.shares = count, block_size, shares
        self.keeper: Keeper | None = None
        """Is told when content leaves the pool; None if nobody keeps it."""
        self._users = [0] * count
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def unused(self) -> int:
        """Number of unused blocks."""
        return len(self._unused)

    def blocks_for(self, positions: int) -> int:
        """Return the number of blocks for this many positions."""
        return -(-positions // self.block_size)

    def find(self, tokens: Sequence[int], kind: bytes = b"") -> BlockTable:
        """Return the longest prefix of `tokens`, without the last token, in full blocks of this pool. Takes no blocks."""
        found = BlockTable(kind)
        for digest in self.digests(BlockTable(kind), tokens):
            if (block := self._block_of.get(digest)) is None:
                break
            found.blocks.append(block)
            found.digests.append(digest)
            found.length += self.block_size
        return found

    def digests(self, before: BlockTable, tokens: Sequence[int]) -> Iterator[bytes]:
        """Yield the digests of the full blocks of `tokens`, without the last token, that follow those in `before`."""
        size, so_far = self.block_size, BlockTable(before.kind, digests=before.digests[-1:])
        for end in range((len(before.digests) + 1) * size, len(tokens), size):
            so_far.digests = [self._digest(so_far, tokens[end - size : end])]
            yield so_far.digests[0]

    def named(self) -> list[tuple[bytes, int]]:
        """Return the digest and the block of all unused content that can be found, the most recently used first."""
        return [(digest, block) for block in reversed(self._unused) if (digest := self._digest_of.get(block)) is not None]

    def missing(self, found: BlockTable, positions: int) -> int:
        """Return the number of unused blocks that a table from `find` needs for `positions` positions in total."""
        return self.blocks_for(positions) - sum(self._users[block] > 0 for block in found.blocks)

    def take(self, table: BlockTable) -> None:
        """Mark the blocks of a table from `find` as used."""
        for block in table.blocks:
            self._unused.pop(block, None)
            self._users[block] += 1

    def extend(self, table: BlockTable, positions: int) -> None:
        """Make room for this many positions in total. Raises OutOfBlocksError; blocks taken before stay in the table."""
        while len(table.blocks) < self.blocks_for(positions):
            table.blocks.append(self._new(table.blocks[-1] + 1 if table.blocks else None))

    def fill(self, table: BlockTable, tokens: Sequence[int], length: int) -> None:
        """Record that the table now holds the first `length` tokens; full blocks can be found from now on."""
        table.length = length
        if not self.shares:
            return
        for index in range(len(table.digests), table.length // self.block_size):
            digest = self._digest(table, tokens[index * self.block_size : (index + 1) * self.block_size])
            table.digests.append(digest)
            if digest not in self._block_of:
                self._block_of[digest] = table.blocks[index]
                self._digest_of[table.blocks[index]] = digest

    def release(self, table: BlockTable) -> None:
        """Release all blocks; their content can still be found. The table is empty afterwards."""
        for block in reversed(table.blocks):  # the end of a text is less likely to be shared than its beginning
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} given back more often than taken"
            if not self._users[block]:
                self._unused[block] = None
        table.blocks, table.digests, table.length = [], [], 0

    def forget(self, table: BlockTable) -> None:
        """Make the table's blocks impossible to find, because their content may be wrong."""
        for block in table.blocks:
            if self.keeper is not None and (digest := self._digest_of.get(block)) is not None:
                self.keeper.forget(digest)
            self._unname(block)

    def _new(self, wished: int | None) -> int:
        """Return an unused block: the wished one if its content cannot be found, otherwise the one unused for longest."""
        if not self._unused:
            raise OutOfBlocksError
        block = next(iter(self._unused))
        if wished is not None and wished in self._unused and wished not in self._digest_of:
            block = wished
        if self.keeper is not None and (digest := self._digest_of.get(block)) is not None:
            self.keeper.keep(digest, block)
        del self._unused[block]
        self._unname(block)
        self._users[block] = 1
        return block

    def _unname(self, block: int) -> None:
        if (digest := self._digest_of.pop(block, None)) is not None:
            del self._block_of[digest]

    def _digest(self, before: BlockTable, tokens: Sequence[int]) -> bytes:
        """Return the digest of all tokens up to the end of the block that follows those in `before`."""
        previous = before.digests[-1] if before.digests else sha256(before.kind).digest()
        return sha256(previous + b"".join(token.to_bytes(8, "little") for token in tokens)).digest()
