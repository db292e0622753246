"""The Store: decides what is where, and is the only writer of the index and the ledgers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listed
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from kvstrata.core.config import StoreConfig
from kvstrata.core.errors import ClosedError, MisuseError
from kvstrata.core.layout import PagedLayout, layouts_of
from kvstrata.core.model import KVModel
from kvstrata.prefix_index.prefix import Prefix
from kvstrata.store.answers import (
    Blocks,
    Hit,
    Match,
    Pin,
    Polled,
    Reason,
    Sequence,
    Stats,
    polled,
)
from kvstrata.store.control import Control
from kvstrata.store.load import LoadJob
from kvstrata.store.looking import Looking
from kvstrata.store.lookups import Lookups
from kvstrata.store.lower import Lowering
from kvstrata.store.parts import Parts
from kvstrata.store.placement import Placement
from kvstrata.store.prefetch import PrefetchJob
from kvstrata.store.recovery import adopt
from kvstrata.store.residents import Residents
from kvstrata.store.save import SaveJob
from kvstrata.store.swap import Swapped
from kvstrata.store.swapper import Swapper
from kvstrata.store.waiting import Waiting
from kvstrata.tiers.ledger import Ints
from kvstrata.transfer.move import Completion, ReadyEvent, Ticket

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
        self, config: StoreConfig, model: KVModel, placement: Placement, parts: Parts
    ) -> None:
        """For ``open_store``."""
        self.config = config
        self.model = model
        self.metrics = parts.metrics
        self._placement = placement
        self._parts = parts
        self._nvme = nvme = parts.nvme
        self._clock = parts.clock
        self._lock = threading.RLock()
        self._closing = threading.Lock()
        self._closed = False
        self._looking = Looking(
            model, placement, parts.hbm, lambda: 0 if nvme is None else nvme.epoch
        )
        self._lookups = Lookups(placement, nvme, parts.wall, parts.metrics)
        self._control = Control(config, model, placement, parts)
        self._waiting = Waiting(
            self._control, self._lock, parts.bell, parts.clock, attended=parts.attended
        )
        self._lowering = Lowering(self._control, parts.admission)
        self._swapper = Swapper(self._control, self._looking)
        self._residents = Residents(self._control, placement.hbm)
        if nvme is not None:
            for group, orphans in adopt(placement, nvme.recovered()).items():
                self._control.delete_records(group, np.array(orphans, np.int64))

    # -- the engine's memory ---------------------------------------------------------------------

    def register(
        self, kv_tensors: Mapping[int, Listed[Any]], layout: str | Mapping[int, PagedLayout]
    ) -> None:
        """Tell where the engine keeps its paged KV: by group, the tensors, used as they are.

        ``layout`` is one of ``kvstrata.core.layout.LAYOUTS`` by name, or a PagedLayout a group.
        Raises LayoutError where tensors or layout contradict the KVModel; nothing is changed then.
        """
        with self._open():
            layouts = layouts_of(self.model, kv_tensors, layout)
            self._parts.hbm.register_all(kv_tensors, layouts)

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

    def pin(self, prefix: Prefix) -> Pin:
        """See to it that what the Store has of the prefix is not evicted until ``Pin.release``.

        Pinned blocks may sink to NVMe, and are lost with it if it is damaged.
        """
        with self._open():
            symbols = self._looking.symbols(prefix)
            path, _ = self._looking.path(symbols, None)
            refs = path[: self._placement.usable(path)]
            self._placement.keeps.grow(self._placement.index.capacity)
            lease = self._placement.keeps.lease(refs)
            return Pin(len(refs) * self.model.block_size, self._lock, lease)

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
        reader is done (default: what the current stream has queued is). ``deadline`` is in seconds
        from now (default ``transfer.timeout``). Takes over the hit's lease. Raises MisuseError for
        a hit that was released or loaded before, and LayoutError for block ids that do not fit.
        """
        with self._open():
            if hit.on_release != self.release:
                raise MisuseError("this hit is another store's; look the prefix up in this one")
            if not hit.lease.held.size and hit.blocks and hit.epoch == self._control.epoch:
                raise MisuseError(
                    "this hit was released or loaded before; look the prefix up again"
                )
            ids = self._looking.block_ids(blocks, hit.blocks, hit.tokens)
            refs = hit.refs
            if hit.epoch != self._control.epoch:
                refs, ids = refs[:0], {group: got[:0] for group, got in ids.items()}
            number = self._control.fresh_id()
            ticket = Ticket(number, "load", number if self._placement.at_once(refs) else 0)
            asked, until = (hit.blocks, hit.epoch), self._until(deadline)
            job = LoadJob(self._control, ticket, refs, ids, self._ready(ready), until, asked)
            # The job holds the path before the hit lets go: at no time is a block unheld.
            hit.lease.release()
            return self._control.start(job)

    def save(
        self, prefix: Prefix, blocks: Blocks, start: int = 0, ready: ReadyEvent | None = None
    ) -> Ticket:
        """Store the prefix's full blocks from block ``start`` on; asynchronous.

        ``blocks[g][i]`` is the engine's block that holds block ``start + i``. They must stay as
        they are until the Completion lists them in ``freed``. ``ready`` is passed once their last
        writer is done (default: what the current stream has queued is). What some tier has already
        is not copied; beyond ``transfer.queue`` bytes of saves under way nothing is stored, and
        the reason is ``busy``.
        """
        with self._open():
            symbols, ids, start = self._looking.part(prefix, blocks, start)
            job = SaveJob.begin(self._control, "save", symbols, ids, start, self._ready(ready))
            if job.nbytes < self._control.saving_bytes > self.config.transfer.queue:
                job.give_up("busy")
            return self._control.start(job)

    def prefetch(self, prefix: Prefix, max_tokens: int | None = None) -> Ticket:
        """Bring what NVMe has of the prefix into DRAM, ahead of need; asynchronous."""
        with self._open():
            symbols = self._looking.symbols(prefix)
            _, limited = self._looking.path(symbols, max_tokens)
            refs = limited[: self._placement.usable(limited)]
            self._placement.touch(refs)
            ticket = Ticket(self._control.fresh_id(), "prefetch")
            return self._control.start(PrefetchJob(self._control, ticket, refs, self._until()))

    def keep(self, prefix: Prefix, blocks: Blocks, start: int = 0) -> dict[int, Ints]:
        """Cache blocks of the engine's pool where they are; returns, by group, the ids taken.

        ``blocks`` as for ``save``. The engine must neither write nor release the blocks taken until
        ``shed`` or ``Polled.shed`` gives them back. Raises MisuseError where the Store was not
        opened to cache in HBM.
        """
        with self._open():
            symbols, ids, start = self._looking.part(prefix, blocks, start)
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
            return self._swapper.out(sequence, self._ready(ready))

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
            until = self._until(deadline)
            return self._swapper.back(swapped, blocks, self._ready(ready), until)

    def discard(self, swapped: Swapped) -> None:
        """Forget a swapped-out sequence that will not come back (it was aborted)."""
        with self._open():
            self._swapper.discard(swapped)

    # -- completions -----------------------------------------------------------------------------

    def poll(self) -> Polled:
        """Everything that has completed and was not waited for. Never blocks; one consumer."""
        with self._open():
            return polled(self._waiting.take(), self._residents.take_shed())

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Completion | None:
        """Block until a ticket has completed; None if that takes longer than ``timeout`` seconds.

        Other completions stay for ``poll``. Raises MisuseError for a ticket whose Completion was
        fetched before.
        """
        return self._waiting.completion(ticket, timeout)

    def gate(self, ticket: Ticket, group: int) -> Any | None:
        """The LayerGate of a load whose layers arrive one by one; None: wait for the ticket."""
        return self._parts.executor.gate(ticket.gate, group) if ticket.gate else None

    def flush(self, timeout: float | None = None) -> bool:
        """Let saves end and write what only DRAM has to NVMe; True once all of it is durable.

        False where the disk does not take all of it, or not within ``timeout`` seconds. Without
        an NVMe tier there is nothing to write.
        """
        with self._open():
            until = None if timeout is None else self._clock() + timeout
        if not self._waiting.until(lambda: not self._control.saving, timeout):
            return False
        before: int | None = None
        while True:
            with self._lock:
                only_above = len(self._lowering.only_above())
                # As many as before: NVMe is smaller than DRAM, and one block drives out another.
                if not only_above or (before is not None and only_above >= before):
                    return not only_above
                before = only_above
                self._lowering.flush()
            left = None if until is None else max(0.0, until - self._clock())
            if not self._waiting.until(lambda: self._lowering.idle, left):
                return False

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until DRAM has all its memory, touched (only timings need it); False if too long."""
        return self._parts.dram.settle(timeout)

    # -- forgetting ------------------------------------------------------------------------------

    def drop(self, tier: str) -> int:
        """Empty ``hbm``, ``dram`` or ``nvme``, but for blocks in use. Returns how many went."""
        with self._open():
            evict = {"dram": self._control.evict_dram}
            if self._placement.hbm is not None:
                evict["hbm"] = self._residents.drop
            if self._nvme is not None:
                evict["nvme"] = self._control.evict_nvme
            if tier not in evict:
                raise MisuseError(f"this store has no tier {tier!r}; it has {', '.join(evict)}")
            refs = self._placement.unused(tier)
            evict[tier](refs)
            return len(refs)

    def reset(self) -> None:
        """Forget every block in every tier, for good; copies in flight publish nothing.

        Call it when the weights have changed. Durable when it returns. Raises StorageError, with
        nothing changed, where the NVMe directory does not take the new epoch.
        """
        with self._open():
            if self._nvme is not None:
                self._nvme.reset()  # first: where it raises, nothing has changed
            self._control.epoch += 1
            freed = self._placement.reset()
            if self._placement.hbm is not None:
                self._residents.after_reset(freed[0])
            self._waiting.advance()

    def stats(self) -> Stats:
        """The Store in numbers, now."""
        with self._lock:
            return self._control.stats()

    def check(self) -> None:
        """Raise AssertionError naming the invariant that does not hold. Slow; for tests."""
        with self._lock:
            self._control.check()
            if self._nvme is not None:
                self._nvme.check()

    def close(self) -> None:
        """Make durable what can be in a minute, end what is in flight. Twice is fine."""
        with self._closing, ExitStack() as last:  # whatever happens, everything is given back
            if not self._closed:
                for tier in (self._parts.hbm, self._parts.dram, self._nvme):
                    if tier is not None:
                        last.callback(tier.close)
                last.callback(self._waiting.close)
                last.callback(self._parts.executor.close)
                last.callback(self._stop)
                if self._nvme is not None:
                    self.flush(_CLOSE_SECONDS)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ClosedError("the store is closed")
            yield

    def _stop(self) -> None:
        with self._lock:
            self._closed = True
            self._control.stop()

    def _ready(self, given: ReadyEvent | None) -> ReadyEvent | None:
        return self._parts.hbm.now() if given is None else given

    def _until(self, deadline: float | None = None) -> float:
        return self._clock() + (self.config.transfer.timeout if deadline is None else deadline)
