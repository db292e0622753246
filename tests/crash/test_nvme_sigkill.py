"""A process that saves and evicts is killed at a named step; the directory then tells no lies.

KVSTRATA_CRASH_SEEDS says how often each point is tried with other seeds (1 by default).
"""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstrata.tiers.nvme.directory import physical_bytes

WORLD = Path(__file__).parent.parent / "tiers" / "nvme" / "world.py"
SEEDS = range(int(os.environ.get("KVSTRATA_CRASH_SEEDS", "1")))
POINTS = {  # -> the most of such steps that a writer surely takes
    "payload.before": 60,
    "payload.after": 60,
    "payload.torn": 60,
    "sync.before": 50,
    "sync.after": 50,
    "commit.before": 50,
    "commit.after": 50,
    "apply.after": 50,
    "grow.before": 3,
    "grow.after": 3,
    "rename.before": 7,
    "rename.after": 7,
    "build.before": 1,
    "build.after": 1,
    "mark.before": 4,
    "mark.after": 4,
    "format.before": 1,
    "format.after": 1,
}


@pytest.fixture(scope="module")
def world():
    spec = importlib.util.spec_from_file_location("kvstrata_crash_world", WORLD)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def start(path: Path, seed: int, *point: str) -> subprocess.Popen:
    """A writer; what it says goes into ``said`` next to its directory."""
    with path.with_name("said").open("wb") as said, path.with_name("cried").open("wb") as cried:
        return subprocess.Popen(
            [sys.executable, str(WORLD), "write", str(path), str(seed), *point],
            stdout=said,
            stderr=cried,
        )


def judge(world, path: Path, out: str) -> None:
    """Open what a killed process left and hold it against what that had said."""
    said = out.split("\n")[:-1]  # the last line may be torn
    must: set[bytes] = set()
    never: set[bytes] = set()
    for line in said:
        what, _, name = line.partition(" ")
        if what == "saved":
            must.add(bytes.fromhex(name))
        elif what == "deleting":
            must.discard(bytes.fromhex(name))
        elif what == "resetting":
            maybe, must = must, set()
        elif what == "reset":
            never = maybe
    assert physical_bytes(str(path)) <= world.QUOTA
    one = world.World(str(path))
    try:
        one.tier.check()
        good, failed, wrong = one.read()
        assert wrong == 0, "wrong bytes were served"
        assert failed == 0, "a catalogued record was not whole"
        assert must <= good, f"{len(must - good)} acknowledged records are gone"
        assert not good & never, "a reset record came back"
        assert one.save(999_999_999, 3) is not None
        one.tier.check()
        assert physical_bytes(str(path)) <= world.QUOTA
        # Nothing leaked: when all records go, nobody has anything.
        assert one.tier.used_bytes > 0
        one.delete([key for _, key in list(one.held)])
        assert one.tier.used_bytes == 0
        one.tier.check()
    finally:
        one.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("point", POINTS)
def test_killed_at(world, tmp_path, point, seed):
    path = tmp_path / "nvme"
    nth = random.Random(f"{point}{seed}").randint(1, POINTS[point])
    child = start(path, seed + 1, point, str(nth))
    assert child.wait(timeout=120) == -signal.SIGKILL, (tmp_path / "cried").read_text()
    judge(world, path, (tmp_path / "said").read_text())


@pytest.mark.parametrize("seed", range(3 * len(SEEDS)))
def test_killed_at_any_time(world, tmp_path, seed):
    path = tmp_path / "nvme"
    for again in range(2):
        child = start(path, 10 * seed + again + 1)
        while not (tmp_path / "said").stat().st_size:
            assert child.poll() is None, (tmp_path / "cried").read_text()
            time.sleep(0.01)
        time.sleep(random.Random(f"{seed}/{again}").random() * 0.6)
        child.kill()
        child.wait()
        judge(world, path, (tmp_path / "said").read_text())
