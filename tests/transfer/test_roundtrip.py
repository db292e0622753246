"""Bytes stored = bytes loaded, whatever the layout, the kind and the element type."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import xxhash

from kvstrata.core.dtypes import dtype
from kvstrata.core.errors import LayoutError
from kvstrata.core.layout import LAYOUTS
from kvstrata.core.spec import MLA, FullAttention, SlidingWindow

SPECS = {
    "full": lambda t: FullAttention(4, 2, 8, t),
    "wide-k": lambda t: FullAttention(4, 2, 8, t, head_dim_v=5),
    "window": lambda t: SlidingWindow(4, 1, 6, t, window=9),
    "mla": lambda t: MLA(3, 9, t),
}


@pytest.mark.parametrize("gate", [0, 7])
@pytest.mark.parametrize("element", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_byte_exact(house, layout: str, kind: str, element: str, gate: int) -> None:
    try:
        one = house(SPECS[kind](dtype(element)), layout)
    except LayoutError:
        assert (layout, kind) == ("parts_first", "wide-k")
        return
    rng = random.Random(f"{layout}{kind}{element}")
    blocks, slots = rng.sample(range(16), 9), rng.sample(range(12), 9)
    want = [one.record(block) for block in blocks]
    done = one.do("hbm", "dram", blocks, slots, wants_checksums=True)
    assert done.ok.all() and not done.error
    assert [one.row(slot) for slot in slots] == want
    assert done.checksums.tolist() == [xxhash.xxh3_64_intdigest(record) for record in want]
    one.randomise()
    before = [one.record(block) for block in range(16)]
    back = rng.sample(range(16), 9)
    every = np.ones(9, np.bool_)
    loaded = one.do("dram", "hbm", slots, back, checksums=done.checksums, verify=every, gate=gate)
    assert loaded.ok.all()
    assert [one.record(block) for block in back] == want
    rest = set(range(16)) - set(back)
    assert all(one.record(block) == before[block] for block in rest), "others must be untouched"
    if gate:
        assert all(one.engine.gate(gate, 0).is_open(layer) for layer in range(3))
        one.engine.gate(gate, 0).check()


def test_within_a_tier(house) -> None:
    one = house()
    want = [one.record(block) for block in (3, 1)]
    assert one.do("hbm", "hbm", [3, 1], [8, 9]).ok.all()
    assert [one.record(block) for block in (8, 9)] == want
    one.do("hbm", "dram", [3, 1], [0, 11])
    assert one.do("dram", "dram", [0, 11], [10, 2]).ok.all()
    assert [one.row(slot) for slot in (10, 2)] == want


def test_large_moves_are_cut_and_whole(house, monkeypatch) -> None:
    monkeypatch.setattr("kvstrata.transfer.plan.SPLIT_ABOVE", 1)
    monkeypatch.setattr("kvstrata.transfer.engine.parts", _small_parts)
    one = house(threads=2)
    want = [one.record(block) for block in range(12)]
    assert one.do("hbm", "dram", range(12), range(12)).ok.all()
    one.randomise()
    assert one.do("dram", "hbm", range(12), range(12), gate=1).ok.all()
    assert [one.record(block) for block in range(12)] == want
    assert one.engine.gate(1, 0).is_open(2)


def _small_parts(n: int, item: int, workers: int, most: int = 0) -> list[range]:
    return [range(i, min(i + 2, n)) for i in range(0, n, 2)]


def test_typed_tensors_keep_their_values(house) -> None:
    one = house()
    flat = one.hbm.flat(0)[0].view(torch.float32)
    flat.copy_(torch.arange(len(flat), dtype=torch.float32))
    kept = flat.clone()
    one.do("hbm", "dram", range(12), range(12))
    flat.zero_()
    one.do("dram", "hbm", range(12), range(12))
    assert torch.equal(flat[: 12 * 64], kept[: 12 * 64])
