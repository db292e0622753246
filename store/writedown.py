"""One run of blocks on its way from DRAM to a committed record."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstrata.prefix_index.hashing import KeyChain
from kvstrata.store.control import Control
from kvstrata.store.hold import Hold
from kvstrata.store.placement import Refs
from kvstrata.tiers.ledger import Ints, Reservation
from kvstrata.tiers.run import WriteRun
from kvstrata.transfer.move import Done, Priority


class WriteDown:
    """Payload first, then the catalogue, then visible.

    1. The DRAM slots are pinned until the bytes are durable.
    2. The records are readable only once the catalogue has them.
    3. The blocks keep their names to the end, wherever they are evicted from meanwhile.
    """

    def __init__(
        self,
        control: Control,
        group: int,
        refs: Refs,
        slots: Ints,
        taken: Reservation,
        runs: tuple[WriteRun, ...],
        landed: Callable[[int], None],
    ) -> None:
        self._control = control
        self._epoch = control.epoch
        self._group = group
        self._refs = refs
        self._slots = slots
        self._taken = taken
        self._runs = runs
        self._landed = landed
        self._hold = Hold(control.placement, refs, name_only=True)
        self.nbytes = len(refs) * control.model.groups[group].block_bytes()

    @classmethod
    def start(
        cls,
        control: Control,
        group: int,
        chain: KeyChain,
        first: int,
        refs: Refs,
        landed: Callable[[int], None],
    ) -> WriteDown | None:
        """Begin writing ``refs``, blocks ``first`` ... of the chain; None if the disk has no room.

        Every ref must be READY in DRAM and absent from NVMe, whose ledger has slots for them.
        """
        nvme, shelf = control.nvme, control.placement.nvme
        assert nvme is not None and shelf is not None
        dram = control.placement.dram.ledgers[group]
        taken = shelf.ledgers[group].reserve(refs)
        assert taken is not None
        slots = dram.slots(refs)
        width, data = chain.symbols.width, chain.symbols.data
        stop = first + len(refs)
        runs = nvme.place(
            group,
            root=chain.symbols.root,
            parent=chain.parent(first),
            depth=first,
            keys=chain.keys(first, stop),
            symbols=[data[i * width : (i + 1) * width] for i in range(first, stop)],
            records=taken.slots.tolist(),
            checksums=[int(s) for s in control.sums[group][slots]],
        )
        if runs is None:
            shelf.ledgers[group].settle(taken, np.zeros(len(refs), np.bool_))
            return None
        dram.pin(slots)
        write = cls(control, group, refs, slots, taken, runs, landed)
        control.move(
            "dram", "nvme", group, slots, taken.slots, Priority.STORE, write._written, runs=runs
        )
        return write

    def _written(self, done: Done) -> None:
        control = self._control
        assert control.nvme is not None
        control.placement.dram.ledgers[self._group].unpin(self._slots)
        if self._epoch != control.epoch or not done.ok.any():
            control.nvme.abandon(self._runs)
            if self._epoch == control.epoch and done.error != "closed":
                control.nvme.failed(done.error)
            self._end(np.zeros(len(self._refs), np.bool_))
            return
        if done.error:
            control.nvme.failed(done.error)
        number = control.nvme.commit(self._runs, done.written)
        control.batch(number, lambda ok: self._end(done.ok & ok))

    def _end(self, ok: np.typing.NDArray[np.bool_]) -> None:
        control = self._control
        shelf = control.placement.nvme
        assert shelf is not None
        if self._epoch != control.epoch:
            shelf.ledgers[self._group].settle(self._taken, ok)
        else:
            freed = control.placement.settle(shelf, self._group, self._refs, self._taken, ok)
            # Evicted while they were being written: on record by now, and wanted by nobody.
            kept = self._taken.slots[ok]
            control.delete_records(self._group, freed[np.isin(freed, kept)])
            control.metrics.add(
                "nvme_written_bytes_total",
                int(ok.sum()) * control.model.groups[self._group].block_bytes(),
            )
        self._hold.close()
        self._landed(self.nbytes)
