"""The transfer engine: carries out Moves, decides nothing.

A Move's route follows from what its two tiers can do. Pages and arena rows are memory, copied by a
lane of workers a direction; a keyed tier is reached through extent files, by a lane of I/O threads
that loads and stores share, so that a load overtakes every store that has not begun.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstrata.core.clock import Bell, Clock, monotonic
from kvstrata.core.errors import ClosedError, KVStrataError, LayoutError, MisuseError
from kvstrata.kernels.pages import Pages
from kvstrata.tiers.base import Keyed, Tier
from kvstrata.tiers.dram import DramTier
from kvstrata.tiers.hbm import HbmTier
from kvstrata.tiers.run import ReadRun, WriteRun
from kvstrata.transfer.device import Arena, Worker, make_worker
from kvstrata.transfer.job import Job, describe
from kvstrata.transfer.lane import Lane, Task
from kvstrata.transfer.layers import LayerGate
from kvstrata.transfer.move import Done, Move, Priority, Slots
from kvstrata.transfer.plan import parts
from kvstrata.transfer.tasks import CopyPart, Disk, Files, Place, ReadPart, WritePart

GATES = 4096
"""Gates kept; the oldest of those whose Moves have ended are forgotten beyond it."""


class TransferEngine:
    """Moves blocks between the tiers of this process. Any thread may call it.

    Invariants (``check`` tests them by these numbers):

    1. Submitted Moves = Moves under way + Dones made: every Move has exactly one Done, however it
       ends, and after ``close`` none is under way.
    2. Bytes waiting or being moved, by priority, are those of the Moves under way.
    3. Every lane keeps its own invariants.

    ``threads`` is copy workers a direction, ``io_threads`` requests in flight to the disk. ``bell``
    is rung after each Done. ``files`` replaces the extent files of the keyed tier, for tests.
    Registering tensors with the HBM tier must precede the first Move of their group.
    """

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        *,
        device: torch.device | str = "cpu",
        threads: int = 2,
        io_threads: int = 4,
        bell: Bell | None = None,
        clock: Clock = monotonic,
        files: Files | None = None,
    ) -> None:
        self._tiers = dict(tiers)
        self._device = torch.device(device)
        self._threads = threads
        self._bell = bell if bell is not None else Bell()
        self._clock = clock
        self._files = files
        self._pages: dict[tuple[str, int], Pages] = {}
        self._lock = threading.Lock()
        self._dones: list[Done] = []
        self._under_way: dict[int, tuple[Priority, int]] = {}
        self._submitted = self._ended = 0
        self._backlog = [0] * len(Priority)
        self._gates: dict[tuple[int, int], tuple[LayerGate, set[int]]] = {}
        self._closed = False
        self._lanes: dict[str, Lane[Worker]] = {
            name: Lane(name, threads, lambda: make_worker(self._device))
            for name in ("out", "in", "local")
        }
        self._storage: Lane[Disk] = Lane("io", io_threads, lambda: Disk(self._extents()))

    def submit(self, moves: Sequence[Move]) -> None:
        """Queue Moves, in order of priority then of submission. Never blocks on a copy.

        A Move that cannot be carried out (no such route, slots out of range) is answered by a Done
        whose error says so. Raises ClosedError after ``close`` and MisuseError for the id of a Move
        that is under way; then none of them is queued.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the transfer engine has been closed")
            ids = [move.id for move in moves]
            twice = [one for one in ids if one in self._under_way]
            if twice or len(set(ids)) != len(ids):
                raise MisuseError(f"Moves need ids of their own; {twice or ids} are not")
            for move in moves:
                self._under_way[move.id] = move.priority, 0
            self._submitted += len(moves)
        for move in moves:
            try:
                self._route(move)
            except (KVStrataError, ArithmeticError, LookupError, TypeError) as error:
                self._refuse(move, str(error) or describe(error))

    def poll(self) -> list[Done]:
        """Completions since the last call; exactly one for every Move. Never blocks."""
        with self._lock:
            dones, self._dones = self._dones, []
        return dones

    def backlog(self, priority: Priority) -> int:
        """Bytes of this priority's Moves that have not ended."""
        with self._lock:
            return self._backlog[priority]

    def gate(self, gate: int, group: int) -> LayerGate:
        """The LayerGate of the Moves that carry ``gate`` for this group.

        It exists from ``submit`` on and is kept for a while after they have ended. Raises
        MisuseError for one that no Move has named.
        """
        with self._lock:
            found = self._gates.get((gate, group))
        if found is None:
            raise MisuseError(f"no Move has named gate {gate} for group {group}")
        return found[0]

    def close(self) -> None:
        """Fail what has not started (``closed``), finish what has; then end the threads.

        Every Move has its Done afterwards; ``poll`` still returns them. Twice is fine. The tiers
        are the caller's to close.
        """
        with self._lock:
            self._closed = True
        for lane in self._lanes.values():
            lane.close()
        self._storage.close()
        with self._lock:
            files, self._files = self._files, None
        if files is not None:
            files.close()

    def check(self) -> None:
        """Raise AssertionError unless the numbered invariants hold. Not while submitting."""
        with self._lock:
            assert self._submitted == len(self._under_way) + self._ended, "1: a Done is missing"
            for priority in Priority:
                of = [n for one, n in self._under_way.values() if one == priority]
                assert self._backlog[priority] == sum(of), "2: backlog"
        for lane in self._lanes.values():
            lane.check()
        self._storage.check()

    def _route(self, move: Move) -> None:
        """Check the Move and queue its parts. Raises before anything is queued, or not at all."""
        if len(move.source_slots) != len(move.target_slots):
            raise LayoutError("a Move needs as many source slots as target slots")
        source, target = self._tier(move.source), self._tier(move.target)
        if isinstance(source, Keyed) or isinstance(target, Keyed):
            self._route_storage(move, source, target)
        else:
            self._route_memory(move, source, target)

    def _route_memory(self, move: Move, source: Tier, target: Tier) -> None:
        places = (
            self._place(source, move, move.source_slots),
            self._place(target, move, move.target_slots),
        )
        paged = [isinstance(place, Pages) for place in places]
        name = "local" if paged[0] == paged[1] else "out" if paged[0] else "in"
        sizes = [
            place.layout.record_bytes if isinstance(place, Pages) else place.record_bytes
            for place in places
        ]
        if sizes[0] != sizes[1]:
            raise LayoutError(f"records of {sizes[0]} and {sizes[1]} bytes do not match")
        gated = bool(move.gate) and paged[1]
        # A gated load goes layer by layer: cut into more parts than there are workers, its first
        # layer would be whole only when the last part starts.
        cuts = parts(len(move), sizes[0], self._threads, *([1 << 62] if gated else []))
        gate = self._join(move, places[1], len(cuts)) if gated else None
        job = self._job(move, len(cuts), sizes[0] * len(move), gate)
        tasks: list[Task[Worker]] = [CopyPart(job, part, *places) for part in cuts]
        self._lanes[name].put(move.priority, tasks)

    def _route_storage(self, move: Move, source: Tier, target: Tier) -> None:
        out = isinstance(target, Keyed)
        near = source if out else target
        if not isinstance(near, DramTier):
            raise LayoutError(f"there is no route from {move.source} to {move.target}")
        slots, records = (
            (move.source_slots, move.target_slots)
            if out
            else (move.target_slots, move.source_slots)
        )
        kind = WriteRun if out else ReadRun
        if [record for run in move.runs for record in run.records] != records.tolist():
            raise LayoutError("the runs' records must equal the Move's slots of the keyed side")
        if not all(isinstance(run, kind) for run in move.runs):
            raise LayoutError(f"a Move from {move.source} to {move.target} needs {kind.__name__}s")
        self._place(near, move, slots)
        group = move.group
        files = {run.file for run in move.runs}

        def row(slot: int) -> memoryview:
            return near.row(group, slot)

        def sync() -> None:
            self._extents().sync(files)

        nbytes = sum(run.raw * len(run.records) for run in move.runs)
        job = self._job(move, max(1, len(move.runs)), nbytes, None, sync if out else None)
        if out:
            job.written = [None] * len(move)
        if not move.runs:
            job.end()
            return
        tasks: list[Task[Disk]] = []
        first = 0
        for run in move.runs:
            part = WritePart if isinstance(run, WriteRun) else ReadPart
            tasks.append(part(job, run, first, row))  # type: ignore[arg-type]
            first += len(run.records)
        self._storage.put(move.priority, tasks)

    def _tier(self, name: str) -> Tier:
        tier = self._tiers.get(name)
        if tier is None:
            raise LayoutError(f"there is no tier {name}; there are {', '.join(self._tiers)}")
        return tier

    def _place(self, tier: Tier, move: Move, slots: Slots) -> Place:
        """The tier's memory of the Move's group; raises LayoutError for slots out of range."""
        group = move.group
        if isinstance(tier, HbmTier):
            tier.check_ids(group, slots)
            with self._lock:
                pages = self._pages.get((tier.name, group))
                if pages is None:
                    pages = Pages(tier.flat(group), tier.layout(group))
                    self._pages[tier.name, group] = pages
            return pages
        if isinstance(tier, DramTier):
            capacity = tier.capacity(group)
            outside = slots[(slots < 0) | (slots >= capacity)]
            if len(outside):
                raise LayoutError(
                    f"slot {outside[0]} of group {group} is outside of {tier.name}'s {capacity}"
                )
            return Arena(tier.rows(group), tier.record_bytes[group])
        raise LayoutError(f"there is no route through {tier.name}")

    def _extents(self) -> Files:
        """The extent files, opened when the first run is carried out."""
        with self._lock:
            if self._files is None:
                from kvstrata.tiers.nvme.io import ExtentFiles

                keyed = [tier for tier in self._tiers.values() if isinstance(tier, Keyed)]
                self._files = ExtentFiles(keyed[0].directory)
            return self._files

    def _join(self, move: Move, pages: Place, num_parts: int) -> LayerGate:
        assert isinstance(pages, Pages)
        key = (move.gate, move.group)
        with self._lock:
            gate, moves = self._gates.get(key) or (LayerGate(len(pages.layers), 0), set())
            gate.join(num_parts)
            moves.add(move.id)
            self._gates[key] = gate, moves
            for old in list(self._gates)[: max(0, len(self._gates) - GATES)]:
                if not any(one in self._under_way for one in self._gates[old][1]):
                    del self._gates[old]
        return gate

    def _job(
        self, move: Move, num_parts: int, nbytes: int, gate: LayerGate | None, last: Any = None
    ) -> Job:
        with self._lock:
            self._under_way[move.id] = move.priority, nbytes
            self._backlog[move.priority] += nbytes
        return Job(move, num_parts, self._clock, self._finished, gate, last)

    def _refuse(self, move: Move, error: str) -> None:
        if move.gate:
            with self._lock:
                key = (move.gate, move.group)
                gate, _ = self._gates.setdefault(key, (LayerGate(0, 0), {move.id}))
            gate.fail(error)
        self._finished(Done(move.id, np.zeros(len(move), np.bool_), error))

    def _finished(self, done: Done) -> None:
        with self._lock:
            priority, nbytes = self._under_way.pop(done.id)
            self._backlog[priority] -= nbytes
            self._ended += 1
            self._dones.append(done)
        self._bell.ring()
