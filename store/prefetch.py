"""Prefetch: NVMe -> DRAM ahead of need."""

from __future__ import annotations

import numpy as np

from kvstrata.store.control import Control
from kvstrata.store.hold import Hold
from kvstrata.store.placement import Refs
from kvstrata.store.promote import promote
from kvstrata.tiers.ledger import State
from kvstrata.transfer.move import Completion, Priority, Ticket


class PrefetchJob:
    """Brings the blocks that a resume at the end of the path reads into DRAM, the leading ones
    first.

    It takes free slots and those of less valuable blocks, never a second round: what does not fit
    now stays below.
    """

    def __init__(
        self,
        control: Control,
        ticket: Ticket,
        refs: Refs,
        deadline: float | None,
    ) -> None:
        self.ticket = ticket
        self.deadline = deadline
        self._control = control
        self._epoch = control.epoch
        self._refs = refs
        self._hold = Hold(control.placement, refs)
        self._asked = False
        self._reason = ""

    def step(self) -> bool:
        control = self._control
        if self._asked or self._epoch != control.epoch:
            return False
        self._asked = True
        shelf = control.placement.nvme
        if shelf is None:
            return False
        moved = False
        absent: list[Refs] = []
        for group, read in enumerate(control.placement.read_ranges(len(self._refs))):
            refs = self._refs[read.start : read.stop]
            up = control.placement.dram.ledgers[group].states(refs) != State.EMPTY
            absent.append(refs[~up & shelf.ledgers[group].ready(refs)])
        control.make_room([len(refs) for refs in absent])
        for group, refs in enumerate(absent):
            moved |= bool(promote(control, group, refs, Priority.PREFETCH))
        return moved

    def completion(self) -> Completion | None:
        control, blocks = self._control, len(self._refs)
        size = control.model.block_size
        if self._epoch != control.epoch:
            return Completion(self.ticket, 0, blocks * size, "reset")
        if not self._asked:
            return None
        up = np.ones(blocks, np.bool_)
        for group, read in enumerate(control.placement.read_ranges(blocks)):
            states = control.placement.dram.ledgers[group].states(self._refs)
            if (states[read.start : read.stop] == State.FILLING).any() and not self._reason:
                return None
            up[read.start : read.stop] &= states[read.start : read.stop] == State.READY
        whole = blocks if up.all() else int(up.argmin())
        reason = self._reason or ("no_room" if whole < blocks else "")
        return Completion(self.ticket, whole * size, blocks * size, reason)

    def give_up(self, reason: str) -> None:
        self._asked, self._reason = True, reason

    def close(self) -> None:
        self._hold.close()
