"""Paged KV as the kernels see it: flat byte tensors, and where the pieces of a block lie."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from kvstrata.core.errors import LayoutError
from kvstrata.core.layout import PagedLayout, Segment


class Pages:
    """One KV group's tensors on one device.

    ``tensors`` are 1-D, uint8 and contiguous, in the order that ``layout`` numbers them. They are
    kept alive, never copied. ``memo`` is where a kernel keeps what it worked out about these very
    addresses, so that it is worked out once and dies with them.
    """

    __slots__ = ("_by_layer", "device", "layout", "memo", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor], layout: PagedLayout) -> None:
        for index, tensor in enumerate(tensors):
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise LayoutError(f"tensor {index} is not a flat contiguous tensor of bytes")
        self.tensors = tuple(tensors)
        self.layout = layout
        self.device: torch.device = tensors[0].device
        self.memo: dict[Hashable, Any] = {}
        self._by_layer: dict[int, tuple[Segment, ...]] = {}
        for segment in layout.segments:
            self._by_layer[segment.layer] = (*self._by_layer.get(segment.layer, ()), segment)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers in the order of computation."""
        return tuple(sorted(self._by_layer))

    def segments(self, layer: int | None = None) -> tuple[Segment, ...]:
        """The pieces of one layer, or of all of them, by their offset in the record."""
        return self.layout.segments if layer is None else self._by_layer[layer]

    def address(self, segment: Segment) -> int:
        """Where the segment's piece of block 0 lies."""
        return int(self.tensors[segment.tensor].data_ptr()) + segment.base

    def view(self, segment: Segment) -> torch.Tensor:
        """The segment of every block: uint8 ``[num_blocks, nbytes]``, strided, sharing memory."""
        tensor = self.tensors[segment.tensor]
        # as_strided counts from the start of the storage, not of the tensor.
        base = int(tensor.storage_offset()) + segment.base
        return tensor.as_strided(
            (self.layout.num_blocks, segment.nbytes), (segment.stride, 1), base
        )
