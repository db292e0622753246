"""Which model computed this KV: a digest of its weights and of the settings that shape them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch
from torch import Tensor, nn

from kvstrata.core.errors import MisuseError

# Labels and habits: two models that differ in nothing else compute the same KV. The element type
# is read from the tensors themselves, since the configuration keeps the one of the file.
_LABELS = frozenset(
    {"_name_or_path", "architectures", "transformers_version", "use_cache", "dtype", "torch_dtype"}
)


def weights_digest(model: nn.Module) -> bytes:
    """32 bytes that change with any weight, buffer or setting of a Transformers model.

    sha256 over name, type, shape and bytes of every parameter and buffer, tied ones once, and over
    the configuration (a rotary base or a window is no weight, and decides the KV all the same). The
    bytes are hashed where they lie, on all CPUs; those on a device are copied to the host one
    tensor at a time. Does not mutate. MisuseError for weights that are not loaded.
    """
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as workers:
        parts = list(workers.map(_part, _tensors(model)))
    total = hashlib.sha256(b"kvstrata/weights")
    for part in (*sorted(parts), _settings(model)):
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # Both iterators leave out what they have shown already, so tied weights come once.
    return chain(model.named_parameters(), model.named_buffers())


def _part(named: tuple[str, Tensor]) -> bytes:
    name, tensor = named
    if tensor.is_meta:
        raise MisuseError(
            f"the weight {name} is not loaded: load the model before opening kvstrata"
        )
    what = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return what + hashlib.sha256(flat.numpy().data).digest()


def _settings(model: nn.Module) -> bytes:
    config = getattr(model, "config", None)
    tree = config.to_dict() if config is not None else {}
    kept = {key: value for key, value in tree.items() if key not in _LABELS}
    return json.dumps(kept, sort_keys=True, default=_plain).encode()


def _plain(value: object) -> object:
    # The order of a set depends on PYTHONHASHSEED, and an identity may not.
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
