"""Who has which pages of the extent files: a best-fit allocator of variable lengths. Pure."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

from kvstrata.core.errors import MisuseError
from kvstrata.core.layout import PAGE

Place = tuple[int, int]
"""(file, offset in bytes)."""


class Extents:
    """Free and allocated stretches of the extent files, in whole pages of 4096 bytes.

    Invariant 1: free + allocated bytes = bytes of all files.
    Invariant 2: no two stretches overlap, and all lie inside of their file.
    Invariant 3: no two free stretches of a file touch (they are joined when freed).
    Invariant 4: every free stretch is found by its start, its end and its size.

    ``allocate`` and ``free`` take O(log n): the smallest free stretch that fits is found by
    bisection over the distinct sizes, the lowest place of that size by a heap, neighbours by
    their ends. Not thread-safe.
    """

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._start: dict[Place, int] = {}
        self._end: dict[Place, int] = {}
        self._sizes: list[int] = []
        self._heaps: dict[int, list[Place]] = {}
        self._count: dict[int, int] = {}
        self._free = 0
        self._total = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return self._total

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has."""
        return self._free

    @property
    def allocated_bytes(self) -> int:
        """Bytes that somebody has."""
        return self._total - self._free

    @property
    def largest(self) -> int:
        """Bytes of the largest free stretch, 0 without one."""
        return self._sizes[-1] if self._sizes else 0

    def files(self) -> dict[int, int]:
        """A copy: file number -> bytes."""
        return dict(self._files)

    def add(self, file: int, nbytes: int) -> None:
        """Take in a new file, all of it free. Raises MisuseError for one that is here already."""
        if file in self._files or nbytes <= 0 or nbytes % PAGE:
            raise MisuseError(f"cannot add {nbytes} bytes as extent {file}")
        self._files[file] = nbytes
        self._total += nbytes
        self._free += nbytes
        self._insert((file, 0), nbytes)

    def allocate(self, nbytes: int) -> Place | None:
        """The place of ``nbytes`` (whole pages) that are now the caller's, or None for no room."""
        if nbytes <= 0 or nbytes % PAGE:
            raise MisuseError(f"{nbytes} bytes are not whole pages")
        index = bisect_left(self._sizes, nbytes)
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        place = self._lowest(size)
        self._remove(place, size)
        if size > nbytes:
            self._insert((place[0], place[1] + nbytes), size - nbytes)
        self._free -= nbytes
        return place

    def claim(self, file: int, offset: int, nbytes: int) -> bool:
        """Allocate exactly this stretch; False (and nothing changed) unless all of it is free.

        For recovery. Takes O(free stretches of the file): claim in rising order of place, and the
        stretch that holds the place is the last one of the file.
        """
        found = self._holding(file, offset)
        if found is None or nbytes <= 0 or nbytes % PAGE or offset % PAGE:
            return False
        start, size = found
        if offset + nbytes > start + size:
            return False
        self._remove((file, start), size)
        if offset > start:
            self._insert((file, start), offset - start)
        if start + size > offset + nbytes:
            self._insert((file, offset + nbytes), start + size - offset - nbytes)
        self._free -= nbytes
        return True

    def free(self, file: int, offset: int, nbytes: int) -> None:
        """Give a stretch (or a part of one) back. Raises MisuseError where any of it is free."""
        end = offset + nbytes
        if nbytes <= 0 or nbytes % PAGE or offset % PAGE or end > self._files.get(file, 0):
            raise MisuseError(f"{nbytes} bytes at {offset} of extent {file} cannot be given back")
        if (file, offset) in self._start or (file, end) in self._end:
            raise MisuseError(f"{nbytes} bytes at {offset} of extent {file} are free already")
        self._free += nbytes
        before = self._end.get((file, offset))
        if before is not None:
            self._remove((file, offset - before), before)
            offset -= before
        after = self._start.get((file, end))
        if after is not None:
            self._remove((file, end), after)
            end += after
        self._insert((file, offset), end - offset)

    def _holding(self, file: int, offset: int) -> tuple[int, int] | None:
        size = self._start.get((file, offset))
        if size is not None:
            return offset, size
        total = self._files.get(file, 0)
        # Claims rise, so the stretch is nearly always the file's last: look there first.
        last = self._end.get((file, total))
        if last is not None and total - last <= offset < total:
            return total - last, last
        for (other, start), size in self._start.items():
            if other == file and start <= offset < start + size:
                return start, size
        return None

    def _lowest(self, size: int) -> Place:
        heap = self._heaps[size]
        # Stretches that were joined or split leave their entry behind: skipped here, once each.
        while self._start.get(heap[0]) != size:
            heapq.heappop(heap)
        return heap[0]

    def _insert(self, place: Place, size: int) -> None:
        file, offset = place
        self._start[place] = size
        self._end[(file, offset + size)] = size
        if size not in self._count:
            insort(self._sizes, size)
            self._count[size] = 0
            self._heaps[size] = []
        self._count[size] += 1
        heap = self._heaps[size]
        heapq.heappush(heap, place)
        # Entries left behind must not outgrow the living by much.
        if len(heap) > 64 and len(heap) > 4 * self._count[size]:
            alive = {entry for entry in heap if self._start.get(entry) == size}
            self._heaps[size] = sorted(alive)

    def _remove(self, place: Place, size: int) -> None:
        file, offset = place
        del self._start[place]
        del self._end[(file, offset + size)]
        self._count[size] -= 1
        if not self._count[size]:
            del self._count[size], self._heaps[size]
            del self._sizes[bisect_left(self._sizes, size)]

    def check(self) -> None:
        """Test the invariants. Raises AssertionError naming the one that is broken."""
        assert sum(self._start.values()) == self._free, "extents 1"
        assert sum(self._files.values()) == self._total, "extents 1"
        reached: dict[int, int] = {}
        for (file, offset), size in sorted(self._start.items()):
            assert size > 0 and offset >= reached.get(file, 0), "extents 2"
            assert offset + size <= self._files[file], "extents 2"
            assert offset > reached.get(file, -1), "extents 3"
            reached[file] = offset + size
        ends = {(file, offset + size): size for (file, offset), size in self._start.items()}
        assert ends == self._end, "extents 4"
        by_size: dict[int, set[Place]] = {}
        for place, size in self._start.items():
            by_size.setdefault(size, set()).add(place)
        assert sorted(by_size) == self._sizes, "extents 4"
        for size, places in by_size.items():
            assert self._count[size] == len(places), "extents 4"
            assert places <= set(self._heaps[size]), "extents 4"
