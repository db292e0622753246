"""What a prefix says about itself, and the symbols that it is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstrata.core.errors import MisuseError
from kvstrata.prefix_index.prefix import Prefix, Symbols

ROOT = b"r" * 32
TOKENS = list(range(100, 140))  # two blocks of 16 and a half


def blocks(symbols: Symbols) -> list[bytes]:
    width = symbols.width
    return [symbols.data[i : i + width] for i in range(0, len(symbols.data), width)]


def test_tokens_become_little_endian_int32_of_full_blocks() -> None:
    prefix = Prefix.from_tokens(TOKENS)
    symbols = prefix.symbols(ROOT, 16)
    assert symbols == (ROOT, 64, b"".join(t.to_bytes(4, "little") for t in TOKENS[:32]))
    assert (prefix.num_tokens, prefix.num_blocks(16), symbols.num_blocks) == (40, 2, 2)
    assert prefix.symbols(ROOT, 8).num_blocks == 5  # another block size after the first


def test_a_prefix_does_not_follow_its_source() -> None:
    source = np.array(TOKENS, np.int32)
    prefix = Prefix.from_tokens(source)
    source[0] = 1
    assert prefix == Prefix.from_tokens(TOKENS)


def test_hashes_are_symbols_as_they_are() -> None:
    hashes = [bytes([i]) * 32 for i in range(3)]
    prefix = Prefix.from_hashes(hashes, salt=b"s")
    assert prefix.symbols(ROOT, 16) == (ROOT, 32, b"".join(hashes))
    assert prefix == Prefix.from_hashes(b"".join(hashes), salt=b"s")
    assert prefix.num_tokens is None and prefix.num_blocks(16) == 3 and prefix.hashed


@pytest.mark.parametrize("hashes", [[b"x" * 31], [b"x" * 64], b"x" * 33, "x" * 32, [7], ["x" * 32]])
def test_hashes_of_another_length_are_refused(hashes: Any) -> None:
    with pytest.raises(MisuseError):
        Prefix.from_hashes(hashes)


def test_extra_changes_its_own_block_only() -> None:
    plain = blocks(Prefix.from_tokens(TOKENS).symbols(ROOT, 8))
    image = blocks(Prefix.from_tokens(TOKENS, extra={1: b"cat"}).symbols(ROOT, 8))
    other = blocks(Prefix.from_tokens(TOKENS, extra={1: b"dog"}).symbols(ROOT, 8))
    assert image[:1] + image[2:] == plain[:1] + plain[2:]
    assert len({plain[1], image[1], other[1]}) == 3
    assert all(len(block) == 32 for block in image)


def test_a_digest_can_never_be_tokens_and_depends_on_them() -> None:
    digests = set()
    for first in range(200):
        tokens = [first, *range(15)]
        symbol = Prefix.from_tokens(tokens, extra={0: b"cat"}).symbols(ROOT, 16).data
        assert np.frombuffer(symbol, "<i4")[0] < 0
        digests.add(symbol)
    assert len(digests) == 200


def test_an_image_without_an_id_ends_the_prefix() -> None:
    for unknown in (None, b""):
        prefix = Prefix.from_tokens(TOKENS, extra={2: b"cat", 3: unknown})
        assert not prefix.cacheable
        assert prefix.num_blocks(8) == 3
        known = Prefix.from_tokens(TOKENS[:24], extra={2: b"cat"})
        assert prefix.symbols(ROOT, 8) == known.symbols(ROOT, 8)
        assert known.cacheable


def test_a_block_too_small_for_a_digest_is_refused() -> None:
    prefix = Prefix.from_tokens(TOKENS, extra={1: b"cat"})
    with pytest.raises(MisuseError, match="at least 8"):
        prefix.symbols(ROOT, 4)
    late = Prefix.from_tokens(TOKENS, extra={99: b"cat"})
    assert late.symbols(ROOT, 4).num_blocks == 10  # no such block yet: nothing to represent


def test_longer_prefixes_equal_those_made_at_once() -> None:
    start = Prefix.from_tokens(TOKENS[:20], b"s", "adapter", {1: b"cat"})
    longer = start.with_tokens(TOKENS[20:], {4: b"dog"})
    whole = Prefix.from_tokens(TOKENS, b"s", b"adapter", {1: b"cat", 4: b"dog"})
    assert longer == whole and hash(longer) == hash(whole)
    assert start.num_tokens == 20 and start.extra == {1: b"cat"}
    hashes = Prefix.from_hashes(b"a" * 32).with_hashes([b"b" * 32])
    assert hashes == Prefix.from_hashes([b"a" * 32, b"b" * 32])
    with pytest.raises(MisuseError, match="with_hashes"):
        hashes.with_tokens([1])
    with pytest.raises(MisuseError, match="with_tokens"):
        start.with_hashes(b"a" * 32)


def test_every_dimension_of_identity_tells_prefixes_apart() -> None:
    different = [
        Prefix.from_tokens(TOKENS),
        Prefix.from_tokens(TOKENS[:-1]),
        Prefix.from_tokens(TOKENS, salt=b"x"),
        Prefix.from_tokens(TOKENS, lora=b"x"),
        Prefix.from_tokens(TOKENS, extra={0: b"x"}),
        Prefix.from_hashes(Prefix.from_tokens(TOKENS).symbols(ROOT, 8).data),
    ]
    assert len(set(different)) == len(different)
    assert different[0] != "something else"


@pytest.mark.parametrize(
    "arguments",
    [
        {"salt": "text"},
        {"salt": None},
        {"lora": 3},
        {"lora": b""},
        {"lora": ""},
        {"extra": {-1: b"x"}},
        {"extra": {True: b"x"}},
        {"extra": {"1": b"x"}},
        {"extra": {1: "x"}},
    ],
)
def test_misuse_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(MisuseError):
        Prefix.from_tokens(TOKENS, **arguments)


@pytest.mark.parametrize("block_size", [0, -1, -16, 1.5])
def test_a_block_size_is_a_positive_whole_number(block_size: Any) -> None:
    with pytest.raises(MisuseError):
        Prefix.from_tokens(TOKENS).symbols(ROOT, block_size)


def test_a_prefix_does_not_print_what_it_holds() -> None:
    text = repr(Prefix.from_tokens(TOKENS, salt=b"secret"))
    assert text == "<Prefix of 40 tokens>"
