"""Eviction policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class LRU:
    """Least recently used.

    A path is touched from tail to head, so a block is never older than its children: the order is
    leaf-first without ever looking at the tree (and among blocks of one request the tail goes
    first, as contracts.md section 6 counts hit rates).
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, refs: Sequence[int]) -> None:
        for ref in reversed(refs):
            self._order[ref] = None
            self._order.move_to_end(ref)

    def touch(self, path: Sequence[int]) -> None:
        order = self._order
        for ref in reversed(path):
            if ref in order:
                order.move_to_end(ref)

    def remove(self, refs: Iterable[int]) -> None:
        for ref in refs:
            self._order.pop(ref, None)

    def victims(self, n: int, protected: NDArray[np.int32]) -> list[int]:
        found: list[int] = []
        known = len(protected)
        for ref in self._order:
            if len(found) == n:
                break
            if ref >= known or not protected[ref]:
                found.append(ref)
        return found

    def clear(self) -> None:
        self._order.clear()


EVICTION = {"lru": LRU}
"""Policies by the name that ``policy.eviction`` gives them."""
