"""Saves: HBM -> DRAM, as many blocks at a time as DRAM has room for."""

from __future__ import annotations

import numpy as np

from kvstrata.prefix_index.prefix import Symbols
from kvstrata.store.control import Control, where
from kvstrata.store.hold import Hold
from kvstrata.store.placement import Mask, Refs
from kvstrata.tiers.ledger import Ints, Reservation
from kvstrata.transfer.move import Completion, Done, Priority, ReadyEvent, Ticket


class SaveJob:
    """Stores the blocks of a path from ``start`` on that no tier has yet.

    1. A block is copied at most once, and published only if its copy is whole.
    2. The engine's blocks are read by nobody once the completion is out: it lists them as freed.
    3. A block stays in the index and in its tier while the job lasts, but for one that is safe
       below when room is needed: so a prefix larger than DRAM passes through it in waves.
    """

    def __init__(
        self,
        control: Control,
        ticket: Ticket,
        symbols: Symbols,
        refs: Refs,
        blocks: dict[int, Ints],
        start: int,
        ready: ReadyEvent | None,
    ) -> None:
        """``blocks[g][i]`` holds block ``start + i``; -1 where the group has none to give."""
        self.ticket = ticket
        self.deadline: float | None = control.clock() + control.config.transfer.timeout
        self._control = control
        self._epoch = control.epoch
        self._symbols = symbols
        self._refs = refs
        self._blocks = blocks
        self._start = start
        self._ready = ready
        self._hold = Hold(control.placement, refs)
        placement = control.placement
        tail = refs[start:]
        self._open: list[Mask] = []
        """By group, the blocks that are in no tier yet and whose copy has not been started."""
        for group, ids in blocks.items():
            self._open.append((ids >= 0) & ~placement.stored(group, tail))
        sizes = [group.block_bytes() for group in control.model.groups]
        self.nbytes = sum(
            int(mask.sum()) * size for mask, size in zip(self._open, sizes, strict=True)
        )
        """Bytes to be copied, as long as the job lasts."""
        control.saving_bytes += self.nbytes
        self._flying: list[Mask] = [np.zeros(len(tail), np.bool_) for _ in blocks]
        self._failed = np.zeros(len(tail), np.bool_)
        self._reason = ""

    @classmethod
    def begin(
        cls,
        control: Control,
        kind: str,
        symbols: Symbols,
        blocks: dict[int, Ints],
        start: int,
        ready: ReadyEvent | None,
    ) -> SaveJob:
        """A job for blocks ``start`` ... of ``symbols``, which enter the index with it."""
        refs = control.placement.index.insert(symbols)
        ticket = Ticket(control.fresh_id(), kind)
        return cls(control, ticket, symbols, refs, blocks, start, ready)

    def step(self) -> bool:
        if self._stale():
            return False
        moved = False
        wanted = [self._missing(group) for group in range(len(self._open))]
        if any(len(w) for w in wanted):
            self._control.make_room([len(w) for w in wanted])
        for group, positions in enumerate(wanted):
            moved |= self._send(group, positions)
        self._let_sink()
        return moved

    def completion(self) -> Completion | None:
        if any(mask.any() for mask in self._flying):
            return None
        if self._stale():
            self._failed[:] = True
            self._reason = "reset"
        elif any(mask.any() for mask in self._open):
            return None
        whole = int(self._failed.argmax()) if self._failed.any() else len(self._failed)
        size = self._control.model.block_size
        freed = {g: tuple(ids[ids >= 0].tolist()) for g, ids in self._blocks.items()}
        return Completion(
            self.ticket,
            (self._start + whole) * size,
            len(self._refs) * size,
            self._reason,
            freed,
        )

    def give_up(self, reason: str) -> None:
        for mask in self._open:
            if mask.any():
                self._failed |= mask
                mask[:] = False
                self._reason = self._reason or reason

    def close(self) -> None:
        if not self._stale():
            self._control.placement.touch(self._refs)
        self._hold.close()
        self._control.saving_bytes -= self.nbytes

    # -- inside ----------------------------------------------------------------------------------

    def _stale(self) -> bool:
        return self._epoch != self._control.epoch

    def _missing(self, group: int) -> Ints:
        """Open blocks that nobody else is bringing in; those that somebody has are not open."""
        placement, mask = self._control.placement, self._open[group]
        positions = where(mask)
        refs = self._refs[self._start + positions]
        mask[positions[placement.stored(group, refs)]] = False
        coming = [shelf.ledgers[group].slots(refs) >= 0 for shelf in placement.below]
        missing: Ints = positions[~np.logical_or.reduce(coming)]
        return missing

    def _let_sink(self) -> None:
        """Hold no longer what is safe below: room for the rest may have to come from there."""
        below = self._control.placement.nvme
        if below is None or not any(mask.any() for mask in self._open):
            return
        safe = np.zeros(len(self._refs), np.bool_)
        safe[self._start :] = ~np.logical_or.reduce([*self._open, *self._flying]) & ~self._failed
        safe &= self._control.placement.dram.covers(self._refs, below)
        self._hold.let_go(safe & below.holds(self._refs))

    def _send(self, group: int, positions: Ints) -> bool:
        control = self._control
        shelf = control.placement.dram
        positions = positions[: shelf.ledgers[group].free]
        refs = self._refs[self._start + positions]
        taken = shelf.ledgers[group].reserve(refs)
        if taken is None or not len(refs):
            return False
        self._open[group][positions] = False
        self._flying[group][positions] = True
        control.move(
            "hbm",
            "dram",
            group,
            self._blocks[group][positions],
            taken.slots,
            Priority.STORE,
            lambda done: self._ended(group, positions, refs, taken, done),
            ready=self._ready,
            wants_checksums=True,
        )
        return True

    def _ended(
        self, group: int, positions: Ints, refs: Refs, taken: Reservation, done: Done
    ) -> None:
        control = self._control
        self._flying[group][positions] = False
        if done.checksums is not None:
            control.sums[group][taken.slots] = done.checksums
        if self._stale():
            control.placement.dram.ledgers[group].settle(taken, done.ok)
            return
        control.placement.settle(control.placement.dram, group, refs, taken, done.ok)
        control.placement.damaged.difference_update(refs.tolist())
        nbytes = control.model.groups[group].block_bytes()
        control.metrics.add("saved_bytes_total", nbytes * int(done.ok.sum()))
        if not done.ok.all():
            self._failed[positions[~done.ok]] = True
            self._reason = self._reason or done.error
        stored = self._start + positions[done.ok]
        if len(stored):
            control.stored(self._symbols, int(stored[0]), int(stored[-1]) + 1)
