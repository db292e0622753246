"""Changes on their way into the catalogue, and what follows for the space when they are durable."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.tiers.nvme import record
from kvstrata.tiers.nvme.catalogue import Batch, Catalogue
from kvstrata.tiers.nvme.record import Record
from kvstrata.tiers.records import CatalogueDone

log = logging.getLogger("kvstrata.nvme")

RETRY = 30.0
"""Seconds without stores after a commit has failed."""
CHUNK = 2000
"""Records in a delete of many, so that no commit waits for a long one."""

Place = tuple[int, int, int, int]
"""Where a record lies: (file, run offset, payload offset, bytes)."""
Gone = tuple[bytes, Place]
"""(catalogue key, place) of a record to delete."""
Put = tuple[int, int, Record]
"""(group, record id, record)."""


def place_of(one: Record) -> Place:
    """Where a record lies."""
    return one.file, one.run, one.offset, one.width


@dataclass(slots=True)
class _Pending:
    puts: list[Put]
    deletes: list[Gone]
    meta: list[tuple[bytes, bytes]]
    told: bool
    error: str


@dataclass(slots=True)
class Outcome:
    """What has become durable, or has failed.

    ``freed`` are places whose deletes are durable; ``failed`` are puts that were not stored.
    """

    done: list[CatalogueDone] = field(default_factory=list)
    freed: list[Place] = field(default_factory=list)
    failed: list[Put] = field(default_factory=list)
    stored: int = 0


class Changes:
    """Batches that a catalogue works on.

    Invariant 1: every put and delete is in one batch or owed, until ``poll`` gives its outcome.
    Invariant 2: a delete that failed is owed and tried again; it is never reported as freed before.

    Called by one thread at a time; nothing blocks but ``flush``.
    """

    def __init__(self, catalogue: Catalogue, path: str) -> None:
        self._catalogue = catalogue
        self._path = path
        self._pending: dict[int, _Pending] = {}
        self._owed: list[Gone] = []
        self._deletes = 0
        self._meta: list[tuple[bytes, bytes]] = []
        self._blocked_until = 0.0
        self._warned = False

    @property
    def blocked(self) -> bool:
        """Whether the catalogue has failed of late, so that storing more makes no sense now."""
        return time.monotonic() < self._blocked_until

    def block(self, error: str, seconds: float = RETRY) -> None:
        """Stop storing for a while; the first time there is a warning."""
        self._blocked_until = time.monotonic() + seconds
        if not self._warned:
            self._warned = True
            log.warning("%s: storing to NVMe stops for now: %s", self._path, error)

    def owe_meta(self, item: tuple[bytes, bytes]) -> None:
        """Have every batch put this item until one of them is durable."""
        self._meta = [item]

    def put(self, puts: list[Put], error: str = "") -> int:
        """Queue records to be catalogued; ``error`` makes the outcome a failure (of nothing)."""
        batch = Batch(puts=[(one.id(), record.encode(one)) for _, _, one in puts])
        return self._submit(batch, _Pending(puts, [], self._meta, True, error))

    def delete(self, gone: Sequence[Gone], told: bool = False) -> int:
        """Queue records to be deleted, in batches; the number of the last (0 for none at all).

        With ``told`` that one appears in the outcome.
        """
        last = 0
        for start in range(0, max(len(gone), int(told)), CHUNK):
            chunk = list(gone[start : start + CHUNK])
            batch = Batch(deletes=[(key, place[0], place[2]) for key, place in chunk])
            final = told and start + CHUNK >= len(gone)
            last = self._submit(batch, _Pending([], chunk, self._meta, final, ""))
        return last

    def erase(self, lost: Sequence[Record]) -> None:
        """Queue the deletion of records that own no space."""
        if lost:
            batch = Batch(deletes=[(one.id(), one.file, one.offset) for one in lost])
            self._submit(batch, _Pending([], [], self._meta, False, ""))

    def flush(self, timeout: float) -> bool:
        """Have what is queued committed and wait for it; False after ``timeout`` seconds."""
        batch = self._submit(Batch(), _Pending([], [], self._meta, False, ""))
        return self._catalogue.wait(batch, timeout)

    def poll(self) -> Outcome:
        """What is done since the last call. Tries failed deletes again when it is time."""
        out = Outcome()
        for done in self._catalogue.poll():
            pending = self._pending.pop(done.batch)
            self._deletes -= len(pending.deletes)
            if done.ok:
                out.freed += [place for _, place in pending.deletes]
                out.stored += len(pending.puts)
                if pending.meta is self._meta:
                    self._meta = []
            else:
                self.block(done.error)
                self._owed += pending.deletes
                out.failed += pending.puts
            if pending.told:
                error = pending.error or done.error
                out.done.append(CatalogueDone(done.batch, not error, error))
        return out

    def retry(self) -> None:
        """Try owed deletes again, unless blocked."""
        if self._owed and not self.blocked:
            owed, self._owed = self._owed, []
            self.delete(owed)

    @property
    def deletes(self) -> int:
        """Deletes that are not durable yet."""
        return self._deletes + len(self._owed)

    def deleting(self) -> list[Place]:
        """Places of deletes that are not durable yet."""
        batches = [pending.deletes for pending in self._pending.values()]
        return [place for deletes in (*batches, self._owed) for _, place in deletes]

    def _submit(self, batch: Batch, pending: _Pending) -> int:
        batch.meta = list(pending.meta)
        number = self._catalogue.submit(batch)
        self._pending[number] = pending
        self._deletes += len(pending.deletes)
        return number
