"""From places to runs to write, and from written runs to records."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.tiers.nvme.passport import width
from kvstrata.tiers.nvme.record import Record
from kvstrata.tiers.run import WriteRun, Written


def cut(whole: WriteRun, places: Sequence[tuple[int, int, int, int]]) -> tuple[WriteRun, ...]:
    """One run for each (file, offset, passport bytes, blocks), out of a run of all blocks.

    The file, offset and passport length of ``whole`` mean nothing.
    """
    runs: list[WriteRun] = []
    at = 0
    for file, offset, passport, blocks in places:
        end = at + blocks
        runs.append(
            WriteRun(
                file=file,
                offset=offset,
                passport_bytes=passport,
                capacity=whole.capacity,
                raw=whole.raw,
                group=whole.group,
                epoch=whole.epoch,
                namespace=whole.namespace,
                root=whole.root,
                depth=whole.depth + at,
                parent=whole.keys[at - 1] if at else whole.parent,
                keys=whole.keys[at:end],
                symbols=whole.symbols[at:end],
                records=whole.records[at:end],
                codec=whole.codec,
                checksums=whole.checksums[at:end],
            )
        )
        at = end
    return tuple(runs)


def entries(
    run: WriteRun, written: Sequence[Written | None], namespace: int, last_use: float
) -> list[Record | None]:
    """The records that a written run holds, None for blocks that were not written.

    A run of compressed blocks with one None in it holds nothing: a payload begins where the one
    before it ends, so nobody knows where the rest lies.
    """
    if run.codec and None in written:
        return [None] * len(written)
    out: list[Record | None] = []
    offset = run.offset + run.passport_bytes
    for index, one in enumerate(written):
        if one is None:
            out.append(None)
            offset += run.capacity
            continue
        out.append(
            Record(
                namespace=namespace,
                epoch=run.epoch,
                group=run.group,
                key=run.keys[index],
                parent=run.keys[index - 1] if index else run.parent,
                root=run.root,
                depth=run.depth + index,
                symbol=run.symbols[index],
                last_use=last_use,
                file=run.file,
                run=run.offset,
                passport_bytes=run.passport_bytes,
                offset=offset,
                capacity=run.capacity,
                stored=one.stored,
                raw=run.raw,
                codec=one.codec,
                checksum=one.checksum,
            )
        )
        offset += width(run.capacity, one)
    return out
