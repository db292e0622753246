"""What KV a Transformers model has: we ask the model, by one token, and describe what it stored."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstrata.core.dtypes import dtype
from kvstrata.core.errors import MisuseError
from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import FullAttention, SlidingWindow
from kvstrata.engines.transformers.identity import weights_digest

_CHUNKED = "chunked_attention"


def kv_model(model: Any, block_size: int = 16, weights: bytes | None = None) -> KVModel:
    """The KVModel of a Transformers model: one group per kind of layer, in order of appearance.

    Runs one token through the model, since only the model knows what its layers put into a cache:
    heads and widths that the configuration hides, latents instead of keys, a window on some layers.
    ``block_size`` is in tokens. ``weights`` (32 bytes) replaces ``weights_digest(model)``, which
    reads every weight. Layer n is called ``layers.n``. MisuseError for a model whose cache is not
    made of keys and values: state-space layers, chunked attention, shared KV.
    """
    specs = [_spec(layer, index, block_size) for index, layer in enumerate(_probe(model))]
    names: dict[FullAttention, list[str]] = {}
    for index, spec in enumerate(specs):
        names.setdefault(spec, []).append(f"layers.{index}")
    groups = tuple(KVGroup(tuple(layers), spec) for spec, layers in names.items())
    return KVModel(weights if weights is not None else weights_digest(model), groups)


def cache_keyword(model: Any) -> str:
    """What this model's ``forward`` and ``generate`` call the cache; it was renamed in 5.x."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _probe(model: Any) -> list[Any]:
    config = model.config.get_text_config(decoder=True)
    if _CHUNKED in (getattr(config, "layer_types", None) or ()):
        raise MisuseError("chunked attention is not supported: use this model without kvstrata")
    cache = DynamicCache(config=config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, use_cache=True, **{cache_keyword(model): cache})
    return list(cache.layers)


def _spec(layer: Any, index: int, block_size: int) -> FullAttention:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.keys is None:
        raise MisuseError(
            f"layer {index} keeps a {type(layer).__name__} instead of keys and values of its own, "
            "which is not supported: use this model without kvstrata"
        )
    _, heads, _, key_dim = layer.keys.shape
    value_dim = layer.values.shape[-1]
    if layer.values.shape[1] != heads or layer.values.dtype != layer.keys.dtype:
        raise MisuseError(f"layer {index}: keys and values differ in heads or type: not supported")
    kind = dtype(layer.keys.dtype)
    wide = None if value_dim == key_dim else value_dim
    if isinstance(layer, DynamicSlidingWindowLayer):
        return SlidingWindow(block_size, heads, key_dim, kind, wide, window=layer.sliding_window)
    return FullAttention(block_size, heads, key_dim, kind, wide)
