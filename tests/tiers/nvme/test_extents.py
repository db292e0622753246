"""The allocator against a bitmap of pages."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.core.errors import MisuseError
from kvstrata.core.layout import PAGE
from kvstrata.tiers.nvme.extents import Extents


class Bitmap(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.extents = Extents()
        self.pages = {}  # file -> list of bool, taken
        self.held = []

    @rule(pages=st.integers(1, 40))
    @precondition(lambda self: len(self.pages) < 4)
    def add(self, pages):
        file = len(self.pages)
        self.extents.add(file, pages * PAGE)
        self.pages[file] = [False] * pages

    @rule(n=st.integers(1, 20))
    def allocate(self, n):
        holes = [size for _, _, size in self.holes() if size >= n]
        place = self.extents.allocate(n * PAGE)
        assert (place is not None) == bool(holes)
        if place is not None:
            file, offset = place
            # The smallest hole that fits.
            assert (file, offset // PAGE, min(holes)) in list(self.holes())
            self.mark(file, offset, n, True)
            self.held.append((file, offset, n))

    @rule(data=st.data())
    def claim(self, data):
        file = data.draw(st.integers(0, 4))
        at, n = data.draw(st.integers(0, 45)), data.draw(st.integers(1, 8))
        pages = self.pages.get(file, [])
        free = at + n <= len(pages) and not any(pages[at : at + n])
        assert self.extents.claim(file, at * PAGE, n * PAGE) == free
        if free:
            self.mark(file, at * PAGE, n, True)
            self.held.append((file, at * PAGE, n))

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def free(self, data):
        file, offset, n = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        first = data.draw(st.integers(0, n - 1))
        count = data.draw(st.integers(1, n - first))
        self.extents.free(file, offset + first * PAGE, count * PAGE)
        self.mark(file, offset + first * PAGE, count, False)
        if first:
            self.held.append((file, offset, first))
        if first + count < n:
            self.held.append((file, offset + (first + count) * PAGE, n - first - count))

    @invariant()
    def agrees(self):
        self.extents.check()
        free = sum(page is False for pages in self.pages.values() for page in pages)
        assert self.extents.free_bytes == free * PAGE
        assert self.extents.allocated_bytes == sum(n for _, _, n in self.held) * PAGE
        assert self.extents.largest == max((size for *_, size in self.holes()), default=0) * PAGE

    def holes(self):
        for file, pages in self.pages.items():
            start = None
            for at, taken in enumerate([*pages, True]):
                if not taken and start is None:
                    start = at
                elif taken and start is not None:
                    yield file, start, at - start
                    start = None

    def mark(self, file, offset, n, taken):
        for at in range(offset // PAGE, offset // PAGE + n):
            assert self.pages[file][at] is not taken
            self.pages[file][at] = taken


TestBitmap = Bitmap.TestCase
TestBitmap.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_misuse():
    extents = Extents()
    extents.add(0, 4 * PAGE)
    for call in (
        lambda: extents.add(0, PAGE),
        lambda: extents.add(1, 100),
        lambda: extents.allocate(0),
        lambda: extents.allocate(100),
        lambda: extents.free(0, 0, PAGE),
        lambda: extents.free(0, 0, 5 * PAGE),
        lambda: extents.free(7, 0, PAGE),
    ):
        with pytest.raises(MisuseError):
            call()
    extents.check()


def test_many_stretches_stay_quick():
    import time

    extents = Extents()
    extents.add(0, 200_000 * PAGE)
    held = [extents.allocate(PAGE * (1 + i % 7)) for i in range(40_000)]
    before = time.perf_counter()
    for at, place in enumerate(held):
        if at % 2:
            extents.free(*place, PAGE * (1 + at % 7))
    for i in range(20_000):
        assert extents.allocate(PAGE * (1 + i % 3)) is not None
    # 0.1 s where it is linear in nothing; a linear scan would take minutes.
    assert time.perf_counter() - before < 5
    extents.check()
