"""Layouts: the segments of a block tile its record, and those of all blocks tile the tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvstrata.core.errors import LayoutError
from kvstrata.core.layout import LAYOUTS, PAGE, PagedLayout, Segment, check_tensors, padded
from kvstrata.core.model import KVGroup
from kvstrata.core.spec import MLA, FullAttention, KVSpec, SlidingWindow, dtype

SPECS: dict[str, KVSpec] = {
    "full": FullAttention(4, 2, 4, dtype("bfloat16")),
    "wide": FullAttention(2, 1, 6, dtype("float32"), head_dim_v=3),
    "odd": FullAttention(3, 1, 3, dtype("int4")),
    "window": SlidingWindow(4, 1, 2, dtype("fp8"), window=6),
    "latent": MLA(2, 5, dtype("float16")),
}


def tensors(name: str, group: KVGroup, num_blocks: int) -> list[int]:
    """Bytes of each tensor that an engine with this layout has, said in another way."""
    spec, layers = group.spec, len(group.layers)
    return {
        "part_per_tensor": [num_blocks * part for part in spec.parts] * layers,
        "parts_first": [num_blocks * sum(spec.parts)] * layers,
        "blocks_first": [num_blocks * sum(spec.parts)] * layers,
        "packed": [num_blocks * sum(spec.parts) * layers],
    }[name]


CASES = [
    (name, kind, layers, blocks)
    for name in LAYOUTS
    for kind in SPECS
    for layers in (1, 3)
    for blocks in (1, 5)
    if (name, kind) != ("parts_first", "wide")
]


@pytest.mark.parametrize("name,kind,layers,blocks", CASES)
def test_every_byte_of_record_and_tensors_is_described_once(
    name: str, kind: str, layers: int, blocks: int
) -> None:
    group = KVGroup(tuple(f"l{i}" for i in range(layers)), SPECS[kind])
    layout = LAYOUTS[name](group, blocks)
    assert layout.num_blocks == blocks and layout.record_bytes == group.block_bytes()

    record = [byte for s in layout.segments for byte in range(s.offset, s.offset + s.nbytes)]
    assert record == list(range(layout.record_bytes))
    per_layer = group.spec.block_bytes()
    for s in layout.segments:
        assert s.layer * per_layer <= s.offset < s.offset + s.nbytes <= (s.layer + 1) * per_layer

    sizes = tensors(name, group, blocks)
    described = Counter(
        (s.tensor, byte)
        for s in layout.segments
        for block in range(blocks)
        for byte in range(s.base + block * s.stride, s.base + block * s.stride + s.nbytes)
    )
    assert set(described) == {(t, byte) for t, size in enumerate(sizes) for byte in range(size)}
    assert set(described.values()) == {1}
    check_tensors(layout, sizes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_come_in_the_order_of_computation(name: str) -> None:
    layout = LAYOUTS[name](KVGroup(("z", "a", "m"), SPECS["full"]), 4)
    order = [s.layer for s in layout.segments]
    assert order == sorted(order) and set(order) == {0, 1, 2}


def test_parts_of_different_size_do_not_fit_into_one_tensor() -> None:
    with pytest.raises(LayoutError, match="K and V differ in width"):
        LAYOUTS["parts_first"](KVGroup(("a",), SPECS["wide"]), 4)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["full", "latent"])
def test_tensors_of_another_model_are_refused(name: str, kind: str) -> None:
    group = KVGroup(("a", "b"), SPECS[kind])
    layout = LAYOUTS[name](group, 5)
    sizes = tensors(name, group, 5)
    for wrong in range(len(sizes)):
        for delta in (-1, 1, sizes[wrong]):
            changed = [size + delta * (at == wrong) for at, size in enumerate(sizes)]
            with pytest.raises(LayoutError, match=f"tensor {wrong} has {changed[wrong]} bytes"):
                check_tensors(layout, changed)
    for count in (len(sizes) - 1, len(sizes) + 1):
        with pytest.raises(LayoutError, match=f"{len(sizes)} tensors, {count} were registered"):
            check_tensors(layout, (sizes * 2)[:count])


TILES = (Segment(0, 0, 0, 8, 8, 0), Segment(1, 0, 0, 4, 4, 8))


def test_tiles_make_a_layout() -> None:
    assert PagedLayout(3, 12, TILES).segments == TILES
    check_tensors(PagedLayout(3, 12, TILES), [24, 12])


@pytest.mark.parametrize(
    "segments,record",
    [
        (TILES[::-1], 12),
        (TILES[1:], 12),
        ((TILES[0], replace(TILES[1], offset=9)), 13),
        ((TILES[0], replace(TILES[1], offset=7)), 11),
        ((TILES[0], TILES[0], TILES[1]), 20),
        (TILES, 11),
        (TILES, 13),
        ((), 1),
    ],
)
def test_a_gap_an_overlap_or_a_wrong_end_is_refused(
    segments: tuple[Segment, ...], record: int
) -> None:
    with pytest.raises(LayoutError) as refused:
        PagedLayout(3, record, segments)
    assert "\n" not in str(refused.value) and "record" in str(refused.value)


def test_slots_are_whole_pages() -> None:
    assert PAGE == 4096
    assert [padded(n) for n in (0, 1, 4095, 4096, 4097, 8192)] == [0, 4096, 4096, 4096, 8192, 8192]
