"""Leases: who still needs a block to stay where it is.

A lease is one array of refs however long the prefix, and pinning is one numpy add. The head of a
lease can be let go while its tail is still held, as layers or runs of a load complete.
"""

from __future__ import annotations

from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import MisuseError
from kvstrata.prefix_index.refs import Refs, as_refs


class LeaseBook:
    """Counts pins per BlockRef.

    Invariants, tested by ``check()``:

    1. No count is negative.
    2. ``total`` is the sum of all counts.

    ``refs`` given to one call must be distinct, as those of a path are.
    """

    __slots__ = ("_counts", "generation", "total")

    def __init__(self, capacity: int = 0) -> None:
        self._counts: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.total = 0
        """Pins held now, over all refs."""
        self.generation = 0
        """Grows by one at each reset: a Lease of an older generation holds nothing any more."""

    @property
    def counts(self) -> NDArray[np.int32]:
        """Pins by ref, a read-only view for eviction to respect. Valid until the next grow."""
        view = self._counts.view()
        view.setflags(write=False)
        return view

    def grow(self, capacity: int) -> None:
        """Make room for refs below ``capacity``; never shrinks."""
        if capacity > len(self._counts):
            larger = np.zeros(capacity, np.int32)
            larger[: len(self._counts)] = self._counts
            self._counts = larger

    def pin(self, refs: Refs) -> None:
        """Add one pin to each of ``refs``. MisuseError, and no pin, where a ref is out of range."""
        refs = self._known(refs)
        self._counts[refs] += 1
        self.total += len(refs)

    def unpin(self, refs: Refs) -> None:
        """Take one pin from each of ``refs``. MisuseError, and no change, where one has none."""
        refs = self._known(refs)
        if not self._counts[refs].all():
            raise MisuseError("unpin of a block that is not pinned: it was released twice")
        self._counts[refs] -= 1
        self.total -= len(refs)

    def pinned(self, refs: Refs) -> NDArray[np.bool_]:
        """For each of ``refs`` whether anyone holds it; the same shape. Does not mutate."""
        pins: NDArray[np.bool_] = self._counts[refs] > 0
        return pins

    def all_pinned(self) -> Refs:
        """Every ref that is held, ascending. O(capacity)."""
        return np.flatnonzero(self._counts).astype(np.int32)

    def lease(self, refs: Refs) -> Lease:
        """Pin ``refs`` and return the Lease that holds them."""
        return Lease(self, refs)

    def reset(self) -> None:
        """Drop every pin. Leases of before hold nothing, and their release does nothing."""
        self._counts = np.zeros(len(self._counts), np.int32)
        self.total = 0
        self.generation += 1

    def check(self) -> None:
        """Assert the class's invariants. O(capacity); for tests."""
        assert not (self._counts < 0).any(), "invariant 1: a negative pin count"
        assert int(self._counts.sum()) == self.total, "invariant 2: total is not the sum"

    def _known(self, refs: Refs) -> Refs:
        # A negative ref would silently count at the array's far end.
        refs = as_refs(refs)
        if len(refs) and (refs.min() < 0 or refs.max() >= len(self._counts)):
            raise MisuseError("a BlockRef is out of range: it comes from another index")
        return refs


class Lease:
    """Holds a run of blocks until ``release()``; a context manager.

    Invariants, tested by ``check()``:

    1. ``held`` is a tail of ``refs``.
    2. Each of the ``held`` refs carries at least one pin.
    """

    __slots__ = ("_book", "_generation", "_released", "refs")

    def __init__(self, book: LeaseBook, refs: Refs) -> None:
        """Pin ``refs`` (distinct, head first). The array is copied."""
        self.refs: Refs = as_refs(refs).copy()
        self.refs.setflags(write=False)
        book.pin(self.refs)
        self._book = book
        self._generation = book.generation
        self._released = 0

    @property
    def held(self) -> Refs:
        """The refs not yet released; empty after ``release()`` or a reset of the index."""
        if self._generation != self._book.generation:
            return self.refs[:0]
        return self.refs[self._released :]

    def release_head(self, count: int) -> None:
        """Release the first ``count`` of the refs still held; more than that releases all."""
        if count < 0:
            raise MisuseError(f"release_head needs a count of 0 or more, got {count}")
        gone = self.held[:count]
        self._book.unpin(gone)
        self._released += len(gone)

    def release(self) -> None:
        """Release all that is still held. Any further call does nothing."""
        self.release_head(len(self.refs))

    def check(self) -> None:
        """Assert the class's invariants; for tests."""
        assert 0 <= self._released <= len(self.refs), "invariant 1: more released than held"
        assert self._book.pinned(self.held).all(), "invariant 2: a held block without a pin"

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
