"""The passport is an on-disk promise: golden bytes, exact return, a decoder that never raises."""

import dataclasses
import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.core.layout import padded
from kvstrata.tiers.nvme.passport import claimed_length, decode, encode, passport_bytes, width
from kvstrata.tiers.run import WriteRun, Written

WHEN = 1_700_000_000_123_456_789


def run(n=2, symbol=8, **changes):
    one = WriteRun(
        file=3,
        offset=8192,
        passport_bytes=passport_bytes(n, symbol),
        capacity=padded(5000),
        raw=5000,
        group=1,
        epoch=7,
        namespace=b"n" * 32,
        root=b"r" * 32,
        depth=5,
        parent=b"p" * 32,
        keys=tuple(bytes([i % 256]) * 32 for i in range(n)),
        symbols=tuple(bytes([i % 256]) * symbol for i in range(n)),
        records=tuple(range(n)),
        codec=1,
        checksums=(None,) * n,
    )
    return dataclasses.replace(one, **changes)


WRITTEN = [Written(5000, 0, 0x1122334455667788), Written(77, 1, 2**64 - 1)]


def test_golden():
    data = encode(run(), WRITTEN, WHEN)
    assert len(data) == 4096
    assert data[:8] == b"\x89kvpass\n"
    assert hashlib.sha256(data).hexdigest() == GOLDEN


def test_what_was_encoded_is_decoded():
    told = decode(encode(run(), WRITTEN, WHEN))
    assert told is not None
    assert told.run == run(records=(), codec=0, checksums=())
    assert told.written == tuple(WRITTEN)
    assert told.when == WHEN / 1e9


def test_symbols_may_differ_in_length():
    one = run(symbols=(b"long symbol"[:8], b""))
    told = decode(encode(one, WRITTEN, WHEN))
    assert told is not None and told.run.symbols == one.symbols


def test_many_blocks_take_several_pages():
    one = run(64, 2048)
    assert one.passport_bytes == padded(184 + 64 * (56 + 2048)) > 4096
    data = encode(one, [WRITTEN[0]] * 64, WHEN)
    assert claimed_length(data[:4096]) == one.passport_bytes
    told = decode(data)
    assert told is not None and told.run.keys == one.keys
    assert decode(data[:-1]) is None


def test_widths():
    assert width(8192, Written(5000, 0, 0)) == 8192
    assert width(8192, Written(77, 1, 0)) == 4096


def test_every_flipped_bit_is_seen():
    data = encode(run(), WRITTEN, WHEN)
    for at in [*range(0, 400), 1000, 4095]:
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        assert decode(bytes(bad)) is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600), st.integers(0, 4095), st.booleans())
def test_nothing_makes_the_decoder_raise(junk, at, sealed):
    data = bytearray(encode(run(), WRITTEN, WHEN))
    data[at : at + len(junk)] = junk
    del data[4096:]
    if sealed:  # right checksum, any contents
        import xxhash

        data[:8] = b"\x89kvpass\n"
        data[8:24] = xxhash.xxh3_128_digest(bytes(data[24:]))
    told = decode(bytes(data))
    assert told is None or len(told.run.keys) == len(told.written) > 0


@given(st.binary(max_size=5000))
def test_random_bytes_are_no_passport(data):
    assert decode(data) is None


GOLDEN = "2d62a9a3a01ff82027ef92928aad967add8d4b53e0f55df1cf23e691d984d0e1"
