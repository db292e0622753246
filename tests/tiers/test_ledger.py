"""Ledger: every operation, and what an older generation may no longer do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstrata.core.errors import MisuseError
from kvstrata.tiers.ledger import PRIVATE, Ledger, Reservation, State, runs_of


def filled(capacity: int, refs: list[int]) -> Ledger:
    """A ledger with READY copies of ``refs`` in slots 0, 1, ..."""
    ledger = Ledger(capacity)
    taken = reserved(ledger, refs)
    ledger.settle(taken, [True] * len(refs))
    ledger.check()
    return ledger


def reserved(ledger: Ledger, refs: list[int]) -> Reservation:
    taken = ledger.reserve(refs)
    assert taken is not None and len(taken) == len(refs)
    return taken


def counts(ledger: Ledger) -> list[int]:
    """Slots EMPTY, FILLING, READY, DOOMED."""
    ledger.check()
    return [ledger.count(state) for state in State]


# -- filling --------------------------------------------------------------------------------------


def test_a_fresh_ledger_is_free() -> None:
    ledger = Ledger(4)
    assert counts(ledger) == [4, 0, 0, 0] and ledger.free == ledger.capacity == 4
    assert ledger.pins == 0 and ledger.resident().tolist() == []
    assert ledger.slots([0, 5, 10**6]).tolist() == [-1, -1, -1]
    assert ledger.states([3]).tolist() == [State.EMPTY]
    assert ledger.slots([]).tolist() == [] == ledger.states([]).tolist()


def test_a_ledger_without_slots_knows_nothing_and_takes_nothing() -> None:
    ledger = Ledger(0)
    assert ledger.states([1, 2]).tolist() == [State.EMPTY] * 2
    assert not ledger.ready([1]).any()
    assert ledger.reserve([1]) is None and ledger.reserve_private(1) is None
    assert reserved(ledger, []).slots.tolist() == []
    assert counts(ledger) == [0, 0, 0, 0]


def test_fill_commit_and_read() -> None:
    ledger = Ledger(4)
    taken = reserved(ledger, [70, 7])
    assert counts(ledger) == [2, 2, 0, 0] and ledger.pins == 2
    assert ledger.slots([7, 70, 8]).tolist() == [taken.slots[1], taken.slots[0], -1]
    assert ledger.owners(taken.slots).tolist() == [70, 7]
    assert not ledger.ready([7, 70]).any(), "not before the bytes are there"
    assert ledger.resident().tolist() == []
    assert ledger.settle(taken, [True, True]).tolist() == []
    assert counts(ledger) == [2, 0, 2, 0] and ledger.pins == 0
    assert ledger.ready([7, 8, 70]).tolist() == [True, False, True]
    assert sorted(ledger.resident().tolist()) == [7, 70]


def test_what_failed_is_given_back_and_never_seen() -> None:
    ledger = Ledger(4)
    taken = reserved(ledger, [1, 2, 3])
    freed = ledger.settle(taken, [True, False, True])
    assert freed.tolist() == [taken.slots[1]]
    assert counts(ledger) == [2, 0, 2, 0]
    assert ledger.slots([2]).tolist() == [-1]
    assert ledger.ready([1, 2, 3]).tolist() == [True, False, True]


def test_parts_of_a_reservation_are_settled_apart() -> None:
    ledger = Ledger(4)
    taken = reserved(ledger, [1, 2, 3])
    part = taken.part(slice(1, 3))
    assert len(part) == 2 and part.slots.tolist() == taken.slots[1:].tolist()
    ledger.settle(part, [True, False])
    assert ledger.states([1, 2, 3]).tolist() == [State.FILLING, State.READY, State.EMPTY]
    assert counts(ledger) == [2, 1, 1, 0]


def test_too_many_are_refused_and_nothing_changes() -> None:
    ledger = filled(4, [1, 2])
    assert ledger.reserve([3, 4, 5]) is None and ledger.reserve_private(3) is None
    assert counts(ledger) == [2, 0, 2, 0]
    assert ledger.slots([3, 4, 5]).tolist() == [-1] * 3
    assert len(reserved(ledger, [3, 4])) == 2 and ledger.free == 0


@pytest.mark.parametrize("settled", [True, False])
def test_a_block_has_one_place_in_a_tier(settled: bool) -> None:
    ledger = Ledger(4)
    taken = reserved(ledger, [1])
    if settled:
        ledger.settle(taken, [True])
    before = counts(ledger)
    with pytest.raises(MisuseError, match="already in this tier"):
        ledger.reserve([2, 1])
    assert counts(ledger) == before and ledger.slots([2]).tolist() == [-1]


def test_a_fresh_tier_hands_out_contiguous_runs() -> None:
    ledger = Ledger(100)
    assert reserved(ledger, list(range(10))).slots.tolist() == list(range(10))
    assert reserved(ledger, list(range(10, 40))).slots.tolist() == list(range(10, 40))


def test_slots_given_back_come_out_in_order_again() -> None:
    ledger = filled(10, list(range(10)))
    ledger.evict([7, 2, 5])
    assert reserved(ledger, [20, 21, 22]).slots.tolist() == [2, 5, 7]


# -- generations ----------------------------------------------------------------------------------


def test_a_completion_of_an_older_generation_is_dropped() -> None:
    ledger = Ledger(1)
    old = reserved(ledger, [1])
    ledger.settle(old, [False])
    new = reserved(ledger, [2])
    assert new.slots.tolist() == old.slots.tolist()
    assert new.generations[0] != old.generations[0]
    for late in (True, False):
        assert ledger.settle(old, [late]).tolist() == []
        assert counts(ledger) == [0, 1, 0, 0] and ledger.pins == 1
    ledger.settle(new, [True])
    assert ledger.settle(old, [False]).tolist() == []
    assert ledger.ready([1, 2]).tolist() == [False, True]


def test_only_the_stale_slots_of_a_completion_are_dropped() -> None:
    ledger = Ledger(2)
    old = reserved(ledger, [1, 2])
    ledger.settle(old.part(slice(0, 1)), [False])
    reserved(ledger, [3])
    ledger.settle(old, [True, True])
    assert ledger.states([1, 2, 3]).tolist() == [State.EMPTY, State.READY, State.FILLING]
    assert counts(ledger) == [0, 1, 1, 0]


def test_a_second_completion_is_misuse_and_changes_nothing() -> None:
    ledger = Ledger(2)
    taken = reserved(ledger, [1, 2])
    ledger.settle(taken, [True, False])
    with pytest.raises(MisuseError, match="unpinned more often"):
        ledger.settle(taken, [True, True])
    assert counts(ledger) == [1, 0, 1, 0] and ledger.pins == 0


# -- holding and letting go -----------------------------------------------------------------------


def test_a_pinned_slot_outlives_its_eviction() -> None:
    ledger = filled(3, [1, 2])
    slots = ledger.slots([1, 2])
    ledger.pin(slots)
    ledger.pin(slots[:1])
    assert ledger.pins == 3
    assert ledger.evict([1, 2]).tolist() == []
    assert counts(ledger) == [1, 0, 0, 2]
    assert not ledger.ready([1, 2]).any(), "at once unreadable"
    assert ledger.owners(slots).max() < 0
    assert ledger.unpin(slots).tolist() == [slots[1]]
    assert counts(ledger) == [2, 0, 0, 1]
    assert ledger.unpin(slots[:1]).tolist() == [slots[0]]
    assert counts(ledger) == [3, 0, 0, 0]


def test_a_block_may_come_back_while_its_old_copy_is_still_read() -> None:
    ledger = filled(2, [1])
    old = ledger.slots([1])
    ledger.pin(old)
    ledger.evict([1])
    new = reserved(ledger, [1])
    assert new.slots[0] != old[0]
    ledger.settle(new, [True])
    assert ledger.ready([1]).all() and counts(ledger) == [0, 0, 1, 1]
    assert ledger.unpin(old).tolist() == old.tolist()
    assert ledger.slots([1]).tolist() == new.slots.tolist()


def test_one_call_may_pin_a_slot_twice_and_frees_it_once() -> None:
    ledger = filled(2, [1])
    slot = int(ledger.slots([1])[0])
    ledger.pin([slot, slot])
    assert ledger.pins == 2
    ledger.evict([1])
    assert ledger.unpin([slot, slot]).tolist() == [slot]
    assert counts(ledger) == [2, 0, 0, 0]


def test_only_a_ready_slot_can_be_pinned() -> None:
    ledger = filled(4, [1, 2])
    filling = reserved(ledger, [3]).slots
    doomed, empty = ledger.slots([2]), np.array([3])
    ledger.pin(doomed)
    ledger.evict([2])
    for slots in (filling, doomed, empty):
        with pytest.raises(MisuseError, match="READY"):
            ledger.pin(np.concatenate([ledger.slots([1]), slots]))
    assert ledger.pins == 2  # the writer's and the reader's
    assert counts(ledger) == [1, 1, 1, 1]


def test_unpinning_too_often_is_misuse_and_changes_nothing() -> None:
    ledger = filled(2, [1, 2])
    slots = ledger.slots([1, 2])
    ledger.pin(slots[:1])
    for bad in (slots, slots[[0, 0]], slots[1:]):
        with pytest.raises(MisuseError, match="more often than pinned"):
            ledger.unpin(bad)
        assert ledger.pins == 1 and counts(ledger) == [0, 0, 2, 0]


def test_eviction_skips_what_is_not_there() -> None:
    ledger = filled(3, [1, 2])
    slot = ledger.slots([2])
    assert ledger.evict([9, 2, 500_000]).tolist() == slot.tolist()
    assert ledger.evict([2]).tolist() == [] == ledger.evict([]).tolist()
    assert counts(ledger) == [2, 0, 1, 0]


@pytest.mark.parametrize("ok", [True, False])
def test_a_filling_slot_that_was_doomed_is_never_published(ok: bool) -> None:
    ledger = Ledger(2)
    taken = reserved(ledger, [1])
    assert ledger.evict([1]).tolist() == []
    assert counts(ledger) == [1, 0, 0, 1] and ledger.pins == 1
    assert ledger.settle(taken, [ok]).tolist() == taken.slots.tolist()
    assert counts(ledger) == [2, 0, 0, 0]
    assert ledger.slots([1]).tolist() == [-1]


def test_a_doomed_slot_is_not_given_out_before_its_writer_has_ended() -> None:
    ledger = Ledger(2)
    doomed = reserved(ledger, [1])
    ledger.evict([1])
    again = reserved(ledger, [1])
    assert again.slots[0] != doomed.slots[0] and ledger.reserve([2]) is None
    ledger.settle(doomed, [True])
    assert not ledger.ready([1]).any()
    ledger.settle(again, [True])
    assert ledger.ready([1]).all() and counts(ledger) == [1, 0, 1, 0]


# -- private slots --------------------------------------------------------------------------------


def test_a_private_slot_has_no_name() -> None:
    ledger = filled(4, [1])
    mine = ledger.reserve_private(2)
    assert mine is not None and ledger.owners(mine.slots).tolist() == [PRIVATE] * 2
    ledger.settle(mine, [True, True])
    assert counts(ledger) == [1, 0, 3, 0]
    assert ledger.resident().tolist() == [1], "nobody can look a private slot up"
    ledger.pin(mine.slots[:1])
    assert ledger.discard(mine.slots).tolist() == [mine.slots[1]]
    assert counts(ledger) == [2, 0, 1, 1]
    assert ledger.unpin(mine.slots[:1]).tolist() == [mine.slots[0]]
    assert counts(ledger) == [3, 0, 1, 0]


def test_a_private_slot_may_be_discarded_while_it_is_filled() -> None:
    ledger = Ledger(2)
    mine = ledger.reserve_private(1)
    assert mine is not None
    assert ledger.discard(mine.slots).tolist() == []
    assert counts(ledger) == [1, 0, 0, 1]
    assert ledger.settle(mine, [True]).tolist() == mine.slots.tolist()
    assert counts(ledger) == [2, 0, 0, 0]


# -- growing, adopting, resetting -----------------------------------------------------------------


def test_growing_keeps_everything_and_gives_out_old_slots_first() -> None:
    ledger = filled(4, [1, 2])
    taken = reserved(ledger, [3])
    ledger.pin(ledger.slots([1]))
    before = ledger.slots([1, 2, 3]).tolist()
    ledger.grow(8)
    assert counts(ledger) == [5, 1, 2, 0] and ledger.capacity == 8
    assert ledger.slots([1, 2, 3]).tolist() == before and ledger.pins == 2
    ledger.settle(taken, [True])
    assert reserved(ledger, [4]).slots.tolist() == [3]
    assert reserved(ledger, [5, 6, 7, 8]).slots.tolist() == [4, 5, 6, 7]
    assert counts(ledger) == [0, 5, 3, 0]


def test_a_ledger_never_shrinks() -> None:
    ledger = Ledger(4)
    ledger.grow(4)
    ledger.grow(2)
    assert ledger.capacity == 4 and counts(ledger) == [4, 0, 0, 0]


def test_adopted_blocks_are_ready_where_they_were_found() -> None:
    ledger = Ledger(6)
    ledger.adopt([10, 11], [4, 1])
    assert counts(ledger) == [4, 0, 2, 0] and ledger.pins == 0
    assert ledger.slots([10, 11]).tolist() == [4, 1] and ledger.ready([10, 11]).all()
    assert sorted(reserved(ledger, [0, 1, 2, 3]).slots.tolist()) == [0, 2, 3, 5]
    assert ledger.evict([10]).tolist() == [4]
    assert reserved(ledger, [9]).slots.tolist() == [4]


def test_an_adopted_slot_has_a_generation_of_its_own() -> None:
    ledger = Ledger(1)
    old = reserved(ledger, [1])
    ledger.settle(old, [False])
    ledger.adopt([2], [0])
    ledger.pin([0])
    assert ledger.settle(old, [False]).tolist() == []
    assert ledger.pins == 1 and ledger.ready([2]).all()


@pytest.mark.parametrize(
    "refs,slots",
    [([1], [0]), ([1], [3]), ([5, 1], [3, 2]), ([5], [0]), ([5, 6], [2, 2]), ([5, 5], [2, 3])],
)
def test_nothing_is_adopted_twice(refs: list[int], slots: list[int]) -> None:
    ledger = filled(4, [1, 2])
    with pytest.raises(MisuseError, match="recovered twice"):
        ledger.adopt(refs, slots)
    assert counts(ledger) == [2, 0, 2, 0]
    assert ledger.slots([1, 2, 5, 6]).tolist() == [0, 1, -1, -1]


def test_nothing_is_adopted_into_a_slot_that_is_doomed() -> None:
    ledger = filled(2, [1])
    ledger.pin([0])
    ledger.evict([1])
    with pytest.raises(MisuseError):
        ledger.adopt([5], [0])
    assert counts(ledger) == [1, 0, 0, 1]


def test_a_reset_is_total_while_copies_are_in_flight() -> None:
    ledger = filled(6, [1, 2])
    writing = reserved(ledger, [3])
    private = ledger.reserve_private(1)
    assert private is not None
    read = ledger.slots([2])
    ledger.pin(read)
    assert ledger.reset().tolist() == [0], "only the copy that nobody uses is gone at once"
    assert ledger.reset().tolist() == []
    assert counts(ledger) == [3, 0, 0, 3]
    assert ledger.slots([1, 2, 3]).tolist() == [-1] * 3 and ledger.resident().tolist() == []
    assert ledger.settle(writing, [True]).tolist() == writing.slots.tolist()
    assert ledger.settle(private, [True]).tolist() == private.slots.tolist()
    assert ledger.unpin(read).tolist() == read.tolist()
    assert counts(ledger) == [6, 0, 0, 0] and ledger.pins == 0


# -- check ----------------------------------------------------------------------------------------


def damage(attribute: str, index: int, value: int) -> Callable[[Ledger], None]:
    def do(ledger: Ledger) -> None:
        getattr(ledger, attribute)[index] = value

    return do


@pytest.mark.parametrize(
    "number,hurt",
    [
        ("1", damage("_state", 0, State.DOOMED)),
        ("1", damage("_counts", 0, 3)),
        ("2", damage("_owner", 0, -1)),
        ("2", damage("_owner", 0, 2)),
        ("2", damage("_owner", 3, 9)),
        ("2", damage("_slot_of", 1, 1)),
        ("3", damage("_pins", 1, -1)),
        ("3", damage("_pins", 3, 1)),
        ("3", damage("_pins", 2, 0)),
        ("4", damage("_free", 0, 0)),
    ],
)
def test_check_names_the_invariant_that_is_broken(
    number: str, hurt: Callable[[Ledger], None]
) -> None:
    ledger = filled(5, [1, 2])
    reserved(ledger, [3])
    ledger.check()
    hurt(ledger)
    with pytest.raises(AssertionError, match=f"^{number}: "):
        ledger.check()


@pytest.mark.parametrize(
    "numbers,runs",
    [
        ([], []),
        ([7], [(7, 8)]),
        ([3, 4, 5, 9], [(3, 6), (9, 10)]),
        ([0, 2, 4], [(0, 1), (2, 3), (4, 5)]),
        ([0, 1, 2], [(0, 3)]),
    ],
)
def test_runs_of_consecutive_numbers(numbers: list[int], runs: list[tuple[int, int]]) -> None:
    assert runs_of(numbers) == runs
    assert [n for start, stop in runs_of(numbers) for n in range(start, stop)] == numbers
