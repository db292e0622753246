"""Look into an NVMe directory without an engine: count what is there, or read and check it all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import lmdb

from kvstrata.core.clock import Bell
from kvstrata.core.errors import DirectoryBusyError, StorageError
from kvstrata.tiers.nvme import epochs, grow, scan
from kvstrata.tiers.nvme.catalogue import Batch
from kvstrata.tiers.nvme.directory import Directory, foreign_bytes, physical_bytes, read_format
from kvstrata.tiers.nvme.io import ExtentFiles
from kvstrata.tiers.nvme.quota import Budget
from kvstrata.tiers.nvme.record import Record, decode, decode_spaces
from kvstrata.tiers.nvme.recovery import Spaces, recover, write_mark
from kvstrata.tiers.nvme.walk import walk

Progress = Callable[[int, int], None]
"""Called with (records done, records in all), from several threads."""
THREADS = 4
MiB = 1 << 20


def inspect(path: str) -> dict[str, Any]:
    """What a directory holds, by its catalogue; also beside a live Store. Changes nothing.

    Keys: records, bytes (of payload in the extents), namespaces (hex), epochs (by namespace),
    groups (records by group), physical_bytes, live (a Store has it open), damaged (records that
    fail their own checksum, or -1 for a catalogue that cannot be read). Raises StorageError for
    what is not a kvstrata directory, FingerprintError for another format version.
    """
    with _reading(path) as live:
        spaces, records, damaged = _catalogued(path, live)
        return {
            "records": len(records),
            "bytes": sum(record.width for record in records),
            "namespaces": [name.hex() for name in sorted(spaces)],
            "epochs": {name.hex(): epoch for name, (_, epoch) in sorted(spaces.items())},
            "groups": dict(sorted(Counter(str(record.group) for record in records).items())),
            "physical_bytes": physical_bytes(path),
            "live": live,
            "damaged": damaged,
        }


def verify(path: str, repair: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Read every record of a directory and check it.

    Keys: records, ok, corrupt, bytes, free_bytes (of the extents, that no record has), orphan_bytes
    (files that are not ours), damaged (as for ``inspect``), repaired (records removed). A lost
    catalogue is replaced, for the count, by the passports. With ``repair`` corrupt records are
    removed and a damaged catalogue is rebuilt: that needs the directory's lock. Raises as
    ``inspect`` does, and DirectoryBusyError where a live Store stands against a repair.
    """
    if repair:
        return _repair(path, progress)
    with _reading(path) as live:
        _, records, damaged = _catalogued(path, live)
        if damaged < 0:
            known = epochs.read(path) or {}
            found = scan.scan(path, _sizes(path))
            records = [one for (name, epoch, *_), one in found.items() if known.get(name) == epoch]
        bad = _check(path, records, progress)
        if bad and live:
            # Deleted, and its place given away, while we were reading?
            now = {record.id(): record for record in _catalogued(path, live)[1]}
            bad = _check(path, [one for one in bad if _same(one, now.get(one.id()))], None)
        return _told(path, records, bad, damaged, 0)


def _repair(path: str, progress: Progress | None) -> dict[str, Any]:
    path = os.path.abspath(path)
    _must_be_ours(path)
    directory = Directory.open(path, force=True, create=False)
    try:
        data = os.path.join(path, "catalogue", "data.mdb")
        size = os.path.getsize(data) if os.path.exists(data) else 0
        total = sum(_sizes(path).values())
        share = Budget(total + size, total, max(64 * MiB, 4 * size))
        found = recover(directory, share, Bell())
        sizes = found.files
        bad = [r for r in found.records if r.offset + r.width > sizes.get(r.file, 0)]
        bad += _check(path, [r for r in found.records if r not in set(bad)], progress)
        found.catalogue.start()
        if bad:
            found.catalogue.submit(Batch(deletes=[(r.id(), r.file, r.offset) for r in bad]))
        last = found.catalogue.close()
        failed = [done for done in found.catalogue.poll() if not done.ok]
        if failed:
            raise StorageError(f"cannot repair {path}: {failed[0].error}")
        epochs.keep(path, {name: epoch for name, (_, epoch) in found.spaces.items()})
        write_mark(path, last)
        return _told(path, found.records, bad, -1 if found.notes else 0, len(bad))
    except (OSError, lmdb.Error) as error:
        raise StorageError(f"cannot repair {path}: {error}") from error
    finally:
        directory.close()


@contextmanager
def _reading(path: str) -> Iterator[bool]:
    """Hold the directory if nobody has it; tells whether a live Store has."""
    _must_be_ours(path)
    try:
        directory = Directory.open(path, force=True, create=False, patience=0)
    except DirectoryBusyError:
        yield True
        return
    try:
        yield False
    finally:
        directory.close()


def _must_be_ours(path: str) -> None:
    if not os.path.isdir(path) or read_format(path) is None:
        raise StorageError(f"{path} is not a kvstrata directory; name the nvme.path of a Store")


def _catalogued(path: str, live: bool) -> tuple[Spaces, list[Record], int]:
    items = walk(os.path.join(path, "catalogue"), locked=live)
    spaces = decode_spaces(items[0]) if items else None
    if items is None or spaces is None:
        return {}, [], -1
    records = [decode(key, value) for key, value in items[1]]
    return spaces, [one for one in records if one is not None], records.count(None)


def _check(path: str, records: Sequence[Record], progress: Progress | None) -> list[Record]:
    """Those that are damaged."""
    io = ExtentFiles(path)
    ordered = sorted(records, key=lambda record: (record.file, record.offset))
    count = 0

    def one(record: Record) -> bool:
        nonlocal count
        whole = scan.verify(io, record)
        count += 1
        if progress is not None:
            progress(count, len(ordered))
        return whole

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return [
                r for r, whole in zip(ordered, pool.map(one, ordered), strict=True) if not whole
            ]
    finally:
        io.close()


def _same(one: Record, other: Record | None) -> bool:
    return other is not None and (one.file, one.offset) == (other.file, other.offset)


def _sizes(path: str) -> dict[int, int]:
    return {file: size // 4096 * 4096 for file, size in grow.find(path).items()}


def _told(
    path: str, records: Sequence[Record], bad: Sequence[Record], damaged: int, repaired: int
) -> dict[str, Any]:
    passports = {(r.file, r.run): r.passport_bytes for r in records}
    taken = sum(r.width for r in records) + sum(passports.values())
    return {
        "records": len(records),
        "ok": len(records) - len(bad),
        "corrupt": len(bad) + max(damaged, 0),
        "bytes": sum(r.width for r in records),
        "free_bytes": sum(_sizes(path).values()) - taken,
        "orphan_bytes": foreign_bytes(path),
        "damaged": damaged,
        "repaired": repaired,
    }
