"""Loads: NVMe -> DRAM -> HBM, block by block as they come, never more than can be resumed at."""

from __future__ import annotations

import numpy as np

from kvstrata.prefix_index.hybrid import usable_prefix
from kvstrata.store.control import Control, where
from kvstrata.store.hold import Hold
from kvstrata.store.placement import Mask, Refs, Shelf
from kvstrata.store.promote import promote
from kvstrata.tiers.ledger import Ints, State
from kvstrata.transfer.move import Completion, Done, Priority, ReadyEvent, Ticket


class LoadJob:
    """Delivers the blocks that a resume at ``n`` blocks reads, in every KV group.

    1. A block is delivered at most once, and only from a DRAM slot that was pinned for the copy.
    2. ``n`` never grows; when a block is lost it falls to the most that can still be had.
    3. The completion comes after the last copy into the engine's blocks has ended.

    The path is held; blocks are let go as they arrive, so that a prefix larger than DRAM passes
    through it in waves.
    """

    def __init__(
        self,
        control: Control,
        ticket: Ticket,
        refs: Refs,
        blocks: dict[int, Ints],
        ready: ReadyEvent | None,
        deadline: float | None,
        asked: tuple[int, int],
    ) -> None:
        """``asked``: the blocks that were asked for, and the epoch in which they were found."""
        self.ticket = ticket
        self.deadline = deadline
        self._control = control
        self._requested, self._epoch = asked
        self._refs = refs
        self._hold = Hold(control.placement, refs)
        self._blocks = blocks
        self._ready = ready
        self._n = len(refs)
        groups = range(len(control.model.groups))
        self._done = [self._in_place(group) for group in groups]
        self._flying: list[Mask] = [np.zeros(len(refs), np.bool_) for _ in groups]
        self._asked: list[Mask] = [np.zeros(len(refs), np.bool_) for _ in groups]
        """Blocks that were asked of NVMe: once each, or a disk that fails would be asked for
        ever."""
        self._over = False
        self._reason = ""

    def step(self) -> bool:
        if self._over or self._stale():
            return False
        moved = False
        for group, read in enumerate(self._control.placement.read_ranges(self._n)):
            wanted = self._wanted(group, read)
            if len(wanted):
                moved |= self._serve(group, wanted)
        self._let_go()
        return moved

    def completion(self) -> Completion | None:
        if any(mask.any() for mask in self._flying):
            return None
        if self._stale():
            self._n, self._reason = 0, "reset"
        elif not self._over:
            ranges = self._control.placement.read_ranges(self._n)
            if any(len(self._wanted(group, read)) for group, read in enumerate(ranges)):
                return None
        size = self._control.model.block_size
        return Completion(self.ticket, self._n * size, self._requested * size, self._reason)

    def give_up(self, reason: str) -> None:
        if self._over:
            return
        self._over, self._reason = True, self._reason or reason
        arriving = [a | b for a, b in zip(self._done, self._flying, strict=True)]
        self._n = min(self._n, usable_prefix(arriving, self._control.placement.specs))

    def close(self) -> None:
        self._hold.close()

    # -- inside ----------------------------------------------------------------------------------

    def _stale(self) -> bool:
        return self._epoch != self._control.epoch

    def _wanted(self, group: int, read: range) -> Ints:
        open_ = ~(self._done[group] | self._flying[group])
        return read.start + where(open_[read.start : read.stop])

    def _serve(self, group: int, wanted: Ints) -> bool:
        """Send up what DRAM has, bring into DRAM what NVMe has, and notice what nobody has."""
        control = self._control
        refs = self._refs[wanted]
        states = control.placement.dram.ledgers[group].states(refs)
        moved = False
        absent = states == State.EMPTY
        hbm = control.placement.hbm
        if hbm is not None:
            # Blocks that lie elsewhere in the pool are copied there: nearer than any tier.
            near = hbm.ledgers[group].ready(refs)
            moved |= self._send(group, wanted[near], hbm)
            absent &= ~near
            states[near] = State.EMPTY
        moved |= self._send(group, wanted[states == State.READY], control.placement.dram)
        return self._fetch(group, wanted[absent]) or moved

    def _fetch(self, group: int, absent: Ints) -> bool:
        """Bring into DRAM what NVMe has of these; notice what nobody has."""
        control = self._control
        moved = False
        if len(absent):
            shelf = control.placement.nvme
            below = np.zeros(len(absent), np.bool_)
            if shelf is not None:
                below = shelf.ledgers[group].ready(self._refs[absent])
            if not below.all():
                self._lose(int(absent[~below][0]), "failed_check")
                return True
            asked = self._asked[group][absent]
            if asked.any():
                self._lose(int(absent[asked][0]), "unreadable")
                return True
            needs = [0] * len(control.model.groups)
            needs[group] = len(absent)
            control.make_room(needs)
            count = promote(control, group, self._refs[absent], Priority.DEMAND)
            self._asked[group][absent[:count]] = True
            moved |= bool(count)
        return moved

    def _in_place(self, group: int) -> Mask:
        """Which blocks the engine shares instead of having them copied."""
        hbm = self._control.placement.hbm
        if hbm is None:
            return np.zeros(len(self._refs), np.bool_)
        blocks = self._blocks[group]
        same: Mask = (blocks >= 0) & (hbm.ledgers[group].slots(self._refs) == blocks)
        return same

    def _send(self, group: int, positions: Ints, shelf: Shelf) -> bool:
        if not len(positions):
            return False
        control = self._control
        ledger = shelf.ledgers[group]
        slots = ledger.slots(self._refs[positions])
        ledger.pin(slots)
        self._flying[group][positions] = True
        nbytes = control.model.groups[group].block_bytes()

        def ended(done: Done) -> None:
            self._flying[group][positions] = False
            gone = ledger.unpin(slots)
            if shelf is control.placement.hbm:
                control.shed[group].extend(gone.tolist())
            if self._stale():
                return
            self._done[group][positions[done.ok]] = True
            control.metrics.add(
                "loaded_bytes_total", nbytes * int(done.ok.sum()), source=shelf.name
            )
            bad = positions[~done.ok]
            if len(bad):
                if done.error == "checksum":
                    control.metrics.add("failed_check_blocks_total", len(bad), tier="dram")
                    control.placement.damaged.update(self._refs[bad].tolist())
                    shelf.evict(self._refs[bad])
                self._lose(int(bad[0]), "failed_check" if done.error == "checksum" else done.error)

        control.move(
            shelf.name,
            "hbm",
            group,
            slots,
            self._blocks[group][positions],
            Priority.DEMAND,
            ended,
            ready=self._ready,
            gate=self.ticket.gate,
            deadline=self.deadline,
            **self._checks(group, slots, shelf),
        )
        return True

    def _checks(self, group: int, slots: Ints, shelf: Shelf) -> dict[str, object]:
        """The sums that a copy out of DRAM verifies; HBM keeps none."""
        if shelf is not self._control.placement.dram:
            return {}
        sums = self._control.sums[group][slots]
        return {"checksums": sums, "verify": self._sample(len(slots))}

    def _sample(self, n: int) -> Mask:
        """Which of the next n blocks have their checksum verified."""
        every = self._control.config.dram.verify_one_in
        self._control.verified += n + 1  # one more, or loads of equal length check the same blocks
        if not every:
            return np.zeros(n, np.bool_)
        chosen: Mask = (self._control.verified + np.arange(n)) % every == 0
        return chosen

    def _lose(self, position: int, reason: str) -> None:
        """Block ``position`` cannot be had: aim at the most that can be resumed at without it."""
        if position >= self._n:
            return
        self._reason = self._reason or reason
        placement = self._control.placement
        head = self._refs[:position]
        have = [
            a[:position] | b[:position] | c
            for a, b, c in zip(
                self._done, self._flying, self._reachable(placement.readable(head)), strict=True
            )
        ]
        self._n = usable_prefix(have, placement.specs)

    def _reachable(self, readable: list[Mask]) -> list[Mask]:
        # A window group may have been given no block (-1) to load an older position into.
        return [
            mask & (self._blocks[group][: len(mask)] >= 0) for group, mask in enumerate(readable)
        ]

    def _let_go(self) -> None:
        """Hold no longer what has arrived in every group that reads it."""
        arrived = np.zeros(len(self._refs), np.bool_)
        unread = np.ones(len(self._refs), np.bool_)
        open_ = np.zeros(len(self._refs), np.bool_)
        for group, read in enumerate(self._control.placement.read_ranges(self._n)):
            at = slice(read.start, read.stop)
            unread[at] = False
            arrived[at] |= self._done[group][at]
            open_[at] |= ~self._done[group][at]
        # A block that no group reads now may be read after all if n falls: it is held to the end.
        self._hold.let_go(arrived & ~open_ & ~unread)
