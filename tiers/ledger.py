"""Who is where in one tier, for one KV group: states, pins and generations of slots. No bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstrata.core.errors import MisuseError

Ints = NDArray[np.int64]
PRIVATE = -2
"""Owner of a slot that no prefix names: a swapped sequence's partial block."""
_NOBODY = -1
_TABLE = 1024
"""Refs that a fresh ledger has room for; it doubles when it must."""


class State(IntEnum):
    """Life of a block copy: EMPTY -> FILLING -> READY (pinned N times) -> DOOMED -> EMPTY."""

    EMPTY = 0
    FILLING = 1
    READY = 2
    DOOMED = 3


# numpy asks a member of an enum for a dozen attributes before it compares it; not so a uint8.
_EMPTY, _READY = np.uint8(State.EMPTY), np.uint8(State.READY)


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Slots that are being filled, with the generation each had when it was given out."""

    slots: Ints
    generations: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.slots)

    def part(self, index: slice) -> Reservation:
        """The reservation of some of its slots."""
        return Reservation(self.slots[index], self.generations[index])


class Ledger:
    """Slots of one tier and group, and the blocks (``BlockRef``) that own them.

    1. Conservation: free + filling + ready + doomed = capacity.
    2. A ref owns at most one slot and a FILLING or READY slot has one owner: ``slot_of`` and the
       owners agree; EMPTY and DOOMED slots have none.
    3. Pins are never negative; EMPTY slots have none, FILLING ones at least their writer's.
    4. A slot is on the free list exactly once if EMPTY, else never.

    Every operation takes and returns whole arrays; none is half done when it raises. Refs and slots
    given to one call must be distinct, but for ``pin`` and ``unpin``.
    """

    def __init__(self, capacity: int) -> None:
        self._state = np.zeros(0, np.uint8)
        self._pins = np.zeros(0, np.int32)
        self._generation = np.zeros(0, np.uint32)
        self._owner = np.zeros(0, np.int64)
        self._slot_of = np.zeros(0, np.int64)
        self._free = np.zeros(0, np.int64)
        self._counts = [0, 0, 0, 0]
        self.grow(capacity)

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return len(self._state)

    @property
    def free(self) -> int:
        """Slots that can be reserved now."""
        return self._counts[State.EMPTY]

    def count(self, state: State) -> int:
        """Slots in this state."""
        return self._counts[state]

    @property
    def pins(self) -> int:
        """Pins held in all, those of writers included."""
        return int(self._pins.sum())

    def grow(self, capacity: int) -> None:
        """Add EMPTY slots up to ``capacity``; never shrinks."""
        more = capacity - self.capacity
        if more <= 0:
            return
        # The free list is a stack whose top is at `free`; new slots go below, so that lower
        # numbers are given out first and a fresh tier hands out contiguous runs.
        fresh = np.arange(self.capacity, capacity, dtype=np.int64)[::-1]
        self._free = np.concatenate(
            [fresh, self._free[: self.free], np.zeros(capacity - more - self.free, np.int64)]
        )
        self._state = np.concatenate([self._state, np.zeros(more, np.uint8)])
        self._pins = np.concatenate([self._pins, np.zeros(more, np.int32)])
        self._generation = np.concatenate([self._generation, np.zeros(more, np.uint32)])
        self._owner = np.concatenate([self._owner, np.full(more, _NOBODY, np.int64)])
        self._counts[State.EMPTY] += more

    # -- looking ---------------------------------------------------------------------------------

    def slots(self, refs: ArrayLike) -> Ints:
        """The slot of each ref, -1 where it has none. Does not mutate."""
        wanted = np.asarray(refs)
        known = len(self._slot_of)
        if not len(wanted) or not known:
            return np.full(len(wanted), -1, np.int64)
        if wanted.max() < known:
            near: Ints = self._slot_of[wanted]
            return near
        found: Ints = self._slot_of[np.minimum(wanted, known - 1)]
        found[wanted >= known] = -1
        return found

    def states(self, refs: ArrayLike) -> NDArray[np.uint8]:
        """The state of each ref's copy, EMPTY where it has none. Does not mutate."""
        slots = self.slots(refs)
        if not self.capacity:
            return np.zeros(len(slots), np.uint8)
        return np.where(slots >= 0, self._state[slots], _EMPTY)

    def ready(self, refs: ArrayLike) -> NDArray[np.bool_]:
        """Which refs have a copy that may be read. Does not mutate."""
        mask: NDArray[np.bool_] = self.states(refs) == _READY
        return mask

    def owners(self, slots: ArrayLike) -> Ints:
        """The ref that owns each slot, negative where none does. Does not mutate."""
        owners: Ints = self._owner[np.asarray(slots, np.int64)]
        return owners

    def resident(self) -> Ints:
        """All refs with a READY copy, in order of slot. Does not mutate; O(capacity)."""
        mine: Ints = self._owner[(self._state == State.READY) & (self._owner >= 0)]
        return mine

    # -- filling ---------------------------------------------------------------------------------

    def reserve(self, refs: ArrayLike) -> Reservation | None:
        """Give each ref a slot, FILLING and pinned by its writer; None, and no change, if too few.

        Raises MisuseError where a ref has a slot already.
        """
        refs = np.asarray(refs, np.int64)
        if len(refs) > self.free:
            return None
        if (self.slots(refs) >= 0).any():
            raise MisuseError("a block that is already in this tier cannot be reserved again")
        taken = self._take(len(refs), refs)
        self._name(refs, taken.slots)
        return taken

    def reserve_private(self, n: int) -> Reservation | None:
        """Slots that no ref owns, FILLING and pinned; None, and no change, if there are too few."""
        return self._take(n, PRIVATE) if n <= self.free else None

    def settle(self, taken: Reservation, ok: ArrayLike) -> Ints:
        """End a filling: READY where ``ok``, given back where not; drops the writer's pin.

        A slot that was doomed meanwhile, or whose generation has moved on, is not published.
        Returns the slots that became EMPTY.
        """
        live = self._generation[taken.slots] == taken.generations
        slots, whole = taken.slots[live], np.asarray(ok, np.bool_)[live]
        filling = self._state[slots] == State.FILLING
        self._set(slots[filling & whole], State.FILLING, State.READY)
        failed = slots[filling & ~whole]
        self._disown(failed)
        self._set(failed, State.FILLING, State.DOOMED)
        return self.unpin(slots)

    def adopt(self, refs: ArrayLike, slots: ArrayLike) -> None:
        """Make EMPTY slots READY copies of refs, as found on a device at open."""
        refs, slots = np.asarray(refs, np.int64), np.asarray(slots, np.int64)
        twice = len(np.unique(refs)) < len(refs) or len(np.unique(slots)) < len(slots)
        if twice or (self._state[slots] != State.EMPTY).any() or (self.slots(refs) >= 0).any():
            raise MisuseError("a slot or a block was recovered twice")
        kept = self._free[: self.free]
        kept = kept[~np.isin(kept, slots)]
        self._free[: len(kept)] = kept
        self._owner[slots] = refs
        self._generation[slots] += 1
        self._set(slots, State.EMPTY, State.READY)
        self._name(refs, slots)

    # -- holding and letting go ------------------------------------------------------------------

    def pin(self, slots: ArrayLike) -> None:
        """Keep READY slots as they are until unpinned, once for each pin."""
        slots = np.asarray(slots, np.int64)
        if (self._state[slots] != State.READY).any():
            raise MisuseError("only a block that is READY can be pinned")
        np.add.at(self._pins, slots, 1)

    def unpin(self, slots: ArrayLike) -> Ints:
        """Drop one pin of each slot; returns the doomed ones that became EMPTY with it."""
        slots = np.asarray(slots, np.int64)
        np.subtract.at(self._pins, slots, 1)
        if (self._pins[slots] < 0).any():
            np.add.at(self._pins, slots, 1)
            raise MisuseError("a slot was unpinned more often than pinned")
        gone = slots[(self._pins[slots] == 0) & (self._state[slots] == State.DOOMED)]
        gone = np.unique(gone)
        self._give_back(gone, State.DOOMED)
        return gone

    def evict(self, refs: ArrayLike) -> Ints:
        """Take READY or FILLING copies from their refs, at once unreadable; absent ones are
        skipped.

        Returns the slots that became EMPTY; pinned ones follow, from ``unpin`` or ``settle``.
        """
        slots = self.slots(refs)
        return self._doom(slots[slots >= 0])

    def discard(self, slots: ArrayLike) -> Ints:
        """Let go of private slots; returns those that became EMPTY."""
        return self._doom(np.asarray(slots, np.int64))

    def reset(self) -> Ints:
        """Take every copy from its owner, at once unreadable. Returns the slots that became
        EMPTY."""
        live = (self._state == State.READY) | (self._state == State.FILLING)
        return self._doom(np.flatnonzero(live))

    # -- inside ----------------------------------------------------------------------------------

    def _take(self, n: int, owner: Ints | int) -> Reservation:
        free = self.free
        slots = np.sort(self._free[free - n : free])
        self._generation[slots] += 1
        self._pins[slots] = 1
        self._owner[slots] = owner
        self._set(slots, State.EMPTY, State.FILLING)
        return Reservation(slots, self._generation[slots].copy())

    def _name(self, refs: Ints, slots: Ints) -> None:
        if not len(refs):
            return
        most = int(refs.max()) + 1
        if most > len(self._slot_of):
            grown = np.full(max(most, 2 * len(self._slot_of), _TABLE), -1, np.int64)
            grown[: len(self._slot_of)] = self._slot_of
            self._slot_of = grown
        self._slot_of[refs] = slots

    def _disown(self, slots: Ints) -> None:
        owners = self._owner[slots]
        self._slot_of[owners[owners >= 0]] = -1
        self._owner[slots] = _NOBODY

    def _doom(self, slots: Ints) -> Ints:
        self._disown(slots)
        for state in (State.READY, State.FILLING):
            self._set(slots[self._state[slots] == state], state, State.DOOMED)
        gone: Ints = slots[(self._pins[slots] == 0) & (self._state[slots] == State.DOOMED)]
        self._give_back(gone, State.DOOMED)
        return gone

    def _give_back(self, slots: Ints, state: State) -> None:
        top = self.free
        self._free[top : top + len(slots)] = np.sort(slots)[::-1]
        self._set(slots, state, State.EMPTY)

    def _set(self, slots: Ints, old: State, new: State) -> None:
        self._state[slots] = new
        self._counts[old] -= len(slots)
        self._counts[new] += len(slots)

    def check(self) -> None:
        """Raise AssertionError naming the invariant that does not hold. O(capacity)."""
        counts = np.bincount(self._state, minlength=4).tolist()
        assert counts == self._counts and sum(counts) == self.capacity, (
            f"1: {counts} {self._counts}"
        )
        owned = np.flatnonzero(self._owner >= 0)
        named = np.flatnonzero(self._slot_of >= 0)
        assert len(owned) == len(named), "2: owners and slot_of differ in number"
        assert (self._slot_of[self._owner[owned]] == owned).all(), "2: owners and slot_of disagree"
        idle = (self._state == State.EMPTY) | (self._state == State.DOOMED)
        assert (self._owner[idle] == _NOBODY).all(), "2: an EMPTY or DOOMED slot has an owner"
        assert (self._owner[~idle] != _NOBODY).all(), "2: a live slot has no owner"
        assert (self._pins >= 0).all(), "3: negative pins"
        assert (self._pins[self._state == State.EMPTY] == 0).all(), "3: an EMPTY slot is pinned"
        assert (self._pins[self._state == State.FILLING] >= 1).all(), "3: a writer lost its pin"
        free = self._free[: self.free]
        assert len(set(free.tolist())) == len(free), "4: a slot is free twice"
        assert (self._state[free] == State.EMPTY).all(), "4: a slot in use is on the free list"


def runs_of(numbers: Sequence[int] | Ints) -> list[tuple[int, int]]:
    """Split ascending positions into runs of consecutive ones: ``[3,4,5,9] -> [(3,6), (9,10)]``."""
    array = np.asarray(numbers, np.int64)
    if not len(array):
        return []
    cuts = np.flatnonzero(np.diff(array) != 1) + 1
    starts = array[np.concatenate([[0], cuts])]
    stops = array[np.concatenate([cuts - 1, [len(array) - 1]])] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
