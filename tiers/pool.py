"""Which blocks of a paged pool are taken, and by how many: numbers only, no bytes.

A sequence whose blocks lie side by side is moved by a few large copies instead of many small ones,
so the pool hands out neighbours wherever it can.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import LayoutError, MisuseError

Ids = NDArray[np.int64]


class BlockPool:
    """Reference-counted block ids ``0 .. num_blocks - 1``.

    Invariants (``check`` tests them by these numbers):

    1. Every count is zero or more; a block is free exactly while its count is zero.
    2. ``num_free`` + blocks with a count = ``num_blocks``.

    Not locked: whoever owns the pool calls it under a lock of its own.
    """

    __slots__ = ("_free", "_refs")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise LayoutError(f"a pool needs at least one block, got {num_blocks}")
        self._refs: Ids = np.zeros(num_blocks, np.int64)
        self._free = num_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._free

    def allocate(self, n: int, after: int | None = None) -> Ids | None:
        """``n`` free blocks with a count of one each, shape ``[n]``; None (and no change) if fewer.

        The blocks right behind ``after`` where those are free, so that a growing sequence stays in
        one piece; else the start of the roomiest run, where it can go on growing; else as few
        pieces as possible. Raises MisuseError for a
        negative ``n``, LayoutError for an unknown ``after``.
        """
        if n < 0:
            raise MisuseError(f"cannot allocate {n} blocks")
        if after is not None:
            self._known(np.array([after], np.int64))
        if n > self._free:
            return None
        if n == 0:
            return np.zeros(0, np.int64)
        if after is not None and not self._refs[after + 1 : after + 1 + n].any():
            first = after + 1
            if first + n <= self.num_blocks:
                return self._take(np.arange(first, first + n, dtype=np.int64))
        starts, lengths = self._runs()
        # Longest first; the stable sort breaks ties by address, so that equal calls answer alike.
        order = np.argsort(-lengths, kind="stable")
        pieces: list[Ids] = []
        missing = n
        for index in order:
            size = min(missing, int(lengths[index]))
            pieces.append(np.arange(starts[index], starts[index] + size, dtype=np.int64))
            missing -= size
            if not missing:
                break
        return self._take(np.sort(np.concatenate(pieces)))

    def share(self, ids: Ids | Sequence[int]) -> None:
        """One more holder for each block; raises for a free or unknown one and changes nothing."""
        blocks = self._held(ids, "share")
        np.add.at(self._refs, blocks, 1)

    def release(self, ids: Ids | Sequence[int]) -> Ids:
        """One holder less for each block; returns the ids that became free, shape ``[m]``.

        Raises MisuseError where a block is given back more often than it is held, LayoutError where
        it does not exist; then nothing has changed.
        """
        blocks, counts = np.unique(self._held(ids, "release"), return_counts=True)
        over = blocks[counts > self._refs[blocks]]
        if len(over):
            raise MisuseError(f"block {over[0]} is released more often than it is held")
        self._refs[blocks] -= counts
        freed: Ids = blocks[self._refs[blocks] == 0]
        self._free += len(freed)
        return freed

    def is_shared(self, block: int) -> bool:
        """Whether two or more hold the block, so that a writer must copy it first."""
        return self.references(block) > 1

    def references(self, block: int) -> int:
        """How many hold the block. Raises LayoutError for an unknown id."""
        self._known(np.array([block], np.int64))
        return int(self._refs[block])

    def check(self) -> None:
        """Raise AssertionError unless the numbered invariants hold."""
        assert (self._refs >= 0).all(), "1: a negative count"
        assert self._free == int((self._refs == 0).sum()), "2: num_free is not what is free"

    def _take(self, ids: Ids) -> Ids:
        self._refs[ids] = 1
        self._free -= len(ids)
        return ids

    def _runs(self) -> tuple[Ids, Ids]:
        """Starts and lengths of the runs of free blocks, by address."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._refs == 0, [False]))))
        starts: Ids = edges[::2].astype(np.int64)
        return starts, edges[1::2].astype(np.int64) - starts

    def _known(self, blocks: Ids) -> None:
        outside = blocks[(blocks < 0) | (blocks >= self.num_blocks)]
        if len(outside):
            raise LayoutError(
                f"block id {outside[0]} is outside of the pool of {self.num_blocks} blocks"
            )

    def _held(self, ids: Ids | Sequence[int], verb: str) -> Ids:
        blocks = np.asarray(ids, np.int64).reshape(-1)
        self._known(blocks)
        free = blocks[self._refs[blocks] == 0]
        if len(free):
            raise MisuseError(f"cannot {verb} block {free[0]}: nobody holds it")
        return blocks
