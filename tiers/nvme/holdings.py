"""What a tier holds, by record id, and the space that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstrata.core.config import NvmeConfig
from kvstrata.core.layout import padded
from kvstrata.core.model import KVModel
from kvstrata.tiers.nvme.changes import Gone, Outcome, Place, Put, place_of
from kvstrata.tiers.nvme.entries import entries
from kvstrata.tiers.nvme.grow import Growth
from kvstrata.tiers.nvme.quota import Budget
from kvstrata.tiers.nvme.record import record_id
from kvstrata.tiers.nvme.recovery import Recovery
from kvstrata.tiers.nvme.space import Space
from kvstrata.tiers.nvme.stock import Stock, sort_out
from kvstrata.tiers.nvme.table import Table
from kvstrata.tiers.run import WriteRun, Written


class Holdings:
    """Records of one namespace in their tables, records of others by age, and the space of all.

    Invariant 1: every record's space is held once: by a table (in use or retired), by ``others``
    or by a delete that is not durable yet.

    Pure bookkeeping: it tells what to put into the catalogue and what to delete from it, and hears
    how that went.
    """

    def __init__(self, space: Space, tables: list[Table], number: int, stock: Stock) -> None:
        self.space = space
        self.tables = tables
        self._number = number
        self._retired: list[tuple[int, int, Table]] = []
        self._others: list[Gone] = [(one.id(), place_of(one)) for one in stock.others]

    @classmethod
    def stocked(
        cls, config: NvmeConfig, model: KVModel, directory: str, share: Budget, found: Recovery
    ) -> tuple[Holdings, Stock]:
        """The holdings of a directory as this model sees them, and the stock they came from."""
        number, epoch = found.spaces[model.namespace()]
        growth = Growth(directory, config.extent, share.payload, found.files)
        space = Space(growth, min(config.extent, share.payload), found.files)
        tables: list[Table] = []
        for group in model.groups:
            raw = group.block_bytes()
            # Compressed ones may be more than fit as they are; twice as many is a bound of ids.
            most = share.payload // padded(raw) * (1 if config.codec == "none" else 2)
            tables.append(Table(most, raw))
        stock = sort_out(found.records, space, tables, number, epoch)
        return cls(space, tables, number, stock), stock

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    @property
    def others(self) -> int:
        """Records of other namespaces."""
        return len(self._others)

    def ids(self, group: int, records: Iterable[int], epoch: int) -> list[bytes]:
        """The catalogue's keys of those ids that hold a record."""
        table = self.tables[group]
        return [
            record_id(self._number, epoch, group, table.key(one))
            for one in records
            if table.holds(one)
        ]

    def take(
        self, runs: Sequence[WriteRun], written: Sequence[Written | None], now: float
    ) -> list[Put]:
        """Fill the ids of written runs; what was not written comes back. What to catalogue."""
        puts: list[Put] = []
        at = 0
        for run in runs:
            mine = written[at : at + len(run.keys)]
            at += len(run.keys)
            found = entries(run, mine, self._number, now)
            kept = [
                (run.group, one, entry)
                for one, entry in zip(run.records, found, strict=True)
                if entry is not None
            ]
            puts += kept
            self.tables[run.group].fill([k[1] for k in kept], [k[2] for k in kept])
            places = [(entry.offset, entry.width) for *_, entry in kept]
            self.space.fill(run.file, run.offset, run.passport_bytes, places)
        return puts

    def forget(self, group: int, records: Iterable[int], epoch: int) -> list[Gone]:
        """Empty ids (those that hold nothing are passed over); what is to be deleted."""
        return self._empty(self.tables[group], group, records, epoch)

    def _empty(self, table: Table, group: int, records: Iterable[int], epoch: int) -> list[Gone]:
        gone: list[Gone] = []
        for one in records:
            if table.holds(one):
                key = record_id(self._number, epoch, group, table.key(one))
                gone.append((key, table.place(one)))
                table.clear(one)
        return gone

    @property
    def retired(self) -> int:
        """Records of epochs that a reset has ended, still to be deleted."""
        return sum(len(table) for *_, table in self._retired)

    def retire(self, epoch: int) -> None:
        """Empty all ids at once; ``clear_out`` then tells bit by bit what is to be deleted."""
        self._retired += [(g, epoch, table) for g, table in enumerate(self.tables) if len(table)]
        self.tables = [Table(table.capacity, table.raw) for table in self.tables]

    def clear_out(self, most: int) -> list[Gone]:
        """Up to about ``most`` retired records, to be deleted."""
        gone: list[Gone] = []
        while self._retired and len(gone) < most:
            group, epoch, table = self._retired[-1]
            gone += self._empty(table, group, table.ids()[:most].tolist(), epoch)
            if not len(table):
                self._retired.pop()
        return gone

    def reclaim(self, nbytes: int) -> list[Gone]:
        """Give up the least recently used records of others, ``nbytes`` or more; to be deleted."""
        gone: list[Gone] = []
        while self._others and nbytes > 0:
            gone.append(self._others.pop())
            nbytes -= gone[-1][1][3]
        return gone

    def hear(self, out: Outcome) -> None:
        """Give back the space of durable deletes and of puts that failed."""
        for group, one, entry in out.failed:
            # Unless it was deleted in the meantime: then the delete gives the space back.
            for table in (self.tables[group], *(t for g, _, t in self._retired if g == group)):
                if table.holds(one) and table.place(one) == place_of(entry):
                    table.clear(one)
                    self.space.release(*place_of(entry))
                    break
        for place in out.freed:
            self.space.release(*place)

    def check(self, deleting: Sequence[Place]) -> None:
        """Test the invariants, given the deletes on their way. Raises AssertionError."""
        self.space.check()
        for table in self.tables:
            table.check()
        every = [*self.tables, *(table for *_, table in self._retired)]
        places = [table.place(one) for table in every for one in table.ids().tolist()]
        places += [place for _, place in self._others]
        places += deleting
        assert len(set(places)) == len(places) == self.space.live, "holdings 1"
