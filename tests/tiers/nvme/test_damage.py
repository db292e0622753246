"""Flip, truncate or delete anything between runs: no wrong byte, no dead process, one warning."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORLD = Path(__file__).with_name("world.py")
FILES = [
    "FORMAT",
    "LOCK",
    "EPOCHS",
    "CLEAN",
    "catalogue/data.mdb",
    "catalogue/lock.mdb",
    "extents/0000",
    "extents/0001",
]
DAMAGE = ["flip 0", "flip 0.1", "flip 0.6", "empty", "half", "longer", "delete"]


class Keys(set):
    """What must be served; ``may`` is what may be."""

    def __init__(self, must, evicted):
        super().__init__(must)
        self.may = {*must, *evicted}


@pytest.fixture(scope="module")
def original(world, tmp_path_factory):
    """A directory with a reset behind it, two extents, and what should be found in it."""
    path = tmp_path_factory.mktemp("original") / "nvme"
    one = world.World(str(path))
    old = one.save(77, 100)
    one.tier.reset()
    one.held.clear()
    one.free = {0: list(range(one.tier.capacity(0)))}
    keys = [key for number in range(10) for key in one.save(number, 40)]
    one.delete(keys[-40:])
    one.close()
    # A rebuild may bring evicted blocks back (they are whole, and evicted is not forbidden).
    return path, Keys(keys[:-40], keys[-40:]), set(old)


def serve(path: Path) -> dict:
    child = subprocess.run(
        [sys.executable, str(WORLD), "serve", str(path)], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, (child.returncode, child.stderr[-2000:])
    return json.loads(child.stdout)


def damage(path: Path, how: str) -> None:
    kind, _, where = how.partition(" ")
    if kind == "delete":
        path.unlink()
        return
    size = path.stat().st_size
    with path.open("r+b") as file:
        if kind == "flip":
            at = min(int(size * float(where)), size - 1)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x11]))
        else:
            file.truncate({"empty": 0, "half": size // 2, "longer": size + 5000}[kind])


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage(original, tmp_path, name, how):
    source, keys, old = original
    path = tmp_path / "nvme"
    shutil.copytree(source, path)
    (path / name).touch()
    if (path / name).stat().st_size == 0 and how not in ("delete", "longer"):
        return
    damage(path / name, how)
    told = serve(path)
    good = {bytes.fromhex(key) for key in told["good"]}
    assert told["wrong"] == 0
    assert good <= keys.may and not good & old
    assert told["stores"]
    # One warning at open at the most, and none that is not true.
    assert len([text for text in told["warnings"] if "was damaged" in text]) <= 1
    if name.startswith("extents"):
        assert good or how == "delete"
        if how in ("empty", "half", "delete"):
            assert len(good) < len(keys) and told["warnings"]
    else:
        # Whatever else is lost, the extents tell.
        assert good >= keys and told["failed"] == 0 and told["epoch"] == 1
    if name == "catalogue/data.mdb":
        assert told["warnings"]


@pytest.mark.parametrize("at", range(0, 12 * 4096, 3100))
def test_any_page_of_the_catalogue(original, tmp_path, at):
    source, keys, _ = original
    path = tmp_path / "nvme"
    shutil.copytree(source, path)
    data = path / "catalogue" / "data.mdb"
    raw = bytearray(data.read_bytes())
    at %= len(raw)
    raw[at : at + 8] = bytes(byte ^ 0xFF for byte in raw[at : at + 8])
    data.write_bytes(raw)
    if at % 200:
        # As after a crash: no mark that would tell.
        (path / "CLEAN").unlink()
    told = serve(path)
    good = {bytes.fromhex(key) for key in told["good"]}
    assert keys <= good <= keys.may and told["wrong"] == 0 and told["stores"]


def test_catalogue_and_epochs_lost_together_resurrect_nothing(original, tmp_path):
    source, _, _ = original
    path = tmp_path / "nvme"
    shutil.copytree(source, path)
    shutil.rmtree(path / "catalogue")
    (path / "EPOCHS").write_bytes(b"{}")
    told = serve(path)
    assert not told["good"] and told["wrong"] == 0 and told["stores"]
    assert "everything was dropped" in told["warnings"][0]
    # Nor later, when only the catalogue goes.
    (path / "catalogue" / "data.mdb").unlink()
    assert len(serve(path)["good"]) == 4


def test_an_old_epochs_file_put_back_resurrects_nothing(original, tmp_path, world):
    source, keys, old = original
    path = tmp_path / "nvme"
    shutil.copytree(source, path)
    from kvstrata.tiers.nvme import epochs

    epochs.write(str(path), {world.model().namespace(): 0})
    (path / "catalogue" / "data.mdb").unlink()
    told = serve(path)
    assert keys <= {bytes.fromhex(key) for key in told["good"]} <= keys.may
    assert told["epoch"] == 1


def test_extents_swapped_serve_nothing_wrong(original, tmp_path):
    source, keys, _ = original
    path = tmp_path / "nvme"
    shutil.copytree(source, path)
    os.rename(path / "extents/0000", path / "extents/x")
    os.rename(path / "extents/0001", path / "extents/0000")
    os.rename(path / "extents/x", path / "extents/0001")
    told = serve(path)
    assert told["wrong"] == 0 and not told["good"] and told["failed"] == len(keys)
    (path / "catalogue" / "data.mdb").unlink()
    told = serve(path)
    assert told["wrong"] == 0 and len(told["good"]) <= 4 + 4


def test_a_reopen_after_damage_is_clean(original, tmp_path):
    source, keys, _ = original
    path = tmp_path / "nvme"
    shutil.copytree(source, path)
    damage(path / "catalogue/data.mdb", "half")
    assert len(serve(path)["warnings"]) == 1
    told = serve(path)
    assert not told["warnings"] and {*map(bytes.fromhex, told["good"])} >= keys
