"""What a worker does for a part of a Move: memory copies with their checks, and extent I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvstrata.kernels.pages import Pages
from kvstrata.tiers.run import ReadRun, WriteRun, Written
from kvstrata.transfer.device import Arena, Worker, copy_rows
from kvstrata.transfer.job import Job, describe
from kvstrata.transfer.move import Slots


class Files(Protocol):
    """The extent files of an NVMe directory; ``kvstrata.tiers.nvme.io.ExtentFiles`` is one."""

    def write_run(self, run: WriteRun, buffers: Sequence[memoryview]) -> list[Written]:
        """Write a run; durable only after ``sync``. Raises OSError."""
        ...

    def read_run(self, run: ReadRun, buffers: Sequence[memoryview]) -> Any:
        """Read and verify a run: a named tuple ``(ok: list[bool], error: str)``."""
        ...

    def sync(self, files: Iterable[int]) -> None:
        """Make what was written to these files durable. Raises OSError."""
        ...

    def close(self) -> None:
        """Close the descriptors."""
        ...


class _Part:
    """A part of a job: it ends exactly once, with or without an error."""

    __slots__ = ("job",)

    def __init__(self, job: Job) -> None:
        self.job = job

    def abandon(self, reason: str) -> None:
        """It will not be done."""
        self.job.fail(reason)
        self.job.end()

    def attempt(self, work: Callable[[], None]) -> None:
        """Do it, unless the deadline passed; whatever happens becomes an answer."""
        try:
            if self.job.begin():
                work()
            else:
                self.job.fail("deadline")
        except Exception as error:
            self.job.fail(describe(error))
        self.job.end()


Place = Pages | Arena
"""A group's blocks in memory: an engine's pages, or the rows of an arena."""


class CopyPart(_Part):
    """Positions ``part`` of a Move between two places in memory."""

    __slots__ = ("part", "source", "target")

    def __init__(self, job: Job, part: range, source: Place, target: Place) -> None:
        super().__init__(job)
        self.part = part
        self.source = source
        self.target = target

    def run(self, worker: Worker) -> None:
        self.attempt(lambda: self._copy(worker))

    def _copy(self, worker: Worker) -> None:
        job, move = self.job, self.job.move
        worker.wait(move.ready)
        positions = self._verified(np.arange(self.part.start, self.part.stop, dtype=np.int64))
        if job.sums is None or not isinstance(self.target, Arena):
            self._transfer(worker, positions)
        else:
            step = max(1, worker.step // self.target.record_bytes)
            for first in range(0, len(positions), step):
                some = positions[first : first + step]
                self._transfer(worker, some)
                job.sums[some] = self.target.sums(move.target_slots[some])
        job.ok[positions] = True

    def _transfer(self, worker: Worker, positions: Slots) -> None:
        """The copy itself, by what the two places are."""
        move, gate = self.job.move, self.job.gate
        source, target = move.source_slots[positions], move.target_slots[positions]
        if isinstance(self.source, Pages):
            if isinstance(self.target, Pages):
                worker.duplicate(self.source, source, target)
            else:
                worker.save(self.source, source, self.target, target)
        elif isinstance(self.target, Pages):
            opened = None if gate is None else gate.open
            worker.load(self.source, source, self.target, target, opened)
        else:
            copy_rows(self.source, source, self.target, target)

    def _verified(self, positions: Slots) -> Slots:
        """The positions without those whose record is not what it was when it was saved.

        Checked before anything is copied: bytes that fail must not reach pages that attention
        reads.
        """
        move = self.job.move
        if move.verify is None or move.checksums is None or not isinstance(self.source, Arena):
            return positions
        flagged = positions[move.verify[positions]]
        sums = self.source.sums(move.source_slots[flagged])
        bad = flagged[sums != move.checksums[flagged]]
        if not len(bad):
            return positions
        self.job.fail("checksum")
        left: Slots = np.setdiff1d(positions, bad)
        return left


Rows = Callable[[int], memoryview]
"""From a slot to its row in the arena, padded and aligned."""


@dataclass(frozen=True, slots=True)
class Disk:
    """What the storage lane's workers share; all of it is thread-safe."""

    files: Files


class WritePart(_Part):
    """One run from the arena to an extent; the job syncs once after all of its runs."""

    __slots__ = ("first", "row", "which")

    def __init__(self, job: Job, which: WriteRun, first: int, row: Rows) -> None:
        super().__init__(job)
        self.which = which
        self.first = first
        self.row = row

    def run(self, disk: Disk) -> None:
        self.attempt(lambda: self._write(disk.files))

    def _write(self, files: Files) -> None:
        job, stop = self.job, self.first + len(self.which.records)
        if job.move.ready is not None:
            job.move.ready.synchronize()
        slots = job.move.source_slots[self.first : stop].tolist()
        written = files.write_run(self.which, [*map(self.row, slots)])
        for position, one in zip(range(self.first, stop), written, strict=True):
            job.written[position] = one
        job.ok[self.first : stop] = True


class ReadPart(_Part):
    """One run from an extent to the arena; what does not verify is not ok."""

    __slots__ = ("first", "row", "which")

    def __init__(self, job: Job, which: ReadRun, first: int, row: Rows) -> None:
        super().__init__(job)
        self.which = which
        self.first = first
        self.row = row

    def run(self, disk: Disk) -> None:
        self.attempt(lambda: self._read(disk.files))

    def _read(self, files: Files) -> None:
        job, stop = self.job, self.first + len(self.which.records)
        if job.move.ready is not None:
            job.move.ready.synchronize()
        slots = job.move.target_slots[self.first : stop].tolist()
        ok, error = files.read_run(self.which, [*map(self.row, slots)])
        job.ok[self.first : stop] = ok
        if job.sums is not None:
            # What was verified against these sums has them.
            job.sums[self.first : stop] = self.which.checksums
        if not all(ok):
            job.fail(error or "checksum")
