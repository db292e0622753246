"""Why a block cannot be loaded: the answer to "it should have been a hit"."""

from __future__ import annotations

import numpy as np

from kvstrata.prefix_index.prefix import Symbols
from kvstrata.store.answers import Reason
from kvstrata.store.placement import Placement, Refs
from kvstrata.tiers.ledger import runs_of


def reasons(placement: Placement, symbols: Symbols, path: Refs, usable: int) -> tuple[Reason, ...]:
    """One Reason for each run of blocks beyond the ``usable`` ones. Does not mutate.

    ``path`` are the refs that the index has of ``symbols``.
    """
    found: list[Reason] = []
    tail = path[usable:]
    if len(tail):
        found.extend(_indexed(placement, tail, usable))
    beyond = symbols.num_blocks - len(path)
    if beyond:
        why = "never_stored"
        if not len(path) and placement.index.known_elsewhere(symbols):
            why = "other_salt"
        found.append(Reason(len(path), beyond, why))
    return tuple(found)


def _indexed(placement: Placement, tail: Refs, first: int) -> list[Reason]:
    """Blocks whose name is known, but that cannot be resumed at."""
    readable = np.logical_and.reduce(placement.readable(tail))
    coming = [shelf.filling(tail) for shelf in placement.shelves]
    filling = np.logical_or.reduce(coming) & ~readable
    damaged = np.isin(tail, list(placement.damaged)) & ~readable & ~filling
    kinds = np.zeros(len(tail), np.int8)
    names = ("evicted", "pending", "failed_check", "after_a_gap")
    kinds[filling] = 1
    kinds[damaged] = 2
    kinds[readable] = 3
    found: list[Reason] = []
    for kind, name in enumerate(names):
        runs = runs_of(np.flatnonzero(kinds == kind))
        found.extend(Reason(first + start, stop - start, name) for start, stop in runs)
    return sorted(found, key=lambda reason: reason.first_block)
