from __future__ import annotations

import pytest

from kvstrata.core.errors import FingerprintError, LayoutError
from kvstrata.tiers.base import Tier
from kvstrata.tiers.null import NullTier


def test_keeps_the_key_of_every_slot() -> None:
    tier = NullTier("dram", 4)
    assert isinstance(tier, Tier) and tier.capacity(0) == 4
    tier.store(0, [1, 2], [b"a", b"b"])
    tier.load(0, [2], [b"b"])
    assert tier.keys(0, [1, 3]) == [b"a", None]
    with pytest.raises(FingerprintError, match="slot 1 of tier dram"):
        tier.load(0, [1], [b"b"])
    with pytest.raises(FingerprintError):
        tier.load(1, [1], [b"a"])
    with pytest.raises(LayoutError, match="slot 4 is outside"):
        tier.store(0, [4], [b"a"])
    tier.check()
