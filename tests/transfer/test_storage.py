"""The storage lane, over files that are slow, faulty or real."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash

from kvstrata.tiers.run import ReadRun, WriteRun, Written
from kvstrata.transfer.move import Priority


class Disk:
    """The keyed tier: a directory and nothing else."""

    name = "nvme"

    def __init__(self, directory: str = "/nowhere") -> None:
        self.directory = directory

    def capacity(self, group: int) -> int:
        return 100

    def close(self) -> None: ...


class Answer(NamedTuple):
    ok: list[bool]
    error: str


class FakeFiles:
    """Extents in a dict; ``hold`` blocks, ``fail`` breaks."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, int], bytes] = {}
        self.log: list[Any] = []
        self.fail: dict[str, Exception] = {}
        self.bad: set[int] = set()
        self.hold: threading.Event | None = None
        self.entered = threading.Event()

    def _enter(self, what: str, run: Any) -> None:
        self.entered.set()
        if self.hold is not None:
            assert self.hold.wait(60)
        self.log.append((what, run))
        if what in self.fail:
            raise self.fail[what]

    def write_run(self, run: WriteRun, buffers: Any) -> list[Written]:
        self._enter("write", run.file)
        written = []
        for i, buffer in enumerate(buffers):
            assert len(buffer) % 4096 == 0
            raw = bytes(buffer[: run.raw])
            self.bytes[run.file, run.records[i]] = raw
            written.append(Written(run.raw, 0, xxhash.xxh3_64_intdigest(raw)))
        return written

    def read_run(self, run: ReadRun, buffers: Any) -> Answer:
        self._enter("read", run.file)
        for record, buffer in zip(run.records, buffers, strict=True):
            buffer[: run.raw] = self.bytes[run.file, record]
        ok = [record not in self.bad for record in run.records]
        return Answer(ok, "" if all(ok) else "checksum")

    def sync(self, files: Any) -> None:
        self._enter("sync", tuple(sorted(files)))

    def close(self) -> None:
        self.log.append(("close", None))


