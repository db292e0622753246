"""Bringing blocks up from NVMe into DRAM, for loads and for prefetch."""

from __future__ import annotations

import errno
import logging
import os

import numpy as np

from kvstrata.store.control import Control, log
from kvstrata.store.hold import Hold
from kvstrata.store.placement import Refs
from kvstrata.tiers.ledger import Ints, Reservation
from kvstrata.tiers.run import ReadRun
from kvstrata.transfer.move import Done, Priority

_PASSING = {"closed", "deadline"} | {
    f"io: {os.strerror(code)}"
    for code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
}
"""Errors that say nothing about the record: it stays, and this once the answer is shorter."""


def promote(control: Control, group: int, refs: Refs, priority: Priority) -> int:
    """Start reading the leading blocks of ``refs`` that DRAM has room for; returns how many.

    Every ref must be READY in NVMe and absent from DRAM. Each run of adjacent records is a Move of
    its own, so the first blocks can go on to HBM while the last are being read.
    """
    nvme = control.nvme
    shelf = control.placement.nvme
    assert nvme is not None and shelf is not None
    dram = control.placement.dram.ledgers[group]
    refs = refs[: dram.free]
    taken = dram.reserve(refs)
    if taken is None or not len(refs):
        return 0
    records = shelf.ledgers[group].slots(refs)
    shelf.ledgers[group].pin(records)
    start = 0
    for run in nvme.read_runs(group, records.tolist()):
        part = slice(start, start + len(run.records))
        start = part.stop
        _read(control, group, refs[part], records[part], taken.part(part), run, priority)
    return len(refs)


def _read(
    control: Control,
    group: int,
    refs: Refs,
    records: Ints,
    taken: Reservation,
    run: ReadRun,
    priority: Priority,
) -> None:
    epoch = control.epoch
    hold = Hold(control.placement, refs, name_only=True)  # whoever asked may have given up by then

    def ended(done: Done) -> None:
        shelf = control.placement.nvme
        assert shelf is not None
        control.sums[group][taken.slots] = np.array(run.checksums, np.uint64)
        control.metrics.add("nvme_read_bytes_total", run.raw * int(done.ok.sum()))
        doomed = shelf.ledgers[group].unpin(records)
        if epoch != control.epoch:
            # The reset has deleted the records; only the slots remain to be given back.
            control.placement.dram.ledgers[group].settle(taken, done.ok)
            return
        control.placement.settle(control.placement.dram, group, refs, taken, done.ok)
        bad = refs[~done.ok]
        if len(bad):
            if done.error in _PASSING:
                log.debug("%d block(s) could not be read now: %s", len(bad), done.error)
            else:
                _drop_damaged(control, bad, done.error)
        control.delete_records(group, doomed)
        hold.close()

    control.move("nvme", "dram", group, records, taken.slots, priority, ended, runs=(run,))


def _drop_damaged(control: Control, refs: Refs, error: str) -> None:
    """A block that did not read back as written is a miss from now on, and says so once."""
    control.metrics.add("failed_check_blocks_total", len(refs), tier="nvme")
    level = logging.INFO if control.placement.damage_seen else logging.WARNING
    control.placement.damage_seen = True
    text = "dropped %d damaged block(s) from NVMe (%s): they are recomputed; metrics count them"
    log.log(level, text, len(refs), error)
    control.placement.damaged.update(refs.tolist())
    control.evict_nvme(refs)
