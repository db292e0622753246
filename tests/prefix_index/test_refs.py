"""The flat table behind the tree."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstrata.core.errors import MisuseError
from kvstrata.prefix_index.refs import NO_REF, RefTable, as_refs


def test_a_run_is_linked_head_to_tail() -> None:
    table = RefTable()
    run = table.take(4, NO_REF, node=7)
    below = table.take(2, int(run[1]), node=8)
    assert table.parent[run].tolist() == [NO_REF, *run[:-1].tolist()]
    assert table.children[run].tolist() == [1, 2, 1, 0]
    assert table.parent[below].tolist() == [run[1], below[0]]
    assert table.node[below].tolist() == [8, 8]
    assert len(table) == 6
    table.check()
    table.give(below)
    assert table.children[run].tolist() == [1, 1, 1, 0]
    table.check()


def test_freed_refs_are_used_again_before_the_table_grows() -> None:
    table = RefTable()
    run = table.take(100, NO_REF, 0)
    table.give(run[40:])
    again = table.take(60, NO_REF, 1)
    assert set(again.tolist()) == set(run[40:].tolist())
    assert table.parent[again].tolist() == [NO_REF, *again[:-1].tolist()]
    assert table.high == 100 and len(table) == 100
    table.check()


def test_a_run_longer_than_what_is_free_leaves_it_for_later() -> None:
    table = RefTable()
    table.give(table.take(3, NO_REF, 0))
    assert table.take(5, NO_REF, 0).tolist() == [3, 4, 5, 6, 7]
    assert sorted(table.take(3, NO_REF, 0).tolist()) == [0, 1, 2]
    table.check()


def test_growing_keeps_everything() -> None:
    table = RefTable()
    first = table.take(10, NO_REF, 3)
    freed = table.take(2, NO_REF, 4)
    table.give(freed)
    start = table.capacity
    big = table.take(5 * start, int(first[9]), 5)
    assert table.capacity > int(big.max())
    assert table.parent[first].tolist() == [NO_REF, *first[:-1].tolist()]
    assert table.node[first].tolist() == [3] * 10
    table.check()
    assert table.capacity == table.high  # exactly full
    table.take(3, NO_REF, 6)
    table.check()


def test_only_live_refs_pass() -> None:
    table = RefTable()
    run = table.take(3, NO_REF, 0)
    table.give(run[2:])
    table.require_live(run[:2])
    table.require_live(as_refs([]))
    for bad in (2, 3, -1, table.capacity):
        with pytest.raises(MisuseError, match="names no block"):
            table.require_live(as_refs([0, bad]))


def test_reset_forgets_and_keeps_the_capacity() -> None:
    table = RefTable()
    table.take(table.capacity + 1, NO_REF, 0)
    capacity = table.capacity
    table.reset()
    assert len(table) == 0 and table.capacity == capacity
    with pytest.raises(MisuseError):
        table.require_live(as_refs([0]))
    table.check()


def damage_free(table: RefTable) -> None:
    table._free[0] = 0


def damage_parent(table: RefTable) -> None:
    table.parent[0] = 4


def damage_children(table: RefTable) -> None:
    table.children[3] = 1


def damage_length(table: RefTable) -> None:
    table.parent = table.parent[:100]


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [(damage_free, 1), (damage_parent, 2), (damage_children, 3), (damage_length, 4)],
)
def test_check_notices(damage: Callable[[RefTable], None], invariant: int) -> None:
    table = RefTable()
    table.take(4, NO_REF, 0)
    table.give(table.take(2, NO_REF, 0))
    table.check()
    damage(table)
    with pytest.raises(AssertionError, match=f"invariant {invariant}"):
        table.check()
