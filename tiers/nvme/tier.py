"""The NVMe tier as the Store sees it: where blocks go, where they are, and when they are safe."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import lmdb

from kvstrata.core.clock import Bell
from kvstrata.core.config import NvmeConfig
from kvstrata.core.errors import ClosedError, ConfigError, MisuseError, StorageError
from kvstrata.core.layout import padded
from kvstrata.core.metrics import Metrics
from kvstrata.core.model import KVModel
from kvstrata.tiers.nvme import epochs, record
from kvstrata.tiers.nvme.catalogue import Catalogue, CatalogueDone
from kvstrata.tiers.nvme.changes import Changes, Gone, Put, place_of
from kvstrata.tiers.nvme.directory import Directory, foreign_bytes, physical_bytes
from kvstrata.tiers.nvme.entries import cut, entries
from kvstrata.tiers.nvme.grow import Growth
from kvstrata.tiers.nvme.quota import Budget, budget, catalogued_bytes
from kvstrata.tiers.nvme.record import Record
from kvstrata.tiers.nvme.recovery import Recovery, recover, write_mark
from kvstrata.tiers.nvme.run import ReadRun, WriteRun, Written
from kvstrata.tiers.nvme.space import Space
from kvstrata.tiers.nvme.stock import Recovered, sort_out
from kvstrata.tiers.nvme.table import Table

log = logging.getLogger("kvstrata.nvme")

PATIENCE = 60.0
"""Seconds that a reset waits for its commit."""
FOR_EVER = float("inf")


class NvmeTier:
    """Records of one namespace and epoch in one directory. Satisfies ``Tier`` and ``Keyed``.

    Invariant 1: the space is that of placed runs, of records in the tables, of records of other
    namespaces, and of deletes that are not durable yet; nothing else.
    Invariant 2: extents hold at most the payload's share of the quota; physical bytes of everything
    below the directory never exceed the quota.
    Invariant 3: a record's space is given to another only after its delete is durable.
    Invariant 4: nothing is catalogued before ``commit``, which callers call after ``io.sync``.

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
        self._catalogue: Catalogue = found.catalogue
        self._changes = Changes(found.catalogue, directory.path)
        self._metrics = metrics
        self._codec = 1 if config.codec == "zstd" else 0
        self._spaces = found.spaces
        self._closed = False
        self._number, self.epoch = self._register()
        growth = Growth(self.directory, config.extent, share.payload, found.files)
        self._space = Space(growth, min(config.extent, share.payload), found.files)
        most = [share.payload // padded(group.block_bytes()) for group in model.groups]
        if self._codec:
            most = [2 * n for n in most]
        self._tables = [
            Table(n, group.block_bytes()) for n, group in zip(most, model.groups, strict=True)
        ]
        self._cost = catalogued_bytes(max(4 * model.block_size, 32))
        stock = sort_out(found.records, self._space, self._tables, self._number, self.epoch)
        self._recovered = stock.recovered
        self._others = [(one.id(), place_of(one)) for one in stock.others]
        self._catalogue.start()
        self._changes.erase(stock.lost)
        self._changes.delete([(one.id(), place_of(one)) for one in stock.doomed])
        notes = list(found.notes)
        if stock.lost:
            notes.append(f"{len(stock.lost)} records had lost their extent and were dropped")
        if notes:
            log.warning("%s was damaged: %s", self.directory, "; ".join(notes))

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
        try:
            share = budget(config.quota - foreign_bytes(directory.path), model)
            found = recover(directory, share, bell)
            return cls(config, model, directory, share, found, metrics)
        except (OSError, lmdb.Error) as error:
            directory.close()
            raise StorageError(
                f"cannot use the NVMe directory {config.path}: {error}; free some space, or name "
                "another directory"
            ) from error
        except BaseException:
            directory.close()
            raise

    def capacity(self, group: int) -> int:
        """Most records of this group that could ever fit."""
        return self._tables[group].capacity

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
        table = self._tables[group]
        for one in records:
            if not 0 <= one < table.capacity or table.holds(one):
                raise MisuseError(f"record {one} of group {group} is not free")
        if self._changes.blocked:
            return None
        if (sum(map(len, self._tables)) + len(keys)) * self._cost > self._share.map_size:
            return None
        places = self._space.place(len(keys), table.padded, max(map(len, symbols), default=0))
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
        if not all(self._space.is_placed(run.file, run.offset) for run in runs):
            raise MisuseError("a run was committed that is not placed")
        stale = any(run.epoch != self.epoch for run in runs)
        puts: list[Put] = []
        at = 0
        now = time.time()
        for run in runs:
            mine = written[at : at + len(run.keys)]
            at += len(run.keys)
            kept: list[Record] = []
            if not stale:
                for one, entry in zip(
                    run.records, entries(run, mine, self._number, now), strict=True
                ):
                    if entry is not None:
                        kept.append(entry)
                        puts.append((run.group, one, entry))
                        self._tables[run.group].fill(one, entry)
            self._space.fill(
                run.file, run.offset, run.passport_bytes, [(r.offset, r.width) for r in kept]
            )
        return self._changes.put(puts, "reset" if stale else "")

    def abandon(self, runs: Iterable[WriteRun]) -> None:
        """Give placed runs back; nothing was stored."""
        for run in runs:
            self._space.abandon(run.file, run.offset)

    def read_runs(self, group: int, records: Sequence[int]) -> tuple[ReadRun, ...]:
        """The runs to read for these records, in the order given; those side by side are joined.

        Raises MisuseError for an id that holds no record.
        """
        table = self._tables[group]
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
        return self._changes.delete(self._forget(group, records), told=True)

    def touch(self, group: int, records: Iterable[int], now: float) -> None:
        """Note a use at ``now`` (seconds since 1970). Durable within about ten seconds, lazily."""
        table = self._tables[group]
        self._catalogue.touch([self._id(group, one) for one in records if table.holds(one)], now)

    def reclaim(self, nbytes: int) -> bool:
        """Delete the least recently used records of other namespaces, ``nbytes`` of them or more.

        True if any were; their space comes with a later ``poll``.
        """
        self._open()
        gone: list[Gone] = []
        while self._others and nbytes > 0:
            gone.append(self._others.pop())
            nbytes -= gone[-1][1][3]
        self._changes.delete(gone)
        return bool(gone)

    def poll(self) -> list[CatalogueDone]:
        """Commits and deletes that are done. Space of durable deletes is free from here on."""
        out = self._changes.poll()
        for group, one, entry in out.failed:
            # Unless it was deleted in the meantime: then the delete gives the space back.
            if self._tables[group].holds(one) and self._tables[group].place(one) == place_of(entry):
                self._tables[group].clear(one)
                self._space.release(*place_of(entry))
        for place in out.freed:
            self._space.release(*place)
        if out.stored or out.freed or out.failed:
            self._metrics.add("nvme_stored_records_total", out.stored)
            self._metrics.add("nvme_deleted_records_total", len(out.freed))
            self._metrics.add("nvme_failed_records_total", len(out.failed))
            self._metrics.set("nvme_used_bytes", self.used_bytes)
        if not self._closed:
            self._changes.retry()
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
        self.epoch += 1
        self._spaces[self.namespace] = self._number, self.epoch
        self._changes.owe_meta(record.encode_space(self.namespace, self._number, self.epoch))
        self._changes.flush(PATIENCE)
        for group, table in enumerate(self._tables):
            self._changes.delete(self._forget(group, table.ids().tolist(), self.epoch - 1))
        self._recovered = []
        return self.epoch

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents that somebody has: records, passports, runs in flight."""
        return self._space.extents.allocated_bytes

    def stats(self) -> dict[str, int]:
        """Records, and bytes used, free inside of the extents, of the extents, of the catalogue."""
        extents = self._space.extents
        return {
            "records": sum(map(len, self._tables)),
            "other_records": len(self._others),
            "used_bytes": extents.allocated_bytes,
            "free_bytes": extents.free_bytes,
            "extent_bytes": extents.total_bytes,
            "catalogue_bytes": 0 if self._closed else self._catalogue.used_bytes(),
            "payload_bytes": self._share.payload,
            "quota_bytes": self._share.quota,
            "epoch": self.epoch,
        }

    def close(self) -> None:
        """Commit what is queued and leave the directory clean. Twice is fine; raises no OSError."""
        if self._closed:
            return
        self._closed = True
        self._space.close()
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
        self._space.check()
        for table in self._tables:
            table.check()
        self._catalogue.check()
        places = [t.place(one) for t in self._tables for one in t.ids().tolist()]
        places += [place for _, place in self._others]
        places += self._changes.deleting()
        assert len(set(places)) == len(places) == self._space.live, "nvme 1, 3"
        assert self._space.extents.total_bytes <= self._share.payload, "nvme 2"
        assert physical_bytes(self.directory) <= self._share.quota, "nvme 2"

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the NVMe tier has been closed")

    def _register(self) -> tuple[int, int]:
        """The number and epoch of our namespace; EPOCHS knows it before any record of it exists."""
        if self.namespace not in self._spaces:
            number = 1 + max((number for number, _ in self._spaces.values()), default=0)
            self._spaces[self.namespace] = number, 0
        number, epoch = self._spaces[self.namespace]
        known = {name: epoch for name, (_, epoch) in self._spaces.items()}
        if epochs.read(self.directory) != known:
            try:
                epochs.write(self.directory, known)
            except OSError as error:
                self._changes.block(f"cannot write EPOCHS: {error.strerror}", FOR_EVER)
        self._changes.owe_meta(record.encode_space(self.namespace, number, epoch))
        return number, epoch

    def _id(self, group: int, one: int, epoch: int | None = None) -> bytes:
        key = self._tables[group].key(one)
        return record.record_id(self._number, self.epoch if epoch is None else epoch, group, key)

    def _forget(self, group: int, records: Iterable[int], epoch: int | None = None) -> list[Gone]:
        table = self._tables[group]
        gone: list[Gone] = []
        for one in records:
            if table.holds(one):
                gone.append((self._id(group, one, epoch), table.place(one)))
                table.clear(one)
        return gone
