"""What a job holds of a path: block by block, since blocks are done with in any order."""

from __future__ import annotations

import numpy as np

from kvstrata.store.placement import Mask, Placement, Refs


class Hold:
    """A lease on blocks that can be let go one by one.

    A held block keeps its name in the index and its place in every tier. One let go may sink, be
    evicted, or even give its ref to another block: nothing may be asked about it any more.
    """

    def __init__(self, placement: Placement, refs: Refs, *, name_only: bool = False) -> None:
        """``name_only``: the blocks may leave any tier, but stay what their refs say."""
        self._placement = placement
        self._book = placement.index.leases
        if name_only:
            self._book = placement.names
            self._book.grow(placement.index.capacity)
        self._generation = self._book.generation
        self._refs = refs
        self._held: Mask = np.ones(len(refs), np.bool_)
        self._book.pin(refs)

    def let_go(self, done: Mask) -> None:
        """Let go of the blocks of the mask that are still held."""
        now = done & self._held
        if now.any() and self._generation == self._book.generation:
            self._book.unpin(self._refs[now])
            self._held &= ~now

    def close(self) -> None:
        """Let go of all, and take out of the index what names nothing."""
        if self._generation == self._book.generation:
            held = self._refs[self._held]
            self._book.unpin(held)
            self._held[:] = False
            self._placement.prune(held)
