"""Bytes to and from the extents: aligned or not, whole or damaged, with and without O_DIRECT."""

import errno
import logging
import os
import threading
from pathlib import Path

import pytest
import xxhash

from kvstrata.core.errors import ClosedError, MisuseError
from kvstrata.core.layout import padded
from kvstrata.tiers.nvme import passport
from kvstrata.tiers.nvme.io import ExtentFiles, extent_path
from kvstrata.tiers.run import ReadRun, WriteRun

RAW = 15_360
CAP = padded(RAW)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def files(tmp_path, request):
    (tmp_path / "extents").mkdir()
    for number in range(2):
        (tmp_path / "extents" / f"{number:04d}").write_bytes(bytes(4 << 20))
    files = ExtentFiles(str(tmp_path), direct=request.param)
    yield files
    files.scratch.check()
    files.close()


def write_run(n, codec=0, **changes):
    settings = dict(
        file=0, offset=8192, passport_bytes=passport.passport_bytes(n, 64), capacity=CAP, raw=RAW,
        group=0, epoch=0, namespace=b"n" * 32, root=b"r" * 32, depth=0, parent=b"r" * 32,
        keys=tuple(bytes([i]) * 32 for i in range(n)), symbols=(b"s" * 64,) * n,
        records=tuple(range(n)), codec=codec, checksums=(None,) * n,
    )  # fmt: skip
    return WriteRun(**{**settings, **changes})


def read_run(run, written):
    """One read run per block, or one for all where they lie at one stride."""
    at = run.offset + run.passport_bytes
    out = []
    for one in written:
        width = passport.width(run.capacity, one)
        out.append(
            ReadRun(
                run.file, at, width, run.raw, (one.stored,), (one.codec,), (one.checksum,), (0,)
            )
        )
        at += width
    return out


def joined(run, written):
    return ReadRun(
        run.file, run.offset + run.passport_bytes, run.capacity, run.raw,
        tuple(w.stored for w in written), tuple(w.codec for w in written),
        tuple(w.checksum for w in written), run.records,
    )  # fmt: skip


