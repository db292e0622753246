from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstrata.core.dtypes import dtype
from kvstrata.core.errors import LayoutError
from kvstrata.core.layout import LAYOUTS
from kvstrata.core.model import KVGroup
from kvstrata.core.spec import MLA, FullAttention
from kvstrata.kernels import host, paged, reference
from kvstrata.kernels.pages import Pages


@pytest.mark.parametrize("start", range(0, 400, 100))
@pytest.mark.parametrize("threshold", [0, host.INDEXED_BELOW])
def test_equals_the_reference(random_case, same, monkeypatch, start, threshold) -> None:
    # Threshold 0: never the indexed path, so both are held against the oracle.
    monkeypatch.setattr(host, "INDEXED_BELOW", threshold)
    monkeypatch.setattr(host, "STEP", 3000)
    for seed in range(start, start + 100):
        case = random_case(seed)
        ids = torch.from_numpy(case.blocks), torch.from_numpy(case.rows)
        paged.gather(case.pages, case.blocks, case.packed, case.rows, case.layer)
        reference.gather(case.twin, ids[0], case.packed_twin, ids[1], case.layer)
        assert same(case), f"gather, seed {seed}"
        case.packed.copy_(torch.randint(0, 256, case.packed.shape))
        case.packed_twin.copy_(case.packed)
        paged.scatter(case.pages, case.blocks, case.packed, case.rows, case.layer)
        reference.scatter(case.twin, ids[0], case.packed_twin, ids[1], case.layer)
        assert same(case), f"scatter, seed {seed}"


def test_duplicate_and_copy_rows(random_case) -> None:
    for seed in range(60):
        case = random_case(seed)
        half = case.pages.layout.num_blocks // 2
        ids = np.random.default_rng(seed).permutation(case.pages.layout.num_blocks)
        source, target = ids[:half], ids[half : 2 * half]
        host.duplicate(case.pages, source, target)
        for segment in case.pages.layout.segments:
            want = case.twin.view(segment).clone()
            want[target] = want[source]
            assert torch.equal(case.pages.view(segment), want)
        other = torch.zeros_like(case.packed)
        host.copy_rows(other, case.rows, case.packed, case.rows[::-1].copy())
        assert torch.equal(other[case.rows], case.packed[case.rows[::-1].copy()])


def _pages(name: str, group: KVGroup, blocks: int, slab: bool) -> Pages:
    layout = LAYOUTS[name](group, blocks)
    sizes: dict[int, int] = {}
    for s in layout.segments:
        end = s.base + (blocks - 1) * s.stride + s.nbytes
        sizes[s.tensor] = max(sizes.get(s.tensor, 0), end)
    if slab:
        memory = torch.zeros(sum(sizes.values()), dtype=torch.uint8)
        return Pages(torch.split(memory, list(sizes.values())), layout)
    return Pages([torch.zeros(n, dtype=torch.uint8) for n in sizes.values()], layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_steps_are_one_band(name: str) -> None:
    group = KVGroup(tuple("abcdef"), FullAttention(16, 2, 64, dtype("bf16")))
    bands = host.bands(_pages(name, group, 8, slab=True))
    assert len(bands) == 1
    assert sum(band.count * band.nbytes for band, _ in bands) == group.block_bytes()


def test_parts_of_two_widths_are_two_bands() -> None:
    group = KVGroup(tuple("abcdef"), FullAttention(16, 2, 64, dtype("bf16"), head_dim_v=32))
    assert len(host.bands(_pages("part_per_tensor", group, 8, slab=True))) == 2


def test_a_layer_is_a_band_too() -> None:
    group = KVGroup(tuple("abc"), MLA(16, 576, dtype("bf16")))
    pages = _pages("packed", group, 8, slab=True)
    assert [band.offset for layer in pages.layers for band, _ in host.bands(pages, layer)] == [
        layer * group.spec.block_bytes() for layer in range(3)
    ]


def test_refuses_what_does_not_fit() -> None:
    group = KVGroup(("a",), MLA(16, 64, dtype("bf16")))
    pages = _pages("packed", group, 4, slab=True)
    ids = np.zeros(1, np.int64)
    with pytest.raises(LayoutError, match="do not hold records"):
        paged.gather(pages, ids, torch.zeros(2, 100, dtype=torch.uint8), ids)
    with pytest.raises(LayoutError, match="uint8"):
        paged.scatter(pages, ids, torch.zeros(2, 4096), ids)
    with pytest.raises(LayoutError, match="flat"):
        Pages([torch.zeros(4, 4)], pages.layout)
