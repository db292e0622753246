"""The radix tree: what it finds, what it names, and what it lets go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstrata.core.errors import MisuseError
from kvstrata.prefix_index.prefix import Symbols
from kvstrata.prefix_index.radix import RadixIndex
from kvstrata.prefix_index.refs import Refs

ROOT = b"a" * 32
OTHER = b"b" * 32


def run(text: str, root: bytes = ROOT, width: int = 4) -> Symbols:
    """One symbol per character."""
    return Symbols(root, width, b"".join(c.encode() * width for c in text))


def counted(*numbers: int, root: bytes = ROOT) -> Symbols:
    """One 4-byte symbol per number."""
    return Symbols(root, 4, np.array(numbers, "<i4").tobytes())


@pytest.fixture
def index() -> RadixIndex:
    return RadixIndex()


def found(index: RadixIndex, text: str) -> int:
    return len(index.match(run(text)))


def test_what_was_inserted_is_found_as_far_as_it_goes(index: RadixIndex) -> None:
    refs = index.insert(run("abcdef"))
    assert len(index) == 6 and len(set(refs.tolist())) == 6
    assert np.array_equal(index.match(run("abcdef")), refs)
    assert np.array_equal(index.match(run("abcxyz")), refs[:3])
    assert np.array_equal(index.match(run("abcd")), refs[:4])
    assert np.array_equal(index.match(run("abcdefgh")), refs)
    assert found(index, "xabc") == 0 and found(index, "") == 0
    assert len(index.match(run("abc", OTHER))) == 0


def test_match_changes_nothing(index: RadixIndex) -> None:
    index.insert(run("abcdef"))
    before = (len(index._nodes), index._table.high, index._table.node[:6].tolist())
    for text in ("abcdef", "abcx", "abc", "zzz", ""):
        for root in (ROOT, OTHER):
            index.match(run(text, root))
    after = (len(index._nodes), index._table.high, index._table.node[:6].tolist())
    assert before == after and index.width_of(OTHER) is None


def test_the_caller_owns_what_it_gets(index: RadixIndex) -> None:
    kept = index.insert(run("abc")).copy()
    for refs in (
        index.insert(run("abc")),
        index.match(run("abc")),
        index.path(int(kept[2])),
        index.parents(kept),
        index.match(run("")),
    ):
        refs[:] = 99
    assert np.array_equal(index.match(run("abc")), kept)
    index.check()


def test_refs_survive_splits(index: RadixIndex) -> None:
    first = index.insert(run("abcdefgh"))
    for text in ("abcdefgx", "abcx", "ax", "abcdx", "abcdy"):
        assert np.array_equal(index.insert(run(text))[: len(text) - 1], first[: len(text) - 1])
        index.check()
    assert np.array_equal(index.match(run("abcdefgh")), first)
    assert index.children(first).tolist() == [2, 1, 2, 3, 1, 1, 2, 0]
    assert index.parents(first).tolist() == [-1, *first[:-1].tolist()]


def test_what_a_ref_says_of_itself(index: RadixIndex) -> None:
    for text in ("abcdef", "abcxyz", "abcd"):
        index.insert(run(text))
    other = index.insert(run("abz", OTHER, 8))
    refs = index.match(run("abcxyz"))
    for i, ref in enumerate(refs.tolist()):
        assert index.symbol(ref) == "abcxyz"[i].encode() * 4
        assert np.array_equal(index.path(ref), refs[: i + 1])
        assert index.symbols(ref) == run("abcxyz"[: i + 1])
        assert index.root_of(ref) == (ROOT, 4)
    assert index.root_of(int(other[2])) == (OTHER, 8)
    assert index.symbols(int(other[1])) == run("ab", OTHER, 8)


def test_roots_share_nothing_and_have_one_width(index: RadixIndex) -> None:
    here, there = index.insert(run("abc")), index.insert(run("abc", OTHER, 8))
    assert not set(here.tolist()) & set(there.tolist())
    assert (index.width_of(ROOT), index.width_of(OTHER)) == (4, 8)
    calls: list[Callable[[Symbols], Refs]] = [index.match, index.insert]
    for call in calls:
        with pytest.raises(MisuseError, match="not 8"):
            call(run("abc", ROOT, 8))
    index.remove(here)
    assert index.width_of(ROOT) is None
    index.insert(run("abc", ROOT, 8))
    index.check()


@pytest.mark.parametrize(("width", "size"), [(4, 6), (0, 0), (-4, 8), (6, 12)])
def test_symbols_must_be_whole(index: RadixIndex, width: int, size: int) -> None:
    for call in (index.match, index.insert):
        with pytest.raises(MisuseError, match="whole symbols"):
            call(Symbols(ROOT, width, bytes(size)))
    assert index.width_of(ROOT) is None


def test_nothing_inserted_leaves_no_root(index: RadixIndex) -> None:
    assert len(index.insert(run(""))) == 0
    assert index.width_of(ROOT) is None


def test_symbols_are_compared_whole(index: RadixIndex) -> None:
    # Blocks that differ in their last byte only, at widths of both word sizes and none.
    for width in (4, 8, 12, 64):
        root = bytes([width]) * 32
        data = bytes(width) * 2 + bytes(width - 1) + b"\1"
        index.insert(Symbols(root, width, bytes(width) * 5))
        assert len(index.match(Symbols(root, width, data))) == 2
        assert len(index.insert(Symbols(root, width, data))) == 3
        index.check()


def test_extend_goes_on_below_a_block(index: RadixIndex) -> None:
    ab = index.extend(-1, run("ab"))
    cd = index.extend(int(ab[1]), run("cd"))
    assert np.array_equal(index.match(run("abcd")), np.concatenate((ab, cd)))
    assert np.array_equal(index.extend(int(ab[0]), run("bcx"))[:2], [ab[1], cd[0]])
    assert found(index, "abcx") == 4
    middle = index.extend(int(ab[0]), run("y"))
    assert index.parents(middle).tolist() == [ab[0]]
    assert len(index.extend(int(ab[0]), run(""))) == 0
    assert np.array_equal(index.extend(int(ab[0]), run("b")), ab[1:])
    index.check()


def test_extend_refuses_a_parent_that_is_not_there(index: RadixIndex) -> None:
    ab = index.insert(run("ab"))
    index.insert(run("ab", OTHER))
    with pytest.raises(MisuseError, match="another root"):
        index.extend(int(ab[0]), run("c", OTHER))
    with pytest.raises(MisuseError, match="another root"):
        index.extend(int(ab[0]), run("c", b"c" * 32))
    index.remove(ab)
    for dead in (int(ab[1]), 999, -2):
        with pytest.raises(MisuseError, match="names no block"):
            index.extend(dead, run("c", OTHER))
    assert len(index) == 2
    index.check()


def test_remove_takes_leaves_and_cascades_within_what_is_given(index: RadixIndex) -> None:
    trunk = index.insert(run("abcd"))
    branch = index.insert(run("abxy"))[2:]
    assert len(index.remove(trunk[:2])) == 0  # others follow on them
    assert len(index.remove(trunk[[0, 2]])) == 0  # d follows on c
    assert sorted(index.remove(trunk[[3, 1, 0]])) == [trunk[3]]
    assert found(index, "abcd") == 3 and found(index, "abxy") == 4
    index.check()
    gone = index.remove(np.concatenate((trunk[:3], branch)))
    assert sorted(gone) == sorted(np.concatenate((trunk[:3], branch)))
    assert len(index) == 0 and index.width_of(ROOT) is None
    index.check()


def test_removing_twice_in_one_call_is_removing_once(index: RadixIndex) -> None:
    refs = index.insert(run("abcd"))
    assert index.remove([int(refs[3])] * 5).tolist() == [refs[3]]
    assert index.remove([]).tolist() == []
    index.check()


def test_a_leased_block_stays_and_so_does_what_leads_to_it(index: RadixIndex) -> None:
    refs = index.insert(run("abcdef"))
    with index.leases.lease(refs[2:4]):
        assert sorted(index.remove(refs)) == sorted(refs[4:])
        assert found(index, "abcdef") == 4
        index.check()
    assert len(index.remove(refs[:4])) == 4


def test_removed_refs_are_dead_and_come_back_later(index: RadixIndex) -> None:
    refs = index.insert(run("abcd"))
    index.remove(refs[2:])
    for dead in (int(refs[3]), -1, 4, 10**6):
        with pytest.raises(MisuseError, match="names no block"):
            index.remove([int(refs[0]), dead])
        with pytest.raises(MisuseError, match="names no block"):
            index.symbol(dead)
    assert found(index, "ab") == 2
    assert set(index.insert(run("xy", OTHER)).tolist()) == set(refs[2:].tolist())
    index.check()


def test_the_only_child_left_joins_its_parent(index: RadixIndex) -> None:
    refs = index.insert(run("abcdef"))
    for i, text in enumerate(("ax", "abx", "abcx", "abcdx")):
        tail = index.insert(run(text))[-1:]
        assert len(index._nodes) == 3
        index.remove(tail)
        index.check()
        assert len(index._nodes) == 1, i
    assert np.array_equal(index.match(run("abcdef")), refs)


def test_joining_keeps_what_hangs_below(index: RadixIndex) -> None:
    for text in ("abcd", "abcx", "ay"):
        index.insert(run(text))
    index.remove(index.match(run("ay"))[1:])
    index.check()
    assert found(index, "abcd") == 4 and found(index, "abcx") == 4
    assert index.symbols(int(index.match(run("abcx"))[-1])) == run("abcx")


def test_growing_block_by_block_does_not_make_a_node_a_block(index: RadixIndex) -> None:
    numbers = list(range(1000))
    for n in range(1, 1001):
        index.insert(counted(*numbers[:n]))
    assert len(index._nodes) == 1
    ref = int(index.match(counted(*numbers))[-1])
    for n in range(1000, 1100):
        (ref,) = index.extend(ref, counted(n)).tolist()
    assert len(index._nodes) == 1
    assert len(index.match(counted(*range(1100)))) == 1100
    index.check()


def test_one_path_of_a_hundred_thousand_blocks(index: RadixIndex) -> None:
    data = np.arange(100_000 * 16, dtype="<i4").tobytes()
    refs = index.insert(Symbols(ROOT, 64, data))
    assert index.capacity > int(refs.max())
    assert np.array_equal(index.match(Symbols(ROOT, 64, data + bytes(64))), refs)
    assert np.array_equal(index.path(int(refs[-1])), refs)
    assert index.symbol(int(refs[77_777])) == data[77_777 * 64 : 77_778 * 64]
    index.check()
    assert len(index.remove(refs[50_000:])) == 50_000
    assert len(index.match(Symbols(ROOT, 64, data))) == 50_000
    index.check()


def test_a_path_through_ten_thousand_nodes(index: RadixIndex) -> None:
    deep = 10_000
    trunk = counted(*range(1, deep + 1))
    refs = index.insert(trunk)
    for ref in refs.tolist():
        index.extend(ref, counted(0))
    assert len(index._nodes) > deep
    assert np.array_equal(index.match(trunk), refs)
    assert np.array_equal(index.path(int(refs[-1])), refs)
    assert index.symbols(int(refs[-1])) == trunk
    assert index.root_of(int(refs[-1])) == (ROOT, 4)
    index.check()
    assert len(index.remove(np.arange(2 * deep, dtype=np.int32))) == 2 * deep
    assert len(index) == 0
    index.check()


def test_many_siblings(index: RadixIndex) -> None:
    for n in range(1, 300):
        index.insert(counted(0, n, n))
    assert index.children(index.match(counted(0))).tolist() == [299]
    assert all(len(index.match(counted(0, n, n))) == 3 for n in range(1, 300))
    index.check()


def test_reset_is_total(index: RadixIndex) -> None:
    refs = index.insert(run("abc"))
    index.insert(run("abx"))
    old = index.leases.lease(refs)
    capacity = index.capacity
    index.reset()
    assert len(index) == 0 and found(index, "abc") == 0 and index.capacity == capacity
    assert index.leases.total == 0
    with pytest.raises(MisuseError):
        index.remove(refs)
    again = index.insert(run("abc"))
    old.release()
    assert len(index.remove(again)) == 3
    index.check()


def damage_width(index: RadixIndex) -> None:
    index._roots[ROOT]._width = 6


def damage_refs(index: RadixIndex) -> None:
    index._table.node[0] = 1


def damage_edge(index: RadixIndex) -> None:
    node = index._nodes.place(0)[0]
    node.symbols += bytes(4)


def damage_kids(index: RadixIndex) -> None:
    kids = index._roots[ROOT].kids
    kids[b"zzzz"] = kids.pop(b"aaaa")


def damage_parents(index: RadixIndex) -> None:
    index._table.parent[1] = 2
    index._table.children[:4] = [0, 1, 2, 0]


def damage_lease(index: RadixIndex) -> None:
    index.leases.pin(np.array([9], np.int32))


def damage_marks(index: RadixIndex) -> None:
    index._marked[0] = True


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (damage_refs, 1),
        (damage_edge, 2),
        (damage_kids, 3),
        (damage_parents, 4),
        (damage_width, 5),
        (damage_lease, 6),
        (damage_marks, 7),
    ],
)
def test_check_notices(
    index: RadixIndex, damage: Callable[[RadixIndex], None], invariant: int
) -> None:
    index.insert(run("abcd"))
    index.insert(run("xy"))
    index.check()
    damage(index)
    with pytest.raises(AssertionError, match=f"invariant {invariant}"):
        index.check()
