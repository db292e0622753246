"""The space of a tier: runs placed, records that live in them, and what comes back when they go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstrata.tiers.nvme.extents import Extents
from kvstrata.tiers.nvme.grow import Growth
from kvstrata.tiers.nvme.passport import passport_bytes
from kvstrata.tiers.nvme.record import Record
from kvstrata.tiers.nvme.settle import settle

RUN_BYTES = 8 << 20
"""Bytes of a run: large enough for the device's full speed, small enough that a save or a load is
several runs and so several requests in flight."""
RUN_BLOCKS = 64


@dataclass(slots=True)
class _Run:
    """A run that holds records: how many, the bytes of its passport, and of its payloads."""

    live: int
    passport: int
    payload: int


class Space:
    """Which run and which record has which bytes of the extents.

    Invariant 1: allocated bytes = placed runs + passports and payloads of runs that hold records.
    Invariant 2: the bytes of a passport come back with the last record of its run.

    Not thread-safe. Growing may block on the file system, which happens only where looking ahead
    (half an extent) was too slow.
    """

    def __init__(self, growth: Growth, extent: int, files: dict[int, int]) -> None:
        self.extents = Extents()
        self._growth = growth
        self._ahead = extent // 2
        self._placed: dict[tuple[int, int], int] = {}
        self._runs: dict[tuple[int, int], _Run] = {}
        for file, size in sorted(files.items()):
            self.extents.add(file, size)

    def settle(self, records: Sequence[Record]) -> list[int]:
        """Take in the records of a catalogue; indices of those that cannot be there."""
        found = settle(records, self.extents.files())
        for file, offset, live, passport, payload in found.runs:
            self._runs[file, offset] = _Run(live, passport, payload)
        for stretch in found.stretches:
            if not self.extents.claim(*stretch):
                raise AssertionError("a stretch that overlaps nothing is not free")
        return found.bad

    def place(self, n: int, capacity: int, symbol: int) -> list[tuple[int, int, int, int]] | None:
        """Room for n blocks: (file, offset, passport bytes, blocks) a run, or None for no room."""
        self._adopt(0, wait=False)
        runs: list[tuple[int, int, int, int]] = []
        most = max(1, min(RUN_BLOCKS, RUN_BYTES // capacity))
        while n:
            want = min(n, most)
            got = self._run(want, capacity, symbol)
            if got is None:
                # Sooner a new extent than a run in pieces; sooner pieces than no room.
                if self._adopt(passport_bytes(want, symbol) + want * capacity, wait=True):
                    continue
                while got is None and want > 1:
                    want = min(want - 1, max(1, self.extents.largest // capacity))
                    got = self._run(want, capacity, symbol)
                # What is left of the quota may still be an extent, though a small one.
                if got is None and self._adopt(passport_bytes(1, symbol) + capacity, wait=True):
                    continue
            if got is None:
                for file, offset, *_ in runs:
                    self.abandon(file, offset)
                return None
            runs.append(got)
            n -= want
        if self.extents.free_bytes < self._ahead:
            self._growth.ahead()
        return runs

    def abandon(self, file: int, offset: int) -> None:
        """Take back a placed run that nobody will fill."""
        self.extents.free(file, offset, self._placed.pop((file, offset)))

    def fill(self, file: int, offset: int, passport: int, kept: Iterable[tuple[int, int]]) -> None:
        """A placed run now holds records at these (offset, bytes); the rest of it comes back."""
        kept = sorted(kept)
        end = offset + self._placed[file, offset]
        if not kept:
            self.abandon(file, offset)
            return
        del self._placed[file, offset]
        self._runs[file, offset] = _Run(len(kept), passport, sum(size for _, size in kept))
        at = offset + passport
        for start, size in [*kept, (end, 0)]:
            if start > at:
                self.extents.free(file, at, start - at)
            at = start + size

    def release(self, file: int, run: int, offset: int, width: int) -> None:
        """A record has gone: its payload comes back, and with the last one the passport."""
        self.extents.free(file, offset, width)
        owner = self._runs[file, run]
        owner.live -= 1
        owner.payload -= width
        if not owner.live:
            self.extents.free(file, run, owner.passport)
            del self._runs[file, run]

    @property
    def live(self) -> int:
        """Records that hold space."""
        return sum(run.live for run in self._runs.values())

    def is_placed(self, file: int, offset: int) -> bool:
        """Whether a run that was placed there waits to be filled or abandoned."""
        return (file, offset) in self._placed

    def close(self) -> None:
        """Wait for a file that is being made."""
        self._growth.close()

    def _run(self, n: int, capacity: int, symbol: int) -> tuple[int, int, int, int] | None:
        passport = passport_bytes(n, symbol)
        place = self.extents.allocate(passport + n * capacity)
        if place is None:
            return None
        self._placed[place] = passport + n * capacity
        return (*place, passport, n)

    def _adopt(self, need: int, wait: bool) -> bool:
        made = self._growth.take(need, wait)
        if made is not None:
            self.extents.add(*made)
        return made is not None

    def check(self) -> None:
        """Test the invariants. Raises AssertionError naming the one that is broken."""
        self.extents.check()
        self._growth.check()
        runs = self._runs.values()
        held = sum(self._placed.values()) + sum(run.passport + run.payload for run in runs)
        assert held == self.extents.allocated_bytes, "space 1"
        assert all(run.live > 0 for run in runs), "space 2"
