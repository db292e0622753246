"""The small parts: scratch, epochs, the child's frames, the quota, the space of runs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.core.errors import ConfigError
from kvstrata.core.layout import PAGE
from kvstrata.tiers.nvme import epochs, walk
from kvstrata.tiers.nvme.grow import Growth, find, fit
from kvstrata.tiers.nvme.quota import budget
from kvstrata.tiers.nvme.scratch import KEEP, ScratchPool, address
from kvstrata.tiers.nvme.space import RUN_BLOCKS, Space


def test_scratch_is_aligned_reused_and_bounded():
    pool = ScratchPool()
    with pool.lend(5000) as one, pool.lend(5000) as two:
        assert len(one) == len(two) == 5000
        assert address(one) % PAGE == address(two) % PAGE == 0 != address(one) - address(two)
        places = {address(one), address(two)}
    with pool.lend(6000) as again:
        assert address(again) in places
    with pool.lend(KEEP + 1):
        pass
    pool.check()
    assert address(memoryview(b"read-only")) > 0


def test_epochs(tmp_path):
    assert epochs.read(str(tmp_path)) is None
    known = {b"n" * 32: 3, b"m" * 32: 0}
    epochs.write(str(tmp_path), known)
    assert epochs.read(str(tmp_path)) == known
    text = (tmp_path / "EPOCHS").read_bytes()
    for at in range(len(text)):
        bad = bytearray(text)
        bad[at] ^= 1
        (tmp_path / "EPOCHS").write_bytes(bytes(bad))
        assert epochs.read(str(tmp_path)) in (None, known)


@given(st.binary(max_size=200))
def test_frames_of_a_dying_child(data):
    assert walk.parse(data) is None or data.endswith(bytes(8))


def test_frames_must_be_complete():
    whole = walk._FRAME.pack(b"R", 1, 2) + b"kvv" + walk._END.pack(b"E", 1)
    assert walk.parse(whole) == ([], [(b"k", b"vv")])
    for end in range(len(whole)):
        assert walk.parse(whole[:end]) is None
    assert walk.parse(whole + b"x") is None


def test_a_walk_that_cannot_start_is_an_answer(tmp_path, monkeypatch):
    assert walk.walk(str(tmp_path / "nothing")) is None
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert walk.walk(str(tmp_path)) is None


def test_budget(world):
    kv = world.model()
    for quota in (1 << 20, 24 << 20, 1 << 30, 1 << 40):
        share = budget(quota, kv)
        assert share.payload + share.map_size < quota
        assert 0 < share.map_size <= quota
        assert share.payload >= quota * 0.74
    with pytest.raises(ConfigError):
        budget(1000, kv)


def space_of(tmp_path, payload, extent):
    (tmp_path / "extents").mkdir(exist_ok=True)
    files = fit(str(tmp_path), payload)
    return Space(Growth(str(tmp_path), extent, payload, files), extent, files)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_space_never_leaks(tmp_path_factory, seed, dense):
    tmp_path = tmp_path_factory.mktemp("space")
    chance = random.Random(seed)
    space = space_of(tmp_path, 3 << 20, 1 << 20)
    capacity = 4 * PAGE
    live = []
    for _ in range(60):
        runs = space.place(chance.randrange(1, 100), capacity, 64)
        for file, offset, passport, blocks in runs or []:
            if chance.random() < 0.2:
                space.abandon(file, offset)
                continue
            at, kept = offset + passport, []
            for _ in range(blocks):
                size = PAGE * chance.randint(1, 4) if dense else capacity
                if dense or chance.random() < 0.9:
                    kept.append((at, size))
                at += size
            space.fill(file, offset, passport, kept)
            live += [(file, offset, start, size) for start, size in kept]
        chance.shuffle(live)
        for place in live[: len(live) // (2 if runs else 1)]:
            space.release(*place)
        del live[: len(live) // (2 if runs else 1)]
        space.check()
        assert space.live == len(live)
    for place in live:
        space.release(*place)
    assert space.extents.allocated_bytes == 0
    space.close()
    assert sum(find(str(tmp_path)).values()) <= 3 << 20


def test_runs_are_bounded_and_extents_grow_one_at_a_time(tmp_path):
    space = space_of(tmp_path, 8 << 20, 2 << 20)
    runs = space.place(200, 2 * PAGE, 64)
    assert sum(blocks for *_, blocks in runs) == 200
    assert max(blocks for *_, blocks in runs) <= RUN_BLOCKS
    space.close()
    assert 1 <= len(find(str(tmp_path))) <= 2
    for number in find(str(tmp_path)):
        found = (tmp_path / "extents" / f"{number:04d}").stat()
        assert found.st_blocks * 512 >= found.st_size == 2 << 20


def test_fit_makes_holes_real_and_cuts_what_is_too_much(tmp_path):
    (tmp_path / "extents").mkdir()
    for number, size in ((0, 100_000), (1, 0), (3, 1 << 20), (12345, 1 << 20)):
        with (tmp_path / "extents" / f"{number:04d}").open("wb") as file:
            file.truncate(size)
    (tmp_path / "extents" / "03").write_text("not ours")
    kept = fit(str(tmp_path), (1 << 20) + 200_000)
    assert kept[0] == 24 * PAGE and kept[3] == 1 << 20 and 1 not in kept
    assert kept[12345] == (200_000 - 24 * PAGE) // PAGE * PAGE
    assert sum(kept.values()) <= (1 << 20) + 200_000
    for number, size in kept.items():
        found = (tmp_path / "extents" / f"{number:04d}").stat()
        assert found.st_size == size and found.st_blocks * 512 >= size
    assert (tmp_path / "extents" / "03").exists()
