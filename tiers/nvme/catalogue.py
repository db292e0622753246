"""The catalogue: one LMDB environment, written by one thread that commits in groups."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import lmdb

from kvstrata.core.clock import Bell
from kvstrata.core.errors import ClosedError
from kvstrata.tiers.nvme import record
from kvstrata.tiers.nvme.directory import sync_directory
from kvstrata.tiers.nvme.walk import META, RECORDS, Items
from kvstrata.tiers.records import CatalogueDone

log = logging.getLogger("kvstrata.nvme")

GROUP = 4096
"""Records after which a transaction takes no further batch: no commit shall wait for a long one."""
TOUCH_EVERY = 10.0
"""Seconds that last uses may wait for a commit of their own."""
MARGIN = 16 << 20
"""Bytes that a file system must have free for a commit to be tried."""


@dataclass(slots=True)
class Batch:
    """Changes that are durable together.

    ``deletes`` are (record id, file, offset): a record is deleted only while it names that place,
    so that a late delete cannot hit the block's successor. ``meta`` items are put as they are.
    """

    id: int = 0
    puts: list[tuple[bytes, bytes]] = field(default_factory=list)
    deletes: list[tuple[bytes, int, int]] = field(default_factory=list)
    meta: list[tuple[bytes, bytes]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.puts) + len(self.deletes) + len(self.meta)


class Catalogue:
    """An open environment and its thread.

    Invariant 1: only the catalogue thread writes; batches are applied in the order submitted.
    Invariant 2: every batch has exactly one CatalogueDone, after its commit is on the disk.
    Invariant 3: no transaction is open while the thread waits.

    The thread sleeps on a condition and wakes for work alone: with nothing to do it uses no CPU.
    """

    def __init__(self, path: str, map_size: int, bell: Bell) -> None:
        """Open an existing environment; no other may have it. Raises lmdb.Error or OSError."""
        self.path = path
        self._bell = bell
        # The lock file is of processes that are gone; damage in it could block a mutex for ever.
        _unlink(os.path.join(path, "lock.mdb"))
        self._env = lmdb.open(
            path,
            map_size=map_size,
            create=False,
            max_dbs=4,
            max_readers=64,
            mode=0o600,
            readahead=True,
        )
        try:
            self._env.reader_check()
            self._meta = self._env.open_db(META, create=False)
            self._records = self._env.open_db(RECORDS, create=False)
        except BaseException:
            self._env.close()
            raise
        self._wake = threading.Condition()
        self._queue: deque[Batch] = deque()
        self._touches: dict[bytes, float] = {}
        self._touch_due = 0.0
        self._done: list[CatalogueDone] = []
        self._closing = False
        self._next = 0
        self._submitted = 0
        self._finished = 0
        self._thread: threading.Thread | None = None

    @staticmethod
    def build(path: str, map_size: int, meta: Iterable[tuple[bytes, bytes]], items: Items) -> None:
        """Replace whatever is in ``path`` by an environment that holds these items.

        One transaction: after a crash there is all of it, or an environment without ``format``,
        which counts as none. Raises lmdb.Error or OSError.
        """
        for name in ("data.mdb", "lock.mdb"):
            _unlink(os.path.join(path, name))
        env = lmdb.open(path, map_size=map_size, max_dbs=4, mode=0o600)
        try:
            with env.begin(write=True) as txn:
                records = env.open_db(RECORDS, txn=txn)
                metas = env.open_db(META, txn=txn)
                for key, value in items:
                    txn.put(key, value, db=records)
                txn.put(*record.FORMAT_ITEM, db=metas)
                for key, value in meta:
                    txn.put(key, value, db=metas)
        finally:
            env.close()
        sync_directory(path)

    def load(self) -> tuple[Items, Items]:
        """All (meta items, record items). Raises lmdb.Error where the environment is damaged."""
        with self._env.begin() as txn:
            return list(txn.cursor(self._meta)), list(txn.cursor(self._records))

    def start(self) -> None:
        """Start the catalogue thread."""
        self._thread = threading.Thread(target=self._run, name="kvstrata-catalogue", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> int:
        """Queue a batch; its CatalogueDone will carry the number returned. Never blocks on I/O."""
        with self._wake:
            if self._closing:
                raise ClosedError("the NVMe tier has been closed")
            self._next += 1
            batch.id = self._next
            self._submitted += 1
            self._queue.append(batch)
            self._wake.notify_all()
            return batch.id

    def touch(self, keys: Iterable[bytes], now: float) -> None:
        """Note last uses (seconds since 1970), to go with a later commit. Never blocks on I/O."""
        with self._wake:
            if not self._touches:
                self._touch_due = time.monotonic() + TOUCH_EVERY
                self._wake.notify_all()
            for key in keys:
                self._touches[key] = now

    def poll(self) -> list[CatalogueDone]:
        """What has been done since the last call."""
        with self._wake:
            done, self._done = self._done, []
        return done

    def wait(self, batch: int, timeout: float) -> bool:
        """Block until a batch and all before it are done, False after ``timeout`` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: self._finished >= batch, timeout)

    def used_bytes(self) -> int:
        """Bytes of the map that have ever been used."""
        info = self._env.info()
        return (int(info["last_pgno"]) + 1) * int(self._env.stat()["psize"])

    def close(self) -> int:
        """Commit what is queued, stop the thread, close; the number of the last transaction."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        last = int(self._env.info()["last_txnid"])
        self._env.close()
        return last

    def _run(self) -> None:
        while True:
            with self._wake:
                self._sleep()
                group = self._take()
                touches: dict[bytes, float] = {}
                due = self._touches and time.monotonic() >= self._touch_due
                if group or due or self._closing:
                    touches, self._touches = self._touches, {}
                if not group and not touches:
                    if self._closing:
                        return
                    continue
            done = self._commit_all(group, touches)
            with self._wake:
                self._done.extend(done)
                self._finished += len(done)
                self._wake.notify_all()
            if done:
                self._bell.ring()

    def _sleep(self) -> None:
        """Until there is something to do. Only waiting touches make this a wait with an end."""
        while not self._queue and not self._closing:
            left = self._touch_due - time.monotonic() if self._touches else None
            if left is not None and left <= 0:
                return
            self._wake.wait(left)

    def _take(self) -> list[Batch]:
        group: list[Batch] = []
        size = 0
        while self._queue and size < GROUP:
            batch = self._queue.popleft()
            group.append(batch)
            size += len(batch)
        return group

    def _commit_all(self, group: list[Batch], touches: dict[bytes, float]) -> list[CatalogueDone]:
        error = self._commit(group, touches)
        if not error:
            return [CatalogueDone(batch.id, True, "") for batch in group]
        if len(group) == 1 and not touches:
            return [CatalogueDone(group[0].id, False, error)]
        # One by one, so that a batch that cannot be (map full) does not take others down with it.
        # Last uses are not worth a second try.
        done: list[CatalogueDone] = []
        for batch in group:
            error = self._commit([batch], {})
            done.append(CatalogueDone(batch.id, not error, error))
        return done

    def _commit(self, group: list[Batch], touches: dict[bytes, float]) -> str:
        try:
            disk = os.statvfs(self.path)
            if disk.f_bavail * disk.f_frsize < MARGIN:
                return "the disk is full"
            with self._env.begin(write=True) as txn:
                for batch in group:
                    self._apply(txn, batch)
                for key, when in touches.items():
                    value = txn.get(key, db=self._records)
                    if value is not None:
                        renewed = record.touched(key, bytes(value), when)
                        txn.put(key, renewed, db=self._records)
        except (lmdb.Error, OSError) as error:
            return str(error)
        return ""

    def _apply(self, txn: lmdb.Transaction, batch: Batch) -> None:
        for key, value in batch.puts:
            txn.put(key, value, db=self._records)
        for key, file, offset in batch.deletes:
            old = txn.get(key, db=self._records)
            if old is not None and record.names_place(bytes(old), file, offset):
                txn.delete(key, db=self._records)
        for key, value in batch.meta:
            txn.put(key, value, db=self._meta)

    def check(self) -> None:
        """Test the invariants. Raises AssertionError naming the one that is broken."""
        with self._wake:
            waiting = [batch.id for batch in self._queue]
            assert waiting == sorted(waiting), "catalogue 1"
            assert self._submitted >= self._finished + len(waiting), "catalogue 2"


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
