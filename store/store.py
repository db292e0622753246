"""The Store: decides what is where, and is the only writer of the index and the ledgers."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Listed
from typing import Any, cast

import numpy as np

from kvstrata.core.clock import Bell, Clock
from kvstrata.core.config import StoreConfig
from kvstrata.core.errors import ClosedError, LayoutError, MisuseError
from kvstrata.core.layout import PagedLayout
from kvstrata.core.metrics import Metrics
from kvstrata.core.model import KVModel
from kvstrata.prefix_index.prefix import Prefix, Symbols
from kvstrata.store.answers import Blocks, Hit, Match, Polled, Reason, Sequence, Stats, polled
from kvstrata.store.control import Control
from kvstrata.store.load import LoadJob
from kvstrata.store.looking import Looking, block_ids
from kvstrata.store.lookups import Lookups
from kvstrata.store.lower import Lowering
from kvstrata.store.placement import Placement
from kvstrata.store.policy.base import Admission
from kvstrata.store.prefetch import PrefetchJob
from kvstrata.store.recovery import adopt
from kvstrata.store.residents import Residents
from kvstrata.store.save import SaveJob
from kvstrata.store.swap import SwapIn, Swapped, TailOut, finish
from kvstrata.store.waiting import Waiting
from kvstrata.tiers.base import Tier
from kvstrata.tiers.ledger import Ints
from kvstrata.tiers.records import RecordTier
from kvstrata.transfer.move import Completion, Executor, ReadyEvent, Ticket

_CLOSE_SECONDS = 60.0


class Store:
    """A hierarchical KV store for one model. Open it with ``kvstrata.open_store``.

    1. Nothing is visible before its bytes are whole, and nothing unverified is ever loaded.
    2. Leases and pins return to 0 once every hit is released and every ticket has completed.
    3. Every ticket has exactly one Completion, from ``poll`` or from ``wait``.
    4. After ``reset`` returned no older block is loaded, nor published by a copy in flight.

    Any thread may call any method: one lock, never held over I/O or a copy (``reset``, ``close``
    and opening wait for the disk). A miss, a full tier and a damaged record are answers.
    """

    def __init__(
        self,
        config: StoreConfig,
        model: KVModel,
        placement: Placement,
        executor: Executor,
        *,
        hbm: Any,
        dram: Tier,
        nvme: RecordTier | None,
        admission: Admission,
        clock: Clock,
        wall: Clock,
        bell: Bell,
        metrics: Metrics,
    ) -> None:
        """For ``open_store``. ``hbm`` has ``register``, ``capacity`` and ``close``.

        ``clock`` is monotonic and times deadlines; ``wall`` is what last uses are remembered by.
        """
        self.config = config
        self.model = model
        self.metrics = metrics
        self._placement = placement
        self._executor = executor
        self._hbm = hbm
        self._dram = dram
        self._nvme = nvme
        self._clock = clock
        self._lock = threading.RLock()
        self._closed = False
        self._looking = Looking(model, placement, lambda: 0 if nvme is None else nvme.epoch)
        self._lookups = Lookups(placement, nvme, wall, metrics)
        self._control = Control(config, model, placement, executor, dram, nvme, clock, metrics)
        self._waiting = Waiting(self._control, self._lock, bell, clock)
        self._lowering = Lowering(self._control, admission)
        self._residents = Residents(self._control, placement.hbm)
        if nvme is not None:
            for group, orphans in adopt(placement, nvme.recovered()).items():
                self._control.delete_records(group, np.array(orphans, np.int64))

    # -- the engine's memory ---------------------------------------------------------------------

    def register(self, group: int, tensors: Listed[Any], layout: PagedLayout) -> None:
        """Tell where the engine keeps the paged KV of one group (see ``kvstrata.core.layout``).

        Raises LayoutError where tensors or layout contradict the KVModel; nothing is changed then.
        """
        with self._open():
            if not 0 <= group < len(self.model.groups):
                raise LayoutError(f"the KVModel has no group {group}")
            needed = self.model.groups[group].block_bytes()
            if layout.record_bytes != needed:
                raise LayoutError(
                    f"a block of group {group} has {layout.record_bytes} bytes in this layout "
                    f"and {needed} in the KVModel"
                )
            self._hbm.register(group, tensors, layout)

    # -- looking ---------------------------------------------------------------------------------

    def match(self, prefix: Prefix, max_tokens: int | None = None) -> Match:
        """What could be loaded now. No lease, no side effect; ask as often as you like.

        ``max_tokens`` bounds the answer: an engine that must compute the last token itself passes
        the prompt's length minus one.
        """
        with self._open():
            symbols = self._looking.symbols(prefix)
            return self._looking.match(symbols, *self._looking.path(symbols, max_tokens))

    def lookup(
        self, prefix: Prefix, max_tokens: int | None = None, request: str | None = None
    ) -> Hit:
        """Like ``match``, and holds what it found until ``Hit.release`` or ``load``.

        Counts as a use of the blocks. ``request`` names the lookup for ``why``.
        """
        with self._open():
            symbols = self._looking.symbols(prefix)
            path, limited = self._looking.path(symbols, max_tokens)
            match = self._looking.match(symbols, path, limited)
            blocks = match.tokens // self.model.block_size
            refs = path[:blocks]
            asked = symbols.num_blocks * self.model.block_size
            self._lookups.note(match, asked, path, refs, request)
            lease = self._placement.index.leases.lease(refs)
            resident = self._residents.where(refs)
            epoch = self._control.epoch
            return Hit(match, symbols, blocks, refs, epoch, lease, self.release, resident)

    def release(self, hit: Hit) -> None:
        """Let a hit's blocks go. Twice is fine, and so is after ``load``."""
        with self._lock:
            held = hit.lease.held
            hit.lease.release()
            if len(held) and hit.epoch == self._control.epoch:
                self._placement.prune(held)

    def why(self, request: str) -> tuple[Reason, ...]:
        """Why the blocks that a named lookup missed were missed; empty if all were there.

        Raises MisuseError for a request that was not looked up by name, or too long ago.
        """
        with self._lock:
            return self._lookups.why(request)

    # -- moving ----------------------------------------------------------------------------------

    def load(
        self,
        hit: Hit,
        blocks: Blocks,
        ready: ReadyEvent | None = None,
        deadline: float | None = None,
    ) -> Ticket:
        """Bring the hit's blocks into the engine's ``blocks``; asynchronous.

        The engine must not touch those blocks until the ticket's Completion, which says how many
        tokens have arrived: fewer than asked for is an answer. ``ready`` is passed once their last
        reader is done. ``deadline`` is in seconds from now (default ``transfer.timeout``). Takes
        over the hit's lease. Raises MisuseError for a hit that was released or loaded before, and
        LayoutError for block ids that do not fit.
        """
        with self._open():
            if not hit.lease.held.size and hit.blocks and hit.epoch == self._control.epoch:
                raise MisuseError(
                    "this hit was released or loaded before; look the prefix up again"
                )
            ids = self._block_ids(blocks, hit.blocks, hit.blocks)
            refs = hit.refs
            if hit.epoch != self._control.epoch:
                refs, ids = refs[:0], {group: got[:0] for group, got in ids.items()}
            number = self._control.fresh_id()
            whole = all(mask.all() for mask in self._placement.dram.ready(refs)) and len(refs)
            ticket = Ticket(number, "load", number if whole else 0)
            timeout = self.config.transfer.timeout if deadline is None else deadline
            job = LoadJob(self._control, ticket, refs, ids, ready, self._clock() + timeout)
            # The job holds the path before the hit lets go: at no time is a block unheld.
            hit.lease.release()
            return self._control.start(job)

    def save(
        self, prefix: Prefix, blocks: Blocks, start: int = 0, ready: ReadyEvent | None = None
    ) -> Ticket:
        """Store the prefix's full blocks from block ``start`` on; asynchronous.

        ``blocks[g][i]`` is the engine's block that holds block ``start + i``. They must stay as
        they are until the Completion lists them in ``freed``. ``ready`` is passed once their last
        writer is done. What some tier has already is not copied.
        """
        with self._open():
            symbols, ids, start = self._part(prefix, blocks, start)
            return self._control.start(self._save_job("save", symbols, ids, start, ready))

    def prefetch(self, prefix: Prefix, max_tokens: int | None = None) -> Ticket:
        """Bring what NVMe has of the prefix into DRAM, ahead of need; asynchronous."""
        with self._open():
            symbols = self._looking.symbols(prefix)
            _, limited = self._looking.path(symbols, max_tokens)
            refs = limited[: self._placement.usable(limited)]
            self._placement.touch(refs)
            ticket = Ticket(self._control.fresh_id(), "prefetch")
            deadline = self._clock() + self.config.transfer.timeout
            return self._control.start(PrefetchJob(self._control, ticket, refs, deadline))

    def keep(self, prefix: Prefix, blocks: Blocks, start: int = 0) -> dict[int, Ints]:
        """Cache blocks of the engine's pool where they are; returns, by group, the ids taken.

        ``blocks`` as for ``save``. The engine must neither write nor release the blocks taken until
        ``shed`` or ``Polled.shed`` gives them back. Raises MisuseError where the Store was not
        opened to cache in HBM.
        """
        with self._open():
            symbols, ids, start = self._part(prefix, blocks, start)
            return self._residents.keep(symbols, ids, start)

    def shed(self, count: int) -> dict[int, Ints]:
        """Give back up to ``count`` kept blocks, least valuable first; by group their ids."""
        with self._open():
            return self._residents.shed(count)

    def swap_out(self, sequence: Sequence, ready: ReadyEvent | None = None) -> Swapped:
        """Take a preempted sequence down, its partial last block included; asynchronous.

        The engine's blocks are free once the Completion of ``Swapped.ticket`` lists them.
        """
        with self._open():
            size = self.model.block_size
            whole, partial = divmod(sequence.num_tokens, size)
            symbols = self._looking.symbols(sequence.prefix)
            if sequence.num_tokens < 0 or symbols.num_blocks < whole:
                raise MisuseError(
                    f"a sequence of {sequence.num_tokens} tokens needs a prefix that names its "
                    f"{whole} whole blocks; this one names {symbols.num_blocks}"
                )
            symbols = symbols._replace(data=symbols.data[: whole * symbols.width])
            count = whole + bool(partial)
            ids = self._block_ids(sequence.blocks, count, count)
            job = self._save_job(
                "swap_out", symbols, {g: got[:whole] for g, got in ids.items()}, 0, ready
            )
            self._placement.keeps.grow(self._placement.index.capacity)
            keep = self._placement.keeps.lease(self._placement.index.match(symbols))
            epoch = self._control.epoch
            swapped = Swapped(job.ticket, symbols, sequence.num_tokens, whole, epoch, keep)
            tails = {g: int(got[whole]) for g, got in ids.items()} if partial else {}
            self._control.start(TailOut(self._control, job, swapped, tails, ready))
            return swapped

    def swap_in(
        self,
        swapped: Swapped,
        blocks: Blocks,
        ready: ReadyEvent | None = None,
        deadline: float | None = None,
    ) -> Ticket:
        """Bring a sequence back into the engine's ``blocks``; asynchronous, once for each Swapped.

        The Completion's tokens are ``num_tokens``, or fewer whole blocks where something was lost.
        """
        with self._open():
            self._usable_swap(swapped)
            count = -(-swapped.num_tokens // self.model.block_size)
            ids = self._block_ids(blocks, count, count)
            swapped.over = True
            ticket = Ticket(self._control.fresh_id(), "swap_in")
            timeout = self.config.transfer.timeout if deadline is None else deadline
            until = self._clock() + timeout
            return self._control.start(SwapIn(self._control, ticket, until, swapped, ids, ready))

    def discard(self, swapped: Swapped) -> None:
        """Forget a swapped-out sequence that will not come back (it was aborted)."""
        with self._open():
            self._usable_swap(swapped)
            finish(self._control, swapped)

    # -- completions -----------------------------------------------------------------------------

    def poll(self) -> Polled:
        """Everything that has completed and was not waited for. Never blocks; one consumer."""
        with self._open():
            self._waiting.advance()
            results, self._control.results = self._control.results, {}
            shed = self._residents.take_shed()
        return polled(list(results.values()), shed)

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Completion | None:
        """Block until a ticket has completed; None if that takes longer than ``timeout`` seconds.

        Other completions stay for ``poll``. Raises MisuseError for a ticket whose Completion was
        fetched before.
        """
        return self._waiting.completion(ticket, timeout)

    def gate(self, ticket: Ticket, group: int) -> Any | None:
        """The LayerGate of a load whose layers arrive one by one; None: wait for the ticket."""
        return cast(Any, self._executor).gate(ticket.gate, group) if ticket.gate else None

    def flush(self, timeout: float | None = None) -> bool:
        """Write what only DRAM has to NVMe; True once all that the disk has room for is durable."""
        with self._open():
            self._lowering.flush()
        return self._waiting.until(lambda: self._lowering.idle, timeout)

    # -- forgetting ------------------------------------------------------------------------------

    def drop(self, tier: str) -> int:
        """Empty ``hbm``, ``dram`` or ``nvme``, but for blocks in use. Returns the blocks
        dropped."""
        with self._open():
            shelf = {s.name: s for s in self._placement.shelves}.get(tier)
            if shelf is None:
                names = ", ".join(s.name for s in self._placement.shelves)
                raise MisuseError(f"this store has no tier {tier!r}; it has {names}")
            refs = np.unique(np.concatenate([x.resident() for x in shelf.ledgers]))
            refs = refs.astype(np.int32)
            refs = refs[~self._placement.index.leases.pinned(refs)]
            evict = {
                "hbm": self._residents.drop,
                "dram": self._control.evict_dram,
                "nvme": self._control.evict_nvme,
            }
            evict[tier](refs)
            return len(refs)

    def reset(self) -> None:
        """Forget every block in every tier, for good; copies in flight publish nothing.

        Call it when the weights have changed. Durable when it returns.
        """
        with self._open():
            self._control.epoch += 1
            freed = self._placement.reset()
            if self._placement.hbm is not None:
                self._residents.after_reset(freed[0])
            if self._nvme is not None:
                self._nvme.reset()
            self._waiting.advance()

    def stats(self) -> Stats:
        """The Store in numbers, now."""
        with self._lock:
            return Stats(
                tiers={shelf.name: shelf.counts() for shelf in self._placement.shelves},
                blocks_indexed=len(self._placement.index),
                leases=self._placement.index.leases.total,
                moves_in_flight=self._control.in_flight,
                tickets_open=len(self._control.jobs),
                metrics=self.metrics.snapshot(),
            )

    def check(self) -> None:
        """Raise AssertionError naming the invariant that does not hold. Slow; for tests."""
        with self._lock:
            self._control.check()
            if self._nvme is not None:
                self._nvme.check()

    def close(self) -> None:
        """Make durable what can be within a minute, end what is in flight, give all back.

        Twice is fine.
        """
        if self._closed:
            return
        try:
            if self._nvme is not None:
                self.flush(_CLOSE_SECONDS)
        finally:
            with self._lock:
                self._closed = True
                for job in self._control.jobs.values():
                    job.give_up("closed")
            self._executor.close()
            with self._lock:
                self._control.advance()
            for tier in (self._nvme, self._dram, self._hbm):
                if tier is not None:
                    tier.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _open(self) -> threading.RLock:
        if self._closed:
            raise ClosedError("the store is closed")
        return self._lock

    def _save_job(
        self,
        kind: str,
        symbols: Symbols,
        ids: dict[int, Ints],
        start: int,
        ready: ReadyEvent | None,
    ) -> SaveJob:
        refs = self._placement.index.insert(symbols)
        ticket = Ticket(self._control.fresh_id(), kind)
        return SaveJob(
            self._control, ticket, symbols, refs, ids, start, ready, self._lowering.stored
        )

    def _part(
        self, prefix: Prefix, blocks: Blocks, start: int
    ) -> tuple[Symbols, dict[int, Ints], int]:
        """The head of a prefix that ``blocks`` from ``start`` on reach, its ids, and the start."""
        if start < 0:
            raise MisuseError(f"start must be 0 or more, got {start}")
        symbols = self._looking.symbols(prefix)
        given = max((np.size(ids) for ids in blocks.values()), default=0)
        stop = min(symbols.num_blocks, start + given)
        start = min(start, stop)
        head = symbols._replace(data=symbols.data[: stop * symbols.width])
        return head, self._block_ids(blocks, stop - start, given), start

    def _block_ids(self, blocks: Blocks, count: int, given: int) -> dict[int, Ints]:
        capacities = [self._hbm.capacity(group) for group in range(len(self.model.groups))]
        return block_ids(blocks, capacities, count, given)

    def _usable_swap(self, swapped: Swapped) -> None:
        if swapped.over:
            raise MisuseError("this sequence was swapped in or discarded before")
