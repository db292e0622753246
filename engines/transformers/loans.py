"""Blocks lent to the Store, which may be neither written nor handed out: saves read them, or it
keeps them as its HBM tier until the pool wants them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstrata.prefix_index.prefix import Prefix
from kvstrata.store.store import Store
from kvstrata.tiers.pool import BlockPool, Ids
from kvstrata.transfer.move import Ticket


class Loans:
    """A reference of its own to every block that the Store reads or keeps.

    So a sequence may close while it is being saved, and nobody waits for that.

    Invariant 1: a block has one reference from here for every open save that reads it.
    Invariant 2: a block has one more while the Store keeps it, from ``keep`` until it is shed.
    Invariant 3: this is the one consumer of the Store's ``poll``.
    """

    def __init__(self, store: Store, blocks: Sequence[BlockPool], keeps: bool) -> None:
        """``keeps``: the Store was opened to cache in HBM."""
        self._store = store
        self._blocks = blocks
        self._keeps = keeps
        self._kept = 0
        self._open: dict[int, tuple[Ticket, dict[int, list[int]]]] = {}

    def reading(self, ticket: Ticket, ids: Mapping[int, Sequence[int]]) -> None:
        """``ticket`` reads these blocks, ``ids[group]``, until it has ended."""
        held = {group: list(blocks) for group, blocks in ids.items()}
        for group, blocks in held.items():
            self._blocks[group].share(blocks)
        self._open[ticket.id] = (ticket, held)

    def keep(self, prefix: Prefix, ids: Mapping[int, Sequence[int]], start: int) -> None:
        """Let the Store find blocks ``start`` ... of the prefix here, as long as there is room."""
        if self._keeps:
            for group, taken in self._store.keep(prefix, dict(ids), start).items():
                self._blocks[group].share(taken)
                self._kept += len(taken)

    def reap(self) -> None:
        """Take back the blocks of all saves that have ended, and those the Store has shed."""
        polled = self._store.poll()
        for completion in polled.saved:
            self._ended(completion.ticket)
        self._shed(polled.shed)

    def reclaim(self, count: int) -> bool:
        """Have the pool get blocks back, ``count`` of each group if it can be; False if none.

        Kept blocks first, since that takes no time; then those of a save, which is waited for.
        """
        self.reap()
        if self._kept and self._shed(self._store.shed(count)):
            return True
        return self._finish_one()

    def drain(self) -> None:
        """Wait for all saves under way."""
        self.reap()
        while self._finish_one():
            pass

    def _finish_one(self) -> bool:
        for ticket, _ in self._open.values():
            self._store.wait(ticket)
            self._ended(ticket)
            return True
        return False

    def _shed(self, shed: Mapping[int, Ids | Sequence[int]]) -> bool:
        for group, ids in shed.items():
            self._blocks[group].release(ids)
        count = sum(len(ids) for ids in shed.values())
        self._kept -= count
        return count > 0

    def _ended(self, ticket: Ticket) -> None:
        _, held = self._open.pop(ticket.id, (ticket, {}))
        for group, blocks in held.items():
            self._blocks[group].release(blocks)
