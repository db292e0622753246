"""Block references: the flat side of the prefix index.

A BlockRef is a small dense number that names one block, that is one position in the tree. What is
known of a block per ref lies in flat arrays, so that the tree's edges stay as small as their
tokens, and a run of thousands of blocks is allocated, linked or freed in a handful of numpy calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import MisuseError

Refs = NDArray[np.int32]
"""One-dimensional array of BlockRefs."""

NO_REF = -1
"""The parent of a root's first block; also the node number of a ref that names nothing."""

_FIRST_CAPACITY = 1 << 16


def as_refs(refs: Refs | Sequence[int]) -> Refs:
    """``refs`` as a one-dimensional int32 array; copies only where the type differs."""
    array = np.asarray(refs, dtype=np.int32)
    if array.ndim != 1:
        raise MisuseError(f"refs must be one-dimensional, got shape {array.shape}")
    return array


def dead_ref() -> MisuseError:
    """The error to raise for a ref that names nothing now."""
    return MisuseError(
        "a BlockRef names no block: it was removed, or comes from another index; "
        "look the prefix up again"
    )


class RefTable:
    """Allocates BlockRefs and holds parent, child count and node number of each.

    Invariants, tested by ``check()``:

    1. The free refs are distinct, lie below ``high``, and are exactly those without a node number.
    2. A live ref's parent is live or NO_REF, and is not the ref itself.
    3. ``children[r]`` is the number of live refs whose parent is r.
    4. Every ref lies below ``capacity``, the length of each array.
    """

    __slots__ = ("_free", "_num_free", "capacity", "children", "high", "node", "parent")

    def __init__(self) -> None:
        self.capacity = _FIRST_CAPACITY
        self.parent: Refs = np.empty(self.capacity, np.int32)
        self.children: Refs = np.empty(self.capacity, np.int32)
        self.node: Refs = np.empty(self.capacity, np.int32)
        self._free: Refs = np.empty(self.capacity, np.int32)
        self._num_free = 0
        self.high = 0
        """Refs from here on have never been given out: their entries are undefined."""

    def __len__(self) -> int:
        return self.high - self._num_free

    def take(self, count: int, parent: int, node: int) -> Refs:
        """Allocate ``count`` >= 1 refs as one run below ``parent``, all on ``node``. O(count).

        ``parent`` is a live ref or NO_REF; its child count grows by one.
        """
        where: Refs | slice
        if self._num_free < count:
            refs = self._fresh(count)
            # The new refs are a range, and to fill a slice costs next to nothing.
            where = slice(self.high - count, self.high)
            self.parent[where] = refs - 1
        else:
            self._num_free -= count
            where = refs = self._free[self._num_free : self._num_free + count].copy()
            self.parent[refs[1:]] = refs[:-1]
        first, last = int(refs[0]), int(refs[-1])
        self.node[where] = node
        self.parent[first] = parent
        self.children[where] = 1
        self.children[last] = 0
        if parent != NO_REF:
            self.children[parent] += 1
        return refs

    def _fresh(self, count: int) -> Refs:
        start = self.high
        self.high += count
        if self.high > self.capacity:
            self._grow(start)
        return np.arange(start, self.high, dtype=np.int32)

    def give(self, refs: Refs) -> None:
        """Free a run of >= 1 live refs, head first, whose last has no child. O(len(refs))."""
        parent = self.parent[refs[0]]
        if parent != NO_REF:
            self.children[parent] -= 1
        self.node[refs] = NO_REF
        self._free[self._num_free : self._num_free + len(refs)] = refs
        self._num_free += len(refs)

    def live(self) -> Refs:
        """Every ref that names a block, ascending. O(capacity)."""
        return np.flatnonzero(self.node[: self.high] >= 0).astype(np.int32)

    def require_live(self, refs: Refs) -> None:
        """Raise MisuseError where one of ``refs`` names nothing now."""
        if not len(refs):
            return
        if refs.min() < 0 or refs.max() >= self.high or self.node[refs].min() < 0:
            raise dead_ref()

    def reset(self) -> None:
        """Forget every ref. O(1); the capacity stays, as arrays outside have grown to it."""
        self._num_free = 0
        self.high = 0

    def _grow(self, used: int) -> None:
        # Doubling is cheap in memory too: the pages of a large np.empty cost nothing until touched.
        self.capacity = max(self.high, 2 * self.capacity)
        self.parent = _grown(self.parent, used, self.capacity)
        self.children = _grown(self.children, used, self.capacity)
        self.node = _grown(self.node, used, self.capacity)
        self._free = _grown(self._free, self._num_free, self.capacity)

    def check(self) -> None:
        """Assert the class's invariants. O(capacity); for tests."""
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == len(free), "invariant 1: a ref is free twice"
        dead = np.flatnonzero(self.node[: self.high] < 0)
        assert np.array_equal(np.sort(free), dead), (
            "invariant 1: free refs and nodeless refs differ"
        )
        live = np.flatnonzero(self.node[: self.high] >= 0)
        parents = self.parent[live]
        linked = parents[parents != NO_REF]
        assert (parents != live).all(), "invariant 2: a ref is its own parent"
        assert np.isin(linked, live).all(), "invariant 2: a parent is not live"
        counts = np.bincount(linked, minlength=self.high)
        assert np.array_equal(self.children[live], counts[live]), "invariant 3: child counts"
        assert self.high <= self.capacity, "invariant 4: more refs than capacity"
        for array in (self.parent, self.children, self.node, self._free):
            assert len(array) == self.capacity, "invariant 4: an array of another length"


def _grown(array: Refs, used: int, capacity: int) -> Refs:
    larger = np.empty(capacity, np.int32)
    larger[:used] = array[:used]
    return larger
