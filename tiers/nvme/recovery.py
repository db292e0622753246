"""Open a directory whatever has happened to it: nothing in it may kill us or tell us lies.

    CLEAN matches data.mdb (size and hash)      -> it is opened as it is
    it does not, but a child can read it all    -> what the child read is written to a new one
    it cannot, or any item fails its checksum   -> rebuilt from the passports
    ... and EPOCHS cannot be trusted either     -> all extents are removed: nothing is resurrected

A catalogue that was not closed cleanly is never mapped by this process: its free list might be
damaged as well, and then LMDB would hand out pages that are in use.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from typing import NamedTuple

import lmdb
import xxhash

from kvstrata.core.clock import Bell
from kvstrata.tiers.nvme import epochs, grow, record, scan
from kvstrata.tiers.nvme.catalogue import Catalogue
from kvstrata.tiers.nvme.directory import Directory, sync_directory
from kvstrata.tiers.nvme.directory import replace as replace_file
from kvstrata.tiers.nvme.io import extent_path
from kvstrata.tiers.nvme.quota import Budget
from kvstrata.tiers.nvme.record import Record
from kvstrata.tiers.nvme.walk import Items, walk

log = logging.getLogger("kvstrata.nvme")

Spaces = dict[bytes, tuple[int, int]]
"""Namespace -> (number, epoch)."""
Tree = dict[str, int | str]


class Mark(NamedTuple):
    """What CLEAN says of data.mdb: its size in bytes and xxh3-128, so that no change escapes."""

    size: int
    hash: str


@dataclass(slots=True)
class Recovery:
    """What a directory turned out to hold.

    ``notes`` says in words what was damaged and dropped; it is empty after a crash alone.
    """

    catalogue: Catalogue
    files: dict[int, int]
    spaces: Spaces
    records: list[Record]
    notes: list[str] = field(default_factory=list)


def recover(directory: Directory, budget: Budget, bell: Bell) -> Recovery:
    """Make the catalogue usable and tell what it holds; the thread is not started yet.

    On return the catalogue is open and CLEAN is gone. Raises OSError or lmdb.Error where the disk
    refuses to hold a catalogue at all.
    """
    path = directory.path
    notes = list(directory.damage)
    before = set(grow.find(path))
    files = grow.fit(path, budget.payload)
    if before - set(files):
        notes.append(f"{len(before - set(files))} extents were empty or too many")
    data = os.path.join(path, "catalogue", "data.mdb")
    mark = _read_mark(path)
    fits = mark is not None and mark.size <= budget.map_size
    clean = fits and mark == _mark_of(data)
    _remove_mark(path)
    on_file = epochs.read(path)

    found = _load(path, budget, bell) if clean else None
    if found is None:
        items = walk(os.path.dirname(data)) if os.path.exists(data) else None
        parsed = _parse(*items) if items else None
        if parsed is not None:
            if fits:
                notes.append("catalogue/data.mdb was changed from outside; its records are whole")
        elif files or on_file or os.path.exists(data):
            parsed, files = _from_passports(path, files, on_file, notes)
        else:
            parsed = {}, []
        _build(path, budget, parsed, notes)
        found = Catalogue(os.path.dirname(data), budget.map_size, bell), parsed
    catalogue, (spaces, records) = found
    if on_file is None and spaces:
        notes.append("EPOCHS was missing or damaged and has been written again")
    for namespace, (number, epoch) in spaces.items():
        spaces[namespace] = number, max(epoch, (on_file or {}).get(namespace, 0))
    return Recovery(catalogue, files, spaces, records, notes)


def register(spaces: Spaces, namespace: bytes) -> tuple[int, int]:
    """(number, epoch) of a namespace, entered into ``spaces`` if it is new."""
    fresh = 1 + max((number for number, _ in spaces.values()), default=0), 0
    return spaces.setdefault(namespace, fresh)


def write_mark(path: str, last_txn: int) -> None:
    """Leave CLEAN for the next opener, after the catalogue has been closed. Raises OSError."""
    mark = _mark_of(os.path.join(path, "catalogue", "data.mdb"))
    if mark is not None:
        tree: Tree = {"size": mark.size, "hash": mark.hash, "last_txn": last_txn}
        text = json.dumps({**tree, "check": _check(tree)})
        replace_file(os.path.join(path, "CLEAN"), text.encode() + b"\n")


def _load(
    path: str, budget: Budget, bell: Bell
) -> tuple[Catalogue, tuple[Spaces, list[Record]]] | None:
    try:
        catalogue = Catalogue(os.path.join(path, "catalogue"), budget.map_size, bell)
    except lmdb.Error:
        return None
    try:
        parsed = _parse(*catalogue.load())
    except lmdb.Error:
        parsed = None
    if parsed is None:
        catalogue.close()
        return None
    return catalogue, parsed


def _parse(meta: Items, items: Items) -> tuple[Spaces, list[Record]] | None:
    spaces = record.decode_spaces(meta)
    if spaces is None:
        return None
    numbers = {number for number, _ in spaces.values()}
    records: list[Record] = []
    for key, value in items:
        one = record.decode(key, value)
        if one is None or one.namespace not in numbers:
            return None
        records.append(one)
    return spaces, records


def _from_passports(
    path: str, files: dict[int, int], on_file: dict[bytes, int] | None, notes: list[str]
) -> tuple[tuple[Spaces, list[Record]], dict[int, int]]:
    if on_file is None:
        # A later rebuild must not find them either, so the bytes themselves have to go.
        for file in files:
            os.unlink(extent_path(path, file))
        sync_directory(os.path.join(path, "extents"))
        if files:
            notes.append("catalogue and EPOCHS are lost: everything was dropped")
        return ({}, []), {}
    found = scan.scan(path, files)
    # An epoch that a passport has seen has been: EPOCHS may be an older copy put back.
    latest = dict(on_file)
    for namespace, epoch, _, _ in found:
        if namespace in latest:
            latest[namespace] = max(latest[namespace], epoch)
    spaces = {name: (number, latest[name]) for number, name in enumerate(sorted(latest), 1)}
    records = [
        one._replace(namespace=spaces[namespace][0])
        for (namespace, epoch, _, _), one in found.items()
        if namespace in spaces and spaces[namespace][1] == epoch
    ]
    if files:
        notes.append(f"the catalogue is lost: {len(records)} records were found by their passports")
    return (spaces, records), files


def _build(
    path: str, budget: Budget, parsed: tuple[Spaces, list[Record]], notes: list[str]
) -> None:
    spaces, records = parsed
    meta = [record.encode_space(name, *numbers) for name, numbers in spaces.items()]
    while True:
        items = sorted((one.id(), record.encode(one)) for one in records)
        try:
            Catalogue.build(os.path.join(path, "catalogue"), budget.map_size, meta, items)
            return
        except lmdb.MapFullError:
            if not records:
                raise
            records.sort(key=lambda one: one.last_use)
            notes.append(f"the quota has no room to name {len(records) // 2 + 1} old records")
            del records[: len(records) // 2 + 1]


def _read_mark(path: str) -> Mark | None:
    try:
        with open(os.path.join(path, "CLEAN"), "rb") as file:
            tree = json.loads(file.read(4096))
        check = tree.pop("check")
        if check != _check(tree):
            return None
        return Mark(int(tree["size"]), str(tree["hash"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _mark_of(data: str) -> Mark | None:
    state = xxhash.xxh3_128()
    size = 0
    try:
        with open(data, "rb") as file:
            while chunk := file.read(4 << 20):
                state.update(chunk)
                size += len(chunk)
    except OSError:
        return None
    return Mark(size, state.hexdigest())


def _check(tree: Tree) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(tree, sort_keys=True).encode())


def _remove_mark(path: str) -> None:
    try:
        os.unlink(os.path.join(path, "CLEAN"))
        sync_directory(path)
    except FileNotFoundError:
        pass
