"""What a Store is put together from: ``assemble`` has the real ones, ``testing`` others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstrata.core.clock import Bell, Clock
from kvstrata.core.layout import PagedLayout
from kvstrata.core.metrics import Metrics
from kvstrata.store.policy.base import Admission
from kvstrata.tiers.base import Tier
from kvstrata.tiers.records import RecordTier
from kvstrata.transfer.move import Executor, ReadyEvent


class EngineMemory(Tier, Protocol):
    """The engine's paged KV, where it is this process's to tell of."""

    def register_all(
        self, tensors: Mapping[int, Sequence[Any]], layouts: Mapping[int, PagedLayout]
    ) -> None:
        """Take the groups' tensors as they are, or raise LayoutError and take none."""
        ...

    def now(self) -> ReadyEvent | None:
        """The point that the caller's current stream has reached; None where there is none."""
        ...


class GrowingTier(Tier, Protocol):
    """DRAM: open before it has all its memory."""

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until it has; False if that takes longer."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Tiers, executor, policies and time.

    ``clock`` is monotonic and times deadlines; ``wall`` is what last uses are remembered by.
    """

    hbm: EngineMemory
    dram: GrowingTier
    nvme: RecordTier | None
    executor: Executor
    admission: Admission
    clock: Clock
    wall: Clock
    bell: Bell
    metrics: Metrics
    attended: bool = True
    """Whether a thread of the Store's own goes on with what has been started."""
