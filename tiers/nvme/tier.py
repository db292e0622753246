"""The NVMe tier as the Store sees it: where blocks go, where they are, and when they are safe."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import lmdb

from kvstrata.core.clock import Bell
from kvstrata.core.config import NvmeConfig
from kvstrata.core.errors import ClosedError, ConfigError, MisuseError, StorageError
from kvstrata.core.metrics import Metrics
from kvstrata.core.model import KVModel
from kvstrata.tiers.nvme import epochs, record
from kvstrata.tiers.nvme.changes import CHUNK, Changes, place_of
from kvstrata.tiers.nvme.directory import Directory, foreign_bytes, physical_bytes
from kvstrata.tiers.nvme.entries import cut
from kvstrata.tiers.nvme.holdings import Holdings
from kvstrata.tiers.nvme.quota import Budget, budget, catalogued_bytes
from kvstrata.tiers.nvme.recovery import Recovery, recover, register, write_mark
from kvstrata.tiers.records import CatalogueDone, Recovered
from kvstrata.tiers.run import ReadRun, WriteRun, Written

log = logging.getLogger("kvstrata.nvme")

PATIENCE = 60.0
"""Seconds that a reset waits for its commit."""


class NvmeTier:
    """Records of one namespace and epoch in one directory: a ``RecordTier``, and ``Keyed``.

    Invariant 1: physical bytes of everything below the directory never exceed the quota, and the
    extents never their share of it.
    Invariant 2: nothing is catalogued before ``commit``, which callers call after ``io.sync``; a
    record's space is given to another only after its delete is durable.

    Called under the Store's lock, by one thread at a time. Only ``open``, ``reset`` and ``close``
    wait for the disk (and ``place`` where a new extent is needed sooner than it could be made
    ahead). Disk errors are answers: ``place`` says None, a CatalogueDone says not ok.
    """

    name = "nvme"

    def __init__(
        self,
        config: NvmeConfig,
        model: KVModel,
        directory: Directory,
        share: Budget,
        found: Recovery,
        metrics: Metrics,
    ) -> None:
        """Use ``open``."""
        self.directory = directory.path
        self.namespace: bytes = model.namespace()
        self._own = directory
        self._share = share
        self._catalogue = found.catalogue
        self._changes = Changes(found.catalogue, directory.path)
        self._metrics = metrics
        self._codec = 1 if config.codec == "zstd" else 0
        self._cost = catalogued_bytes(max(4 * model.block_size, 32))
        self._closed = False
        self._spaces = found.spaces
        self._number, self.epoch = register(found.spaces, self.namespace)
        try:
            # Before any record of ours exists: without it, a rebuild would drop them all.
            epochs.keep(self.directory, {name: one[1] for name, one in self._spaces.items()})
        except OSError as error:
            self._changes.block(f"cannot write EPOCHS: {error.strerror}", float("inf"))
        self._changes.owe_meta(record.encode_space(self.namespace, self._number, self.epoch))
        self._held, stock = Holdings.stocked(config, model, self.directory, share, found)
        self._recovered = stock.recovered
        self._catalogue.start()
        self._changes.erase(stock.lost)
        self._changes.delete([(one.id(), place_of(one)) for one in stock.doomed])
        notes = list(found.notes)
        if stock.lost:
            notes.append(f"{len(stock.lost)} records had lost their extent and were dropped")
        if notes:
            log.warning("%s was damaged: %s", self.directory, "; ".join(notes))
            self._metrics.add("nvme_recoveries_total")

    @classmethod
    def open(cls, config: NvmeConfig, model: KVModel, *, bell: Bell, metrics: Metrics) -> NvmeTier:
        """Open a directory, making it if its parent exists; whatever is damaged in it is dropped.

        One warning says what was. Raises ConfigError (quota below one block), StorageError (a
        directory that cannot be used), DirectoryBusyError, FingerprintError (another format
        version; nothing is touched). ``bell`` rings when ``poll`` has something.
        """
        if not config.path:
            raise ConfigError("nvme.path is empty; name a directory")
        budget(config.quota, model)
        directory = Directory.open(config.path, force=config.force)
        with ExitStack() as undo:
            undo.callback(directory.close)
            try:
                share = budget(config.quota - foreign_bytes(directory.path), model)
                found = recover(directory, share, bell)
                undo.callback(found.catalogue.close)
                tier = cls(config, model, directory, share, found, metrics)
            except (OSError, lmdb.Error) as error:
                raise StorageError(
                    f"cannot use the NVMe directory {config.path}: {error}; free some space, or "
                    "name another directory"
                ) from error
            undo.pop_all()
        return tier

    def capacity(self, group: int) -> int:
        """Most records of this group that could ever fit."""
        return self._held.tables[group].capacity

    @property
    def writable(self) -> bool:
        """False for a while after the disk has refused something; reading goes on."""
        return not self._changes.blocked

    @property
    def deletes_pending(self) -> bool:
        """Whether space will become free with a later ``poll``."""
        return self._changes.deletes + self._held.retired > 0

    def recovered(self) -> list[Recovered]:
        """What was found at open, by depth. Handed over once: a second call gives an empty list."""
        found, self._recovered = self._recovered, []
        return found

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
        """Room for consecutive blocks of one sequence, to be written to free record ids.

        Every run must come back in one ``commit`` or ``abandon``. None means no room now (or a disk
        that fails), and then nothing has changed. Raises MisuseError for ids that are not free.
        """
        self._open()
        table = self._held.tables[group]
        for one in records:
            if not 0 <= one < table.capacity or table.holds(one):
                raise MisuseError(f"record {one} of group {group} is not free")
        if not self.writable or (len(self._held) + len(keys)) * self._cost > self._share.map_size:
            return None
        symbol = max(map(len, symbols), default=0)
        places = self._held.space.place(len(keys), table.padded, symbol)
        if places is None:
            return None
        whole = WriteRun(
            file=0,
            offset=0,
            passport_bytes=0,
            capacity=table.padded,
            raw=table.raw,
            group=group,
            epoch=self.epoch,
            namespace=self.namespace,
            root=root,
            depth=depth,
            parent=parent,
            keys=tuple(keys),
            symbols=tuple(symbols),
            records=tuple(records),
            codec=self._codec,
            checksums=tuple(checksums),
        )
        return cut(whole, places)

    def commit(self, runs: Sequence[WriteRun], written: Sequence[Written | None]) -> int:
        """Catalogue blocks whose bytes are durable (after ``io.sync``); the batch's number.

        ``written`` has one entry per block, run after run; blocks with None are dropped, as is a
        whole run of compressed blocks with one None in it (nobody knows where the rest lies).
        Asynchronous: the records may be read after their CatalogueDone says ok. Where it does not,
        their ids are free again and nothing was stored. Runs placed before a reset fail so.
        """
        self._open()
        if not all(self._held.space.is_placed(run.file, run.offset) for run in runs):
            raise MisuseError("a run was committed that is not placed")
        if any(run.epoch != self.epoch for run in runs):
            self.abandon(runs)
            return self._changes.put([], "reset")
        return self._changes.put(self._held.take(runs, written, time.time()))

    def abandon(self, runs: Iterable[WriteRun]) -> None:
        """Give placed runs back; nothing was stored."""
        for run in runs:
            self._held.space.abandon(run.file, run.offset)

    def failed(self, error: str) -> None:
        """Hear that the device did not take a write: nothing more is placed for a while."""
        self._changes.block(error)

    def read_runs(self, group: int, records: Sequence[int]) -> tuple[ReadRun, ...]:
        """The runs to read for these records, in the order given; those side by side are joined.

        Raises MisuseError for an id that holds no record.
        """
        table = self._held.tables[group]
        for one in records:
            if not table.holds(one):
                raise MisuseError(f"record {one} of group {group} holds nothing")
        return table.runs(records)

    def delete(self, group: int, records: Iterable[int]) -> int:
        """Forget records; the batch's number. No read of them may be in flight.

        Their ids are free at once, their space when the delete is durable. Ids that hold nothing
        are passed over.
        """
        self._open()
        return self._changes.delete(self._held.forget(group, records, self.epoch), told=True)

    def touch(self, group: int, records: Iterable[int], now: float) -> None:
        """Note a use at ``now`` (seconds since 1970). Durable within about ten seconds, lazily."""
        self._catalogue.touch(self._held.ids(group, records, self.epoch), now)

    def reclaim(self, nbytes: int) -> bool:
        """Delete the least recently used records of other namespaces, ``nbytes`` of them or more.

        True if any were; their space comes with a later ``poll``.
        """
        self._open()
        gone = self._held.reclaim(nbytes)
        self._changes.delete(gone)
        return bool(gone)

    def poll(self) -> list[CatalogueDone]:
        """Commits and deletes that are done. Space of durable deletes is free from here on."""
        out = self._changes.poll()
        self._held.hear(out)
        if out.stored or out.freed or out.failed:
            self._metrics.add("nvme_stored_records_total", out.stored)
            self._metrics.add("nvme_deleted_records_total", len(out.freed))
            self._metrics.add("nvme_failed_records_total", len(out.failed))
            self._metrics.set("nvme_used_bytes", self.used_bytes)
        if not self._closed:
            self._changes.retry()
            if self._held.retired and self.writable and self._changes.deletes < CHUNK:
                self._changes.delete(self._held.clear_out(CHUNK))
        return out.done

    def reset(self) -> int:
        """Begin a new epoch, durably: no older record can be read or committed any more.

        Returns the epoch. All record ids are free; old records are deleted in the background.
        Raises StorageError where the disk does not take it: then the old epoch stands.
        """
        self._open()
        new = {name: epoch for name, (_, epoch) in self._spaces.items()}
        new[self.namespace] = self.epoch + 1
        try:
            # First the file: a catalogue rebuilt from passports has nothing else to go by. With it
            # the reset is done, even if the commit below should fail.
            epochs.write(self.directory, new)
        except OSError as error:
            raise StorageError(f"cannot write EPOCHS in {self.directory}: {error}") from error
        old = self.epoch
        self.epoch += 1
        self._spaces[self.namespace] = self._number, self.epoch
        self._held.retire(old)
        self._changes.owe_meta(record.encode_space(self.namespace, self._number, self.epoch))
        self._changes.flush(PATIENCE)
        self._recovered = []
        return self.epoch

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents that somebody has: records, passports, runs in flight."""
        return self._held.space.extents.allocated_bytes

    def stats(self) -> dict[str, int]:
        """Records, and bytes used, free inside of the extents, of the extents, of the catalogue."""
        extents = self._held.space.extents
        return {
            "records": len(self._held),
            "other_records": self._held.others,
            "used_bytes": extents.allocated_bytes,
            "free_bytes": extents.free_bytes,
            "extent_bytes": extents.total_bytes,
            "catalogue_bytes": 0 if self._closed else self._catalogue.used_bytes(),
            "payload_bytes": self._share.payload,
            "quota_bytes": self._share.quota,
            "epoch": self.epoch,
        }

    def close(self) -> None:
        """Commit what is queued and leave the directory clean. Twice is fine; no OSError."""
        if self._closed:
            return
        self._closed = True
        self._held.space.close()
        try:
            last = self._catalogue.close()
            self.poll()
            write_mark(self.directory, last)
        except (OSError, lmdb.Error) as error:
            log.warning("%s was not closed cleanly: %s", self.directory, error)
        finally:
            self._own.close()

    def check(self) -> None:
        """Test the invariants. Raises AssertionError naming the one that is broken."""
        self._held.check(self._changes.deleting())
        self._catalogue.check()
        assert self._held.space.extents.total_bytes <= self._share.payload, "nvme 1"
        assert physical_bytes(self.directory) <= self._share.quota, "nvme 1"

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the NVMe tier has been closed")
