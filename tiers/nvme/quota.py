"""How the quota is shared between the extents and everything else below the directory."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.core.errors import ConfigError
from kvstrata.core.layout import PAGE, padded
from kvstrata.core.model import KVModel
from kvstrata.tiers.nvme import record
from kvstrata.tiers.nvme.passport import passport_bytes

MiB = 1 << 20
LEAST = 256 << 10
"""Smallest share of the catalogue, bytes: LMDB copies pages on write and needs room for it."""
FIXED = 96 << 10
"""Three directories, FORMAT, EPOCHS and CLEAN twice (replaced by rename), two lock files."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Shares of a quota, bytes: ``payload`` for extents, ``map_size`` for LMDB, rest for files."""

    quota: int
    payload: int
    map_size: int


def budget(quota: int, model: KVModel) -> Budget:
    """Share a quota: 2 % (64 MiB at least, a quarter at most) are not for extents.

    More than 2 % where blocks are small, so that the catalogue can name as many as the extents can
    hold. Raises ConfigError where not even one block of the largest group fits.
    """
    records = [padded(group.block_bytes()) for group in model.groups]
    symbol = max(4 * model.block_size, 32)
    named = quota // min(records) * catalogued_bytes(symbol)
    reserve = max(LEAST, min(quota // 4, max(64 * MiB, quota // 50, named)))
    payload = (quota - reserve) // PAGE * PAGE
    need = max(records) + passport_bytes(1, symbol)
    if payload < need:
        raise ConfigError(
            f"nvme.quota of {quota} bytes holds not one block of {max(records)} bytes; "
            f"give it {need + max(LEAST, need // 3) + PAGE} bytes or more"
        )
    # A file system books its own lists of blocks to the extents: under 0.2 % at the very worst.
    map_size = (reserve - FIXED - payload // 512) // PAGE * PAGE
    return Budget(quota, payload, map_size)


def catalogued_bytes(symbol: int) -> int:
    """Bytes of catalogue that one record takes at worst: half-full pages, and copies on write.

    A value that fills more than half a page gets whole pages of its own.
    """
    size = record.OVERHEAD + symbol
    return 2 * (size if size < PAGE // 2 else padded(size) + 128) + 128
