"""Preemption: a sequence goes down whole, its partial last block too, and comes back token exact.

Whole blocks go down under their content keys, so what any tier has already is not copied again. The
partial last block gets a private slot that no prefix names: nobody can ever match it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvstrata.core.errors import MisuseError
from kvstrata.prefix_index.lease import Lease
from kvstrata.prefix_index.prefix import Symbols
from kvstrata.store.control import Control, Job
from kvstrata.store.load import LoadJob
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
    owner: object
    tails: dict[int, Reservation] = field(default_factory=dict)
    tail_ready: bool = False
    over: bool = False

    def must_be_out(self, owner: object) -> None:
        """Raise MisuseError where it is another Store's, or was brought back or discarded
        before."""
        if self.owner is not owner:
            raise MisuseError("this sequence was swapped out by another store")
        if self.over:
            raise MisuseError("this sequence was swapped in or discarded before")


class TailOut:
    """Copies the partial last block of every group into private DRAM slots, around a save job."""

    def __init__(
        self,
        control: Control,
        inner: Job,
        swapped: Swapped,
        tails: dict[int, int],
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
                "hbm",
                "dram",
                group,
                np.array([block], np.int64),
                taken.slots,
                Priority.STORE,
                partial(self._ended, group, taken),
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


class SwapIn:
    """Brings a sequence back: its whole blocks by a load, its partial last block from private
    slots.

    The load begins once the swap-out has ended, however early the engine changed its mind.
    """

    def __init__(
        self,
        control: Control,
        ticket: Ticket,
        deadline: float,
        swapped: Swapped,
        blocks: dict[int, Ints],
        ready: ReadyEvent | None,
    ) -> None:
        """``blocks[g]``: the engine's blocks for all of the sequence, the partial last one
        included."""
        self.ticket = ticket
        self.deadline: float | None = deadline
        self._control = control
        self._swapped = swapped
        self._blocks = blocks
        self._ready = ready
        self._load: LoadJob | None = None
        self._tail_ok = not swapped.num_tokens % control.model.block_size
        self._tail_flying = 0
        self._reason = ""

    def step(self) -> bool:
        if self._load is not None:
            return self._load.step()
        if self._reason or self._swapped.ticket.id in self._control.jobs:
            return False
        self._load = self._begin()
        self._load.step()
        return True

    def completion(self) -> Completion | None:
        control, swapped = self._control, self._swapped
        inner = self._load.completion() if self._load is not None else None
        if self._tail_flying or (inner is None and (self._load is not None or not self._reason)):
            return None
        size = control.model.block_size
        tokens = 0 if inner is None else inner.tokens
        if self._tail_ok and tokens == swapped.whole_blocks * size and not self._stale():
            tokens = swapped.num_tokens
        reason = self._reason or (inner.reason if inner is not None else "")
        if tokens < swapped.num_tokens:
            reason = reason or ("reset" if self._stale() else "lost_below")
        return Completion(self.ticket, tokens, swapped.num_tokens, reason)

    def give_up(self, reason: str) -> None:
        if self._load is None:
            self._reason = self._reason or reason
        else:
            self._load.give_up(reason)

    def close(self) -> None:
        if self._load is not None:
            self._load.close()
        finish(self._control, self._swapped)

    def _stale(self) -> bool:
        return self._control.epoch != self._swapped.epoch

    def _begin(self) -> LoadJob:
        control, swapped = self._control, self._swapped
        # The blocks are looked up again: a ref kept since the swap-out may name another block now.
        path = control.placement.index.match(swapped.symbols)
        path = path[: 0 if self._stale() else control.placement.usable(path)]
        if swapped.tail_ready and not self._stale():
            for group, taken in swapped.tails.items():
                self._send_tail(group, taken.slots)
        blocks = {group: ids[: len(path)] for group, ids in self._blocks.items()}
        asked = (swapped.whole_blocks, swapped.epoch)
        return LoadJob(control, self.ticket, path, blocks, self._ready, self.deadline, asked)

    def _send_tail(self, group: int, slots: Ints) -> None:
        control = self._control
        ledger = control.placement.dram.ledgers[group]
        ledger.pin(slots)
        self._tail_ok = True
        self._tail_flying += 1
        target = self._blocks[group][self._swapped.whole_blocks :][:1]

        def ended(done: Done) -> None:
            self._tail_flying -= 1
            ledger.unpin(slots)
            self._tail_ok &= bool(done.ok.all())
            self._reason = self._reason or done.error

        control.move(
            "dram",
            "hbm",
            group,
            slots,
            target,
            Priority.DEMAND,
            ended,
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
