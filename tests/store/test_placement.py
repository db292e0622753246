"""Placement, Shelf and Hold: index, ledgers and eviction order in step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.keys import root_key
from kvstrata.core.model import KVModel
from kvstrata.prefix_index.prefix import Prefix, Symbols
from kvstrata.store.hold import Hold
from kvstrata.store.placement import Placement, Refs, Shelf
from kvstrata.store.policy.eviction import LRU
from kvstrata.testing.models import hybrid_model, tiny_model
from kvstrata.testing.store import MemoryStore, memory_store
from kvstrata.tiers.ledger import State

SIZE = 4
NOTHING = np.zeros(0, np.int32)


def symbols_of(tokens: Sequence[int]) -> Symbols:
    """One block for each number."""
    tokens_ = np.repeat(np.array(tokens, np.int32), SIZE)
    return Prefix.from_tokens(tokens_).symbols(root_key(bytes(32)), SIZE)


def placed(model: KVModel | None = None, *, dram: int = 16, nvme: int = 16) -> Placement:
    model = tiny_model(SIZE) if model is None else model
    groups = range(len(model.groups))
    below = Shelf("nvme", [nvme for _ in groups], LRU()) if nvme else None
    return Placement(model, Shelf("dram", [dram for _ in groups], LRU()), below)


def lower(placement: Placement) -> Shelf:
    assert placement.nvme is not None
    return placement.nvme


def put(shelf: Shelf, refs: Refs, *, groups: Sequence[int] = (0,), ok: bool = True) -> None:
    for group in groups:
        taken = shelf.ledgers[group].reserve(refs)
        assert taken is not None
        shelf.settle(group, refs, taken, np.full(len(refs), ok))


def victims(shelf: Shelf) -> list[int]:
    return shelf.eviction.victims(1000, NOTHING)


# -- Shelf ----------------------------------------------------------------------------------------


def test_a_shelf_has_a_ledger_for_each_group_and_one_order() -> None:
    shelf = Shelf("dram", [4, 2], LRU())
    refs = np.array([5, 6], np.int32)
    put(shelf, refs, groups=(0,))
    put(shelf, refs[:1], groups=(1,))
    assert [mask.tolist() for mask in shelf.ready(refs)] == [[True, True], [True, False]]
    assert sorted(victims(shelf)) == [5, 6]
    assert shelf.counts() == {"capacity": 6, "empty": 3, "filling": 0, "ready": 3, "doomed": 0}
    assert [slots.tolist() for slots in shelf.evict(refs)] == [[0, 1], [0]]
    assert victims(shelf) == [] and shelf.counts()["empty"] == 6


def test_a_failed_copy_is_no_candidate_for_eviction() -> None:
    shelf = Shelf("dram", [4], LRU())
    put(shelf, np.array([5], np.int32), ok=False)
    assert victims(shelf) == [] and not shelf.holds(np.array([5], np.int32)).any()


def test_a_shelf_holds_what_is_on_its_way_too() -> None:
    shelf = Shelf("dram", [4, 4], LRU())
    refs = np.array([1, 2, 3], np.int32)
    shelf.ledgers[0].reserve(refs[:1])
    put(shelf, refs[1:2], groups=(1,))
    assert shelf.holds(refs).tolist() == [True, True, False]
    assert not shelf.ready(refs)[0].any()


@given(needs=st.tuples(st.integers(0, 6), st.integers(0, 6)))
def test_what_is_short_is_what_the_worst_group_misses(needs: tuple[int, int]) -> None:
    shelf = Shelf("dram", [4, 2], LRU())
    put(shelf, np.array([1], np.int32), groups=(0, 1))
    assert shelf.short(needs) == max(0, needs[0] - 3, needs[1] - 1)


def test_another_shelf_covers_a_block_if_it_can_be_read_there_in_every_group() -> None:
    mine, other = (Shelf(name, [8, 8], LRU()) for name in ("dram", "nvme"))
    refs = np.arange(5, dtype=np.int32)
    put(mine, refs[:4], groups=(0,))
    put(mine, refs[1:3], groups=(1,))
    put(other, refs[:3], groups=(0,))
    put(other, refs[1:2], groups=(1,))
    other.ledgers[1].reserve(refs[2:3])  # still being written
    other.ledgers[0].reserve(refs[3:4])
    assert mine.covers(refs, other).tolist() == [True, True, False, False, True]


# -- where a path can be read ---------------------------------------------------------------------


def test_a_block_is_readable_in_whatever_tier() -> None:
    placement = placed()
    refs = placement.index.insert(symbols_of([1, 2, 3, 4]))
    put(placement.dram, refs[:2])
    put(lower(placement), refs[1:3])
    assert placement.readable(refs)[0].tolist() == [True, True, True, False]
    assert placement.usable(refs) == 3 and placement.usable(refs[:0]) == 0
    assert placement.pending(refs) == 3
    lower(placement).ledgers[0].reserve(refs[3:])
    assert placement.usable(refs) == 3 and placement.pending(refs) == 4
    assert placement.pending(refs[:0]) == 0


def test_all_groups_must_be_readable_to_resume() -> None:
    placement = placed(hybrid_model(SIZE, window=6))
    refs = placement.index.insert(symbols_of(range(6)))
    put(placement.dram, refs, groups=(0, 2))
    put(placement.dram, refs[3:5], groups=(1,))
    assert placement.usable(refs) == 5
    assert placement.read_ranges(5) == [range(5), range(3, 5), range(5)]
    put(lower(placement), refs[5:], groups=(1,))
    assert placement.usable(refs) == 6


def test_the_tokens_of_a_path_by_the_tier_that_they_come_from() -> None:
    placement = placed()
    refs = placement.index.insert(symbols_of(range(5)))
    put(placement.dram, refs[:3])
    put(lower(placement), refs[2:])
    assert placement.by_tier(placement.present(refs), 5) == {"dram": 3, "nvme": 2}
    assert placement.by_tier(placement.present(refs), 2) == {"dram": 2, "nvme": 0}
    assert placement.by_tier(placement.present(refs), 0) == {"dram": 0, "nvme": 0}


def test_a_block_comes_from_the_lowest_tier_that_one_of_its_groups_needs() -> None:
    placement = placed(hybrid_model(SIZE, window=6))
    refs = placement.index.insert(symbols_of(range(5)))
    put(placement.dram, refs, groups=(0, 2))
    put(lower(placement), refs, groups=(1,))  # the window reads the last two
    assert placement.by_tier(placement.present(refs), 5) == {"dram": 3, "nvme": 2}


def test_blocks_before_every_window_count_with_the_others() -> None:
    window_only = hybrid_model(SIZE, window=6)
    placement = placed(KVModel(bytes(16), window_only.groups[1:2]))
    refs = placement.index.insert(symbols_of(range(8)))
    put(lower(placement), refs[6:])
    assert placement.by_tier(placement.present(refs), 8) == {"dram": 0, "nvme": 8}


def test_without_nvme_everything_comes_from_dram() -> None:
    placement = placed(nvme=0)
    refs = placement.index.insert(symbols_of(range(3)))
    put(placement.dram, refs)
    assert placement.by_tier(placement.present(refs), 3) == {"dram": 3}


def test_records_are_the_slots_of_what_nvme_can_read() -> None:
    placement = placed()
    refs = placement.index.insert(symbols_of(range(4)))
    put(lower(placement), refs[[3, 1]])
    lower(placement).ledgers[0].reserve(refs[:1])
    assert placement.records(refs)[0].tolist() == [1, 0]


# -- who must go and who must not -----------------------------------------------------------------


def test_a_use_of_a_path_counts_in_every_tier() -> None:
    placement = placed()
    a = placement.index.insert(symbols_of([1, 2]))
    b = placement.index.insert(symbols_of([3, 4]))
    for shelf in placement.shelves:
        for refs in (a, b):
            put(shelf, refs)
    placement.touch(a)
    for shelf in placement.shelves:
        assert victims(shelf) == [*b[::-1].tolist(), *a[::-1].tolist()]


def test_a_leased_block_stays_and_a_kept_one_may_sink() -> None:
    placement = placed()
    refs = placement.index.insert(symbols_of([1, 2, 3]))
    for shelf in placement.shelves:
        put(shelf, refs)
    placement.index.leases.pin(refs[:1])
    placement.keeps.grow(placement.index.capacity)
    placement.keeps.pin(refs[1:2])
    safe, unsafe = placement.dram_victims(9, sinks=True)
    assert safe.tolist() == refs[[2, 1]].tolist() and not len(unsafe)
    assert placement.nvme_victims(9).tolist() == refs[2:].tolist()


def test_a_kept_block_stays_in_the_lowest_tier_there_is() -> None:
    placement = placed(nvme=0)
    refs = placement.index.insert(symbols_of([1, 2]))
    put(placement.dram, refs)
    placement.keeps.grow(placement.index.capacity)
    placement.keeps.pin(refs[:1])
    safe, unsafe = placement.dram_victims(9, sinks=False)
    assert safe.tolist() == refs[1:].tolist() and not len(unsafe)


def test_what_is_not_safe_below_must_be_written_first() -> None:
    placement = placed()
    refs = placement.index.insert(symbols_of(range(4)))
    put(placement.dram, refs)
    put(lower(placement), refs[[1, 3]])
    safe, unsafe = placement.dram_victims(3, sinks=True)
    assert safe.tolist() == refs[[3, 1]].tolist() and unsafe.tolist() == refs[[2]].tolist()
    assert placement.dram_victims(3, sinks=True)[0].tolist() == safe.tolist(), "it does not mutate"
    assert [len(found) for found in placement.dram_victims(0, sinks=True)] == [0, 0]


# -- names that name nothing ----------------------------------------------------------------------


def test_a_block_without_a_copy_loses_its_name_and_so_do_its_ancestors() -> None:
    placement = placed()
    refs = placement.index.insert(symbols_of(range(5)))
    put(placement.dram, refs[[1, 4]])
    placement.damaged.update(refs.tolist())
    placement.dram.evict(refs[4:])
    placement.prune(refs[4:])
    placement.check()
    assert placement.index.live().tolist() == sorted(refs[:2].tolist()), "block 1 is still there"
    assert placement.damaged == set(refs[:2].tolist())
    placement.dram.evict(refs[1:2])
    placement.prune(refs[1:2])
    assert len(placement.index) == 0 and placement.damaged == set()


def test_a_name_stays_while_it_has_a_copy_a_child_or_a_lease() -> None:
    placement = placed()
    trunk = placement.index.insert(symbols_of([1, 2]))
    left = placement.index.insert(symbols_of([1, 2, 3]))[2:]
    right = placement.index.insert(symbols_of([1, 2, 4]))[2:]
    put(lower(placement), left)
    placement.index.leases.pin(right)
    placement.prune(np.concatenate([trunk, left, right]))
    assert len(placement.index) == 4
    placement.index.leases.unpin(right)
    placement.prune(right)
    assert len(placement.index) == 3
    lower(placement).ledgers[0].reserve(right)  # nobody's business: the ref is free
    lower(placement).ledgers[0].evict(right)
    lower(placement).evict(left)
    placement.prune(left)
    assert len(placement.index) == 0


@given(data=st.data())
def test_pruning_what_was_evicted_leaves_no_name_without_a_meaning(data: st.DataObject) -> None:
    placement = placed()
    for _ in range(data.draw(st.integers(1, 5))):
        refs = placement.index.insert(
            symbols_of(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)))
        )
        for shelf in placement.shelves:
            new = refs[(shelf.ledgers[0].slots(refs) < 0)]
            some = data.draw(st.lists(st.booleans(), min_size=len(new), max_size=len(new)))
            put(shelf, new[np.array(some, np.bool_)])
        placement.prune(refs)
        placement.check()
    for shelf in placement.shelves:
        while len(gone := shelf.eviction.victims(data.draw(st.integers(1, 3)), NOTHING)):
            refs = np.array(gone, np.int32)
            shelf.evict(refs)
            placement.prune(refs)
            placement.check()
    assert len(placement.index) == 0


def test_a_reset_forgets_everything_and_names_the_free_slots() -> None:
    placement = placed()
    refs = placement.index.insert(symbols_of(range(3)))
    put(placement.dram, refs)
    put(lower(placement), refs[:1])
    slots = placement.dram.ledgers[0].slots(refs[1:2])
    placement.dram.ledgers[0].pin(slots)
    placement.damaged.add(0)
    freed = placement.reset()
    assert [[ids.tolist() for ids in tier] for tier in freed] == [[[0, 2]], [[0]]]
    assert len(placement.index) == 0 and placement.damaged == set()
    assert [victims(shelf) for shelf in placement.shelves] == [[], []]
    assert placement.dram.ledgers[0].count(State.DOOMED) == 1
    placement.check()


def test_check_names_what_is_out_of_step() -> None:
    placement = placed()
    refs = placement.index.insert(symbols_of([1, 2]))
    with pytest.raises(AssertionError, match="^2: "):
        placement.check()
    put(placement.dram, refs)
    placement.check()
    placement.index.remove(refs)
    with pytest.raises(AssertionError, match="^1: "):
        placement.check()


# -- Hold -----------------------------------------------------------------------------------------


def test_a_hold_is_let_go_block_by_block() -> None:
    placement = placed()
    refs = placement.index.insert(symbols_of(range(4)))
    pinned = placement.index.leases.pinned
    put(placement.dram, refs[:2])
    hold, other = Hold(placement, refs), Hold(placement, refs[:1])
    hold.let_go(np.array([True, False, True, False]))
    hold.let_go(np.array([True, False, True, False]))
    assert pinned(refs).tolist() == [True, True, False, True]
    other.close()
    assert pinned(refs).tolist() == [False, True, False, True]
    hold.close()
    hold.close()
    assert placement.index.leases.total == 0
    assert placement.index.live().tolist() == refs[:2].tolist(), "what names nothing is gone"
    placement.check()


def test_a_hold_from_before_a_reset_lets_nothing_go() -> None:
    placement = placed()
    old = Hold(placement, placement.index.insert(symbols_of([1, 2])))
    placement.reset()
    refs = placement.index.insert(symbols_of([3, 4]))
    new = Hold(placement, refs)
    old.let_go(np.array([True, False]))
    old.close()
    assert placement.index.leases.total == 2
    new.close()
    assert len(placement.index) == 0


# -- leaf first, as the Store uses it -------------------------------------------------------------


def save(s: MemoryStore, tokens: np.ndarray, start: int = 0) -> None:
    blocks = np.arange(len(tokens) // SIZE)[start:]
    ticket = s.store.save(Prefix.from_tokens(tokens), {0: blocks}, start=start)
    done = s.store.wait(ticket)
    assert done is not None and done.tokens == done.requested
    s.store.poll()


def before_their_children(s: MemoryStore, name: str) -> list[int]:
    """Blocks that would leave a tier before a child that is in it."""
    placement = s.store._placement
    (shelf,) = (shelf for shelf in placement.shelves if shelf.name == name)
    order = victims(shelf)
    assert order
    parents = placement.index.parents(np.array(order, np.int32)).tolist()
    return [parent for at, parent in enumerate(parents) if parent in order[:at]]


@pytest.mark.parametrize("name", ["dram", "nvme"])
def test_after_a_save_no_block_goes_before_its_children(name: str) -> None:
    s = memory_store(tiny_model(SIZE), dram=16, nvme=64)
    save(s, np.arange(12 * SIZE, dtype=np.int32))
    assert before_their_children(s, name) == []


def test_after_a_longer_save_no_block_leaves_nvme_before_its_children() -> None:
    s = memory_store(tiny_model(SIZE), dram=16, nvme=64)
    tokens = np.arange(12 * SIZE, dtype=np.int32)
    save(s, tokens[: 6 * SIZE])
    s.store.lookup(Prefix.from_tokens(tokens)).release()
    save(s, tokens, start=6)
    assert before_their_children(s, "nvme") == []


@pytest.mark.parametrize("how", ["load", "prefetch"])
def test_after_a_load_from_nvme_no_block_leaves_dram_before_its_children(how: str) -> None:
    s = memory_store(tiny_model(SIZE), dram=16, nvme=64)
    prefix = Prefix.from_tokens(np.arange(12 * SIZE, dtype=np.int32))
    save(s, np.arange(12 * SIZE, dtype=np.int32))
    s.store.drop("dram")
    if how == "prefetch":
        ticket = s.store.prefetch(prefix)
    else:
        ticket = s.store.load(s.store.lookup(prefix), {0: np.arange(20, 32)})
    done = s.store.wait(ticket)
    assert done is not None and done.tokens == 12 * SIZE
    assert before_their_children(s, "dram") == []
