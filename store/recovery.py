"""Taking in what a device had when it was opened."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from kvstrata.prefix_index.prefix import Symbols
from kvstrata.store.placement import Placement
from kvstrata.tiers.records import Recovered


def adopt(placement: Placement, records: list[Recovered]) -> dict[int, list[int]]:
    """Put recovered records into the index and the NVMe shelf, oldest used first.

    Records come with their parent's key; those whose parents are all there become paths again. A
    record whose parent is gone could be reached by no prefix: those are returned, by group, for the
    caller to delete.
    """
    shelf = placement.nvme
    assert shelf is not None
    by_key: dict[bytes, int] = {}
    """Key of a block -> its ref, filled from the roots downwards."""
    refs: dict[int, list[int]] = defaultdict(list)
    slots: dict[int, list[int]] = defaultdict(list)
    orphans: dict[int, list[int]] = defaultdict(list)
    used: dict[int, float] = {}
    for record in sorted(records, key=lambda r: r.depth):
        ref = by_key.get(record.key)
        if ref is None:
            if record.depth == 0:
                parent = -1
            else:
                parent = by_key.get(record.parent, -1)
                if parent < 0:
                    orphans[record.group].append(record.record)
                    continue
            symbols = Symbols(record.root, len(record.symbol), record.symbol)
            ref = int(placement.index.extend(parent, symbols)[0])
            by_key[record.key] = ref
        refs[record.group].append(ref)
        slots[record.group].append(record.record)
        used[ref] = max(used.get(ref, 0.0), record.last_use)
    for group, found in refs.items():
        shelf.ledgers[group].adopt(np.array(found), np.array(slots[group]))
    known = list(by_key.values())  # from the roots downwards
    parents = placement.index.parents(np.array(known, np.int32)).tolist()
    # A block was used whenever one that follows it was, though only its own writing is on record.
    for ref, parent in zip(reversed(known), reversed(parents), strict=True):
        if parent >= 0:
            used[parent] = max(used[parent], used[ref])
    depth = {ref: place for place, ref in enumerate(known)}
    # Most recent first, as on a path: add() takes the head first.
    shelf.eviction.add(sorted(known, key=lambda ref: (-used[ref], depth[ref])))
    return orphans
