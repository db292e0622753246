"""Tiers and an executor in memory, whose every step a test decides.

``ManualExecutor`` carries out a Move only when told to, in any order, and can be told to fail it:
so a test chooses the interleaving. ``MemoryRecords`` is a record tier whose catalogue commits when
told to. Together they stand under the real Store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstrata.core.clock import Bell
from kvstrata.core.layout import PagedLayout
from kvstrata.core.model import KVModel
from kvstrata.tiers.records import CatalogueDone, Recovered
from kvstrata.tiers.run import ReadRun, WriteRun, Written
from kvstrata.transfer.move import Done, Move

Bytes = NDArray[np.uint8]


class MemoryHbm:
    """Engine blocks as rows of bytes: ``rows[g][block]``."""

    name = "hbm"

    def __init__(self, model: KVModel, num_blocks: int) -> None:
        self.rows = [
            np.zeros((num_blocks, group.block_bytes()), np.uint8) for group in model.groups
        ]

    def register_all(
        self, tensors: Mapping[int, Sequence[Any]], layouts: Mapping[int, PagedLayout]
    ) -> None:
        """Not needed here."""

    def now(self) -> None:
        """There are no streams here."""

    def capacity(self, group: int) -> int:
        return len(self.rows[group])

    def close(self) -> None:
        """Nothing to give back."""


class MemoryDram:
    """DRAM slots as rows of bytes."""

    name = "dram"

    def __init__(self, model: KVModel, slots: int) -> None:
        self.rows = [np.zeros((slots, group.block_bytes()), np.uint8) for group in model.groups]

    def capacity(self, group: int) -> int:
        return len(self.rows[group])

    def settle(self, timeout: float | None = None) -> bool:
        return True

    def close(self) -> None:
        """Nothing to give back."""


class MemoryRecords:
    """A record tier of ``capacity`` records a group, space counted in records.

    ``held`` True makes commits and deletes wait for ``settle``. ``disk`` maps (group, place) to the
    bytes; a test may damage them.
    """

    name = "nvme"

    def __init__(
        self,
        model: KVModel,
        capacity: int,
        *,
        held: bool = False,
        survived: MemoryRecords | None = None,
    ) -> None:
        self.model = model
        self.namespace = model.namespace()
        self.held = held
        self.bell = Bell()
        self.writable = True
        self.epoch: int = survived.epoch if survived else 0
        self.disk: dict[tuple[int, int], Bytes] = dict(survived.disk) if survived else {}
        self.catalogue: dict[tuple[int, int], tuple[int, Written, WriteRun, int]] = {}
        self._ids: set[tuple[int, int]] = set()
        """(group, record id) placed and not yet given up."""
        self._capacity = capacity
        self._used = 0
        self._next_place: int = 1 + (survived._next_place if survived else 0)
        self._batch = 0
        self._waiting: list[tuple[int, Any]] = []
        self._done: list[CatalogueDone] = []
        self._recovered: list[Recovered] = []
        if survived:
            self._recover(survived)

    @property
    def deletes_pending(self) -> bool:
        return bool(self._waiting)

    def capacity(self, group: int) -> int:
        return self._capacity

    def recovered(self) -> list[Recovered]:
        return self._recovered

    def place(
        self,
        group: int,
        *,
        root: bytes,
        parent: bytes,
        depth: int,
        keys: Sequence[bytes],
        symbols: Sequence[bytes],
        records: Sequence[int],
        checksums: Sequence[int | None],
    ) -> tuple[WriteRun, ...] | None:
        taken = [record for record in records if (group, record) in self._ids]
        assert not taken, f"records {taken} of group {group} are in use"
        if not self.writable or self._used + len(records) > self._capacity * len(self.model.groups):
            return None
        self._used += len(records)
        self._ids.update((group, record) for record in records)
        first = self._next_place
        self._next_place += len(records)
        raw = self.model.groups[group].block_bytes()
        run = WriteRun(
            0,
            first,
            0,
            1,
            raw,
            group,
            self.epoch,
            self.namespace,
            root,
            depth,
            parent,
            tuple(keys),
            tuple(symbols),
            tuple(records),
            0,
            tuple(checksums),
        )
        return (run,)

    def commit(self, runs: Sequence[WriteRun], written: Sequence[Written | None]) -> int:
        def apply() -> None:
            at = 0
            for run in runs:
                for i, record in enumerate(run.records):
                    entry = written[at]
                    at += 1
                    if entry is None or run.epoch != self.epoch:
                        self._used -= 1
                        self._forget(run, record)
                    else:
                        self.catalogue[run.group, record] = (run.offset + i, entry, run, i)

        return self._queue(apply)

    def abandon(self, runs: Sequence[WriteRun]) -> None:
        self._used -= sum(len(run.records) for run in runs)
        for run in runs:
            for record in run.records:
                self._forget(run, record)

    def failed(self, error: str) -> None:
        """A test that wants the tier off sets ``writable``."""

    def read_runs(self, group: int, records: Sequence[int]) -> tuple[ReadRun, ...]:
        runs = []
        for record in records:
            place, written, _, _ = self.catalogue[group, record]
            raw = self.model.groups[group].block_bytes()
            runs.append(
                ReadRun(0, place, 1, raw, (written.stored,), (0,), (written.checksum,), (record,))
            )
        return tuple(runs)

    def delete(self, group: int, records: Sequence[int]) -> int:
        gone = [self.catalogue.pop((group, record)) for record in records]
        self._ids.difference_update((group, record) for record in records)

        def apply() -> None:
            self._used -= len(gone)
            for place, *_ in gone:
                self.disk.pop((group, place), None)

        return self._queue(apply)

    def touch(self, group: int, records: Sequence[int], now: float) -> None:
        """Nothing is remembered."""

    def reclaim(self, nbytes: int) -> bool:
        return False

    def poll(self) -> list[CatalogueDone]:
        if not self.held:
            self.settle()
        done, self._done = self._done, []
        return done

    def settle(self, batches: int | None = None) -> None:
        """Commit the oldest ``batches`` that wait, all by default."""
        count = len(self._waiting) if batches is None else batches
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        for batch, apply in ready:
            apply()
            self._done.append(CatalogueDone(batch, True))

    def reset(self) -> int:
        self.epoch += 1
        self._used -= len(self.catalogue)
        self.catalogue.clear()
        self._ids.clear()
        return self.epoch

    def stats(self) -> dict[str, Any]:
        return {"records": len(self.catalogue)}

    def check(self) -> None:
        """Used space is never negative."""
        assert self._used >= 0

    def close(self) -> None:
        self.settle()

    def _forget(self, run: WriteRun, record: int) -> None:
        if run.epoch == self.epoch:  # after a reset the id may be another's
            self._ids.discard((run.group, record))

    def _queue(self, apply: Any) -> int:
        self._batch += 1
        self._waiting.append((self._batch, apply))
        if not self.held:
            self.bell.ring()  # as a catalogue does when it has committed
        return self._batch

    def _recover(self, old: MemoryRecords) -> None:
        counts = [0] * len(self.model.groups)
        for (group, _), (place, written, run, i) in sorted(old.catalogue.items()):
            record = counts[group]
            counts[group] += 1
            self._used += 1
            self._ids.add((group, record))
            parent = run.keys[i - 1] if i else run.parent
            self.catalogue[group, record] = (place, written, run, i)
            self._recovered.append(
                Recovered(
                    record, group, run.root, run.depth + i, parent, run.keys[i], run.symbols[i], 0.0
                )
            )


class ManualExecutor:
    """Holds Moves until ``run`` carries one out; ``auto`` carries them out at the next ``poll``."""

    num_ranks = 1

    def __init__(
        self, hbm: MemoryHbm, dram: MemoryDram, records: MemoryRecords | None, *, auto: bool = True
    ) -> None:
        self.auto = auto
        self.pending: list[Move] = []
        self.submitted = 0
        self._hbm, self._dram, self._records = hbm, dram, records
        self._done: list[Done] = []

    def submit(self, moves: Sequence[Move]) -> None:
        self.pending.extend(moves)
        self.submitted += len(moves)

    def poll(self) -> list[Done]:
        if self.auto:
            self.run_all()
        done, self._done = self._done, []
        return done

    def run_all(self) -> None:
        """Carry out everything, in order of submission."""
        while self.pending:
            self.run(0)

    def run(self, index: int, *, fail: str = "") -> None:
        """Carry out one pending Move, or fail it with an error."""
        move = self.pending.pop(index)
        if fail:
            self._done.append(Done(move.id, np.zeros(len(move), np.bool_), fail))
            return
        ok = np.ones(len(move), np.bool_)
        error = ""
        written: list[Written | None] = []
        if move.source == "nvme":
            ok = self._read(move)
            error = "" if ok.all() else "checksum"
        elif move.target == "nvme":
            written = self._write(move)
        else:
            source, target = (
                self._rows(move.source, move.group),
                self._rows(move.target, move.group),
            )
            if move.verify is not None and move.checksums is not None:
                sums = sums_of(source[move.source_slots])
                ok = ~(move.verify & (sums != move.checksums))
                error = "" if ok.all() else "checksum"
            target[move.target_slots[ok]] = source[move.source_slots[ok]]
        taken = None
        if move.wants_checksums:
            taken = sums_of(self._rows(move.target, move.group)[move.target_slots])
        self._done.append(Done(move.id, ok, error, taken, tuple(written)))

    def gate(self, number: int, group: int) -> None:
        """No gates here: wait for the ticket."""

    def close(self) -> None:
        while self.pending:
            self.run(0, fail="closed")

    def _rows(self, tier: str, group: int) -> Bytes:
        return self._hbm.rows[group] if tier == "hbm" else self._dram.rows[group]

    def _write(self, move: Move) -> list[Written | None]:
        assert self._records is not None
        written: list[Written | None] = []
        rows = self._rows("dram", move.group)
        for run in move.runs:
            assert isinstance(run, WriteRun)
            for i in range(len(run.records)):
                row = rows[move.source_slots[len(written)]].copy()
                self._records.disk[move.group, run.offset + i] = row
                written.append(Written(len(row), 0, xxhash.xxh3_64_intdigest(row.tobytes())))
        return written

    def _read(self, move: Move) -> NDArray[np.bool_]:
        assert self._records is not None
        ok: list[bool] = []
        rows = self._rows("dram", move.group)
        for run in move.runs:
            assert isinstance(run, ReadRun)
            for i, checksum in enumerate(run.checksums):
                row = self._records.disk.get((move.group, run.offset + i))
                good = row is not None and xxhash.xxh3_64_intdigest(row.tobytes()) == checksum
                if good and row is not None:
                    rows[move.target_slots[len(ok)]] = row
                ok.append(good)
        return np.array(ok)


def sums_of(rows: Bytes) -> NDArray[np.uint64]:
    """xxh3-64 of each row."""
    return np.array([xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows], np.uint64)
