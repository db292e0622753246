"""What a Store is put together from: ``assemble`` has the real ones, ``testing`` others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstrata.core.clock import Bell, Clock
from kvstrata.core.layout import PagedLayout
from kvstrata.core.metrics import Metrics
from kvstrata.store.policy.base import Admission
from kvstrata.tiers.base import Tier
from kvstrata.tiers.records import RecordTier
from kvstrata.transfer.move import Executor


class EngineMemory(Tier, Protocol):
    """The engine's paged KV, where it is this process's to tell of."""

    def register(self, group: int, tensors: Sequence[Any], layout: PagedLayout) -> None:
        """Take one group's tensors as they are."""
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
