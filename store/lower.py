"""Writing blocks down to NVMe: behind every save, or when DRAM needs their room.

A block is written once: what NVMe has, or is being given, is skipped. Nobody waits for it but
``flush``; when the queue is full or the disk has no room, blocks simply do not go down.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvstrata.core.layout import padded
from kvstrata.prefix_index.hashing import KeyChain
from kvstrata.prefix_index.prefix import Symbols
from kvstrata.store.control import Control, log, where
from kvstrata.store.placement import Mask, Refs
from kvstrata.store.policy.base import Admission
from kvstrata.store.writedown import WriteDown
from kvstrata.tiers.ledger import State, runs_of

_IN_FLIGHT = 64 << 20
"""Bytes under way to the disk at once: enough to keep it busy, little enough for loads to
overtake."""
_EVICTED = 16 << 20
"""Bytes evicted at once where the disk has no space for a run."""
_QUEUED = 4096
"""Requests waiting; beyond them the oldest is dropped (its blocks may still sink on demand)."""


@dataclass(slots=True, eq=False)
class _Request:
    """Blocks ``start`` to ``stop`` of a path. Symbols, not refs: refs may be recycled meanwhile."""

    chain: KeyChain
    start: int
    stop: int
    epoch: int


class Lowering:
    """The queue of blocks on their way down.

    1. Every block under way is FILLING in NVMe, and pinned in DRAM until its bytes are durable.
    2. Bytes under way stay below a bound, but for one run that alone is larger.
    """

    def __init__(self, control: Control, admission: Admission) -> None:
        self._control = control
        self._admission = admission
        self._queue: deque[_Request] = deque()
        self._chain: KeyChain | None = None
        self.bytes_in_flight = 0
        control.background.append(self.step)
        control.stored = self.stored
        control.demote = self.demote

    @property
    def idle(self) -> bool:
        """Nothing is queued or under way."""
        return not self._queue and not self.bytes_in_flight

    def stored(self, symbols: Symbols, start: int, stop: int) -> None:
        """Blocks have come into DRAM: write them behind, where the Store writes through."""
        through = self._control.config.nvme.write == "through"
        if through and self._control.nvme is not None:
            self._push(self._chain_of(symbols), start, stop)

    def demote(self, refs: Refs) -> None:
        """Write blocks so that they may leave DRAM; before whatever else is queued."""
        if self.bytes_in_flight < _IN_FLIGHT:  # else whoever needs the room asks again
            self._push_paths(refs, urgent=True)

    def only_above(self) -> Refs:
        """Blocks that DRAM has and NVMe has not, readable or coming."""
        placement = self._control.placement
        if placement.nvme is None:
            return np.zeros(0, np.int32)
        refs = np.unique(np.concatenate([x.resident() for x in placement.dram.ledgers]))
        refs = refs.astype(np.int32)
        return refs[~placement.dram.covers(refs, placement.nvme)]

    def flush(self) -> None:
        """Queue everything that only DRAM has."""
        self._push_paths(self.only_above(), urgent=False)

    def _push_paths(self, refs: Refs, *, urgent: bool) -> None:
        index = self._control.placement.index
        left = set(refs.tolist())
        for deepest in refs.tolist():  # victims come leaf first, so few paths cover them all
            if deepest not in left:
                continue
            path = index.path(deepest)
            ours = where(np.isin(path, refs))
            left.difference_update(path[ours].tolist())
            chain = self._chain_of(index.symbols(deepest))
            for start, stop in runs_of(ours):
                self._push(chain, start, stop, urgent=urgent)

    def step(self) -> bool:
        """Start the next writes that bounds and room allow; True if any was started or given up."""
        nvme = self._control.nvme
        if nvme is None:
            return False
        moved = False
        while self._queue and self.bytes_in_flight < _IN_FLIGHT:
            request = self._queue[0]
            if request.epoch != self._control.epoch or not nvme.writable:
                self._queue.popleft()
                continue
            done, started = self._lower(request)
            moved |= started
            if done:
                self._queue.popleft()
            elif not started:
                break
        return moved

    # -- inside ----------------------------------------------------------------------------------

    def _chain_of(self, symbols: Symbols) -> KeyChain:
        """The key chain of ``symbols``, the last one's keys taken over where it starts alike."""
        last = self._chain
        if last is None or last.symbols.root != symbols.root:
            self._chain = KeyChain(symbols)
        elif last.symbols.data != symbols.data:
            same = min(len(last.known), symbols.num_blocks)
            width = symbols.width
            if last.symbols.data[: same * width] == symbols.data[: same * width]:
                self._chain = KeyChain(symbols, last.known[:same])
            else:
                self._chain = KeyChain(symbols)
        assert self._chain is not None
        return self._chain

    def _push(self, chain: KeyChain, start: int, stop: int, *, urgent: bool = False) -> None:
        request = _Request(chain, start, stop, self._control.epoch)
        if urgent:
            self._queue.appendleft(request)
        else:
            self._queue.append(request)
        if len(self._queue) > _QUEUED:
            self._queue.popleft() if not urgent else self._queue.pop()
            self._control.metrics.add("lowering_dropped_total")

    def _lower(self, request: _Request) -> tuple[bool, bool]:
        """(the request is dealt with, something was started)."""
        control = self._control
        placement = control.placement
        nvme = placement.nvme
        assert nvme is not None
        path = placement.index.match(request.chain.symbols)
        stop = min(request.stop, len(path))
        groups = range(len(control.model.groups))
        sizes = [group.block_bytes() for group in control.model.groups]
        started = False
        # Blocks before groups: a block is safe below only when all its groups are.
        # And each is tried once: where NVMe is too small, one would drive out another for ever.
        while request.start < stop:
            refs = path[request.start : stop]
            wanted = [self._wanted(group, refs) for group in groups]
            runs = runs_of(where(np.logical_or.reduce(wanted)))
            if not runs:
                break
            first, last = runs[0]
            n = min(last - first, max(1, (_IN_FLIGHT - self.bytes_in_flight) // sum(sizes)))
            n = min(self._make_room(group, n) for group in groups)
            if not n:
                return self._no_room(started)
            for group in groups:
                for begin, end in runs_of(first + where(wanted[group][first : first + n])):
                    block = request.start + begin
                    part = path[block : request.start + end]
                    write = WriteDown.start(
                        control, group, request.chain, block, part, self._landed
                    )
                    if write is None:
                        return self._no_room(started)
                    self.bytes_in_flight += write.nbytes
                    started = True
            request.start += first + n
            if self.bytes_in_flight >= _IN_FLIGHT:
                return request.start >= stop, started
        return True, started

    def _wanted(self, group: int, refs: Refs) -> Mask:
        """Blocks that DRAM has, NVMe has not, and that are worth it."""
        placement = self._control.placement
        assert placement.nvme is not None
        absent = placement.nvme.ledgers[group].slots(refs) < 0
        mask: Mask = placement.dram.ledgers[group].ready(refs) & absent
        mask[mask] = self._admission.admit(refs[mask].tolist())
        return mask

    def _landed(self, nbytes: int) -> None:
        self.bytes_in_flight -= nbytes

    def _make_room(self, group: int, n: int) -> int:
        """Evict for n records if need be; returns how many of them can be had now."""
        control = self._control
        shelf = control.placement.nvme
        assert shelf is not None and control.nvme is not None
        short = n - shelf.ledgers[group].free
        if short > 0:
            victims = control.placement.nvme_victims(short)
            if len(victims):
                control.evict_nvme(victims)
        return min(n, shelf.ledgers[group].free)

    def _no_room(self, started: bool) -> tuple[bool, bool]:
        """The disk has no space for the next run: evict for it, and come back when it is free.

        Answers like ``_lower``; the request is dealt with if there is nothing to wait for.
        """
        control = self._control
        nvme = control.nvme
        assert nvme is not None
        if nvme.deletes_pending:
            return False, started
        if nvme.reclaim(_IN_FLIGHT):
            return False, True
        # As much as a run, and little of a small tier: what goes is gone for good.
        largest = max(padded(group.block_bytes()) for group in control.model.groups)
        most = max(ledger.count(State.READY) for ledger in control.placement.nvme_ledgers)
        count = max(1, min(_EVICTED // largest, most // 16))
        victims = control.placement.nvme_victims(count)
        if len(victims):
            control.evict_nvme(victims)
            return False, True
        control.metrics.add("not_lowered_total", reason="no_room")
        log.debug("NVMe has no room and nothing to evict: blocks stay in DRAM only")
        return True, started
