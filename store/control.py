"""What all jobs of a Store share: Moves out, completions in, room made, and who waits for what.

A job is a load, save, prefetch or swap under way. It never blocks: ``step`` starts what can be
started now, handlers of completions note what has ended, and ``advance`` goes round until nothing
moves. All of it runs under the Store's lock and touches no byte.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.config import StoreConfig
from kvstrata.core.model import KVModel
from kvstrata.prefix_index.prefix import Symbols
from kvstrata.store.answers import Stats
from kvstrata.store.parts import Parts
from kvstrata.store.placement import Placement, Refs
from kvstrata.tiers.ledger import Ints, State
from kvstrata.transfer.move import Completion, Done, Move, Priority, Ticket

log = logging.getLogger("kvstrata")

_RESULTS_KEPT = 1 << 16
"""Completions that nobody fetched; beyond them the oldest goes, or a caller that never polls
leaks."""


class Job(Protocol):
    """Something under way that ends with one Completion."""

    ticket: Ticket
    deadline: float | None

    def step(self) -> bool:
        """Start what can be started; True if anything was."""
        ...

    def completion(self) -> Completion | None:
        """The result once nothing of the job is in flight any more, else None."""
        ...

    def give_up(self, reason: str) -> None:
        """Start nothing more; what is in flight still ends."""
        ...

    def close(self) -> None:
        """Let go of leases and pins, exactly once, after the completion."""
        ...


class Control:
    """The machinery under a Store.

    1. Every Move that was submitted has one handler here until its Done has come.
    2. Every ticket given out has one job here until its Completion is in ``results``.
    3. After ``advance``, no job could start anything more.
    """

    def __init__(
        self, config: StoreConfig, model: KVModel, placement: Placement, parts: Parts
    ) -> None:
        self.config = config
        self.model = model
        self.placement = placement
        self.executor = parts.executor
        self.dram = parts.dram
        self.nvme = parts.nvme
        self.clock = parts.clock
        self.metrics = parts.metrics
        self.epoch = 0
        """Grows at reset: a completion for a job of an older epoch publishes nothing."""
        self.sums = [np.zeros(0, np.uint64) for _ in model.groups]
        """xxh3-64 of the record in each DRAM slot, taken when it came in."""
        self.verified = 0
        """Blocks that passed by the sampled check of loads from DRAM."""
        self.shed: list[list[int]] = [[] for _ in model.groups]
        """By group, kept blocks of the engine's pool that it may have back."""
        self.saving_bytes = 0
        """Bytes of all saves under way, for back-pressure."""
        self.jobs: dict[int, Job] = {}
        self.results: dict[int, Completion] = {}
        self.background: list[Callable[[], bool]] = []
        """Steps of work that has no ticket: lowering to NVMe."""
        self.stored: Callable[[Symbols, int, int], None] = lambda symbols, start, stop: None
        """Hear that blocks ``start`` ... ``stop - 1`` came into DRAM; set by whoever writes
        behind."""
        self.demote: Callable[[Refs], None] = lambda refs: None
        """Write blocks to NVMe so that they may leave DRAM; set by whoever does it."""
        self._handlers: dict[int, Callable[[Done], None]] = {}
        self._batches: dict[int, Callable[[bool], None]] = {}
        self._outbox: list[Move] = []
        self._next = 1
        self.grow()

    # -- names -----------------------------------------------------------------------------------

    def fresh_id(self) -> int:
        """A number that no ticket or Move of this Store had before."""
        self._next += 1
        return self._next

    def start(self, job: Job) -> Ticket:
        """Take a job in; its first step has been made when this returns."""
        self.jobs[job.ticket.id] = job
        self.advance()
        return job.ticket

    @property
    def saving(self) -> bool:
        """Whether a save or swap-out is under way."""
        return any(job.ticket.kind in ("save", "swap_out") for job in self.jobs.values())

    # -- moving ----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Moves and catalogue batches whose end has not been heard of."""
        return len(self._handlers) + len(self._batches)

    def move(
        self,
        source: str,
        target: str,
        group: int,
        source_slots: Ints,
        target_slots: Ints,
        priority: Priority,
        on_done: Callable[[Done], None],
        **more: Any,
    ) -> None:
        """Queue one Move; ``on_done`` hears of its end, under the Store's lock."""
        made = Move(
            self.fresh_id(), source, target, group, source_slots, target_slots, priority, **more
        )
        self._handlers[made.id] = on_done
        self._outbox.append(made)

    def batch(self, number: int, on_done: Callable[[bool], None]) -> None:
        """Have ``on_done`` told whether the catalogue's batch was committed."""
        self._batches[number] = on_done

    # -- room ------------------------------------------------------------------------------------

    def make_room(self, needs: list[int]) -> None:
        """Let DRAM have so many free slots in each group, as far as it can be done now.

        Drops the least valuable blocks that are safe below (or that cannot go below); starts
        writing down those that are not, so that a later call finds them safe.
        """
        shelf = self.placement.dram
        sinks = self.nvme is not None and self.nvme.writable
        for _ in range(2):  # the first victims may have no slot in the group that is short
            short = shelf.short(needs)
            if not short:
                return
            safe, unsafe = self.placement.dram_victims(short, sinks=sinks)
            if len(unsafe):
                if not sinks:
                    safe, unsafe = np.concatenate([safe, unsafe]), unsafe[:0]
                else:
                    self.demote(unsafe)
            if not len(safe):
                return
            self.evict_dram(safe)

    def evict_dram(self, refs: Refs) -> None:
        """Drop blocks from DRAM."""
        self.placement.dram.evict(refs)
        self.metrics.add("evicted_blocks_total", len(refs), tier="dram")
        self.placement.prune(refs)

    def evict_nvme(self, refs: Refs) -> None:
        """Drop blocks from NVMe; space becomes free once the deletes are committed."""
        shelf = self.placement.nvme
        assert shelf is not None
        for group, freed in enumerate(shelf.evict(refs)):
            self.delete_records(group, freed)
        self.metrics.add("evicted_blocks_total", len(refs), tier="nvme")
        self.placement.prune(refs)

    def delete_records(self, group: int, records: Ints) -> None:
        """Delete records that no read is using."""
        if len(records):
            assert self.nvme is not None
            self.batch(self.nvme.delete(group, records.tolist()), lambda ok: None)

    def grow(self) -> None:
        """Use DRAM slots that have become usable since."""
        for group, ledger in enumerate(self.placement.dram.ledgers):
            ledger.grow(self.dram.capacity(group))
            sums = self.sums[group]
            if len(sums) < ledger.capacity:
                more = np.zeros(ledger.capacity - len(sums), np.uint64)
                self.sums[group] = np.concatenate([sums, more])

    # -- going round -----------------------------------------------------------------------------

    def advance(self) -> bool:
        """Hear of what has ended, start what can be started. True if any ticket has completed."""
        before = len(self.results)
        progress = True
        while progress:
            progress = self._hear()
            self.grow()
            for job in list(self.jobs.values()):
                if job.deadline is not None and self.clock() >= job.deadline:
                    job.deadline = None
                    job.give_up("deadline")
                progress |= job.step()
            for step in self.background:
                progress |= step()
            progress |= self._submit()
            progress |= self._finish()
            if not progress and self.jobs and not self.in_flight:
                # Nothing will come that could make room or bring a block: the answer is shorter.
                for job in self.jobs.values():
                    job.give_up("no_room")
                progress = self._finish()
        return len(self.results) > before

    def stop(self) -> None:
        """Start nothing more, ever: jobs give up and background work ends."""
        self.background.clear()
        self.stored = lambda symbols, start, stop: None
        self.demote = lambda refs: None
        for job in self.jobs.values():
            job.give_up("closed")

    def next_deadline(self) -> float | None:
        """When ``advance`` has something to do though nothing was heard of."""
        times = [job.deadline for job in self.jobs.values() if job.deadline is not None]
        return min(times, default=None)

    def _hear(self) -> bool:
        heard = False
        for done in self.executor.poll():
            self._handlers.pop(done.id)(done)
            heard = True
        if self.nvme is not None:
            for batch in self.nvme.poll():
                handler = self._batches.pop(batch.batch, None)
                if handler is not None:
                    handler(batch.ok)
                heard = True
        return heard

    def _submit(self) -> bool:
        moves, self._outbox = self._outbox, []
        if moves:
            self.executor.submit(moves)
        return bool(moves)

    def _finish(self) -> bool:
        ended = False
        for job in list(self.jobs.values()):
            completion = job.completion()
            if completion is not None:
                del self.jobs[job.ticket.id]
                job.close()
                self.results[job.ticket.id] = completion
                ended = True
        while len(self.results) > _RESULTS_KEPT:
            self.results.pop(next(iter(self.results)))
            self.metrics.add("completions_dropped_total")
        return ended

    def stats(self) -> Stats:
        """Everything in numbers, now."""
        return Stats(
            tiers={shelf.name: shelf.counts() for shelf in self.placement.shelves},
            blocks_indexed=len(self.placement.index),
            leases=self.placement.index.leases.total,
            moves_in_flight=self.in_flight,
            tickets_open=len(self.jobs),
            metrics=self.metrics.snapshot(),
        )

    def check(self) -> None:
        """Raise AssertionError naming the invariant that does not hold."""
        self.placement.check()
        assert not self._outbox, "1: a Move was not submitted"
        assert not (self.jobs.keys() & self.results.keys()), "2: a job has completed twice"
        assert self.jobs or not self.saving_bytes, "2: a save's bytes outlive it"
        if not self.jobs and not self.in_flight:
            for shelf in self.placement.shelves:
                assert all(x.count(State.FILLING) == 0 for x in shelf.ledgers), (
                    "1: FILLING with no Move"
                )


def where(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions of True."""
    return np.flatnonzero(mask)
