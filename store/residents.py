"""Blocks that stay in the engine's own pool after their request has ended: HBM as a full tier.

Only for pools whose owner takes part: it hands blocks over with ``keep``, shares those that a hit
names, and asks for blocks back with ``shed`` when the pool runs dry. The Store never calls it.
"""

from __future__ import annotations

import numpy as np

from kvstrata.core.errors import MisuseError
from kvstrata.prefix_index.prefix import Symbols
from kvstrata.store.control import Control
from kvstrata.store.placement import Refs, Shelf
from kvstrata.tiers.ledger import Ints


class Residents:
    """The HBM shelf: a slot is a block id of the engine's pool.

    1. A block that is kept here is one reference that the engine holds for the Store, until
       ``shed`` or ``take_shed`` names it.
    """

    def __init__(self, control: Control, shelf: Shelf | None) -> None:
        self._control = control
        self._shelf = shelf

    def keep(self, symbols: Symbols, blocks: dict[int, Ints], start: int) -> dict[int, Ints]:
        """Take over blocks ``start`` ... of the path; returns, by group, the ids that were taken.

        Those of positions that HBM has already, and -1, are not taken.
        """
        shelf = self._need()
        placement = self._control.placement
        refs = placement.index.insert(symbols)
        tail = refs[start:]
        taken: dict[int, Ints] = {}
        arrived = np.zeros(len(tail), np.bool_)
        for group, ids in blocks.items():
            new = (ids >= 0) & (shelf.ledgers[group].slots(tail) < 0)
            shelf.ledgers[group].adopt(tail[new], ids[new])
            taken[group] = ids[new]
            arrived |= new
        shelf.eviction.add(tail[arrived].tolist())
        placement.touch(refs)
        placement.prune(refs)
        return taken

    def where(self, refs: Refs) -> dict[int, Ints]:
        """For each group, the block that holds each ref in HBM, -1 where none does."""
        if self._shelf is None:
            return {}
        return {g: ledger.slots(refs) for g, ledger in enumerate(self._shelf.ledgers)}

    def shed(self, count: int) -> dict[int, Ints]:
        """Give back up to ``count`` blocks a group, the least valuable ones; by group their ids.

        Fewer where the rest is leased. What no tier below has is lost.
        """
        shelf = self._need()
        protected = self._control.placement.protected(kept_too=False)
        victims = np.array(shelf.eviction.victims(count, protected), np.int32)
        return self._evict(victims)

    def drop(self, refs: Refs) -> None:
        """Evict blocks; ``take_shed`` names them."""
        self._note(self._evict(refs))

    def after_reset(self, freed: list[Ints]) -> None:
        """Every block was taken from its owner."""
        self._note(dict(enumerate(freed)))

    def take_shed(self) -> dict[int, tuple[int, ...]]:
        """Blocks that the engine may release without having asked, since the last call."""
        shed = {group: tuple(ids) for group, ids in enumerate(self._control.shed) if ids}
        for ids in self._control.shed:
            ids.clear()
        return shed

    def _evict(self, refs: Refs) -> dict[int, Ints]:
        freed = dict(enumerate(self._need().evict(refs)))
        self._control.placement.prune(refs)
        self._control.metrics.add("evicted_blocks_total", len(refs), tier="hbm")
        return freed

    def _note(self, freed: dict[int, Ints]) -> None:
        for group, ids in freed.items():
            self._control.shed[group].extend(ids.tolist())

    def _need(self) -> Shelf:
        if self._shelf is None:
            raise MisuseError("this store does not cache in HBM: the engine's own cache does")
        return self._shelf
