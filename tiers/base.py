"""What a tier is to the rest of the house: capabilities, found by ``isinstance``.

A tier is ``Addressable`` when its slots are bytes in this process's memory, ``Keyed`` when bytes
are reached through placed runs on a device. A route is a pair of capabilities, never a pair of
names, so a new tier adds one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Tier(Protocol):
    """Something that holds blocks."""

    @property
    def name(self) -> str:
        """``hbm``, ``dram``, ``nvme`` ...: what Moves and metrics call it."""
        ...

    def capacity(self, group: int) -> int:
        """Slots for blocks of this KV group."""
        ...

    def close(self) -> None:
        """Give everything back; nothing may be in flight. Twice is fine."""
        ...


@runtime_checkable
class Addressable(Protocol):
    """Slots are rows of memory: ``rows(group)[slot]`` is one record."""

    def rows(self, group: int) -> Sequence[Any]:
        """Chunks of the arena: tensors ``[slots in the chunk, padded record bytes]`` of uint8."""
        ...


@runtime_checkable
class Keyed(Protocol):
    """Bytes lie in runs on a device; see ``kvstrata.tiers.run``."""

    @property
    def directory(self) -> str:
        """Where the extents are."""
        ...
