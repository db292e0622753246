from __future__ import annotations

import pytest

from kvstrata.core.errors import ClosedError, MisuseError
from kvstrata.tiers.pool import BlockPool
from kvstrata.tiers.table import BlockTable


def test_slot_is_block_times_size_plus_offset() -> None:
    pool = BlockPool(8)
    pool.allocate(2)
    table = BlockTable(pool, 4)
    table.append(6)
    assert table.blocks.tolist() == [2, 3]
    assert table.slot(5) == 3 * 4 + 1
    assert table.slots(3, 6).tolist() == [11, 12, 13]
    assert table.is_contiguous


def test_copy_on_write() -> None:
    pool = BlockPool(4)
    table = BlockTable(pool, 4)
    table.append(6)
    fork = table.fork()
    assert fork.writable(5) == (1, 2)
    assert fork.writable(5) is None
    assert table.writable(5) is None
    assert table.writable(0) == (0, 3)
    assert not table.is_contiguous
    assert sorted([*table.release(), *fork.release()]) == [0, 1, 2, 3]
    assert pool.num_free == 4


def test_a_full_pool_is_an_answer() -> None:
    pool = BlockPool(2)
    table = BlockTable(pool, 4)
    assert table.append(9) is None
    assert table.num_tokens == 0
    assert table.append(8) is not None
    fork = table.fork()
    with pytest.raises(MisuseError, match="no free block"):
        fork.writable(0)
    fork.check()
    assert fork.blocks.tolist() == table.blocks.tolist()


def test_adopt_wants_exactly_the_blocks() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(2)
    assert ids is not None
    with pytest.raises(MisuseError):
        BlockTable.adopt(pool, 4, ids.tolist(), 9)
    table = BlockTable.adopt(pool, 4, ids.tolist(), 7)
    table.release()
    with pytest.raises(ClosedError):
        table.append(1)
    assert pool.num_free == 4
