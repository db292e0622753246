"""The HBM tier: an engine's own paged KV tensors, or a pool that kvstrata allocates.

It holds bytes and knows where they lie. Which block belongs to whom is the engine's business or
BlockPool's; when bytes may be touched is the transfer engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.core.errors import LayoutError, MisuseError
from kvstrata.core.layout import PAGE, PagedLayout, check_tensors, padded, part_per_tensor
from kvstrata.core.model import KVGroup, KVModel


@dataclass(frozen=True, slots=True)
class _Group:
    tensors: tuple[torch.Tensor, ...]
    flat: tuple[torch.Tensor, ...]
    layout: PagedLayout


class HbmTier:
    """Paged KV tensors of every KV group on one device; the host stands in where there is no GPU.

    With a ``model``, tensors are checked against it too: bytes a block, and element type.

    Invariants (``check`` tests them by these numbers):

    1. Every segment of every block of every group lies inside of its tensor.
    2. All tensors are contiguous and on the tier's device.
    """

    __slots__ = ("_groups", "_model", "device")

    def __init__(self, device: torch.device | str, model: KVModel | None = None) -> None:
        self.device = _full(torch.device(device))
        self._model = model
        self._groups: dict[int, _Group] = {}

    @classmethod
    def allocate(cls, model: KVModel, num_blocks: int, device: torch.device | str) -> HbmTier:
        """A tier with tensors of its own, uint8 ``[num_blocks, part bytes]`` a layer and part.

        All tensors of a group are cut from one slab at equal steps, which lets a copy take all
        layers of a block at once. They read as zeros; on the host a page costs nothing until it is
        written to. Raises LayoutError where ``num_blocks`` is not positive.
        """
        if num_blocks < 1:
            raise LayoutError(f"a pool needs at least one block, got {num_blocks}")
        tier = cls(device, model)
        for number, group in enumerate(model.groups):
            parts = group.spec.parts
            step = padded(num_blocks * max(parts))
            slab = _zeros(step * len(parts) * len(group.layers), tier.device)
            tensors = [
                slab[index * step :][: num_blocks * nbytes].view(num_blocks, nbytes)
                for index, nbytes in enumerate(parts * len(group.layers))
            ]
            tier.register(number, tensors, part_per_tensor(group, num_blocks))
        return tier

    @property
    def name(self) -> str:
        """``hbm``."""
        return "hbm"

    def register(self, group: int, tensors: Sequence[torch.Tensor], layout: PagedLayout) -> None:
        """Take the group's tensors as they are (no copy), in the order of the layout's numbers.

        Raises LayoutError in one line where they contradict the layout or the model, are not
        contiguous, or are on another device; MisuseError where the group has tensors already.
        """
        if group in self._groups:
            raise MisuseError(f"KV group {group} has been registered already")
        for index, tensor in enumerate(tensors):
            if tensor.device != self.device:
                raise LayoutError(f"tensor {index} is on {tensor.device}, not on {self.device}")
            if not tensor.is_contiguous():
                raise LayoutError(f"tensor {index} is not contiguous; register its storage instead")
        if self._model is not None:
            _agrees(self._model, group, tensors, layout)
        check_tensors(layout, [tensor.numel() * tensor.element_size() for tensor in tensors])
        flat = tuple(tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors)
        self._groups[group] = _Group(tuple(tensors), flat, layout)

    def register_all(
        self, tensors: Mapping[int, Sequence[torch.Tensor]], layouts: Mapping[int, PagedLayout]
    ) -> None:
        """``register`` several groups, or none of them where one is refused."""
        before = dict(self._groups)
        try:
            for group, layout in layouts.items():
                self.register(group, tensors[group], layout)
        except BaseException:
            self._groups = before
            raise

    def now(self) -> torch.cuda.Event | None:
        """An event behind all that the caller's current stream has queued; None on the host."""
        if self.device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups that have tensors."""
        return tuple(sorted(self._groups))

    def capacity(self, group: int) -> int:
        """Blocks of the group."""
        return self._of(group).layout.num_blocks

    def layout(self, group: int) -> PagedLayout:
        """Where the group's pieces lie."""
        return self._of(group).layout

    def tensors(self, group: int) -> tuple[torch.Tensor, ...]:
        """The tensors as they were registered; shared memory."""
        return self._of(group).tensors

    def flat(self, group: int) -> tuple[torch.Tensor, ...]:
        """The same memory as 1-D uint8 tensors."""
        return self._of(group).flat

    def views(self, group: int) -> tuple[torch.Tensor, ...]:
        """For each segment uint8 ``[num_blocks, nbytes]``, strided; shared memory."""
        held = self._of(group)
        blocks = held.layout.num_blocks
        return tuple(
            # as_strided counts from the start of the storage, not of the tensor.
            flat.as_strided((blocks, s.nbytes), (s.stride, 1), int(flat.storage_offset()) + s.base)
            for s in held.layout.segments
            for flat in (held.flat[s.tensor],)
        )

    def check_ids(self, group: int, ids: NDArray[np.int64]) -> None:
        """Raise LayoutError unless every block id is in range."""
        capacity = self.capacity(group)
        outside = ids[(ids < 0) | (ids >= capacity)]
        if len(outside):
            raise LayoutError(
                f"block id {outside[0]} of group {group} is outside of {capacity} blocks"
            )

    def check(self) -> None:
        """Raise AssertionError unless the numbered invariants hold."""
        for held in self._groups.values():
            for s in held.layout.segments:
                end = s.base + (held.layout.num_blocks - 1) * s.stride + s.nbytes
                assert end <= held.flat[s.tensor].numel(), "1: a segment sticks out"
            assert all(t.is_contiguous() for t in held.tensors), "2: not contiguous"
            assert all(t.device == self.device for t in held.tensors), "2: another device"

    def close(self) -> None:
        """Let go of the tensors. Twice is fine."""
        self._groups.clear()

    def _of(self, group: int) -> _Group:
        held = self._groups.get(group)
        if held is None:
            raise MisuseError(f"KV group {group} has no tensors; register them first")
        return held


def _agrees(
    model: KVModel, number: int, tensors: Sequence[torch.Tensor], layout: PagedLayout
) -> None:
    if not 0 <= number < len(model.groups):
        raise LayoutError(f"the KVModel has {len(model.groups)} groups, none of number {number}")
    group: KVGroup = model.groups[number]
    if layout.record_bytes != group.block_bytes():
        raise LayoutError(
            f"the layout holds {layout.record_bytes} bytes a block where the KVModel has "
            f"{group.block_bytes()}: check layer count, KV heads, head size and block size"
        )
    dtype = getattr(group.spec, "dtype", None)
    for index, tensor in enumerate(tensors):
        found = str(tensor.dtype).removeprefix("torch.")
        # Bytes are opaque and always welcome; two types of one width would exchange nonsense.
        if dtype is not None and found not in (dtype.name, "uint8", "int8"):
            raise LayoutError(f"tensor {index} is {found} where the KVModel has {dtype.name}")


def _full(device: torch.device) -> torch.device:
    """With its number, so that ``cuda`` and ``cuda:0`` compare equal."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    # numpy asks calloc, which hands out pages that the kernel zeroes when they are first written
    # to; torch.zeros would write all of them now.
    memory = np.zeros(nbytes + PAGE, np.uint8)
    skip = -memory.ctypes.data % PAGE
    return torch.from_numpy(memory[skip : skip + nbytes])
