"""Catalogue keys and values: golden bytes, exact return, damage seen."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.tiers.nvme import record
from kvstrata.tiers.nvme.record import Record

ONE = Record(
    namespace=1,
    epoch=2,
    group=3,
    key=b"k" * 32,
    parent=b"p" * 32,
    root=b"r" * 32,
    depth=9,
    symbol=b"symbol",
    last_use=1.5e9,
    file=4,
    run=8192,
    passport_bytes=4096,
    offset=12288,
    capacity=8192,
    stored=5000,
    raw=5000,
    codec=0,
    checksum=2**63,
)


def test_golden():
    assert ONE.id().hex() == "00000001" + "0000000000000002" + "0003" + "6b" * 32
    value = record.encode(ONE)
    assert len(value) == 160 + 6
    assert hashlib.sha256(value).hexdigest() == GOLDEN


def test_keys_fit_lmdb_and_epochs_are_ranges():
    assert len(ONE.id()) == record.KEY_SIZE <= 511
    later = ONE._replace(epoch=3, key=bytes(32))
    assert ONE.id() < later.id()


def test_what_was_encoded_is_decoded():
    assert record.decode(ONE.id(), record.encode(ONE)) == ONE
    touched = record.touched(ONE.id(), record.encode(ONE), 2.5e9)
    assert record.decode(ONE.id(), touched) == ONE._replace(last_use=2.5e9)


def test_names_place():
    value = record.encode(ONE)
    assert record.names_place(value, 4, 12288)
    assert not record.names_place(value, 5, 12288) and not record.names_place(value, 4, 0)
    assert not record.names_place(b"", 0, 0)


def test_every_flip_is_seen_and_a_value_under_another_key():
    key, value = ONE.id(), record.encode(ONE)
    for at in range(len(value)):
        bad = bytearray(value)
        bad[at] ^= 1
        assert record.decode(key, bytes(bad)) is None
    assert record.decode(key[:-1] + b"x", value) is None
    assert record.decode(key, value[:-1]) is None


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_never_raises(key, value):
    assert record.decode(key, value) is None
    record.decode(record.record_id(1, 2, 3, bytes(32)), value)


def test_spaces():
    items = [record.FORMAT_ITEM, record.encode_space(b"n" * 32, 3, 4)]
    assert record.decode_spaces(items) == {b"n" * 32: (3, 4)}
    assert record.decode_spaces(items[1:]) is None
    key, value = items[1]
    for at in range(len(value)):
        bad = bytearray(value)
        bad[at] ^= 1
        assert record.decode_spaces([items[0], (key, bytes(bad))]) is None
    assert record.decode_spaces([items[0], (b"what", b"")]) is None


GOLDEN = "b681185940689a3d90c206129b07f0d74e75e7ffc2424216c2034820feb3fcbe"
