"""What the catalogue's keys and values look like. Format 1, integers little-endian but in keys.

Key, 46 bytes: namespace number (4, big-endian), epoch (8, big-endian), group (2, big-endian), block
key (32): one epoch of a namespace is one range, so a reset is one range to delete.

    offset  bytes  field of a value
         0      8  xxh3-64 of key and bytes 8 .. end: a damaged or misplaced record shows
         8      2  format version, 1
        10      2  number of parts, one for each rank that holds a shard; 1 in this version
        12      4  symbol length
        16      8  depth of the block in its sequence
        24      8  last use, IEEE double, seconds since 1970
        32     32  parent key
        64     32  root key
        96     64  per part: file 4, codec 2, 0 (2), run offset 8, passport bytes 4, 0 (4),
                   payload offset 8, capacity 8, stored length 8, raw length 8, checksum 8
       160    ...  symbol

Meta, a sub-database of its own: ``format`` -> version (2), and ``namespace/`` + namespace (32) ->
number (4), epoch (8), xxh3-64 of key and the twelve bytes before (8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from kvstrata.core.layout import PAGE, padded

VERSION = 1
_KEY = struct.Struct(">IQH32s")
_SUM = struct.Struct("<Q")
_HEAD = struct.Struct("<HHIQd32s32s")
_PART = struct.Struct("<IHHQIIQQQQQ")
_SPACE = struct.Struct("<IQ")
_SPACE_TAG = b"namespace/"
FORMAT_ITEM = (b"format", VERSION.to_bytes(2, "little"))
_SYMBOL_AT = _SUM.size + _HEAD.size + _PART.size
_USE_AT = 24
KEY_SIZE = _KEY.size
OVERHEAD = KEY_SIZE + _SYMBOL_AT


class Record(NamedTuple):
    """One catalogued block. Offsets and lengths in bytes, ``last_use`` in seconds since 1970.

    A tuple, not a dataclass: an open makes one of each record, and a tuple takes a sixth of the
    time.
    """

    namespace: int
    epoch: int
    group: int
    key: bytes
    parent: bytes
    root: bytes
    depth: int
    symbol: bytes
    last_use: float
    file: int
    run: int
    passport_bytes: int
    offset: int
    capacity: int
    stored: int
    raw: int
    codec: int
    checksum: int

    @property
    def width(self) -> int:
        """Bytes that the payload takes in its extent."""
        return self.capacity if self.codec == 0 else padded(self.stored)

    def id(self) -> bytes:
        """The record's key in the catalogue."""
        return record_id(self.namespace, self.epoch, self.group, self.key)


def record_id(namespace: int, epoch: int, group: int, key: bytes) -> bytes:
    """The catalogue's key of a block."""
    return _KEY.pack(namespace, epoch, group, key)


def encode(record: Record) -> bytes:
    """The catalogue's value of a record."""
    head = _HEAD.pack(
        VERSION,
        1,
        len(record.symbol),
        record.depth,
        record.last_use,
        record.parent,
        record.root,
    )
    part = _PART.pack(
        record.file,
        record.codec,
        0,
        record.run,
        record.passport_bytes,
        0,
        record.offset,
        record.capacity,
        record.stored,
        record.raw,
        record.checksum,
    )
    return _sealed(record.id(), head + part + record.symbol)


def decode(key: bytes, value: bytes) -> Record | None:
    """The record of a key and value, or None if they are not an undamaged one. Never raises."""
    if len(key) != KEY_SIZE or len(value) < _SYMBOL_AT:
        return None
    if _SUM.unpack_from(value)[0] != xxhash.xxh3_64_intdigest(key + value[_SUM.size :]):
        return None
    version, parts, size, depth, last_use, parent, root = _HEAD.unpack_from(value, _SUM.size)
    if version != VERSION or parts != 1 or len(value) != _SYMBOL_AT + size:
        return None
    (file, codec, _, run, passport_bytes, _, offset, capacity, stored, raw, checksum) = (
        _PART.unpack_from(value, _SUM.size + _HEAD.size)
    )
    if not 0 < stored <= capacity or not 0 < raw <= capacity or (codec == 0 and stored != raw):
        return None
    if max(offset, capacity) >= 1 << 44:
        return None
    if (run | passport_bytes | offset | capacity) % PAGE or offset < run + passport_bytes:
        return None
    namespace, epoch, group, block = _KEY.unpack(key)
    return Record(
        namespace, epoch, group, block, parent, root, depth, value[_SYMBOL_AT:], last_use,
        file, run, passport_bytes, offset, capacity, stored, raw, codec, checksum,
    )  # fmt: skip


def touched(key: bytes, value: bytes, last_use: float) -> bytes:
    """The same value, used last at ``last_use``."""
    body = bytearray(value[_SUM.size :])
    struct.pack_into("<d", body, _USE_AT - _SUM.size, last_use)
    return _sealed(key, bytes(body))


def names_place(value: bytes, file: int, offset: int) -> bool:
    """Whether a value says that its payload lies there."""
    if len(value) < _SYMBOL_AT:
        return False
    part = _PART.unpack_from(value, _SUM.size + _HEAD.size)
    return bool(part[0] == file and part[6] == offset)


def encode_space(namespace: bytes, number: int, epoch: int) -> tuple[bytes, bytes]:
    """The meta item of a namespace."""
    key = _SPACE_TAG + namespace
    body = _SPACE.pack(number, epoch)
    return key, body + _SUM.pack(xxhash.xxh3_64_intdigest(key + body))


def decode_spaces(items: Iterable[tuple[bytes, bytes]]) -> dict[bytes, tuple[int, int]] | None:
    """Namespace -> (number, epoch) of all meta items; None if any is damaged or no format."""
    spaces: dict[bytes, tuple[int, int]] = {}
    formats = 0
    for key, value in items:
        if (key, value) == FORMAT_ITEM:
            formats += 1
            continue
        body = value[: _SPACE.size]
        sound = value == body + _SUM.pack(xxhash.xxh3_64_intdigest(key + body))
        if not key.startswith(_SPACE_TAG) or len(body) != _SPACE.size or not sound:
            return None
        number, epoch = _SPACE.unpack(body)
        spaces[key[len(_SPACE_TAG) :]] = (number, epoch)
    return spaces if formats == 1 else None


def _sealed(key: bytes, body: bytes) -> bytes:
    return _SUM.pack(xxhash.xxh3_64_intdigest(key + body)) + body
