"""Policies: leaf first, hands off what is protected, and the hit rates that LRU must have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstrata.core.config import PolicyConfig
from kvstrata.store.policy.admission import ADMISSION, AdmitAll
from kvstrata.store.policy.base import Eviction
from kvstrata.store.policy.eviction import EVICTION, LRU

TRACE = Path(__file__).resolve().parents[2].parent / "shared/data/conversation_trace.jsonl"
NOTHING = np.zeros(0, np.int32)


def lru(*paths: list[int]) -> LRU:
    """An LRU that has seen these paths."""
    policy = LRU()
    for path in paths:
        use(policy, path, set())
    return policy


def use(policy: Eviction, path: list[int], resident: set[int]) -> None:
    """What the Store does with a path: what is missing comes in, then all of it was used."""
    policy.add([ref for ref in path if ref not in resident])
    policy.touch(path)
    resident.update(path)


def order(policy: Eviction, protected: NDArray[np.int32] = NOTHING) -> list[int]:
    return policy.victims(1_000_000, protected)


def counts(*refs: int, n: int = 40) -> NDArray[np.int32]:
    protected = np.zeros(n, np.int32)
    np.add.at(protected, list(refs), 1)
    return protected


# -- LRU ------------------------------------------------------------------------------------------


def test_the_tail_of_the_oldest_path_goes_first() -> None:
    assert order(lru([1, 2, 3], [4, 5])) == [3, 2, 1, 5, 4]


def test_a_use_makes_the_whole_path_recent() -> None:
    policy = lru([1, 2, 3], [4, 5])
    policy.touch([1, 2])
    assert order(policy) == [3, 5, 4, 2, 1]


def test_a_touch_of_what_is_not_resident_changes_nothing() -> None:
    policy = lru([1, 2])
    policy.touch([7, 8])
    assert order(policy) == [2, 1] and len(policy) == 2


def test_adding_again_is_a_use() -> None:
    policy = lru([1], [2])
    policy.add([1])
    assert order(policy) == [2, 1] and len(policy) == 2


def test_what_left_the_tier_is_forgotten() -> None:
    policy = lru([1, 2, 3])
    policy.remove(iter([2, 99, 2]))
    assert order(policy) == [3, 1] and len(policy) == 2
    policy.clear()
    assert order(policy) == [] and len(policy) == 0


def test_no_more_victims_than_asked_for_and_no_more_than_there_are() -> None:
    policy = lru([1, 2, 3])
    assert [policy.victims(n, NOTHING) for n in (0, 1, 2, 9)] == [[], [3], [3, 2], [3, 2, 1]]
    assert LRU().victims(5, NOTHING) == []


def test_what_is_protected_is_not_a_victim_however_often() -> None:
    policy = lru([1, 2, 3], [4])
    assert order(policy, counts(3, 3, 2)) == [1, 4]
    assert policy.victims(1, counts(3)) == [2]
    assert order(policy, counts(1, 2, 3, 4)) == []


def test_blocks_beyond_the_counts_are_not_protected() -> None:
    assert order(lru([1, 2, 30]), counts(1, 2, n=3)) == [30]


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """A random tree as the path from its root to each block."""
    paths: list[list[int]] = []
    for ref in range(draw(st.integers(1, 24))):
        parent = draw(st.integers(-1, ref - 1))
        paths.append([*(paths[parent] if parent >= 0 else []), ref])
    return paths


@pytest.mark.parametrize("name", EVICTION)
@given(data=st.data())
def test_a_block_never_goes_before_its_resident_children(name: str, data: st.DataObject) -> None:
    paths = data.draw(trees())
    some = st.integers(0, len(paths) - 1)
    policy: Eviction = EVICTION[name]()
    resident: set[int] = set()
    leased: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        use(policy, paths[data.draw(some)], resident)
        if data.draw(st.booleans()):  # a lease holds a path from its head
            leased = set(paths[data.draw(some)]) & resident
        protected = counts(*leased)
        n = data.draw(st.integers(0, 8))
        found = policy.victims(n, protected)
        assert len(found) == len(set(found)) == min(n, len(resident - leased))
        assert set(found) <= resident - leased
        assert policy.victims(n, protected) == found, "victims() does not mutate"
        gone: set[int] = set()
        for ref in found:
            children = {p[-1] for p in paths if len(p) > 1 and p[-2] == ref}
            assert not (children & resident) - gone, f"{ref} went before its children"
            gone.add(ref)
        policy.remove(found)
        resident -= gone
        assert set(policy.victims(99, NOTHING)) == resident


@given(data=st.data())
def test_lru_orders_blocks_by_their_last_use(data: st.DataObject) -> None:
    """Against a dict of times: a path's use comes at one time, its head later than its tail."""
    paths = data.draw(trees())
    policy = LRU()
    last: dict[int, tuple[int, int]] = {}
    for now in range(data.draw(st.integers(1, 12))):
        path = paths[data.draw(st.integers(0, len(paths) - 1))]
        use(policy, path, set(last))
        last.update({ref: (now, -depth) for depth, ref in enumerate(path)})
    assert order(policy) == sorted(last, key=lambda ref: last[ref])


# -- the reference hit rates of contracts.md section 6 ---------------------------------------------


@cache
def requests() -> tuple[list[int], ...]:
    lines = TRACE.read_text(encoding="utf-8").splitlines()
    found = sorted((json.loads(line) for line in lines), key=lambda one: int(one["timestamp"]))
    return tuple(one["hash_ids"] for one in found)


def trimmed(policy: LRU, resident: set[int], capacity: int) -> None:
    victims = policy.victims(max(0, len(resident) - capacity), NOTHING)
    policy.remove(victims)
    resident.difference_update(victims)


def leading(path: list[int], resident: set[int]) -> Iterator[int]:
    for ref in path:
        if ref not in resident:
            return
        yield ref


@pytest.mark.skipif(not TRACE.exists(), reason=f"the public trace is not there: {TRACE}")
@pytest.mark.parametrize(
    "capacity,rate", [(1000, 0.0445), (3000, 0.0653), (10000, 0.2116), (10**9, 0.3664)]
)
def test_lru_has_the_hit_rate_of_the_reference(capacity: int, rate: float) -> None:
    policy = LRU()
    resident: set[int] = set()
    hits = blocks = 0
    for path in requests():
        hits += sum(1 for _ in leading(path, resident))
        blocks += len(path)
        use(policy, path, resident)
        trimmed(policy, resident, capacity)
        assert len(resident) <= capacity
    assert (len(requests()), blocks) == (12_031, 288_500)
    assert round(hits / blocks, 4) == rate


# -- admission, and names -------------------------------------------------------------------------


def test_admit_all_admits_all() -> None:
    assert AdmitAll().admit([3, 1, 2]) == [True] * 3 and AdmitAll().admit([]) == []


def test_every_policy_that_settings_name_is_there() -> None:
    assert PolicyConfig().eviction in EVICTION and PolicyConfig().admission in ADMISSION
