"""Reasons: every block that cannot be loaded has exactly one, and it is the right one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.keys import root_key
from kvstrata.core.model import KVModel
from kvstrata.prefix_index.prefix import Prefix, Symbols
from kvstrata.store.placement import Placement, Refs, Shelf
from kvstrata.store.policy.eviction import LRU
from kvstrata.store.reasons import reasons
from kvstrata.testing.models import hybrid_model, tiny_model

SIZE = 4


def symbols_of(tokens: Sequence[int], *, salt: bytes = b"", epoch: int = 0) -> Symbols:
    """One block for each number."""
    root = root_key(bytes(32), salt=salt, epoch=epoch)
    return Prefix.from_tokens(np.repeat(np.array(tokens, np.int32), SIZE)).symbols(root, SIZE)


def placed(model: KVModel) -> Placement:
    groups = range(len(model.groups))
    dram, nvme = (Shelf(name, [64 for _ in groups], LRU()) for name in ("dram", "nvme"))
    return Placement(model, dram, nvme)


def put(placement: Placement, shelf: Shelf | None, refs: Refs, *, groups: Sequence[int]) -> None:
    """Readable copies of refs."""
    assert shelf is not None
    for group in groups:
        taken = shelf.ledgers[group].reserve(refs)
        assert taken is not None
        shelf.settle(group, refs, taken, np.ones(len(refs), np.bool_))


def fill(shelf: Shelf | None, refs: Refs, *, groups: Sequence[int]) -> None:
    """Copies of refs that are on their way."""
    assert shelf is not None
    for group in groups:
        assert shelf.ledgers[group].reserve(refs) is not None


def told(placement: Placement, symbols: Symbols) -> list[tuple[int, int, str]]:
    path = placement.index.match(symbols)
    found = reasons(placement, symbols, path, placement.usable(path))
    return [(reason.first_block, reason.blocks, reason.why) for reason in found]


def test_what_was_never_stored() -> None:
    placement = placed(tiny_model(SIZE))
    assert told(placement, symbols_of([1, 2, 3])) == [(0, 3, "never_stored")]
    put(placement, placement.dram, placement.index.insert(symbols_of([1])), groups=[0])
    assert told(placement, symbols_of([1, 2, 3])) == [(1, 2, "never_stored")]
    assert told(placement, symbols_of([7])) == [(0, 1, "never_stored")]


def test_what_is_all_there_has_no_reason() -> None:
    placement = placed(tiny_model(SIZE))
    refs = placement.index.insert(symbols_of([1, 2, 3]))
    put(placement, placement.dram, refs[:2], groups=[0])
    put(placement, placement.nvme, refs[2:], groups=[0])
    assert told(placement, symbols_of([1, 2, 3])) == [] == told(placement, symbols_of([]))


def test_what_another_salt_has_stored() -> None:
    placement = placed(tiny_model(SIZE))
    put(placement, placement.dram, placement.index.insert(symbols_of([1, 2])), groups=[0])
    assert told(placement, symbols_of([1, 2], salt=b"x")) == [(0, 2, "other_salt")]
    assert told(placement, symbols_of([2, 1], salt=b"x")) == [(0, 2, "never_stored")]


def test_what_is_in_flight_is_pending() -> None:
    placement = placed(tiny_model(SIZE))
    refs = placement.index.insert(symbols_of([1, 2, 3, 4]))
    put(placement, placement.dram, refs[:1], groups=[0])
    fill(placement.dram, refs[1:3], groups=[0])
    fill(placement.nvme, refs[3:], groups=[0])
    assert told(placement, symbols_of([1, 2, 3, 4])) == [(1, 3, "pending")]


def test_what_was_evicted_but_keeps_its_name() -> None:
    placement = placed(tiny_model(SIZE))
    refs = placement.index.insert(symbols_of([1, 2, 3]))
    placement.index.leases.pin(refs)
    put(placement, placement.dram, refs[:1], groups=[0])
    assert told(placement, symbols_of([1, 2, 3, 4])) == [(1, 2, "evicted"), (3, 1, "never_stored")]


def test_what_failed_its_check_until_it_is_stored_again() -> None:
    placement = placed(tiny_model(SIZE))
    symbols = symbols_of([1, 2, 3])
    refs = placement.index.insert(symbols)
    put(placement, placement.dram, refs[[0, 2]], groups=[0])
    placement.damaged.add(int(refs[1]))
    assert told(placement, symbols) == [(1, 1, "failed_check"), (2, 1, "after_a_gap")]
    fill(placement.dram, refs[1:2], groups=[0])
    assert told(placement, symbols) == [(1, 1, "pending"), (2, 1, "after_a_gap")]


def test_what_lies_behind_a_gap() -> None:
    placement = placed(tiny_model(SIZE))
    symbols = symbols_of([1, 2, 3, 4, 5])
    refs = placement.index.insert(symbols)
    put(placement, placement.dram, refs[[0, 2, 4]], groups=[0])
    assert told(placement, symbols) == [
        (1, 1, "evicted"),
        (2, 1, "after_a_gap"),
        (3, 1, "evicted"),
        (4, 1, "after_a_gap"),
    ]


def test_a_copy_in_some_groups_on_its_way_in_the_others_is_pending() -> None:
    placement = placed(hybrid_model(SIZE))
    symbols = symbols_of([1, 2])
    refs = placement.index.insert(symbols)
    put(placement, placement.dram, refs, groups=[0, 1])
    fill(placement.dram, refs, groups=[2])
    assert told(placement, symbols) == [(0, 2, "pending")]


@pytest.mark.parametrize("why", ["failed_check", "evicted"])
def test_what_is_lost_in_one_group_is_not_pending(why: str) -> None:
    """As when an NVMe record of one group fails its check after DRAM got the other groups'."""
    placement = placed(hybrid_model(SIZE))
    symbols = symbols_of([1, 2])
    refs = placement.index.insert(symbols)
    put(placement, placement.dram, refs, groups=[0, 1])
    if why == "failed_check":
        placement.damaged.update(refs.tolist())
    assert told(placement, symbols) == [(0, 2, why)]


@given(data=st.data())
def test_the_reasons_cover_what_is_missing_once_and_in_order(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from([tiny_model(SIZE), hybrid_model(SIZE)]))
    placement = placed(model)
    groups = range(len(model.groups))
    asked, known = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    symbols = symbols_of(range(asked))
    path = placement.index.insert(symbols_of(range(min(known, asked))))
    for ref in path:
        one = np.array([ref], np.int32)
        for shelf in placement.shelves:
            for group in groups:
                kind = data.draw(st.sampled_from(["", "", "ready", "filling"]))
                if kind == "ready":
                    put(placement, shelf, one, groups=[group])
                elif kind == "filling":
                    fill(shelf, one, groups=[group])
        if data.draw(st.booleans()):
            placement.damaged.add(int(ref))
    usable = placement.usable(path)
    at = usable
    before = (len(placement.index), [shelf.counts() for shelf in placement.shelves])
    for first, blocks, why in told(placement, symbols):
        assert first == at and blocks > 0
        at += blocks
        assert (why == "never_stored") == (first >= len(path))
    assert at == asked
    assert before == (len(placement.index), [shelf.counts() for shelf in placement.shelves])
