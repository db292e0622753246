"""What a policy is: values in, values out, no clock, no I/O, no tier.

Blocks are plain numbers (``BlockRef``). What must not be evicted comes as a value too:
``protected`` is an array of counts indexed by ref, where non-zero means hands off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Eviction(Protocol):
    """Which blocks of one tier go first. Leaf first: a block never goes before its resident
    children."""

    def add(self, refs: Sequence[int]) -> None:
        """Blocks that became resident, from head to tail. Mutates."""
        ...

    def touch(self, path: Sequence[int]) -> None:
        """A request has used this path, from head to tail; blocks not resident are skipped.
        Mutates."""
        ...

    def remove(self, refs: Iterable[int]) -> None:
        """Blocks that left the tier, for whatever reason; unknown ones are skipped. Mutates."""
        ...

    def victims(self, n: int, protected: NDArray[np.int32]) -> list[int]:
        """Up to ``n`` blocks to evict, first to go first, none protected. Does not mutate."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


class Admission(Protocol):
    """Which blocks are worth writing to NVMe."""

    def admit(self, refs: Sequence[int]) -> list[bool]:
        """For each block, whether to write it."""
        ...
