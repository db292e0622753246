"""A disk that is full or fails: storing stops with one warning, reading goes on."""

import errno
import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from kvstrata.tiers.nvme import catalogue, changes, grow

WORLD = Path(__file__).with_name("world.py")


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def refuse(code=errno.ENOSPC):
    def call(*_, **__):
        raise OSError(code, os.strerror(code))

    return call


def test_no_room_for_an_extent(opened, monkeypatch, warnings, tmp_path):
    one = opened()
    monkeypatch.setattr(os, "posix_fallocate", refuse())
    for number in range(3):
        assert one.save(number, 5) is None
    assert len(warnings()) == 1 and "No space left" in warnings()[0]
    assert os.listdir(tmp_path / "nvme" / "extents") == []
    one.tier.check()
    monkeypatch.undo()
    monkeypatch.setattr(grow, "PATIENCE", 0)
    one.tier._held.space._growth._again = 0
    assert one.save(7, 5) is not None


def test_what_fits_goes_on_when_the_next_extent_does_not(opened, monkeypatch, warnings):
    one = opened()
    keys = one.save(1, 40)
    one.tier._held.space._growth.close()
    one.tier._held.space._adopt(0, wait=False)
    monkeypatch.setattr(os, "posix_fallocate", refuse())
    saved = {}
    for number in range(2, 40):
        if (more := one.save(number, 20)) is not None:
            saved[number] = more
    assert saved and len(warnings()) == 1
    one.delete(saved.pop(min(saved)))
    assert one.save(99, 20) is not None
    good, failed, wrong = one.read()
    assert set(keys) < good and failed == wrong == 0


def test_a_file_system_that_is_nearly_full_is_left_alone(opened, monkeypatch, warnings):
    one = opened()
    real = os.statvfs

    def nearly(path):
        found = list(real(path))
        found[4] = (32 << 20) // found[1]  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", nearly)
    assert one.save(1, 5) is None and len(warnings()) == 1


def test_a_commit_that_fails_stores_nothing_and_reading_goes_on(opened, monkeypatch, warnings):
    one = opened()
    keys = one.save(1, 10)
    used = one.tier.used_bytes
    with monkeypatch.context() as patch:
        patch.setattr(catalogue.Catalogue, "_apply", refuse(errno.EIO))
        runs = one.place(2, 10)
        done = one.wait(one.tier.commit(runs, one.write(runs)))
        assert not done.ok and "Input/output" in done.error
        assert not one.tier.writable and one.place(3, 1) is None
        assert one.tier.used_bytes == used
        done = one.delete(keys[5:])
        assert not done.ok and one.tier.deletes_pending  # owed, and its space is not given away
        one.tier.check()
    assert len(warnings()) == 1
    assert one.read() == (set(keys[:5]), 0, 0)
    one.tier._changes._blocked_until = 0
    while one.tier.deletes_pending:
        one.tier.poll()
    assert one.save(4, 5) is not None
    one.tier.check()
    one.close()
    assert opened().read()[1:] == (0, 0)


def test_a_map_that_is_full_takes_only_its_batch_down(opened, monkeypatch, warnings):
    one = opened()
    real = catalogue.Catalogue._apply

    def full(self, txn, batch):
        if len(batch.puts) > 10:
            raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")
        real(self, txn, batch)

    keys = one.save(1, 10)
    monkeypatch.setattr(catalogue.Catalogue, "_apply", full)
    small, large = one.place(2, 5), one.place(3, 20)
    texts = [one.write(small), one.write(large)]
    batches = [one.tier.commit(small, texts[0]), one.tier.commit(large, texts[1])]
    batches.append(one.tier.delete(0, [one.held[0, keys[-1]]]))
    done = {}
    while len(done) < 3:
        done.update({d.batch: d.ok for d in one.tier.poll()})
    assert [done[b] for b in batches] == [True, False, True]
    one.tier.check()
    assert len(warnings()) == 1


def test_failed_writes_are_heard(opened, warnings):
    one = opened()
    one.tier.failed("io: Input/output error")
    one.tier.failed("io: Input/output error")
    assert not one.tier.writable and one.place(1, 1) is None and len(warnings()) == 1
    one.tier._changes._blocked_until = 0
    assert one.tier.writable and one.save(1, 1)


def test_retry_is_not_for_ever():
    assert 0 < changes.RETRY <= 60


def test_epochs_that_cannot_be_written_stop_storing_only(opened, monkeypatch, warnings):
    from kvstrata.core.errors import StorageError
    from kvstrata.tiers.nvme import epochs

    first = opened()
    keys = first.save(1, 3)
    monkeypatch.setattr(epochs, "replace", refuse())
    with pytest.raises(StorageError):
        first.tier.reset()
    assert first.tier.epoch == 0 and first.read()[0] == set(keys)
    first.close()
    os.unlink(os.path.join(first.tier.directory, "EPOCHS"))
    two = opened()
    assert two.read()[0] == set(keys) and not two.tier.writable


@pytest.mark.parametrize("limit", [8192, 40_000, 1 << 20])
def test_a_process_whose_files_may_not_grow(tmp_path, limit):
    """RLIMIT_FSIZE, as a disk that is full for us alone: no store, no wrong answer, no death."""
    path = tmp_path / "nvme"
    serve = [sys.executable, str(WORLD), "serve", str(path)]
    first = subprocess.run(serve, capture_output=True, text=True, check=True)
    stored = json.loads(first.stdout)
    assert stored["stores"] and not stored["good"]
    for number in os.listdir(path / "extents"):
        os.unlink(path / "extents" / number)
    child = subprocess.run(
        serve,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert child.returncode == 0, child.stderr[-2000:]
    told = json.loads(child.stdout)
    assert told["wrong"] == 0 and not told["stores"]
    assert len([text for text in told["warnings"] if "cannot grow" in text]) == 1
