"""Runs: consecutive blocks of one sequence that lie side by side in an extent.

Plain data, so that an engine may send it to another process. All offsets and lengths in bytes; file
offsets and capacities are multiples of 4096, so that they suit O_DIRECT.

    extent NNNN: ... | passport (one page or more) | payload 0 | payload 1 | ... | payload n-1 | ...
                     ^ offset                      ^ offset + passport_bytes, every `capacity` bytes
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Written:
    """What became of one block that was written: its stored length, codec and checksum.

    ``checksum`` is xxh3-64 of the raw bytes: the same number that the DRAM tier keeps.
    ``codec`` 0 is none, 1 is zstd.
    """

    stored: int
    codec: int
    checksum: int


@dataclass(frozen=True, slots=True)
class WriteRun:
    """Blocks to be written, with everything that their passport says.

    ``records`` are the record ids (= NVMe ledger slots) in order; block i's parent key is
    ``keys[i - 1]``, block 0's is ``parent``. ``depth`` is block 0's index in its sequence.
    ``root`` is the key its sequence's chain began with. ``checksums`` are those already taken when
    the blocks came into DRAM, or None for a block whose sum is not known.
    """

    file: int
    offset: int
    passport_bytes: int
    capacity: int
    raw: int
    group: int
    epoch: int
    namespace: bytes
    root: bytes
    depth: int
    parent: bytes
    keys: tuple[bytes, ...]
    symbols: tuple[bytes, ...]
    records: tuple[int, ...]
    codec: int = 0
    checksums: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadRun:
    """Blocks to be read that lie side by side: block i at ``offset + i * stride``.

    ``stored``, ``codecs`` and ``checksums`` are what the catalogue promises of each; a block that
    does not keep the promise is reported as failed and its bytes are never shown.
    """

    file: int
    offset: int
    stride: int
    raw: int
    stored: tuple[int, ...]
    codecs: tuple[int, ...]
    checksums: tuple[int, ...]
    records: tuple[int, ...]
