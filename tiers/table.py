"""The block table of one sequence: which physical block holds each of its positions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvstrata.core.errors import ClosedError, MisuseError
from kvstrata.core.spec import blocks_for
from kvstrata.tiers.pool import BlockPool, Ids


class BlockTable:
    """Positions ``0 .. num_tokens - 1`` of a sequence in blocks of a pool.

    Invariants (``check`` tests them by these numbers):

    1. It holds exactly ``ceil(num_tokens / block_size)`` blocks.
    2. It holds one reference to each of its blocks, and no block twice.

    Several tables may hold one block (``fork``); who writes to a position calls ``writable`` first.
    """

    __slots__ = ("_blocks", "_pool", "_released", "_tokens", "block_size")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise MisuseError(f"block_size must be 1 or more, got {block_size}")
        self._pool = pool
        self._blocks: list[int] = []
        self._tokens = 0
        self._released = False
        self.block_size = block_size

    @classmethod
    def adopt(
        cls, pool: BlockPool, block_size: int, blocks: Iterable[int], num_tokens: int
    ) -> BlockTable:
        """A table over blocks whose references the caller already holds and hands over.

        Raises MisuseError unless they are exactly as many as ``num_tokens`` needs.
        """
        table = cls(pool, block_size)
        ids = [int(block) for block in blocks]
        if len(ids) != blocks_for(num_tokens, block_size):
            raise MisuseError(f"{len(ids)} blocks do not hold {num_tokens} tokens exactly")
        table._blocks, table._tokens = ids, num_tokens
        return table

    @property
    def num_tokens(self) -> int:
        """Tokens that have a place."""
        return self._tokens

    @property
    def blocks(self) -> Ids:
        """The block ids in order, shape ``[n]``; a copy."""
        return np.array(self._blocks, np.int64)

    @property
    def is_contiguous(self) -> bool:
        """Whether block i + 1 lies right behind block i, so that one view covers the sequence."""
        first = self._blocks[0] if self._blocks else 0
        return self._blocks == list(range(first, first + len(self._blocks)))

    def slot(self, position: int) -> int:
        """``block_id * block_size + offset``: the row of the paged pool that holds ``position``."""
        self._holds(position)
        index, offset = divmod(position, self.block_size)
        return self._blocks[index] * self.block_size + offset

    def slots(self, start: int, stop: int) -> Ids:
        """The slots of ``start .. stop - 1``, shape ``[stop - start]``."""
        if not 0 <= start <= stop <= self._tokens:
            raise MisuseError(f"positions {start}..{stop} are not in a table of {self._tokens}")
        position = np.arange(start, stop, dtype=np.int64)
        blocks = self.blocks[position // self.block_size]
        slots: Ids = blocks * self.block_size + position % self.block_size
        return slots

    def append(self, num_tokens: int) -> Ids | None:
        """Make room for so many more tokens; the ids of the new blocks, shape ``[n]``, maybe none.

        None where the pool has too few free blocks; then nothing has changed. A last block that is
        shared is not copied here: see ``writable``.
        """
        self._open()
        if num_tokens < 0:
            raise MisuseError(f"cannot append {num_tokens} tokens; use truncate")
        need = blocks_for(self._tokens + num_tokens, self.block_size) - len(self._blocks)
        new = self._pool.allocate(need, self._blocks[-1] if self._blocks else None)
        if new is None:
            return None
        self._blocks.extend(new.tolist())
        self._tokens += num_tokens
        return new

    def fork(self) -> BlockTable:
        """Another table of the same tokens that shares every block."""
        self._open()
        self._pool.share(self._blocks)
        return BlockTable.adopt(self._pool, self.block_size, self._blocks, self._tokens)

    def writable(self, position: int) -> tuple[int, int] | None:
        """Make ``position``'s block this table's own: copy-on-write.

        Returns ``(old, new)`` where the block was shared: the caller copies old to new before it
        writes, and before anyone who shares ``old`` releases it. None where nothing is to copy.
        Raises MisuseError where the pool is full; then nothing has changed (one free block a write
        into a shared block is what a caller keeps in reserve).
        """
        self._holds(position)
        index = position // self.block_size
        old = self._blocks[index]
        if not self._pool.is_shared(old):
            return None
        new = self._pool.allocate(1, self._blocks[index - 1] if index else None)
        if new is None:
            raise MisuseError("no free block to copy a shared one into; free a sequence first")
        self._pool.release([old])
        self._blocks[index] = int(new[0])
        return old, self._blocks[index]

    def truncate(self, num_tokens: int) -> Ids:
        """Keep the first ``num_tokens`` tokens; the blocks that became free, shape ``[m]``."""
        self._open()
        if not 0 <= num_tokens <= self._tokens:
            raise MisuseError(f"cannot truncate {self._tokens} tokens to {num_tokens}")
        keep = blocks_for(num_tokens, self.block_size)
        freed = self._pool.release(self._blocks[keep:])
        del self._blocks[keep:]
        self._tokens = num_tokens
        return freed

    def release(self) -> Ids:
        """Give all blocks back; those that became free, shape ``[m]``. Twice is fine."""
        if self._released:
            return np.zeros(0, np.int64)
        freed = self.truncate(0)
        self._released = True
        return freed

    def check(self) -> None:
        """Raise AssertionError unless the numbered invariants hold."""
        assert len(self._blocks) == blocks_for(self._tokens, self.block_size), "1: block count"
        assert len(set(self._blocks)) == len(self._blocks), "2: a block is held twice"
        assert all(self._pool.references(block) for block in self._blocks), "2: a block is free"

    def _open(self) -> None:
        if self._released:
            raise ClosedError("this block table has been released")

    def _holds(self, position: int) -> None:
        self._open()
        if not 0 <= position < self._tokens:
            raise MisuseError(f"position {position} is not in a table of {self._tokens} tokens")
