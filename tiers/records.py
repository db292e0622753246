"""What the Store asks of a tier that keeps records on a device: plain calls, no waiting.

``NvmeTier`` is one; ``kvstrata.testing`` has one in memory. All methods but ``reset`` and ``close``
return at once; what they began is reported by ``poll``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstrata.tiers.run import ReadRun, WriteRun, Written


@dataclass(frozen=True, slots=True)
class Recovered:
    """A record that was found at open: readable, of this model and epoch.

    ``record`` is its id, counted from 0 in each group. ``last_use`` is in wall-clock seconds.
    """

    record: int
    group: int
    root: bytes
    depth: int
    parent: bytes
    key: bytes
    symbol: bytes
    last_use: float


@dataclass(frozen=True, slots=True)
class CatalogueDone:
    """A batch of the catalogue is durable, or has failed (``error`` says why)."""

    batch: int
    ok: bool
    error: str = ""


class RecordTier(Protocol):
    """A tier of records. The Store holds its lock when it calls."""

    @property
    def name(self) -> str:
        """What Moves and metrics call it."""
        ...

    @property
    def epoch(self) -> int:
        """Part of every root key; grows at ``reset``."""
        ...

    @property
    def writable(self) -> bool:
        """False while the device takes no more blocks (a fault); reading goes on."""
        ...

    @property
    def deletes_pending(self) -> bool:
        """Whether space will become free without anybody doing anything."""
        ...

    def capacity(self, group: int) -> int:
        """Records of this group that could ever fit."""
        ...

    def recovered(self) -> list[Recovered]:
        """What was there at open."""
        ...

    def place(
        self,
        group: int,
        *,
        root: bytes,
        parent: bytes,
        depth: int,
        keys: Sequence[bytes],
        symbols: Sequence[bytes],
        records: Sequence[int],
        checksums: Sequence[int | None],
    ) -> tuple[WriteRun, ...] | None:
        """Allocate space for consecutive blocks; None, and no change, if there is no room now."""
        ...

    def commit(self, runs: Sequence[WriteRun], written: Sequence[Written | None]) -> int:
        """Record what was written (None: it was not); returns the batch that ``poll`` will
        report."""
        ...

    def abandon(self, runs: Sequence[WriteRun]) -> None:
        """Give back the space of runs that were not written."""
        ...

    def failed(self, error: str) -> None:
        """Hear that the device did not take a write."""
        ...

    def read_runs(self, group: int, records: Sequence[int]) -> tuple[ReadRun, ...]:
        """Where records lie, in the order given, adjacent ones joined."""
        ...

    def delete(self, group: int, records: Sequence[int]) -> int:
        """Forget records that nobody reads; returns the batch. The ids may be used again at
        once."""
        ...

    def touch(self, group: int, records: Sequence[int], now: float) -> None:
        """Remember a use, lazily."""
        ...

    def reclaim(self, nbytes: int) -> bool:
        """Delete records of other models and epochs; True if any are on their way out."""
        ...

    def poll(self) -> list[CatalogueDone]:
        """Batches that have ended since the last call."""
        ...

    def reset(self) -> int:
        """Begin a new epoch, durable when this returns; every record of the old one is gone."""
        ...

    def stats(self) -> dict[str, Any]:
        """Numbers for people."""
        ...

    def check(self) -> None:
        """Raise AssertionError naming an invariant that does not hold."""
        ...

    def close(self) -> None:
        """Commit what is queued and close. Twice is fine."""
        ...
