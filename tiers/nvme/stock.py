"""What a tier finds at open, sorted: records to serve, records of others, records to delete."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from kvstrata.tiers.nvme.record import Record
from kvstrata.tiers.nvme.space import Space
from kvstrata.tiers.nvme.table import Table
from kvstrata.tiers.records import Recovered

_DEPTH = attrgetter("depth")
_LAST_USE = attrgetter("last_use")


@dataclass(slots=True)
class Stock:
    """Records of a directory as one namespace and epoch sees them.

    ``doomed`` own their space and are to be deleted; ``lost`` own none (their extent is gone, or
    somebody else lies there) and only their catalogue entries are left. ``others`` belong to other
    namespaces, oldest use last.
    """

    recovered: list[Recovered] = field(default_factory=list)
    others: list[Record] = field(default_factory=list)
    doomed: list[Record] = field(default_factory=list)
    lost: list[Record] = field(default_factory=list)


def sort_out(
    records: Sequence[Record], space: Space, tables: Sequence[Table], number: int, epoch: int
) -> Stock:
    """Claim the records' space, fill the tables with those of this namespace and epoch.

    Record ids are 0 .. n-1 in each group, ``recovered`` is ordered by depth.
    """
    stock = Stock()
    bad = set(space.settle(records))
    mine: list[list[Record]] = [[] for _ in tables]
    for index, record in enumerate(records):
        if index in bad:
            stock.lost.append(record)
        elif record.namespace != number:
            stock.others.append(record)
        elif (
            record.epoch != epoch
            or record.group >= len(tables)
            or record.raw != tables[record.group].raw
            or record.capacity != tables[record.group].padded
        ):
            stock.doomed.append(record)
        else:
            mine[record.group].append(record)
    stock.others.sort(key=lambda record: -record.last_use)
    for table, found in zip(tables, mine, strict=True):
        if len(found) > table.capacity:  # a smaller quota than before: the newest stay
            found.sort(key=_LAST_USE, reverse=True)
            stock.doomed += found[table.capacity :]
            del found[table.capacity :]
        found.sort(key=_DEPTH)
    reachable = _reachable(mine)
    for group, (table, found) in enumerate(zip(tables, mine, strict=True)):
        kept = [one for one in found if one.key in reachable]
        if len(kept) < len(found):
            stock.doomed += [one for one in found if one.key not in reachable]
        table.fill(range(len(kept)), kept)
        stock.recovered += [
            Recovered(at, group, r.root, r.depth, r.parent, r.key, r.symbol, r.last_use)
            for at, r in enumerate(kept)
        ]
    if len(tables) > 1:
        stock.recovered.sort(key=_DEPTH)
    return stock


def _reachable(groups: Sequence[Sequence[Record]]) -> set[bytes]:
    """Keys that a prefix can reach: those of first blocks, and of blocks whose parent is reachable.

    A block without its parent (lost, or evicted by a smaller quota) would take space for ever.
    Every group is ordered by depth.
    """
    keys: set[bytes] = set()
    for record in heapq.merge(*groups, key=_DEPTH) if len(groups) > 1 else groups[0]:
        if record.depth == 0 or record.parent in keys:
            keys.add(record.key)
    return keys