def write_run(file: int, records: list[int], raw: int, offset: int = 0) -> WriteRun:
    n = len(records)
    capacity = -(-raw // 4096) * 4096
    keys = tuple(bytes([record]) * 32 for record in records)
    return WriteRun(
        file, offset, 4096, capacity, raw, 0, 0, b"n" * 32, b"r" * 32, 0, b"p" * 32,
        keys, (b"s" * 16,) * n, tuple(records),
    )  # fmt: skip


def read_run(run: WriteRun, written: Any) -> ReadRun:
    return ReadRun(
        run.file,
        run.offset + run.passport_bytes,
        run.capacity,
        run.raw,
        tuple(one.stored for one in written),
        tuple(one.codec for one in written),
        tuple(one.checksum for one in written),
        run.records,
    )


def build(house: Any, files: Any = None, directory: str = "/nowhere", **fields: Any) -> Any:
    one = house(tiers={"nvme": Disk(directory)}, files=files, **fields)
    one.do("hbm", "dram", range(12), range(12))
    return one


def test_writes_run_by_run_and_syncs_once(house) -> None:
    files = FakeFiles()
    one = build(house, files)
    raw = one.layout.record_bytes
    runs = (write_run(1, [50, 51], raw), write_run(2, [52], raw))
    done = one.do("dram", "nvme", [3, 4, 9], [50, 51, 52], runs=runs, priority=Priority.STORE)
    assert done.ok.all() and not done.error
    assert [files.bytes[f, r] for f, r in ((1, 50), (1, 51), (2, 52))] == [
        one.row(slot) for slot in (3, 4, 9)
    ]
    assert [one.checksum for one in done.written] == [
        xxhash.xxh3_64_intdigest(one.row(slot)) for slot in (3, 4, 9)
    ]
    assert files.log[-1] == ("sync", (1, 2))
    assert Counter(what for what, _ in files.log) == {"write": 2, "sync": 1}
    reads = tuple(
        read_run(run, part)
        for run, part in zip(runs, (done.written[:2], done.written[2:]), strict=True)
    )
    want = [one.row(slot) for slot in (3, 4, 9)]
    loaded = one.do("nvme", "dram", [50, 51, 52], [0, 7, 1], runs=reads, wants_checksums=True)
    assert loaded.ok.all() and [one.row(slot) for slot in (0, 7, 1)] == want
    assert loaded.checksums.tolist() == [xxhash.xxh3_64_intdigest(record) for record in want]


@pytest.mark.parametrize("where", ["write", "sync"])
def test_a_full_disk_is_an_answer(house, where: str) -> None:
    files = FakeFiles()
    files.fail[where] = OSError(28, "No space left on device")
    one = build(house, files)
    run = write_run(1, [50, 51], one.layout.record_bytes)
    done = one.do("dram", "nvme", [3, 4], [50, 51], runs=(run,))
    assert not done.ok.any() and done.error == "io: No space left on device"
    assert done.written == (None, None)
    del files.fail[where]
    assert one.do("dram", "nvme", [3, 4], [50, 51], runs=(run,)).ok.all()


def test_a_damaged_record_is_not_ok(house) -> None:
    files = FakeFiles()
    one = build(house, files)
    run = write_run(1, [50, 51], one.layout.record_bytes)
    done = one.do("dram", "nvme", [3, 4], [50, 51], runs=(run,))
    files.bad.add(51)
    loaded = one.do("nvme", "dram", [50, 51], [3, 4], runs=(read_run(run, done.written),))
    assert loaded.ok.tolist() == [True, False] and loaded.error == "checksum"


def test_loads_overtake_stores(house) -> None:
    files = FakeFiles()
    one = build(house, files, io_threads=1)
    raw = one.layout.record_bytes
    first = one.do("dram", "nvme", [0], [9], runs=(write_run(9, [9], raw),))
    files.log.clear()
    files.hold = threading.Event()
    files.entered.clear()
    stores = [
        one.move("dram", "nvme", [i], [i], runs=(write_run(i, [i], raw),), priority=Priority.STORE)
        for i in range(3)
    ]
    one.engine.submit(stores)
    assert files.entered.wait(60)
    load = one.move(
        "nvme", "dram", [9], [11], runs=(read_run(write_run(9, [9], raw), first.written),)
    )
    one.engine.submit([load])
    files.hold.set()
    one.wait(4)
    assert [entry for entry in files.log if entry[0] != "sync"][:2] == [("write", 0), ("read", 9)]


def test_runs_must_be_what_the_move_says(house) -> None:
    one = build(house, FakeFiles())
    run = write_run(1, [50, 51], one.layout.record_bytes)
    assert "must equal" in one.do("dram", "nvme", [3, 4], [50, 52], runs=(run,)).error
    assert "needs ReadRuns" in one.do("nvme", "dram", [50, 51], [3, 4], runs=(run,)).error
    assert "no route" in one.do("hbm", "nvme", [3, 4], [50, 51], runs=(run,)).error
    assert "slot 12" in one.do("dram", "nvme", [3, 12], [50, 51], runs=(run,)).error
    assert one.do("dram", "nvme", [], []).ok.shape == (0,)


def test_close_fails_what_waits_and_closes_the_files(house) -> None:
    files = FakeFiles()
    one = build(house, files, io_threads=1)
    files.hold = threading.Event()
    raw = one.layout.record_bytes
    runs = write_run(1, [1], raw), write_run(2, [2], raw)
    one.engine.submit([one.move("dram", "nvme", [1, 2], [1, 2], runs=runs)])
    assert files.entered.wait(60)
    closer = threading.Thread(target=one.engine.close)
    closer.start()
    while one.engine._storage._heap:
        threading.Event().wait(0.001)
    files.hold.set()
    closer.join(60)
    (done,) = one.engine.poll()
    assert done.error == "closed" and done.ok.tolist() == [True, False]
    assert done.written[0] is not None and done.written[1] is None
    assert files.log[-2:] == [("sync", (1, 2)), ("close", None)]


def test_through_real_extents(house, tmp_path) -> None:
    (tmp_path / "extents").mkdir()
    rng = random.Random(0)
    one = build(house, None, str(tmp_path))
    raw = one.layout.record_bytes
    size = 8 * (4096 + 4 * 4096)
    for file in (1, 2):
        (tmp_path / "extents" / f"{file:04d}").write_bytes(bytes(size))
    runs = (write_run(1, [5, 6, 7], raw), write_run(2, [8], raw, offset=4096))
    slots = rng.sample(range(12), 4)
    done = one.do("dram", "nvme", slots, [5, 6, 7, 8], runs=runs)
    assert done.ok.all(), done.error
    want = [one.row(slot) for slot in slots]
    for slot in range(12):
        one.dram.row(0, slot)[:raw] = bytes(raw)
    reads = (read_run(runs[0], done.written[:3]), read_run(runs[1], done.written[3:]))
    loaded = one.do("nvme", "dram", [5, 6, 7, 8], [1, 0, 3, 9], runs=reads)
    assert loaded.ok.all(), loaded.error
    assert [one.row(slot) for slot in (1, 0, 3, 9)] == want
    with open(tmp_path / "extents" / "0001", "r+b") as extent:
        extent.seek(runs[0].offset + 4096 + 4096 + 3)
        byte = extent.read(1)[0]
        extent.seek(-1, 1)
        extent.write(bytes([byte ^ 1]))
    again = one.do("nvme", "dram", [5, 6, 7, 8], [1, 0, 3, 9], runs=reads)
    assert again.ok.sum() == 3 and again.error == "checksum"
    assert np.flatnonzero(~again.ok).tolist() == [1]
