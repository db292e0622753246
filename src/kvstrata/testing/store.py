"""A real Store over memory: no files, no threads, every step in the test's hands."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.core.clock import Bell
from kvstrata.core.config import StoreConfig
from kvstrata.core.metrics import Metrics
from kvstrata.core.model import KVModel
from kvstrata.store.parts import Parts
from kvstrata.store.placement import Placement, Shelf
from kvstrata.store.policy.admission import AdmitAll
from kvstrata.store.policy.eviction import LRU
from kvstrata.store.store import Store
from kvstrata.testing.memory import ManualExecutor, MemoryDram, MemoryHbm, MemoryRecords


class ManualClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class MemoryStore:
    """A Store and everything under it."""

    store: Store
    hbm: MemoryHbm
    dram: MemoryDram
    records: MemoryRecords | None
    executor: ManualExecutor
    clock: ManualClock


def memory_store(
    model: KVModel,
    *,
    blocks: int = 64,
    dram: int = 16,
    nvme: int = 0,
    write: str = "through",
    auto: bool = True,
    held: bool = False,
    cache_hbm: bool = False,
    verify_one_in: int = 1,
    queue: int = 1 << 30,
    survived: MemoryRecords | None = None,
) -> MemoryStore:
    """A Store with so many HBM blocks, DRAM slots and NVMe records a group (0: no NVMe tier).

    ``cache_hbm`` lets the Store keep blocks of the pool. ``auto`` False makes Moves wait for
    ``executor.run``; ``held`` True makes the catalogue wait for ``records.settle``. ``survived``
    are the records of an earlier store: a restart.
    """
    clock, bell, metrics = ManualClock(), Bell(), Metrics()
    groups = range(len(model.groups))
    hbm, ram = MemoryHbm(model, blocks), MemoryDram(model, dram)
    records = MemoryRecords(model, nvme, held=held, survived=survived) if nvme else None
    if records is not None:
        records.bell = bell
    executor = ManualExecutor(hbm, ram, records, auto=auto)
    config = StoreConfig.from_dict(
        {
            "nvme": {"write": write},
            "dram": {"verify_one_in": verify_one_in},
            "transfer": {"queue": queue},
        }
    )
    below = Shelf("nvme", [nvme for _ in groups], LRU()) if nvme else None
    above = Shelf("hbm", [blocks for _ in groups], LRU()) if cache_hbm else None
    placement = Placement(model, Shelf("dram", [dram for _ in groups], LRU()), below, above)
    parts = Parts(
        hbm=hbm,
        dram=ram,
        nvme=records,
        executor=executor,
        admission=AdmitAll(),
        clock=clock,
        wall=clock,
        bell=bell,
        metrics=metrics,
        attended=False,
    )
    store = Store(config, model, placement, parts)
    return MemoryStore(store, hbm, ram, records, executor, clock)
