"""Page-aligned scratch memory, kept for reuse: O_DIRECT refuses anything else."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvstrata.core.layout import PAGE

KEEP = 64 << 20
"""Bytes of idle scratch that a pool keeps."""


def address(buffer: memoryview) -> int:
    """Where a contiguous buffer begins in memory; read-only ones too."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


class ScratchPool:
    """Aligned buffers lent to threads.

    Invariant 1: a buffer is lent to one user at a time.
    Invariant 2: idle buffers together hold at most ``KEEP`` bytes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._kept = 0

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[memoryview]:
        """A page-aligned writable buffer of exactly ``nbytes``, valid inside the ``with``.

        Its contents are whatever was there before. Raises OSError where memory is exhausted.
        """
        # Powers of two, so that the many lengths of passports and batches share few buffers.
        size = max(PAGE, 1 << max(nbytes - 1, 0).bit_length())
        with self._lock:
            idle = self._idle.get(size)
            area = idle.pop() if idle else None
            if area is not None:
                self._kept -= size
        if area is None:
            area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(area)
        try:
            yield view[:nbytes]
        finally:
            with self._lock:
                if self._kept + size <= KEEP:
                    self._idle.setdefault(size, []).append(area)
                    self._kept += size
            # A buffer that is not kept is unmapped when its last view goes: closing it here would
            # raise while a traceback still holds one.

    def check(self) -> None:
        """Test the invariants. Raises AssertionError naming the one that is broken."""
        with self._lock:
            areas = [area for idle in self._idle.values() for area in idle]
            assert len({id(area) for area in areas}) == len(areas), "scratch 1"
            assert sum(len(area) for area in areas) == self._kept <= KEEP, "scratch 2"
