"""Preemption: a sequence goes down whole, its partial last block too, and comes back token exact.

Whole blocks go down under their content keys, so what any tier has already is not copied again. The
partial last block gets a private slot that no prefix names: nobody can ever match it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstrata.prefix_index.lease import Lease
from kvstrata.prefix_index.prefix import Symbols
from kvstrata.store.control import Control, Job
from kvstrata.tiers.ledger import Ints, Reservation
from kvstrata.transfer.move import Completion, Done, Priority, ReadyEvent, Ticket


@dataclass(slots=True, eq=False)
class Swapped:
    """A sequence that has been swapped out; hand it to ``swap_in`` or to ``discard``, once.

    ``ticket`` is the swap-out's: when its Completion says fewer tokens than ``num_tokens``, only so
    many can come back (no room below), and the rest is recomputed.
    """

    ticket: Ticket
    symbols: Symbols
    num_tokens: int
    whole_blocks: int
    epoch: int
    keep: Lease
    tails: dict[int, Reservation] = field(default_factory=dict)
    tail_ready: bool = False
    over: bool = False


class TailOut:
    """Copies the partial last block of every group into private DRAM slots, around a save job."""

    def __init__(
        self, control: Control, inner: Job, swapped: Swapped, tails: dict[int, int],
        ready: ReadyEvent | None,
    ) -> None:
        """``tails[g]`` is the engine's block that holds the partial last block of group g."""
        self.ticket = inner.ticket
        self.deadline = inner.deadline
        self._control = control
        self._inner = inner
        self._swapped = swapped
        self._tails = tails
        self._ready = ready
        self._todo = bool(tails)
        self._flying = 0
        self._ok = True
        self._reason = ""

    def step(self) -> bool:
        return self._send() | self._inner.step()

    def completion(self) -> Completion | None:
        if self._flying or self._todo:
            return None
        inner = self._inner.completion()
        if inner is None:
            return None
        swapped = self._swapped
        whole = inner.tokens == inner.requested and self._ok
        if self._control.epoch != swapped.epoch:
            whole = False
        swapped.tail_ready = whole and bool(self._tails)
        freed = {g: list(ids) for g, ids in inner.freed.items()}
        for group, block in self._tails.items():
            freed.setdefault(group, []).append(block)
        return Completion(
            self.ticket,
            swapped.num_tokens if whole else inner.tokens,
            swapped.num_tokens,
            inner.reason or self._reason,
            {g: tuple(ids) for g, ids in freed.items()},
        )

    def give_up(self, reason: str) -> None:
        if self._todo:
            self._todo, self._ok, self._reason = False, False, reason
        self._inner.give_up(reason)

    def close(self) -> None:
        self._inner.close()
        if self._swapped.over or not self._swapped.tail_ready:
            drop_tails(self._control, self._swapped)

    def _send(self) -> bool:
        control = self._control
        if not self._todo or control.epoch != self._swapped.epoch:
            self._todo = False
            return False
        needs = [int(group in self._tails) for group in range(len(control.model.groups))]
        control.make_room(needs)
        if control.placement.dram.short(needs):
            return False
        self._todo = False
        for group, block in self._tails.items():
            taken = control.placement.dram.ledgers[group].reserve_private(1)
            assert taken is not None
            self._swapped.tails[group] = taken
            self._flying += 1
            control.move(
                "hbm", "dram", group, np.array([block], np.int64), taken.slots, Priority.STORE,
                lambda done, group=group, taken=taken: self._ended(group, taken, done),
                ready=self._ready,
                wants_checksums=True,
            )
        return True

    def _ended(self, group: int, taken: Reservation, done: Done) -> None:
        self._flying -= 1
        self._ok &= bool(done.ok.all())
        self._reason = self._reason or done.error
        if done.checksums is not None:
            self._control.sums[group][taken.slots] = done.checksums
        self._control.placement.dram.ledgers[group].settle(taken, done.ok)
        if not done.ok.all():
            del self._swapped.tails[group]


class TailIn:
    """Copies the private slots back into the engine's blocks, around a load job."""

    def __init__(
        self, control: Control, inner: Job, swapped: Swapped, tails: dict[int, int],
        ready: ReadyEvent | None,
    ) -> None:
        self.ticket = inner.ticket
        self.deadline = inner.deadline
        self._control = control
        self._inner = inner
        self._swapped = swapped
        self._tails = tails
        self._ready = ready
        self._todo = swapped.tail_ready
        self._whole = swapped.tail_ready or not swapped.num_tokens % control.model.block_size
        self._flying = 0
        self._reason = ""

    def step(self) -> bool:
        moved = self._inner.step()
        if not self._todo or self._control.epoch != self._swapped.epoch:
            return moved
        self._todo = False
        for group, taken in self._swapped.tails.items():
            self._send(group, taken.slots)
        return True

    def completion(self) -> Completion | None:
        inner = self._inner.completion()
        if inner is None or self._flying:
            return None
        stale = self._control.epoch != self._swapped.epoch
        needed = self._swapped.whole_blocks * self._control.model.block_size
        whole = self._whole and inner.tokens == needed and not stale
        return Completion(
            self.ticket,
            self._swapped.num_tokens if whole else inner.tokens,
            self._swapped.num_tokens,
            inner.reason or self._reason,
        )

    def give_up(self, reason: str) -> None:
        if self._todo:
            self._todo, self._whole, self._reason = False, False, reason
        self._inner.give_up(reason)

    def close(self) -> None:
        self._inner.close()
        finish(self._control, self._swapped)

    def _send(self, group: int, slots: Ints) -> None:
        control = self._control
        ledger = control.placement.dram.ledgers[group]
        ledger.pin(slots)
        self._flying += 1

        def ended(done: Done) -> None:
            self._flying -= 1
            ledger.unpin(slots)
            self._whole &= bool(done.ok.all())
            self._reason = self._reason or done.error

        control.move(
            "dram", "hbm", group, slots, np.array([self._tails[group]], np.int64),
            Priority.DEMAND, ended,
            ready=self._ready,
            checksums=control.sums[group][slots],
            verify=np.ones(len(slots), np.bool_),
        )


def drop_tails(control: Control, swapped: Swapped) -> None:
    """Give the private slots back."""
    if swapped.epoch == control.epoch:
        for group, taken in swapped.tails.items():
            control.placement.dram.ledgers[group].discard(taken.slots)
    swapped.tails.clear()
    swapped.tail_ready = False


def finish(control: Control, swapped: Swapped) -> None:
    """The sequence will not be asked for any more: keep nothing for it."""
    swapped.over = True
    swapped.keep.release()
    if swapped.ticket.id not in control.jobs:
        drop_tails(control, swapped)
