from __future__ import annotations

import pytest

from kvstrata.core.errors import LayoutError, MisuseError
from kvstrata.tiers.pool import BlockPool


def test_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert pool.allocate(4) is not None
    assert pool.allocate(1) is None


def test_a_growing_sequence_stays_contiguous() -> None:
    pool = BlockPool(16)
    first = pool.allocate(3)
    assert first is not None and first.tolist() == [0, 1, 2]
    more = pool.allocate(2, after=2)
    assert more is not None and more.tolist() == [3, 4]


def test_takes_the_roomiest_run_then_the_fewest_pieces() -> None:
    pool = BlockPool(10)
    pool.allocate(10)
    pool.release([0, 1, 4, 5, 6, 9])
    run = pool.allocate(2)
    assert run is not None and run.tolist() == [4, 5]
    rest = pool.allocate(3)
    assert rest is not None and rest.tolist() == [0, 1, 6]


def test_after_the_last_block_there_is_none() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.release([0])
    got = pool.allocate(1, after=2)
    assert got is not None and got.tolist() == [0]


@pytest.mark.parametrize("ids", [[4], [-1], [0, 99]])
def test_ids_out_of_range(ids: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(LayoutError, match="outside of the pool of 4 blocks"):
        pool.release(ids)
    pool.check()


def test_double_free_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(MisuseError, match="released more often"):
        pool.release([0, 1, 1])
    assert pool.num_free == 2
    assert pool.release([0, 1]).tolist() == [0, 1]
    with pytest.raises(MisuseError, match="nobody holds it"):
        pool.release([0])


def test_sharing() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.share([0])
    assert pool.is_shared(0)
    assert not len(pool.release([0]))
    assert pool.release([0]).tolist() == [0]
