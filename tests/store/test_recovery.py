"""Recovery: records in any order become the paths that they were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.keys import root_key
from kvstrata.core.model import KVModel
from kvstrata.prefix_index.hashing import chain_keys
from kvstrata.prefix_index.prefix import Prefix, Symbols
from kvstrata.store.placement import Placement, Shelf
from kvstrata.store.policy.eviction import LRU
from kvstrata.store.recovery import adopt
from kvstrata.testing.models import hybrid_model, tiny_model
from kvstrata.tiers.records import Recovered

SIZE = 4


def path(tokens: Sequence[int], *, salt: bytes = b"") -> Symbols:
    """One block for each number."""
    root = root_key(bytes(32), salt=salt)
    return Prefix.from_tokens(np.repeat(np.array(tokens, np.int32), SIZE)).symbols(root, SIZE)


def placed(model: KVModel, capacity: int = 64) -> Placement:
    groups = range(len(model.groups))
    dram = Shelf("dram", [4 for _ in groups], LRU())
    return Placement(model, dram, Shelf("nvme", [capacity for _ in groups], LRU()))


class Disk:
    """Records of a directory: numbered in each group, one for each block."""

    def __init__(self, groups: int) -> None:
        self.records: dict[tuple[int, bytes], Recovered] = {}
        self._next = [0] * groups

    def write(self, symbols: Symbols, at: float, *, groups: Sequence[int], start: int = 0) -> None:
        keys = chain_keys(symbols)
        width = symbols.width
        for group in groups:
            for depth in range(start, len(keys)):
                if (group, keys[depth]) in self.records:
                    continue
                self.records[group, keys[depth]] = Recovered(
                    record=self._next[group],
                    group=group,
                    root=symbols.root,
                    depth=depth,
                    parent=keys[depth - 1] if depth else symbols.root,
                    key=keys[depth],
                    symbol=symbols.data[depth * width : (depth + 1) * width],
                    last_use=at,
                )
                self._next[group] += 1

    def lose(self, symbols: Symbols, depth: int, groups: Sequence[int]) -> None:
        for group in groups:
            del self.records[group, chain_keys(symbols)[depth]]

    def of(self, symbols: Symbols, group: int) -> list[int]:
        """The record of each block of the path, -1 where there is none."""
        found = [self.records.get((group, key)) for key in chain_keys(symbols)]
        return [-1 if one is None else one.record for one in found]


def nvme(placement: Placement) -> Shelf:
    assert placement.nvme is not None
    return placement.nvme


def slots(placement: Placement, symbols: Symbols, group: int) -> list[int]:
    found = nvme(placement).ledgers[group].slots(placement.index.match(symbols))
    return [int(slot) for slot in found]


def order(placement: Placement) -> list[int]:
    return nvme(placement).eviction.victims(10_000, np.zeros(0, np.int32))


TRUNK = path([1, 2, 3, 4, 5])
BRANCH = path([1, 2, 3, 40, 50, 60])
OTHER = path([9, 2, 3], salt=b"tenant")
ALL = (0, 1, 2)


@given(data=st.data())
def test_shuffled_records_of_all_groups_become_their_paths_again(data: st.DataObject) -> None:
    disk = Disk(3)
    for at, symbols in enumerate((TRUNK, BRANCH, OTHER)):
        disk.write(symbols, at, groups=ALL)
    placement = placed(hybrid_model(SIZE))
    records = data.draw(st.permutations(list(disk.records.values())))
    assert not adopt(placement, records)
    placement.check()
    assert len(placement.index) == 5 + 3 + 3
    for symbols in (TRUNK, BRANCH, OTHER):
        refs = placement.index.match(symbols)
        assert len(refs) == symbols.num_blocks == placement.usable(refs)
        for group in ALL:
            assert slots(placement, symbols, group) == disk.of(symbols, group)
    shared = [placement.index.match(symbols)[:3].tolist() for symbols in (TRUNK, BRANCH)]
    assert shared[0] == shared[1]
    assert len(placement.index.match(path([1, 2, 3], salt=b"tenant"))) == 0
    assert sorted(order(placement)) == placement.index.live().tolist()


def test_a_group_that_has_fewer_blocks_is_restored_as_far_as_it_goes() -> None:
    disk = Disk(3)
    disk.write(TRUNK, 0, groups=(0, 2))
    disk.write(TRUNK, 0, groups=(1,), start=3)  # the window keeps only what it reads
    placement = placed(hybrid_model(SIZE, window=6))
    assert not adopt(placement, list(disk.records.values()))
    placement.check()
    assert slots(placement, TRUNK, 1) == [-1, -1, -1, 0, 1]
    assert placement.usable(placement.index.match(TRUNK)) == 5


@given(data=st.data())
def test_what_no_prefix_can_reach_is_returned_by_group(data: st.DataObject) -> None:
    disk = Disk(2)
    for symbols in (TRUNK, BRANCH, OTHER):
        disk.write(symbols, 0, groups=(0, 1))
    disk.lose(BRANCH, 3, (0, 1))
    lost = {group: sorted(disk.of(BRANCH, group)[4:]) for group in (0, 1)}
    disk.lose(OTHER, 0, (0,))  # the other group still has it: its key is known
    placement = placed(KVModel(bytes(16), hybrid_model(SIZE).groups[:2]))
    records = data.draw(st.permutations(list(disk.records.values())))
    orphans = adopt(placement, records)
    assert {group: sorted(found) for group, found in orphans.items()} == lost
    placement.check()
    assert len(placement.index.match(TRUNK)) == 5 and len(placement.index.match(BRANCH)) == 3
    assert slots(placement, OTHER, 0) == [-1, *disk.of(OTHER, 0)[1:]]
    assert slots(placement, OTHER, 1) == disk.of(OTHER, 1)
    for group in (0, 1):
        ledger = nvme(placement).ledgers[group]
        kept = sum(one.group == group for one in disk.records.values()) - len(lost[group])
        assert ledger.capacity - ledger.free == kept == len(ledger.resident())


def test_records_without_any_root_leave_nothing_behind() -> None:
    disk = Disk(1)
    disk.write(TRUNK, 0, groups=(0,), start=1)
    placement = placed(tiny_model(SIZE))
    assert adopt(placement, list(disk.records.values())) == {0: [0, 1, 2, 3]}
    placement.check()
    assert len(placement.index) == 0 and order(placement) == []
    assert nvme(placement).ledgers[0].free == 64


def test_an_empty_device_is_fine() -> None:
    placement = placed(tiny_model(SIZE))
    assert not adopt(placement, [])
    placement.check()


@given(data=st.data())
def test_the_least_recently_used_path_goes_first_and_its_tail_before_its_head(
    data: st.DataObject,
) -> None:
    paths = [path([first, *range(50, 50 + length)]) for first, length in enumerate((0, 3, 2, 5))]
    times = data.draw(st.permutations([1.0, 2.5, 2.75, 7.0]))
    disk = Disk(1)
    for symbols, at in zip(paths, times, strict=True):
        disk.write(symbols, at, groups=(0,))
    placement = placed(tiny_model(SIZE))
    adopt(placement, data.draw(st.permutations(list(disk.records.values()))))
    refs = [placement.index.match(symbols).tolist() for symbols in paths]
    by_age = sorted(zip(times, refs, strict=True))
    assert order(placement) == [ref for _, found in by_age for ref in reversed(found)]


def test_a_use_in_any_group_is_a_use_of_the_block() -> None:
    first, second = path([1]), path([2])
    disk = Disk(3)
    disk.write(first, 1.0, groups=(0, 1))
    disk.write(first, 9.0, groups=(2,))
    disk.write(second, 5.0, groups=ALL)
    placement = placed(hybrid_model(SIZE))
    adopt(placement, list(disk.records.values()))
    assert order(placement) == [int(placement.index.match(p)[0]) for p in (second, first)]


@given(data=st.data())
def test_a_block_is_never_older_than_its_children(data: st.DataObject) -> None:
    """A save of a longer prefix writes only the new blocks' last use: the head keeps its own."""
    disk = Disk(1)
    disk.write(path([1, 2]), 1.0, groups=(0,))
    disk.write(path([1, 2, 3]), 5.0, groups=(0,))
    disk.write(path([8]), 3.0, groups=(0,))
    placement = placed(tiny_model(SIZE))
    adopt(placement, data.draw(st.permutations(list(disk.records.values()))))
    refs = placement.index.match(path([1, 2, 3])).tolist()
    assert order(placement) == [*placement.index.match(path([8])).tolist(), *reversed(refs)]


def test_adopting_the_same_record_twice_is_refused() -> None:
    disk = Disk(1)
    disk.write(path([1]), 0, groups=(0,))
    (record,) = disk.records.values()
    with pytest.raises(ValueError, match="twice"):
        adopt(placed(tiny_model(SIZE)), [record, record])
