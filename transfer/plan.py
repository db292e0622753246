"""How a Move is cut: into runs of neighbours for large copies, into parts for several workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstrata.transfer.move import Slots

SPLIT_ABOVE = 1 << 20
"""Bytes below which a second worker costs more than it saves."""
PART = 64 << 20
"""Bytes of a part at most: how long a demand load waits for a store's copy to let it in."""


def runs(source: Slots, target: Slots) -> list[tuple[int, int, int]]:
    """``(source0, target0, n)`` for each stretch in which both sides count up by one, in order."""
    if not len(source):
        return []
    cuts = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = [0, *cuts.tolist()]
    ends = [*cuts.tolist(), len(source)]
    return [(int(source[i]), int(target[i]), end - i) for i, end in zip(starts, ends, strict=True)]


def parts(n: int, item: int, workers: int, most: int = PART) -> list[range]:
    """``0 .. n - 1`` in stretches: one for each worker where it is worth it, none over ``most``.

    ``item`` and ``most`` are bytes. Neighbouring positions stay together, as they are often
    neighbours in memory too. There is always at least one part, maybe empty.
    """
    total = n * item
    count = -(-total // most) if total else 1
    if total >= SPLIT_ABOVE:
        count = -(-max(count, 1) // workers) * workers
    count = max(1, min(count, n))
    return [range(i * n // count, (i + 1) * n // count) for i in range(count)]


def by_chunk(slots: Slots, chunk: int) -> Iterator[tuple[int, slice | NDArray[np.int64]]]:
    """For each chunk of an arena the positions whose slots lie in it: ``(chunk, positions)``.

    A slice where they are neighbours, which is the rule, else an index array.
    """
    if not len(slots):
        return
    chunks = slots // chunk
    if chunks[0] == chunks[-1] and (chunks == chunks[0]).all():
        yield int(chunks[0]), slice(0, len(slots))
        return
    for number in np.unique(chunks).tolist():
        positions = np.flatnonzero(chunks == number)
        first, last = int(positions[0]), int(positions[-1])
        dense = last - first + 1 == len(positions)
        yield number, slice(first, last + 1) if dense else positions
