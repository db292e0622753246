"""Small KVModels for tests."""

from __future__ import annotations

from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import MLA, FullAttention, KVSpec, SlidingWindow, dtype


def tiny_model(block_size: int = 4, layers: int = 2, label: bytes = b"tiny") -> KVModel:
    """One group of full attention: 2 heads of 4 float32, ``layers`` layers."""
    spec = FullAttention(block_size, 2, 4, dtype("float32"))
    return KVModel(label.ljust(16, b"."), (_group(spec, "full", layers),))


def hybrid_model(block_size: int = 4, window: int = 6, layers: int = 2) -> KVModel:
    """Full attention, a sliding window and a latent, in three groups."""
    f32, bf16 = dtype("float32"), dtype("bfloat16")
    specs: list[tuple[str, KVSpec]] = [
        ("full", FullAttention(block_size, 2, 4, f32)),
        ("window", SlidingWindow(block_size, 1, 8, bf16, window=window)),
        ("latent", MLA(block_size, 12, bf16)),
    ]
    return KVModel(b"hybrid".ljust(16, b"."), tuple(_group(s, n, layers) for n, s in specs))


def _group(spec: KVSpec, name: str, layers: int) -> KVGroup:
    return KVGroup(tuple(f"{name}.{i}" for i in range(layers)), spec)
