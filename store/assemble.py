"""Putting a Store together from configuration."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvstrata.core.clock import Bell, Clock, monotonic
from kvstrata.core.config import StoreConfig
from kvstrata.core.metrics import Metrics
from kvstrata.core.model import KVModel
from kvstrata.store.parts import Parts
from kvstrata.store.placement import Placement, Shelf
from kvstrata.store.policy.admission import ADMISSION
from kvstrata.store.policy.eviction import EVICTION
from kvstrata.store.store import Store


def open_store(
    config: StoreConfig | str | Path | None,
    model: KVModel,
    device: Any = "cpu",
    *,
    hbm: Any = None,
    cache_in_hbm: bool = False,
    clock: Clock = monotonic,
) -> Store:
    """Open a Store for one model, with an executor in this process.

    ``config`` is a StoreConfig or the path of a TOML file; None takes the defaults (DRAM only).
    ``device`` is where the engine's KV lives (``"cuda:0"``; ``"cpu"`` stands in where there is no
    GPU). ``hbm`` is an HbmTier made before, as ``HbmTier.allocate`` does; else tensors are told
    with ``Store.register``. ``cache_in_hbm`` says that the engine takes part in caching blocks of
    that pool (``Store.keep``); ``hbm.cache = false`` in the configuration overrules it.

    Raises ConfigError for settings that cannot work, StorageError or DirectoryBusyError for an NVMe
    directory that cannot be used; nothing stays open then.
    """
    # Here and not above: deciding needs no torch, and replay assembles a Store without it.
    from kvstrata.tiers.dram import DramTier
    from kvstrata.tiers.hbm import HbmTier
    from kvstrata.transfer.engine import TransferEngine
    from kvstrata.transfer.executor import LocalExecutor

    if config is None:
        config = StoreConfig()
    elif not isinstance(config, StoreConfig):
        config = StoreConfig.from_toml(config)
    bell, metrics = Bell(), Metrics()
    opened: list[Any] = []
    try:
        dram = DramTier(config.dram, model, device)
        opened.append(dram)
        nvme = None
        if config.nvme.path:
            from kvstrata.tiers.nvme.tier import NvmeTier

            nvme = NvmeTier.open(config.nvme, model, bell=bell, metrics=metrics)
            opened.append(nvme)
        hbm = HbmTier(device, model) if hbm is None else hbm
        tiers = {tier.name: tier for tier in (hbm, dram, nvme) if tier is not None}
        engine = TransferEngine(
            tiers,
            device=device,
            threads=config.transfer.threads,
            io_threads=config.nvme.threads,
            bell=bell,
            clock=clock,
        )
        groups = range(len(model.groups))
        eviction = EVICTION[config.policy.eviction]
        below = None
        if nvme is not None:
            below = Shelf("nvme", [nvme.capacity(g) for g in groups], eviction())
        resident = None
        if cache_in_hbm and config.hbm.cache:
            resident = Shelf("hbm", [hbm.capacity(g) for g in groups], eviction())
        above = Shelf("dram", [dram.capacity(g) for g in groups], eviction())
        parts = Parts(
            hbm=hbm,
            dram=dram,
            nvme=nvme,
            executor=LocalExecutor(engine),
            admission=ADMISSION[config.policy.admission](),
            clock=clock,
            wall=time.time,
            bell=bell,
            metrics=metrics,
        )
        return Store(config, model, Placement(model, above, below, resident), parts)
    except BaseException:
        for tier in reversed(opened):
            tier.close()
        raise
