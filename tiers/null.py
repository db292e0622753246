"""A tier without bytes, for replay: it remembers what each slot should hold and proves it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from kvstrata.core.errors import FingerprintError, LayoutError


class NullTier:
    """Slots that hold a key (a number or bytes) instead of a record.

    A replay moves nothing, so its only proof is that every load finds the key that the Store
    believes to be there: ``load`` raises otherwise, and the run has failed.

    Invariant 1: every remembered slot is inside of the capacity.
    """

    __slots__ = ("_capacity", "_keys", "_name")

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 1:
            raise LayoutError(f"tier {name} needs at least one slot, got {capacity}")
        self._name = name
        self._capacity = capacity
        self._keys: dict[tuple[int, int], Hashable] = {}

    @property
    def name(self) -> str:
        """What Moves call it."""
        return self._name

    def capacity(self, group: int) -> int:
        """Slots; the same for every group."""
        return self._capacity

    def store(self, group: int, slots: Iterable[int], keys: Sequence[Hashable]) -> None:
        """Slot i now holds ``keys[i]``. Raises LayoutError for a slot outside of the tier."""
        for slot, key in zip(slots, keys, strict=True):
            if not 0 <= slot < self._capacity:
                raise LayoutError(
                    f"slot {slot} is outside of tier {self._name} of {self._capacity} slots"
                )
            self._keys[group, int(slot)] = key

    def load(self, group: int, slots: Iterable[int], keys: Sequence[Hashable]) -> None:
        """Raise FingerprintError unless slot i holds ``keys[i]``."""
        for slot, key in zip(slots, keys, strict=True):
            found = self._keys.get((group, int(slot)))
            if found != key:
                raise FingerprintError(
                    f"slot {slot} of tier {self._name}, group {group}, holds {found!r}, not {key!r}"
                )

    def keys(self, group: int, slots: Iterable[int]) -> list[Hashable]:
        """What the slots hold, None where nothing has been stored: what a copy carries on."""
        return [self._keys.get((group, int(slot))) for slot in slots]

    def check(self) -> None:
        """Raise AssertionError unless the numbered invariant holds."""
        assert all(0 <= slot < self._capacity for _, slot in self._keys), "1: slot out of range"

    def close(self) -> None:
        """Forget everything. Twice is fine."""
        self._keys.clear()