def data(i):
    return (bytes([i]) * 100 + os.urandom(28)) * (RAW // 128)


@pytest.mark.parametrize("codec", [0, 1])
@pytest.mark.parametrize("shift", [0, 8, 4096])
def test_round_trip(files, world, codec, shift):
    n = 7
    wide = [b[shift:] for b in world.rows(n, CAP + 8192)]
    blocks = [data(i) for i in range(n)]
    for buffer, block in zip(wide, blocks, strict=True):
        buffer[:RAW] = block
    run = write_run(n, codec)
    written = files.write_run(run, wide)
    files.sync([0])
    assert [w.checksum for w in written] == [xxhash.xxh3_64_intdigest(b) for b in blocks]
    assert {w.codec for w in written} == {codec}
    back = [b[shift:] for b in world.rows(n, CAP + 8192)]
    for one, buffer in zip(read_run(run, written), back, strict=True):
        assert files.read_run(one, [buffer]) == ([True], "")
    assert [bytes(b[:RAW]) for b in back] == blocks
    if codec == 0:
        more = world.rows(n, CAP)
        assert files.read_run(joined(run, written), more) == ([True] * n, "")
        assert [bytes(b[:RAW]) for b in more] == blocks
    on_disk = Path(extent_path(files.directory, 0)).read_bytes()
    told = passport.decode(on_disk[8192 : 8192 + run.passport_bytes])
    assert told is not None and told.written == tuple(written) and told.run.keys == run.keys


def test_a_buffer_of_raw_bytes_is_enough(files):
    block = bytearray(data(1))
    run = write_run(1)
    written = files.write_run(run, [memoryview(block)])
    back = bytearray(RAW)
    assert files.read_run(joined(run, written), [memoryview(back)]).ok == [True]
    assert back == block


def test_incompressible_blocks_are_stored_as_they_are(files, world):
    blocks = world.rows(2, CAP)
    blocks[0][:RAW] = os.urandom(RAW)
    run = write_run(2, 1)
    written = files.write_run(run, blocks)
    assert [w.codec for w in written] == [0, 1]
    for one, block in zip(read_run(run, written), blocks, strict=True):
        back = world.rows(1, CAP)
        assert files.read_run(one, back).ok == [True] and back[0][:RAW] == block[:RAW]


def test_known_checksums_are_taken_over(files, world):
    written = files.write_run(write_run(2, checksums=(5, None)), world.rows(2, CAP))
    assert written[0].checksum == 5 and written[1].checksum != 5


@pytest.mark.parametrize("codec", [0, 1])
def test_damage_is_seen_and_only_there(files, world, codec):
    blocks = world.rows(3, CAP)
    for i, block in enumerate(blocks):
        block[:RAW] = data(i)
    run = write_run(3, codec)
    written = files.write_run(run, blocks)
    reads = read_run(run, written)
    with open(extent_path(files.directory, 0), "r+b") as file:
        file.seek(reads[1].offset + reads[1].stored[0] // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    told = [files.read_run(one, world.rows(1, CAP)) for one in reads]
    assert [t.ok for t in told] == [[True], [False], [True]]
    assert told[1].error == "checksum"
    if codec == 0:
        assert files.read_run(joined(run, written), world.rows(3, CAP)).ok == [True, False, True]


def test_short_files_and_missing_files_are_answers(files, world):
    run = write_run(3)
    written = files.write_run(run, world.rows(3, CAP))
    end = run.offset + run.passport_bytes + CAP + 5000
    os.truncate(extent_path(files.directory, 0), end)
    told = files.read_run(joined(run, written), world.rows(3, CAP))
    assert told == ([True, False, False], "short read")
    missing = files.read_run(joined(write_run(3, file=9), written), world.rows(3, CAP))
    assert missing.ok == [False] * 3 and missing.error.startswith("io: ")


def test_a_link_is_not_followed(files, world, tmp_path):
    os.symlink(extent_path(files.directory, 0), extent_path(files.directory, 5))
    with pytest.raises(OSError):
        files.write_run(write_run(1, file=5), world.rows(1, CAP))


def test_misuse(files, world):
    with pytest.raises(MisuseError):
        files.write_run(write_run(2), world.rows(1, CAP))
    with pytest.raises(MisuseError):
        files.write_run(write_run(1), [memoryview(bytearray(10))])


def test_closed(files, world):
    files.close()
    with pytest.raises(ClosedError):
        files.write_run(write_run(1), world.rows(1, CAP))


def test_write_errors_are_raised_and_leave_it_usable(files, world, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OSError):
            files.write_run(write_run(1), world.rows(1, CAP))
    assert files.write_run(write_run(1), world.rows(1, CAP))


def test_short_writes_and_reads_go_on(files, world, monkeypatch):
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, p, at: real_write(fd, [p[0][:4096]], at))
    blocks = world.rows(3, CAP)
    for i, block in enumerate(blocks):
        block[:RAW] = data(i)
    run = write_run(3)
    written = files.write_run(run, blocks)
    monkeypatch.setattr(os, "preadv", lambda fd, p, at: real_read(fd, [p[0][:4096]], at))
    back = world.rows(3, CAP)
    assert files.read_run(joined(run, written), back).ok == [True] * 3
    assert [b[:RAW] for b in back] == [b[:RAW] for b in blocks]


@pytest.mark.parametrize("where", ["open", "write"])
def test_without_o_direct_it_says_so_once(tmp_path, world, monkeypatch, caplog, where):
    (tmp_path / "extents").mkdir()
    for number in range(2):
        (tmp_path / "extents" / f"{number:04d}").write_bytes(bytes(1 << 20))
    files = ExtentFiles(str(tmp_path))
    real_open, real_write = os.open, os.pwritev
    direct = set()

    def opening(path, flags, *rest, **named):
        if flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        fd = real_open(path, flags, *rest, **named)
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def writing(fd, *rest):
        if fd in direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_write(fd, *rest)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "pwritev", writing)
    with caplog.at_level(logging.WARNING):
        for file in (0, 1):
            assert files.write_run(write_run(1, file=file), world.rows(1, CAP))
    assert len(caplog.records) == 1 and not files.direct
    files.close()


def test_threads_share_it_and_descriptors_do_not_leak(files, world):
    before = len(os.listdir("/proc/self/fd"))
    failed = []

    def work(seed):
        run = write_run(4, file=seed % 2, offset=seed * 262144)
        blocks = world.rows(4, CAP)
        for round_ in range(20):
            for i, block in enumerate(blocks):
                block[:RAW] = bytes([seed * 16 + i + round_]) * RAW
            written = files.write_run(run, blocks)
            back = world.rows(4, CAP)
            if files.read_run(joined(run, written), back).ok != [True] * 4 or back[3] != blocks[3]:
                failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(os.listdir("/proc/self/fd")) <= before + 2
