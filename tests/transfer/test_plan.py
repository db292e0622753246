from __future__ import annotations

import numpy as np
import pytest

from kvstrata.transfer.plan import by_chunk, parts, runs


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_runs_count_up_on_both_sides() -> None:
    assert runs(ids(4, 5, 6, 9, 8), ids(0, 1, 2, 3, 4)) == [(4, 0, 3), (9, 3, 1), (8, 4, 1)]
    assert runs(ids(1, 2, 3), ids(1, 2, 9)) == [(1, 1, 2), (3, 9, 1)]
    assert runs(ids(), ids()) == []


@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("item", [1, 4096, 737280, 100 << 20])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_parts_tile_the_move(n: int, item: int, workers: int) -> None:
    cut = parts(n, item, workers)
    assert [i for part in cut for i in part] == list(range(n))
    assert all(len(part) for part in cut) or (n == 0 and len(cut) == 1)
    assert all(len(part) * item <= 64 << 20 or len(part) == 1 for part in cut)
    if n * item < 1 << 20:
        assert len(cut) == 1


def test_by_chunk_finds_every_position() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        slots = rng.permutation(40)[: rng.integers(0, 40)].astype(np.int64)
        slots = np.sort(slots) if rng.random() < 0.5 else slots
        seen = []
        for chunk, positions in by_chunk(slots, 7):
            assert (slots[positions] // 7 == chunk).all()
            seen += np.arange(len(slots))[positions].tolist()
        assert sorted(seen) == list(range(len(slots)))
    assert list(by_chunk(ids(7, 8, 9), 7)) == [(1, slice(0, 3))]
