"""Ledger against a dict of slots: every order of operations, every completion, late ones too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.core.errors import MisuseError
from kvstrata.tiers.ledger import PRIVATE, Ledger, Reservation, State

REFS = 12
MOST = 10
NOBODY = -1


@dataclass
class Slot:
    """What the oracle knows of a slot."""

    state: State = State.EMPTY
    owner: int = NOBODY
    pins: int = 0
    taken: int = 0
    """How often it has been given out."""


@dataclass
class Writer:
    """A reservation, and how often each of its slots had been given out with it."""

    taken: Reservation
    turns: list[int]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(0)
        self.slots: list[Slot] = []
        self.writers: list[Writer] = []
        self.ended: list[Writer] = []
        self.readers: Counter[int] = Counter()

    @initialize(capacity=st.integers(0, 6))
    def begin(self, capacity: int) -> None:
        self.ledger = Ledger(capacity)
        self.slots = [Slot() for _ in range(capacity)]

    # -- the oracle ---------------------------------------------------------------------------

    def free(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot.state is State.EMPTY]

    def slot_of(self, ref: int) -> int:
        return next((i for i, slot in enumerate(self.slots) if slot.owner == ref), -1)

    def absent(self) -> list[int]:
        return [ref for ref in range(REFS) if self.slot_of(ref) < 0]

    def private(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot.owner == PRIVATE]

    def began(self, taken: Reservation | None, owners: list[int]) -> None:
        if len(owners) > len(self.free()):
            assert taken is None
            return
        assert taken is not None
        given = taken.slots.tolist()
        assert len(set(given)) == len(given) == len(owners) and set(given) <= set(self.free())
        for at, owner in zip(given, owners, strict=True):
            turn = self.slots[at].taken + 1
            self.slots[at] = Slot(State.FILLING, owner, 1, turn)
        if given:
            self.writers.append(Writer(taken, [self.slots[at].taken for at in given]))

    def doomed(self, slots: list[int], freed: list[int]) -> None:
        for at in slots:
            self.slots[at].state, self.slots[at].owner = State.DOOMED, NOBODY
        self.emptied(slots, freed)

    def emptied(self, slots: list[int], freed: list[int]) -> None:
        """Those of ``slots`` that are doomed and held by nobody are free now; ``freed`` agrees."""
        gone = {i for i in slots if self.slots[i].state is State.DOOMED and not self.slots[i].pins}
        assert sorted(freed) == sorted(gone)
        for at in gone:
            self.slots[at].state = State.EMPTY

    # -- filling ------------------------------------------------------------------------------

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        absent = self.absent()
        refs = data.draw(st.lists(st.sampled_from(absent), unique=True, max_size=4))
        self.began(self.ledger.reserve(refs), refs)

    @precondition(lambda self: len(self.absent()) < REFS and len(self.free()) > 1)
    @rule(data=st.data())
    def reserve_what_is_there(self, data: st.DataObject) -> None:
        there = [ref for ref in range(REFS) if self.slot_of(ref) >= 0]
        refs = self.absent()[:1] + [data.draw(st.sampled_from(there))]
        with pytest.raises(MisuseError):
            self.ledger.reserve(refs)

    @rule(n=st.integers(0, 3))
    def reserve_private(self, n: int) -> None:
        self.began(self.ledger.reserve_private(n), [PRIVATE] * n)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        writer = self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1)))
        n = len(writer.turns)
        stop = data.draw(st.integers(1, n))
        if stop < n:
            left = slice(stop, n)
            self.writers.append(Writer(writer.taken.part(left), writer.turns[left]))
        taken, turns = writer.taken.part(slice(0, stop)), writer.turns[:stop]
        ok = data.draw(st.lists(st.booleans(), min_size=stop, max_size=stop))
        given = taken.slots.tolist()
        freed = self.ledger.settle(taken, ok).tolist()
        for at, good in zip(given, ok, strict=True):
            slot = self.slots[at]
            slot.pins -= 1
            if slot.state is State.FILLING:
                slot.state = State.READY if good else State.DOOMED
                slot.owner = slot.owner if good else NOBODY
            else:
                assert slot.state is State.DOOMED
        self.emptied(given, freed)
        self.ended.append(Writer(taken, turns))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def settle_too_late(self, data: st.DataObject) -> None:
        """A completion that comes again, for slots that have been given out since."""
        writer = data.draw(st.sampled_from(self.ended))
        moved_on = np.array(
            [
                self.slots[at].taken != turn
                for at, turn in zip(writer.taken.slots.tolist(), writer.turns, strict=True)
            ]
        )
        late = Reservation(writer.taken.slots[moved_on], writer.taken.generations[moved_on])
        ok = data.draw(st.booleans())
        assert self.ledger.settle(late, [ok] * len(late)).tolist() == []

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        pairs = min(len(self.absent()), len(self.free()), 2)
        refs = data.draw(st.permutations(self.absent()))[:pairs]
        slots = data.draw(st.permutations(self.free()))[:pairs]
        self.ledger.adopt(refs, slots)
        for ref, at in zip(refs, slots, strict=True):
            self.slots[at] = Slot(State.READY, ref, 0, self.slots[at].taken + 1)

    @precondition(lambda self: self.slots)
    @rule(ref=st.integers(0, REFS - 1), data=st.data())
    def adopt_what_is_taken(self, ref: int, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.slots) - 1))
        if self.slots[at].state is not State.EMPTY or self.slot_of(ref) >= 0:
            with pytest.raises(MisuseError):
                self.ledger.adopt([ref], [at])

    # -- holding and letting go ---------------------------------------------------------------

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.integers(0, len(self.slots) - 1), max_size=3))
        if any(self.slots[at].state is not State.READY for at in slots):
            with pytest.raises(MisuseError):
                self.ledger.pin(slots)
            return
        self.ledger.pin(slots)
        for at in slots:
            self.slots[at].pins += 1
            self.readers[at] += 1

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        held = list(self.readers.elements())
        slots = data.draw(st.permutations(held))[: data.draw(st.integers(1, len(held)))]
        freed = self.ledger.unpin(slots).tolist()
        for at in slots:
            self.slots[at].pins -= 1
        self.readers -= Counter(slots)
        self.emptied(slots, freed)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def unpin_once_too_often(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.slots) - 1))
        with pytest.raises(MisuseError):
            self.ledger.unpin([at] * (self.slots[at].pins + 1))

    @rule(refs=st.lists(st.integers(0, REFS + 5), unique=True, max_size=5))
    def evict(self, refs: list[int]) -> None:
        slots = [self.slot_of(ref) for ref in refs if self.slot_of(ref) >= 0]
        self.doomed(slots, self.ledger.evict(refs).tolist())

    @precondition(lambda self: self.private())
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.private()), unique=True))
        self.doomed(slots, self.ledger.discard(slots).tolist())

    @rule()
    def reset(self) -> None:
        live = [i for i, slot in enumerate(self.slots) if slot.owner != NOBODY]
        self.doomed(live, self.ledger.reset().tolist())

    @rule(more=st.integers(-1, 2))
    def grow(self, more: int) -> None:
        capacity = min(MOST, len(self.slots) + more)
        self.ledger.grow(capacity)
        self.slots += [Slot() for _ in range(capacity - len(self.slots))]

    # -- agreement ----------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        ledger, slots = self.ledger, self.slots
        ledger.check()
        assert ledger.capacity == len(slots) and ledger.free == len(self.free())
        assert ledger.pins == sum(slot.pins for slot in slots)
        for state in State:
            assert ledger.count(state) == sum(slot.state is state for slot in slots)
        refs = range(REFS + 6)
        where = [self.slot_of(ref) for ref in refs]
        states = [slots[at].state if at >= 0 else State.EMPTY for at in where]
        assert ledger.slots(list(refs)).tolist() == where
        assert ledger.states(list(refs)).tolist() == states
        assert ledger.ready(list(refs)).tolist() == [state is State.READY for state in states]
        named = [slot.owner for slot in slots if slot.owner >= 0 and slot.state is State.READY]
        assert ledger.resident().tolist() == named
        assert ledger.owners(range(len(slots))).tolist() == [slot.owner for slot in slots]


TestLedger = Machine.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
