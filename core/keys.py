"""Identity: when are two blocks the same (design: one hash chain per domain).

``namespace`` names the model and the shape of its KV; ``root_key`` starts a chain for one salt, one
LoRA and one epoch; ``block_key`` extends it by one block. All are 32-byte sha256 digests over
domain-tagged, length-prefixed fields, so that no two different field lists encode alike (a LoRA
called like a salt is still a LoRA). They depend on nothing but their arguments: not on the process,
the host or PYTHONHASHSEED. Golden vectors in ``tests/core/test_keys.py`` hold them for good.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes that name a block by its content and everything before it."""
Namespace = NewType("Namespace", bytes)
"""32 bytes that name a model's KV; see ``KVModel.namespace``."""
BlockId = NewType("BlockId", int)
"""A physical block of an engine's paged HBM pool."""
SlotId = NewType("SlotId", int)
"""A place in one tier, for one KV group."""
BlockRef = NewType("BlockRef", int)
"""A block's dense number in the prefix index; see ``RadixIndex``."""

KEY_BYTES = 32
FORMAT_VERSION = 1
"""Version of identity and on-disk format together: a change of either orphans older records."""


def digest(tag: bytes, fields: Iterable[bytes]) -> bytes:
    """sha256 over a tag and fields, each preceded by its length as 8 little-endian bytes."""
    state = hashlib.sha256()
    for field in (b"kvstrata/" + tag, *fields):
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()


def root_key(
    namespace: bytes,
    *,
    salt: bytes = b"",
    lora: bytes | None = None,
    epoch: int = 0,
    hashed: bool = False,
) -> BlockKey:
    """The start of a chain: the 32-byte parent of a sequence's first block.

    ``lora`` is the content id of the adapter, None without one. ``hashed`` tells prefixes given as
    an engine's own hashes from prefixes given as tokens, which share nothing.
    """
    fields = [
        namespace,
        salt,
        b"none" if lora is None else b"lora",
        lora or b"",
        epoch.to_bytes(8, "little"),
        b"hashes" if hashed else b"tokens",
    ]
    return BlockKey(digest(b"root", fields))


_BLOCK_TAG = len(b"kvstrata/block").to_bytes(8, "little") + b"kvstrata/block"
_KEY_LENGTH = KEY_BYTES.to_bytes(8, "little")


def block_key(parent: bytes, symbol: bytes) -> BlockKey:
    """The key of the block that follows ``parent`` and holds ``symbol``.

    ``symbol`` is the block's int32 little-endian token ids, the digest that stands for them where
    media ids belong to the block, or the engine's own 32-byte hash. Equal to
    ``digest(b"block", [parent, symbol])``, written as one join since it is the hot one.
    """
    encoded = b"".join((_BLOCK_TAG, _KEY_LENGTH, parent, len(symbol).to_bytes(8, "little"), symbol))
    return BlockKey(hashlib.sha256(encoded).digest())
