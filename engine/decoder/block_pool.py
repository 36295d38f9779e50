"""Which blocks of a paged cache hold what: the accounting alone, no tensors.

A block is a run of positions of one sequence. Whole blocks are known by a digest of everything before them and of their own
tokens, so that a later prompt that begins alike uses them too. A block that nobody uses keeps its content until it is
needed for something else; the one that lay unused for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256


class OutOfBlocksError(Exception):
    """No block is unused: somebody has to give some back. Never leaves the scheduler."""


@dataclass(eq=False)
class BlockTable:
    """Where one sequence's positions lie."""

    kind: bytes = b""
    """Sequences of another kind share nothing with this one, whatever their tokens."""
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    """Positions that are filled."""
    digests: list[bytes] = field(default_factory=list)
    """Of the whole blocks that are filled."""


class BlockPool:
    """Blocks 0 to `count` - 1, each unused or used by one or several sequences."""

    def __init__(self, count: int, block_size: int, shares: bool = True) -> None:
        """shares: blocks can be found again; not of sequences that are more than their blocks."""
        self.count, self.block_size, self.shares = count, block_size, shares
        self._users = [0] * count
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def unused(self) -> int:
        """Blocks that nobody uses."""
        return len(self._unused)

    def blocks_for(self, positions: int) -> int:
        """Blocks that so many positions take."""
        return -(-positions // self.block_size)

    def find(self, tokens: Sequence[int], kind: bytes = b"") -> BlockTable:
        """The longest beginning of `tokens` that lies here in whole blocks, short of the last token. Takes nothing."""
        found = BlockTable(kind)
        for end in range(self.block_size, len(tokens), self.block_size):
            digest = self._digest(found, tokens[end - self.block_size : end])
            if (block := self._block_of.get(digest)) is None:
                break
            found.blocks.append(block)
            found.digests.append(digest)
            found.length = end
        return found

    def missing(self, found: BlockTable, positions: int) -> int:
        """How many unused blocks `take` would need for a table of `find` and so many positions in all."""
        return self.blocks_for(positions) - sum(self._users[block] > 0 for block in found.blocks)

    def take(self, table: BlockTable) -> None:
        """Use the blocks of a table that `find` gave."""
        for block in table.blocks:
            self._unused.pop(block, None)
            self._users[block] += 1

    def extend(self, table: BlockTable, positions: int) -> None:
        """Make room for so many positions in all. Raises OutOfBlocksError; what was taken by then stays in the table."""
        while len(table.blocks) < self.blocks_for(positions):
            table.blocks.append(self._new(table.blocks[-1] + 1 if table.blocks else None))

    def fill(self, table: BlockTable, tokens: Sequence[int], length: int) -> None:
        """Note that the table now holds the first `length` tokens; blocks that became whole can be found from here on."""
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
        """Give all blocks back; their content can still be found. The table is empty afterwards."""
        for block in reversed(table.blocks):  # the end of a text is of less use to others than its beginning
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} given back more often than taken"
            if not self._users[block]:
                self._unused[block] = None
        table.blocks, table.digests, table.length = [], [], 0

    def forget(self, table: BlockTable) -> None:
        """Let none of the table's blocks be found any more: what they hold is in doubt."""
        for block in table.blocks:
            self._unname(block)

    def _new(self, wished: int | None) -> int:
        """An unused block: the wished one if it holds nothing that could be found, else the one unused for longest."""
        if not self._unused:
            raise OutOfBlocksError
        block = next(iter(self._unused))
        if wished is not None and wished in self._unused and wished not in self._digest_of:
            block = wished
        del self._unused[block]
        self._unname(block)
        self._users[block] = 1
        return block

    def _unname(self, block: int) -> None:
        if (digest := self._digest_of.pop(block, None)) is not None:
            del self._block_of[digest]

    def _digest(self, before: BlockTable, tokens: Sequence[int]) -> bytes:
        """Of everything up to the end of the block after those that `before` has digests of."""
        previous = before.digests[-1] if before.digests else sha256(before.kind).digest()
        return sha256(previous + b"".join(token.to_bytes(8, "little") for token in tokens)).digest()
