"""Where each layer's bytes lie: in a stored record, and in an engine's paged tensors.

A record is what one block of one group looks like in every tier below HBM: layer after layer, part
after part (K then V), tightly packed. An engine's tensors may lie in any other way; a ``Segment``
says where one piece of every block lies there, so a copy is a list of (segment, block ids) and
nobody but this file knows layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.core.errors import LayoutError
from kvstrata.core.model import KVGroup, KVModel

PAGE = 4096
"""Unit of DRAM slots and NVMe extents, in bytes."""


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of every block: ``nbytes`` at ``base + block_id * stride`` of one tensor.

    ``tensor`` numbers the engine's tensors of the group in the order they were registered;
    ``layer`` is the layer that the piece belongs to (the gate it opens); ``offset`` is where it
    lies in the record. All in bytes.
    """

    tensor: int
    layer: int
    base: int
    stride: int
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """How one group's KV lies in the engine's tensors.

    Invariant: the segments, ordered by offset, tile the record ``[0, record_bytes)`` exactly.
    """

    num_blocks: int
    record_bytes: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        end = 0
        for segment in self.segments:
            if segment.offset != end:
                raise LayoutError(
                    f"segments leave a gap or overlap at byte {end} of the record; "
                    "describe every part of every layer once, in order"
                )
            end += segment.nbytes
        if end != self.record_bytes:
            raise LayoutError(f"segments hold {end} bytes of a record of {self.record_bytes}")


def part_per_tensor(group: KVGroup, num_blocks: int) -> PagedLayout:
    """One tensor a layer and part, ``[num_blocks, part bytes]``: K and V apart (Transformers
    pool)."""
    segments: list[Segment] = []
    offset = tensor = 0
    for layer in range(len(group.layers)):
        for nbytes in group.spec.parts:
            segments.append(Segment(tensor, layer, 0, nbytes, nbytes, offset))
            offset += nbytes
            tensor += 1
    return PagedLayout(num_blocks, offset, tuple(segments))


def parts_first(group: KVGroup, num_blocks: int) -> PagedLayout:
    """One tensor a layer, ``[parts, num_blocks, part bytes]`` (FlashAttention's ``[2, blocks,
    ...]``).

    Raises LayoutError where the parts differ in size: such a tensor cannot exist.
    """
    if len(set(group.spec.parts)) != 1:
        raise LayoutError("K and V differ in width: register them as one tensor a part")
    segments: list[Segment] = []
    offset = 0
    for layer in range(len(group.layers)):
        for index, nbytes in enumerate(group.spec.parts):
            base = index * num_blocks * nbytes
            segments.append(Segment(layer, layer, base, nbytes, nbytes, offset))
            offset += nbytes
    return PagedLayout(num_blocks, offset, tuple(segments))


def blocks_first(group: KVGroup, num_blocks: int) -> PagedLayout:
    """One tensor a layer, ``[num_blocks, block bytes]``: K and V of a block side by side, or a
    latent."""
    nbytes = group.spec.block_bytes()
    segments = [
        Segment(layer, layer, 0, nbytes, nbytes, layer * nbytes)
        for layer in range(len(group.layers))
    ]
    return PagedLayout(num_blocks, len(segments) * nbytes, tuple(segments))


def packed(group: KVGroup, num_blocks: int) -> PagedLayout:
    """One tensor for all layers, ``[num_blocks, record bytes]``: block-outermost, the fastest to
    move."""
    nbytes = group.spec.block_bytes()
    record = group.block_bytes()
    segments = [
        Segment(0, layer, layer * nbytes, record, nbytes, layer * nbytes)
        for layer in range(len(group.layers))
    ]
    return PagedLayout(num_blocks, record, tuple(segments))


LAYOUTS = {
    "part_per_tensor": part_per_tensor,
    "parts_first": parts_first,
    "blocks_first": blocks_first,
    "packed": packed,
}


def layouts_of(
    model: KVModel, tensors: Mapping[int, Sequence[Any]], layout: str | Mapping[int, PagedLayout]
) -> dict[int, PagedLayout]:
    """The layout of each group's tensors; a name counts the blocks from what the tensors hold.

    ``tensors`` have ``nbytes`` and ``shape``. Raises LayoutError for groups and names that do not
    exist, and for shapes that do not begin as the layout says.
    """
    if not isinstance(tensors, Mapping):
        raise LayoutError("kv_tensors must map each KV group to the list of its tensors")
    for group, listed in tensors.items():
        if not isinstance(listed, Sequence) or not all(hasattr(t, "nbytes") for t in listed):
            raise LayoutError(f"kv_tensors of group {group!r} must be a list of tensors")
        if group not in range(len(model.groups)):
            raise LayoutError(f"the KVModel has no group {group!r}: 0...{len(model.groups) - 1}")
    if not isinstance(layout, str):
        if set(layout) != set(tensors):
            raise LayoutError(f"layouts for groups {set(layout)}, tensors for {set(tensors)}")
        return dict(layout)
    if layout not in LAYOUTS:
        raise LayoutError(f"unknown layout {layout!r}: use one of {', '.join(LAYOUTS)}")
    found = {}
    for group, listed in tensors.items():
        what = model.groups[group]
        blocks, rest = divmod(sum(int(t.nbytes) for t in listed), what.block_bytes())
        if rest or not blocks:
            raise LayoutError(
                f"the tensors of group {group} are not whole blocks of {what.block_bytes()} bytes: "
                "check layer count, KV heads, head size, element type and block size"
            )
        found[group] = LAYOUTS[layout](what, blocks)
        lead = (len(what.spec.parts), blocks) if layout == "parts_first" else (blocks,)
        for index, tensor in enumerate(listed):
            # Bytes alone would fit many a wrong shape, and a load would then hit other blocks.
            if tuple(tensor.shape[: len(lead)]) != lead:
                raise LayoutError(
                    f"tensor {index} of group {group} has shape {tuple(tensor.shape)} where "
                    f"{layout!r} of this KVModel begins with {lead}"
                )
    return found


def check_tensors(layout: PagedLayout, sizes: Sequence[int]) -> None:
    """Raise LayoutError unless every segment of every block lies inside tensors of so many
    bytes."""
    needed: dict[int, int] = {}
    for segment in layout.segments:
        end = segment.base + (layout.num_blocks - 1) * segment.stride + segment.nbytes
        needed[segment.tensor] = max(needed.get(segment.tensor, 0), end)
    if len(needed) != len(sizes):
        raise LayoutError(f"the KVModel needs {len(needed)} tensors, {len(sizes)} were registered")
    for tensor, end in needed.items():
        if sizes[tensor] != end:
            raise LayoutError(
                f"tensor {tensor} has {sizes[tensor]} bytes where the KVModel needs {end}: "
                "check layer count, KV heads, head size, element type and block size"
            )
