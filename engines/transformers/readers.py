"""Blocks that the Store is still reading: they may be neither rewritten nor handed out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstrata.store.store import Store
from kvstrata.tiers.pool import BlockPool
from kvstrata.transfer.move import Completion, Ticket


class Readers:
    """A reference of its own to every block that a save reads, given up when the save has ended.

    So a sequence may close while it is being saved, and nobody waits for that.

    Invariant 1: a block has one reference from here for every open ticket that reads it.
    Invariant 2: this is the one consumer of the Store's ``poll``.
    """

    def __init__(self, store: Store, blocks: Sequence[BlockPool]) -> None:
        self._store = store
        self._blocks = blocks
        self._open: dict[int, tuple[Ticket, dict[int, list[int]]]] = {}

    def reading(self, ticket: Ticket, ids: Mapping[int, Sequence[int]]) -> None:
        """``ticket`` reads these blocks, ``ids[group]``, until it has ended."""
        held = {group: list(blocks) for group, blocks in ids.items()}
        for group, blocks in held.items():
            self._blocks[group].share(blocks)
        self._open[ticket.id] = (ticket, held)

    def settle(self, ticket: Ticket) -> Completion | None:
        """Wait for ``ticket``; its completion, None where ``reap`` has seen that already."""
        if ticket.id not in self._open:
            return None
        completion = self._store.wait(ticket)
        self._ended(ticket)
        return completion

    def reap(self) -> None:
        """Let go of the blocks of all saves that have ended. Never waits."""
        for completion in self._store.poll().saved:
            self._ended(completion.ticket)

    def reclaim(self) -> bool:
        """Wait for one save and let its blocks go; False where there is none to wait for."""
        self.reap()
        for ticket, _ in self._open.values():
            self.settle(ticket)
            return True
        return False

    def drain(self) -> None:
        """Wait for all saves under way."""
        while self.reclaim():
            pass

    def _ended(self, ticket: Ticket) -> None:
        _, held = self._open.pop(ticket.id, (ticket, {}))
        for group, blocks in held.items():
            self._blocks[group].release(blocks)
