"""kvstrata: hierarchical KV-cache storage and offload for LLM engines.

    store = kvstrata.open_store(config, model)
    prefix = kvstrata.Prefix.from_tokens(tokens)
    with store.lookup(prefix) as hit:
        ticket = store.load(hit, {0: block_ids})

The floors, from the top: cli; bench; engines and testing; store, which decides; transfer, which
moves; tiers, prefix_index and kernels; core, the vocabulary. Imports go down only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvstrata.core.config import StoreConfig
from kvstrata.core.dtypes import dtype
from kvstrata.core.errors import (
    ClosedError,
    ConfigError,
    DeviceLostError,
    DirectoryBusyError,
    FingerprintError,
    KVStrataError,
    LayoutError,
    MisuseError,
    StorageError,
)
from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import MLA, FullAttention, KVSpec, SlidingWindow

if TYPE_CHECKING:
    from kvstrata.prefix_index.prefix import Prefix
    from kvstrata.store.answers import Hit, Match, Polled, Sequence
    from kvstrata.store.assemble import open_store
    from kvstrata.store.store import Store
    from kvstrata.tiers.pool import BlockPool
    from kvstrata.tiers.table import BlockTable
    from kvstrata.transfer.move import Completion, Ticket

__version__ = "0.1.0"

# Loaded at first use, so that `import kvstrata` costs next to nothing.
_LAZY = {
    "BlockPool": "kvstrata.tiers.pool",
    "BlockTable": "kvstrata.tiers.table",
    "Completion": "kvstrata.transfer.move",
    "Hit": "kvstrata.store.answers",
    "Match": "kvstrata.store.answers",
    "Polled": "kvstrata.store.answers",
    "Prefix": "kvstrata.prefix_index.prefix",
    "Sequence": "kvstrata.store.answers",
    "Store": "kvstrata.store.store",
    "Ticket": "kvstrata.transfer.move",
    "open_store": "kvstrata.store.assemble",
}

__all__ = [
    "MLA",
    "BlockPool",
    "BlockTable",
    "ClosedError",
    "Completion",
    "ConfigError",
    "DeviceLostError",
    "DirectoryBusyError",
    "FingerprintError",
    "FullAttention",
    "Hit",
    "KVGroup",
    "KVModel",
    "KVSpec",
    "KVStrataError",
    "LayoutError",
    "Match",
    "MisuseError",
    "Polled",
    "Prefix",
    "Sequence",
    "SlidingWindow",
    "StorageError",
    "Store",
    "StoreConfig",
    "Ticket",
    "__version__",
    "dtype",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
