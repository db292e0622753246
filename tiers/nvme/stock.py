"""What a tier finds at open, sorted: records to serve, records of others, records to delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.tiers.nvme.record import Record
from kvstrata.tiers.nvme.space import Space
from kvstrata.tiers.nvme.table import Table
from kvstrata.tiers.records import Recovered


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
    reachable = _reachable(mine)
    for group, (table, found) in enumerate(zip(tables, mine, strict=True)):
        # A smaller quota than before: the newest stay.
        stock.doomed.extend(one for one in found if one.key not in reachable)
        found = sorted(
            (one for one in found if one.key in reachable), key=lambda one: -one.last_use
        )
        stock.doomed.extend(found[table.capacity :])
        kept = sorted(found[: table.capacity], key=lambda record: record.depth)
        table.fill(range(len(kept)), kept)
        stock.recovered += [
            Recovered(at, group, r.root, r.depth, r.parent, r.key, r.symbol, r.last_use)
            for at, r in enumerate(kept)
        ]
    stock.recovered.sort(key=lambda one: one.depth)
    return stock


def _reachable(groups: Sequence[Sequence[Record]]) -> set[bytes]:
    """Keys that a prefix can reach: those of first blocks, and of blocks whose parent is reachable.

    A block without its parent (lost, or evicted by a smaller quota) would take space for ever.
    """
    keys: set[bytes] = set()
    every = (record for records in groups for record in records)
    for record in sorted(every, key=lambda record: record.depth):
        if record.depth == 0 or record.parent in keys:
            keys.add(record.key)
    return keys
