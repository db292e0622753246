"""What a tier knows of its records, by record id: parallel arrays, 90 bytes a record."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import KEY_BYTES
from kvstrata.core.layout import padded
from kvstrata.tiers.nvme.record import Record
from kvstrata.tiers.run import ReadRun

READ_BYTES = 8 << 20
"""Bytes of a read run: a load is cut so that several threads share it."""


class Table:
    """The records of one KV group. ``file`` is -1 where an id holds none. Not thread-safe.

    Invariant 1: ``len(self)`` ids hold a record.
    Invariant 2: a record's offset and run are whole pages, its run lies before it.
    """

    def __init__(self, capacity: int, raw: int) -> None:
        self.raw = raw
        self.padded = padded(raw)
        self.capacity = capacity
        # zeros of a large array cost nothing until they are touched; hence file + 1 is kept.
        self._file = np.zeros(capacity, np.int32)
        self._offset = np.zeros(capacity, np.int64)
        self._run = np.zeros(capacity, np.int64)
        self._stored = np.zeros(capacity, np.int64)
        self._codec = np.zeros(capacity, np.uint8)
        self._checksum = np.zeros(capacity, np.uint64)
        self._key = np.zeros((capacity, KEY_BYTES), np.uint8)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def holds(self, record: int) -> bool:
        """Whether this id holds a record; ids out of range do not."""
        return 0 <= record < self.capacity and bool(self._file[record])

    def fill(self, records: Sequence[int], entries: Sequence[Record]) -> None:
        """Fill ids, which must be empty and different."""
        if not entries:
            return
        ids = np.asarray(records, np.int64)
        self._used += len(ids)
        self._file[ids] = [entry.file + 1 for entry in entries]
        self._run[ids] = [entry.run for entry in entries]
        self._offset[ids] = [entry.offset for entry in entries]
        self._stored[ids] = [entry.stored for entry in entries]
        self._codec[ids] = [entry.codec for entry in entries]
        self._checksum[ids] = np.array([entry.checksum for entry in entries], np.uint64)
        keys = np.frombuffer(b"".join(entry.key for entry in entries), np.uint8)
        self._key[ids] = keys.reshape(-1, KEY_BYTES)

    def clear(self, record: int) -> None:
        """Empty an id; empty already is fine."""
        self._used -= self.holds(record)
        self._file[record] = 0

    def ids(self) -> NDArray[np.int64]:
        """All ids that hold a record, rising."""
        return np.flatnonzero(self._file).astype(np.int64)

    def key(self, record: int) -> bytes:
        """The key of a record."""
        return bytes(self._key[record])

    def place(self, record: int) -> tuple[int, int, int, int]:
        """(file, run offset, payload offset, bytes in the file) of a record."""
        codec = int(self._codec[record])
        width = self.padded if codec == 0 else padded(int(self._stored[record]))
        file, run, offset = self._file[record], self._run[record], self._offset[record]
        return int(file) - 1, int(run), int(offset), width

    def runs(self, records: Sequence[int]) -> tuple[ReadRun, ...]:
        """The records in the order given as runs to read, those side by side joined."""
        ids = np.asarray(records, np.int64)
        files = (self._file[ids] - 1).tolist()
        offsets = self._offset[ids].tolist()
        stored = self._stored[ids].tolist()
        codecs = self._codec[ids].tolist()
        sums = self._checksum[ids].tolist()
        out: list[ReadRun] = []
        i = 0
        while i < len(files):
            stride = self.padded if codecs[i] == 0 else padded(stored[i])
            most = max(1, READ_BYTES // stride)
            j = i + 1
            while (
                j < len(files)
                and j - i < most
                and files[j] == files[i]
                and offsets[j] == offsets[i] + (j - i) * stride
                and stored[j] <= stride
            ):
                j += 1
            out.append(
                ReadRun(
                    file=files[i],
                    offset=offsets[i],
                    stride=stride,
                    raw=self.raw,
                    stored=tuple(stored[i:j]),
                    codecs=tuple(codecs[i:j]),
                    checksums=tuple(sums[i:j]),
                    records=tuple(ids[i:j].tolist()),
                )
            )
            i = j
        return tuple(out)

    def check(self) -> None:
        """Test the invariants. Raises AssertionError naming the one that is broken."""
        ids = self.ids()
        assert len(ids) == self._used, "table 1"
        assert not ((self._offset[ids] | self._run[ids]) % 4096).any(), "table 2"
        assert (self._run[ids] < self._offset[ids]).all(), "table 2"
