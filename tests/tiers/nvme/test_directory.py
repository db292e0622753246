"""A directory that cannot be used is one clear line, and nothing in it is touched."""

import json
import os
import subprocess
import sys

import pytest

from kvstrata.core.errors import DirectoryBusyError, FingerprintError, StorageError
from kvstrata.tiers.nvme import directory
from kvstrata.tiers.nvme.directory import Directory, filesystem, physical_bytes, read_format


def refused(error, path, **options):
    with pytest.raises(error) as caught:
        Directory.open(str(path), **options).close()
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_modes(tmp_path):
    path = tmp_path / "nvme"
    one = Directory.open(str(path))
    one.check()
    assert path.stat().st_mode & 0o777 == 0o700
    for name in ("catalogue", "extents"):
        assert (path / name).stat().st_mode & 0o777 == 0o700
    for name in ("FORMAT", "LOCK"):
        assert (path / name).stat().st_mode & 0o777 == 0o600
    one.close()
    one.close()
    path.chmod(0o755)
    Directory.open(str(path)).close()
    assert path.stat().st_mode & 0o777 == 0o700


def test_files_of_an_open_tier_are_private(opened, tmp_path):
    one = opened()
    one.save(1, 5)
    one.close()
    for folder, _, names in os.walk(tmp_path / "nvme"):
        assert os.stat(folder).st_mode & 0o777 == 0o700
        for name in names:
            assert os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o600, name


def test_a_missing_parent_and_a_path_below_a_file(tmp_path):
    refused(StorageError, tmp_path / "no" / "nvme")
    (tmp_path / "file").write_text("mine")
    refused(StorageError, tmp_path / "file")
    refused(StorageError, tmp_path / "file" / "nvme")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_unwritable_directory(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", denied)
    refused(StorageError, tmp_path / "nvme")


def test_links_are_refused(tmp_path):
    Directory.open(str(tmp_path / "real")).close()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    refused(StorageError, tmp_path / "link")
    for name in ("extents/0000", "catalogue/data.mdb", "LOCK"):
        (tmp_path / "real" / name).unlink(missing_ok=True)
        (tmp_path / "real" / name).symlink_to("/etc/hostname")
        with pytest.raises(StorageError):
            Directory.open(str(tmp_path / "real"))
        (tmp_path / "real" / name).unlink()
    Directory.open(str(tmp_path / "real")).close()


def test_somebody_elses_directory(tmp_path, monkeypatch):
    Directory.open(str(tmp_path / "nvme")).close()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert "belongs to user" in refused(StorageError, tmp_path / "nvme")


def test_a_directory_with_other_things_in_it(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert "thesis.tex" in refused(StorageError, tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_empty_directory_is_taken(tmp_path):
    (tmp_path / "nvme").mkdir()
    one = Directory.open(str(tmp_path / "nvme"))
    assert one.damage == []
    one.close()


def test_another_version_is_not_touched(tmp_path):
    path = tmp_path / "nvme"
    Directory.open(str(path)).close()
    check = directory._format_check(2)
    for text in ('{"version": 2, "new": [1]}', json.dumps({"version": 2, "check": check})):
        (path / "FORMAT").write_text(text)
        before = sorted((str(p), p.stat().st_mtime_ns) for p in path.rglob("*"))
        assert "version 2" in refused(FingerprintError, path)
        assert before == sorted((str(p), p.stat().st_mtime_ns) for p in path.rglob("*"))


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[]", b"{}", b'{"version": 2, "check": "x"}'])
def test_a_damaged_format_is_written_again(tmp_path, text):
    path = tmp_path / "nvme"
    Directory.open(str(path)).close()
    (path / "FORMAT").write_bytes(text)
    one = Directory.open(str(path))
    assert one.damage and read_format(str(path)) == 1
    one.close()


def test_a_second_opener_is_told_who_has_it(tmp_path, monkeypatch):
    path = tmp_path / "nvme"
    one = Directory.open(str(path))
    assert f"process {os.getpid()}" in refused(DirectoryBusyError, path)
    (tmp_path / "link").symlink_to(path)
    refused(StorageError, tmp_path / "link")
    code = (
        "import sys\nfrom kvstrata.tiers.nvme.directory import Directory\n"
        "try: Directory.open(sys.argv[1], patience=0)\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert (
        child.stdout.startswith("DirectoryBusyError") and f"process {os.getpid()}" in child.stdout
    )
    one.close()
    Directory.open(str(path)).close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    path = str(tmp_path / "nvme")
    one = Directory.open(path)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    one.close()
    try:
        Directory.open(path, patience=0).close()
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for fd in (*ready, *go):
            os.close(fd)


def test_network_file_systems_need_force(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "filesystem", lambda path: "nfs4")
    assert "nfs4" in refused(StorageError, tmp_path / "nvme")
    assert not (tmp_path / "nvme").exists()
    Directory.open(str(tmp_path / "nvme"), force=True).close()


def test_filesystem():
    assert filesystem("/proc") == "proc"
    assert filesystem("/") not in ("", "proc")


def test_physical_bytes(tmp_path):
    before = physical_bytes(str(tmp_path))
    (tmp_path / "x").write_bytes(bytes(100_000))
    os.sync()
    assert 100_000 <= physical_bytes(str(tmp_path)) - before <= 120_000
