"""The passport: what a run of blocks says about itself, in the pages before its payload.

With it an extent file describes itself: the catalogue can be rebuilt, and ``kvstrata verify`` works
without an engine. Format 1, little-endian, whole pages of 4096 bytes, zero-filled at the end:

    offset  bytes  field
         0      8  magic ``89 6B 76 70 61 73 73 0A``
         8     16  xxh3-128 (big-endian, as ``xxhash.digest``) of bytes 24 .. length
        24      2  format version, 1
        26      2  group
        28      4  length of the passport in bytes, a multiple of 4096
        32      4  number n of blocks, 1 or more
        36      4  number of the extent file it was written to
        40      8  offset of the passport in that file, bytes
        48      8  epoch
        56      8  depth of block 0 in its sequence, blocks
        64      8  raw bytes of a block
        72      8  capacity: bytes that a block of codec 0 takes in the file
        80      8  when it was written, nanoseconds since 1970
        88     32  namespace
       120     32  root key
       152     32  parent key of block 0
       184   56 n  per block: key 32, checksum 8, stored length 8, codec 2, 0 (2), symbol length 4
       ...         the symbols, one after the other

The payloads follow the passport side by side in the order of the blocks: a block of codec 0 takes
``capacity`` bytes, any other its stored length rounded up to 4096. The checksum of a block is
xxh3-64 of its raw bytes. File and offset are part of it so that a copied or moved extent is not
taken for the one it was copied from.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvstrata.core.layout import PAGE, padded
from kvstrata.tiers.run import WriteRun, Written

MAGIC = b"\x89kvpass\n"
VERSION = 1
MAX_PASSPORT = 1 << 24
"""Longest passport that is believed, in bytes: a damaged length must not ask for gigabytes."""

_SUM = struct.Struct("<8s16s")
_HEAD = struct.Struct("<HHIIIQQQQQQ32s32s32s")
_BLOCK = struct.Struct("<32sQQHHI")
_FIXED = _SUM.size + _HEAD.size


@dataclass(frozen=True, slots=True)
class Passport:
    """A passport that was read: the run, its blocks, and when it was written (s since 1970)."""

    run: WriteRun
    written: tuple[Written, ...]
    when: float


def passport_bytes(n: int, symbol_width: int) -> int:
    """Bytes of a passport for ``n`` blocks whose symbols have at most ``symbol_width`` bytes."""
    return padded(_FIXED + n * (_BLOCK.size + symbol_width))


def width(capacity: int, written: Written) -> int:
    """Bytes that a written block takes in the file."""
    return capacity if written.codec == 0 else padded(written.stored)


def encode(run: WriteRun, written: Sequence[Written], when_ns: int) -> bytes:
    """The passport of a run, ``run.passport_bytes`` long. Pure.

    Raises ValueError where the run does not fit into the length it was given: that is a bug.
    """
    head = _HEAD.pack(
        VERSION,
        run.group,
        run.passport_bytes,
        len(run.keys),
        run.file,
        run.offset,
        run.epoch,
        run.depth,
        run.raw,
        run.capacity,
        when_ns,
        run.namespace,
        run.root,
        run.parent,
    )
    blocks = [
        _BLOCK.pack(key, w.checksum, w.stored, w.codec, 0, len(symbol))
        for key, symbol, w in zip(run.keys, run.symbols, written, strict=True)
    ]
    body = b"".join((head, *blocks, *run.symbols))
    room = run.passport_bytes - _SUM.size
    if len(body) > room:
        raise ValueError(f"a passport of {len(body)} bytes does not fit into {room}")
    body = body.ljust(room, b"\0")
    return _SUM.pack(MAGIC, xxhash.xxh3_128_digest(body)) + body


def claimed_length(page: bytes | memoryview) -> int:
    """Bytes of the passport that may begin with this page, 0 if none can. A first look only."""
    if len(page) < _FIXED or bytes(page[:8]) != MAGIC:
        return 0
    version, _, length = struct.unpack_from("<HHI", page, _SUM.size)
    if version != VERSION or length % PAGE or not 0 < length <= MAX_PASSPORT:
        return 0
    return int(length)


def decode(data: bytes | memoryview) -> Passport | None:
    """The passport at the start of ``data``, or None if there is no undamaged one. Never raises."""
    length = claimed_length(data)
    if not length or length > len(data):
        return None
    body = bytes(data[_SUM.size : length])
    if xxhash.xxh3_128_digest(body) != bytes(data[8 : _SUM.size]):
        return None
    (_, group, _, n, file, offset, epoch, depth, raw, capacity, when, namespace, root, parent) = (
        _HEAD.unpack_from(body)
    )
    start = _HEAD.size + n * _BLOCK.size
    # A right checksum with wrong contents is forged or a bug of ours: it must not crash a rebuild.
    if not n or start > len(body) or offset % PAGE or capacity != padded(raw):
        return None
    if not 0 < raw <= 1 << 32:
        return None
    keys: list[bytes] = []
    symbols: list[bytes] = []
    written: list[Written] = []
    for index in range(n):
        key, checksum, stored, codec, _, size = _BLOCK.unpack_from(
            body, _HEAD.size + index * _BLOCK.size
        )
        if start + size > len(body) or not 0 < stored <= capacity:
            return None
        keys.append(key)
        symbols.append(body[start : start + size])
        written.append(Written(stored, codec, checksum))
        start += size
    run = WriteRun(
        file=file,
        offset=offset,
        passport_bytes=length,
        capacity=capacity,
        raw=raw,
        group=group,
        epoch=epoch,
        namespace=namespace,
        root=root,
        depth=depth,
        parent=parent,
        keys=tuple(keys),
        symbols=tuple(symbols),
        records=(),
    )
    return Passport(run, tuple(written), when / 1e9)
