"""What a model's KV looks like, and the fingerprint that names it."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import FORMAT_VERSION, Namespace, digest
from kvstrata.core.spec import KVSpec


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one kind of KV and one block table.

    ``layers`` are names in the order of computation; a block of the group holds all of them, one
    after the other, each with its parts one after the other (see ``layout``).
    """

    layers: tuple[str, ...]
    spec: KVSpec

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a KV group needs at least one layer")
        if len(set(self.layers)) != len(self.layers):
            raise ConfigError("a KV group names a layer twice")

    def block_bytes(self) -> int:
        """Bytes of one block of all layers of the group."""
        return len(self.layers) * self.spec.block_bytes()


@dataclass(frozen=True, slots=True)
class KVModel:
    """The KV of one model as one rank holds it.

    ``weights`` is a digest of the weights themselves: a served name is a label and says nothing
    about what the bytes are. ``scales`` names where quantisation scales lie, "" without any.
    All groups must share the block size, since one index serves them all.
    """

    weights: bytes
    groups: tuple[KVGroup, ...]
    tensor_parallel: int = 1
    scales: str = ""
    block_layout: str = "layer-part-token"

    def __post_init__(self) -> None:
        if not isinstance(self.weights, bytes) or len(self.weights) < 16:
            raise ConfigError(
                "KVModel.weights must be a digest of the weights (16 bytes or more), "
                "not a label; see kvstrata.engines.transformers.weights_digest"
            )
        if not self.groups:
            raise ConfigError("a KVModel needs at least one KV group")
        sizes = {group.spec.block_size for group in self.groups}
        if len(sizes) > 1:
            raise ConfigError(f"all KV groups must share one block size, got {sorted(sizes)}")
        names = [name for group in self.groups for name in group.layers]
        if len(set(names)) != len(names):
            raise ConfigError("a layer belongs to two KV groups")
        ranks = self.tensor_parallel
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ConfigError(f"tensor_parallel must be a whole number, 1 or more, got {ranks!r}")

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.groups[0].spec.block_size

    def bytes_per_token(self) -> float:
        """Bytes of KV that one token adds in all groups of this rank."""
        return sum(group.block_bytes() for group in self.groups) / self.block_size

    def namespace(self) -> Namespace:
        """32 bytes that differ as soon as anything differs that the bytes depend on."""
        fields = [
            FORMAT_VERSION.to_bytes(4, "little"),
            self.weights,
            self.scales.encode(),
            self.block_layout.encode(),
            self.tensor_parallel.to_bytes(4, "little"),
            len(self.groups).to_bytes(4, "little"),
        ]
        for group in self.groups:
            for texts in (group.layers, group.spec.fields()):
                fields.append(len(texts).to_bytes(4, "little"))
                fields.extend(text.encode() for text in texts)
        return Namespace(digest(b"namespace", fields))
