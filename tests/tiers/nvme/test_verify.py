"""``inspect`` and ``verify``: without an engine, beside a live Store, on damaged bytes."""

import os

import pytest

from kvstrata.core.errors import DirectoryBusyError, StorageError
from kvstrata.tiers.nvme.verify import inspect, verify


@pytest.fixture
def path(opened, tmp_path):
    one = opened()
    one.save(1, 30)
    one.tier.reset()
    one.held.clear()
    one.free = {0: list(range(one.tier.capacity(0)))}
    one.save(2, 20)
    one.close()
    return str(tmp_path / "nvme")


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 255]))


def payload(path):
    from kvstrata.tiers.nvme.verify import _catalogued

    return _catalogued(path, False)[1]


def test_inspect(path, world):
    told = inspect(path)
    name = world.model().namespace().hex()
    assert told["records"] == 20 and told["bytes"] == 20 * 16384
    assert told["namespaces"] == [name] and told["epochs"] == {name: 1}
    assert told["groups"] == {"0": 20} and told["damaged"] == 0 and not told["live"]


def test_inspect_and_verify_beside_a_live_store(opened, tmp_path):
    one = opened()
    one.save(1, 12)
    path = str(tmp_path / "nvme")
    assert inspect(path)["live"] and inspect(path)["records"] == 12
    assert verify(path)["ok"] == 12
    with pytest.raises(DirectoryBusyError):
        verify(path, repair=True)
    assert one.save(2, 5) is not None
    one.tier.check()


def test_looking_changes_nothing(path, opened):
    before = {p: os.stat(os.path.join(path, p)).st_mtime_ns for p in ("CLEAN", "EPOCHS", "FORMAT")}
    inspect(path), verify(path)
    assert before == {p: os.stat(os.path.join(path, p)).st_mtime_ns for p in before}
    assert len(opened().recovered) == 20


def test_verify_counts_and_repairs(path, opened):
    assert verify(path) == {
        "records": 20, "ok": 20, "corrupt": 0, "bytes": 20 * 16384, "damaged": 0, "repaired": 0,
        "free_bytes": verify(path)["free_bytes"], "orphan_bytes": 0,
    }  # fmt: skip
    deepest = max(payload(path), key=lambda record: record.depth)
    flip(os.path.join(path, "extents", f"{deepest.file:04d}"), deepest.offset + 99)
    seen = []
    told = verify(path, progress=lambda done, total: seen.append((done, total)))
    assert (told["ok"], told["corrupt"], told["repaired"]) == (19, 1, 0)
    assert len(seen) == 20 and seen[-1][1] == 20
    assert verify(path, repair=True)["repaired"] == 1
    assert verify(path)["records"] == verify(path)["ok"] == 19
    one = opened()
    assert len(one.recovered) == 19
    one.tier.check()


def test_verify_without_a_catalogue(path, opened):
    os.unlink(os.path.join(path, "catalogue", "data.mdb"))
    told = verify(path)
    assert told["damaged"] == -1 and told["ok"] == told["records"] == 20
    assert inspect(path)["damaged"] == -1
    verify(path, repair=True)
    assert verify(path)["damaged"] == 0
    assert len(opened().recovered) == 20


def test_foreign_files_are_orphans(path):
    with open(os.path.join(path, "extents", "notes.txt"), "wb") as file:
        file.write(bytes(5000))
        file.flush()
        os.fsync(file.fileno())
    assert verify(path)["orphan_bytes"] >= 5000


@pytest.mark.parametrize("what", ["missing", "file", "empty"])
def test_bad_paths_are_one_line(tmp_path, what):
    path = tmp_path / "x"
    if what == "file":
        path.write_text("x")
    if what == "empty":
        path.mkdir()
    for call in (inspect, verify, lambda p: verify(p, repair=True)):
        with pytest.raises(StorageError) as caught:
            call(str(path))
        assert "\n" not in str(caught.value)
    assert what != "empty" or os.listdir(path) == []
