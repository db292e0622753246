"""The content chain."""

from __future__ import annotations

import pytest

from kvstrata.core.errors import MisuseError
from kvstrata.core.keys import block_key
from kvstrata.prefix_index.hashing import KeyChain, chain_keys
from kvstrata.prefix_index.prefix import Prefix, Symbols

ROOT = bytes(range(32))
SYMBOLS = Prefix.from_tokens(range(64)).symbols(ROOT, 16)

# Written down once: a chain that comes out differently orphans every record on every disk.
GOLDEN = [
    "8a1b0f95e9d663f7b77bd9f5e20686436724ef90748ee27d14fb273e213f4430",
    "1259db76e208cef16286c21cd777b60a8dfab0125f7f36def6c2b3e30005d270",
]


def test_golden_vectors() -> None:
    keys = [key.hex() for key in chain_keys(SYMBOLS)]
    assert [keys[0], keys[3]] == GOLDEN


def test_each_key_follows_from_the_one_before() -> None:
    keys = chain_keys(SYMBOLS)
    assert len(set(keys)) == 4
    before: bytes = ROOT
    for i, key in enumerate(keys):
        assert key == block_key(before, SYMBOLS.data[i * 64 : (i + 1) * 64])
        before = key


def test_keys_are_computed_only_as_far_as_asked() -> None:
    chain = KeyChain(SYMBOLS)
    assert chain.keys(1, 2) == chain_keys(SYMBOLS)[1:2]
    assert len(chain.known) == 2
    chain.check()
    assert chain.keys(0, 1) == chain_keys(SYMBOLS)[:1] and len(chain.known) == 2
    assert chain.keys(2, 2) == [] and len(chain.known) == 2
    assert chain.keys() == chain_keys(SYMBOLS)
    assert chain.parent(0) == ROOT and chain.parent(3) == chain.keys()[2]
    chain.check()


def test_a_longer_chain_goes_on_from_a_shorter_one() -> None:
    longer = Prefix.from_tokens(range(96)).symbols(ROOT, 16)
    chain = KeyChain(longer, chain_keys(SYMBOLS))
    assert chain.keys() == chain_keys(longer)
    chain.check()


def test_check_notices_a_wrong_key() -> None:
    keys = chain_keys(SYMBOLS)
    with pytest.raises(AssertionError, match="invariant 2"):
        KeyChain(SYMBOLS, [keys[1], keys[0]]).check()


def test_ranges_outside_are_refused() -> None:
    chain = KeyChain(SYMBOLS)
    for start, stop in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(MisuseError):
            chain.keys(start, stop)
    with pytest.raises(MisuseError):
        KeyChain(Symbols(ROOT, 64, b""), chain_keys(SYMBOLS))


def test_no_block_no_key() -> None:
    assert chain_keys(Symbols(ROOT, 64, b"")) == []
