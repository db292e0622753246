"""Hugging Face Transformers: `generate()` and plain forward on a KV cache that kvstrata keeps.

    from kvstrata.engines.transformers import KVStrata

    with KVStrata(model, StoreConfig.from_dict({"nvme": {"path": "/var/cache/kv"}})) as kv:
        output = kv.generate(input_ids, max_new_tokens=64)      # the prefix comes from the store

The names below are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstrata.engines.transformers.cache import PagedCache, PagedLayer
    from kvstrata.engines.transformers.face import KVStrata
    from kvstrata.engines.transformers.identity import weights_digest
    from kvstrata.engines.transformers.model import kv_model
    from kvstrata.engines.transformers.pool import KVPool
    from kvstrata.engines.transformers.sequence import PagedSequence

_HOME = {
    "KVPool": "pool",
    "KVStrata": "face",
    "PagedCache": "cache",
    "PagedLayer": "cache",
    "PagedSequence": "sequence",
    "kv_model": "model",
    "weights_digest": "identity",
}

__all__ = [
    "KVPool",
    "KVStrata",
    "PagedCache",
    "PagedLayer",
    "PagedSequence",
    "kv_model",
    "weights_digest",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
