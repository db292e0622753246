"""Who is where: the index, the ledgers and the eviction order of every tier, kept in step.

Pure: no bytes, no I/O, no clock. Only the Store calls it, under its lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.model import KVModel
from kvstrata.prefix_index.hybrid import usable_prefix
from kvstrata.prefix_index.lease import LeaseBook
from kvstrata.prefix_index.radix import RadixIndex
from kvstrata.store.policy.base import Eviction
from kvstrata.tiers.ledger import Ints, Ledger, Reservation, State

Mask = NDArray[np.bool_]
Refs = NDArray[np.int32]
Present = list[list[Mask]]
"""By shelf and group, which blocks of a path can be read."""


class Shelf:
    """One tier: a ledger for each KV group, and one order of eviction for them all.

    A position is evicted in all groups at once, since a resume needs them all.
    """

    def __init__(self, name: str, capacities: Sequence[int], eviction: Eviction) -> None:
        self.name = name
        self.ledgers = tuple(Ledger(capacity) for capacity in capacities)
        self.eviction = eviction

    def ready(self, refs: Refs) -> list[Mask]:
        """For each group, which refs may be read here."""
        return [ledger.ready(refs) for ledger in self.ledgers]

    def holds(self, refs: Refs) -> Mask:
        """Which refs have a copy here in some group, readable or being filled."""
        masks = [ledger.slots(refs) >= 0 for ledger in self.ledgers]
        held: Mask = np.logical_or.reduce(masks)
        return held

    def filling(self, refs: Refs) -> Mask:
        """Which refs have a copy on its way in, in some group."""
        masks = [ledger.states(refs) == State.FILLING for ledger in self.ledgers]
        coming: Mask = np.logical_or.reduce(masks)
        return coming

    def covers(self, refs: Refs, other: Shelf) -> Mask:
        """Which refs are readable in ``other`` in every group that has them here."""
        covered = np.ones(len(refs), np.bool_)
        for mine, theirs in zip(self.ledgers, other.ledgers, strict=True):
            covered &= (mine.slots(refs) < 0) | theirs.ready(refs)
        return covered

    def settle(self, group: int, refs: Refs, taken: Reservation, ok: Mask) -> Ints:
        """End a filling; what came in joins the order of eviction. Returns slots now EMPTY."""
        freed = self.ledgers[group].settle(taken, ok)
        self.eviction.add(refs[self.ledgers[group].ready(refs)].tolist())
        return freed

    def evict(self, refs: Refs) -> list[Ints]:
        """Take blocks away; for each group the slots that are free now (others when unpinned)."""
        self.eviction.remove(refs.tolist())
        return [ledger.evict(refs) for ledger in self.ledgers]

    def short(self, needs: Sequence[int]) -> int:
        """Slots missing in the group that misses most."""
        pairs = zip(needs, self.ledgers, strict=True)
        return max(0, *(need - ledger.free for need, ledger in pairs))

    def counts(self) -> dict[str, int]:
        """Slots by state, all groups together."""
        named = {s.name.lower(): sum(x.count(s) for x in self.ledgers) for s in State}
        return {"capacity": sum(x.capacity for x in self.ledgers), **named}


class Placement:
    """The index and the shelves.

    1. A ref with a copy on any shelf is in the index.
    2. A ref that is in no shelf and held by no lease, and has no children, is not in the index.
    3. Each shelf's ledgers hold their own invariants.

    ``names`` counts who still means a block by its ref though it may have left every tier, and
    ``keeps`` counts, like the index's leases, who must not lose a block; but a kept block may sink
    to NVMe, where a leased one stays where it is.
    """

    def __init__(
        self, model: KVModel, dram: Shelf, nvme: Shelf | None, hbm: Shelf | None = None
    ) -> None:
        """``hbm`` only where the engine lets the Store cache in its pool (see ``residents``)."""
        self.model = model
        self.specs = [group.spec for group in model.groups]
        self.index = RadixIndex()
        self.names = LeaseBook()
        self.keeps = LeaseBook()
        self.dram = dram
        self.nvme = nvme
        self.hbm = hbm
        self.below = [dram] if nvme is None else [dram, nvme]
        """The shelves that outlive the engine's blocks."""
        self.shelves = self.below if hbm is None else [hbm, *self.below]
        self.damage_seen = False
        """Whether damage was warned of: once is enough, the metrics count the rest."""
        self.damaged: set[int] = set()
        """Refs whose bytes failed a check and that have not been stored again; only for reasons."""

    # -- looking ---------------------------------------------------------------------------------

    def present(self, refs: Refs) -> Present:
        """For each shelf and group, which refs can be read there."""
        return [shelf.ready(refs) for shelf in self.shelves]

    def readable(self, refs: Refs) -> list[Mask]:
        """For each group, which refs can be read in some tier."""
        return _anywhere(self.present(refs))

    def stored(self, group: int, refs: Refs) -> Mask:
        """Which refs can be read below HBM, where they outlive the engine's blocks."""
        masks = [shelf.ledgers[group].ready(refs) for shelf in self.below]
        kept: Mask = np.logical_or.reduce(masks)
        return kept

    def usable(self, refs: Refs, present: Present | None = None) -> int:
        """Leading blocks of the path that every group can resume at."""
        if not len(refs):
            return 0
        return usable_prefix(_anywhere(present or self.present(refs)), self.specs)

    def pending(self, refs: Refs) -> int:
        """Leading blocks that every group could resume at once all copies in flight are in."""
        if not len(refs):
            return 0
        masks = [
            np.logical_or.reduce([shelf.ledgers[g].slots(refs) >= 0 for shelf in self.shelves])
            for g in range(len(self.specs))
        ]
        return usable_prefix(masks, self.specs)

    def read_ranges(self, blocks: int) -> list[range]:
        """For each group, the blocks that a resume at so many blocks reads."""
        return [spec.blocks_read(blocks * spec.block_size) for spec in self.specs]

    def by_tier(self, present: Present, blocks: int) -> dict[str, int]:
        """So many leading blocks by where they would come from: the lowest tier a group needs.

        A block that no group reads (before every window) counts as what the others mostly are.
        """
        level = np.full(blocks, -1, np.int64)
        for group, read in enumerate(self.read_ranges(blocks)):
            at = slice(read.start, read.stop)
            absent = np.array([~masks[group][at] for masks in present])
            # The first shelf that has the block: as many shelves above it are without.
            level[at] = np.maximum(level[at], np.cumprod(absent, axis=0).sum(axis=0))
        counts = np.bincount(level[level >= 0], minlength=len(self.shelves))
        counts[int(counts.argmax())] += int((level < 0).sum())
        return {shelf.name: int(counts[i]) for i, shelf in enumerate(self.shelves)}

    def at_once(self, refs: Refs) -> bool:
        """Whether a load of the whole path is one copy out of DRAM for every group."""
        if not len(refs) or (self.hbm is not None and self.hbm.holds(refs).any()):
            return False
        reads = zip(self.read_ranges(len(refs)), self.dram.ready(refs), strict=True)
        return all(len(read) and ready[read.start : read.stop].all() for read, ready in reads)

    @property
    def nvme_ledgers(self) -> tuple[Ledger, ...]:
        """The ledgers of the NVMe shelf."""
        assert self.nvme is not None
        return self.nvme.ledgers

    def records(self, refs: Refs) -> list[Ints]:
        """For each group, the NVMe records of those refs that have one."""
        assert self.nvme is not None
        return [ledger.slots(refs[ledger.ready(refs)]) for ledger in self.nvme.ledgers]

    def unused(self, tier: str) -> Refs:
        """Blocks of a tier that no lease holds there."""
        ledgers = next(shelf.ledgers for shelf in self.shelves if shelf.name == tier)
        refs = np.unique(np.concatenate([ledger.resident() for ledger in ledgers]))
        refs = refs.astype(np.int32)
        return refs[~self.index.leases.pinned(refs)]

    # -- using -----------------------------------------------------------------------------------

    def settle(self, shelf: Shelf, group: int, refs: Refs, taken: Reservation, ok: Mask) -> Ints:
        """End a filling of blocks that follow one another; those that came in count as used now.

        Returns the slots that are EMPTY now, though their bytes may have come in: they were doomed.
        """
        freed = shelf.settle(group, refs, taken, ok)
        arrived = refs[shelf.ledgers[group].ready(refs)]
        if len(arrived):
            # Their ancestors too: a block must never be evicted before its children.
            shelf.eviction.touch(self.index.path(int(arrived[-1])).tolist())
        return freed

    def touch(self, path: Refs) -> None:
        """A request has used the path, from its head."""
        used = path.tolist()
        for shelf in self.shelves:
            shelf.eviction.touch(used)

    def protected(self, *, kept_too: bool) -> NDArray[np.int32]:
        """Counts by ref, non-zero where a block must stay in its tier."""
        leases = self.index.leases.counts
        if not kept_too or not self.keeps.total:
            return leases
        self.keeps.grow(len(leases))
        return leases + self.keeps.counts[: len(leases)]

    def dram_victims(self, short: int, *, sinks: bool) -> tuple[Refs, Refs]:
        """Blocks to take from DRAM for ``short`` slots: those safe to drop, and those that are not.

        The latter must be written below first, if NVMe takes blocks (``sinks``); those that are
        being written are neither, yet. Does not mutate.
        """
        protected = self.protected(kept_too=not sinks)
        victims = np.array(self.dram.eviction.victims(short, protected), np.int32)
        if self.nvme is None:
            return victims, victims[:0]
        safe = self.dram.covers(victims, self.nvme)
        return victims[safe], victims[~safe & ~self.nvme.filling(victims)]

    def nvme_victims(self, short: int) -> Refs:
        """Blocks to take from NVMe for ``short`` records. Does not mutate."""
        assert self.nvme is not None
        protected = self.protected(kept_too=True)
        return np.array(self.nvme.eviction.victims(short, protected), np.int32)

    def prune(self, refs: Refs) -> None:
        """Take refs out of the index that name nothing any more, and their ancestors likewise."""
        while len(refs):
            self.names.grow(self.index.capacity)
            gone = ~self.names.pinned(refs)
            for shelf in self.shelves:
                gone &= ~shelf.holds(refs)
            refs = refs[gone]
            if not len(refs):
                return
            parents = np.unique(self.index.parents(refs))
            removed = self.index.remove(refs)
            if not len(removed):
                return
            self.damaged.difference_update(removed.tolist())
            # A removed block may have been the last child of an ancestor that names nothing.
            refs = np.setdiff1d(parents[parents >= 0], removed).astype(np.int32)
            refs = refs[self.index.children(refs) == 0]

    def reset(self) -> list[list[Ints]]:
        """Forget every block. For each shelf and group, the slots that are free now."""
        self.index.reset()
        self.names.reset()
        self.keeps.reset()
        self.damaged.clear()
        for shelf in self.shelves:
            shelf.eviction.clear()
        return [[ledger.reset() for ledger in shelf.ledgers] for shelf in self.shelves]

    def check(self) -> None:
        """Raise AssertionError naming the invariant that does not hold. O(everything)."""
        self.index.check()
        self.index.leases.check()
        live = set(self.index.live().tolist())
        held: set[int] = set()
        for shelf in self.shelves:
            for ledger in shelf.ledgers:
                ledger.check()
                held |= set(ledger.resident().tolist())
        assert held <= live, "1: a copy whose block is not in the index"
        idle = np.array(sorted(live - held), np.int32)
        for shelf in self.shelves:
            idle = idle[~shelf.holds(idle)]
        self.names.grow(self.index.capacity)
        idle = idle[~self.names.pinned(idle)]
        idle = idle[(self.index.children(idle) == 0) & ~self.index.leases.pinned(idle)]
        assert not len(idle), "2: a block that names nothing is still in the index"


def _anywhere(present: Present) -> list[Mask]:
    return [np.logical_or.reduce(masks) for masks in zip(*present, strict=True)]
