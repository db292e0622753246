"""A small NVMe tier with synchronous hands, and the children that crash and damage tests start.

The bytes of a block are a function of its key, so any process can tell whether a record is right.

    world.py serve DIR            open, read everything, print what was found as JSON
    world.py write DIR SEED [POINT NTH]
                                  save and delete until killed, or until the NTH time at POINT,
                                  where it kills itself; prints what is acknowledged
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.core.clock import Bell
from kvstrata.core.config import NvmeConfig
from kvstrata.core.dtypes import dtype
from kvstrata.core.keys import block_key, root_key
from kvstrata.core.metrics import Metrics
from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import FullAttention
from kvstrata.tiers.nvme.io import ExtentFiles
from kvstrata.tiers.nvme.tier import NvmeTier
from kvstrata.tiers.records import CatalogueDone

QUOTA = 24 << 20
EXTENT = 4 << 20


def model(weights: bytes = b"w" * 32, groups: int = 1) -> KVModel:
    """Blocks of 15,360 bytes: not whole pages, so padding is exercised everywhere."""
    spec = FullAttention(16, 1, 60, dtype("float32"))
    return KVModel(weights, tuple(KVGroup((f"{g}.a", f"{g}.b"), spec) for g in range(groups)))


def content(key: bytes, nbytes: int) -> bytes:
    """The bytes of the block with this key; half of it compresses."""
    return hashlib.shake_128(key).digest(nbytes // 2) + bytes(nbytes - nbytes // 2)


def rows(n: int, width: int) -> list[memoryview]:
    """n page-aligned buffers, one after the other."""
    area = memoryview(mmap.mmap(-1, n * width))
    return [area[i * width : (i + 1) * width] for i in range(n)]


class World:
    """An open tier, what it holds by key, and the free record ids."""

    def __init__(self, path: str, kv: KVModel | None = None, **settings: Any) -> None:
        self.model = kv or model()
        settings = {"quota": QUOTA, "extent": EXTENT, **settings}
        self.config = NvmeConfig(path=path, **settings)
        self.tier = NvmeTier.open(self.config, self.model, bell=Bell(), metrics=Metrics())
        self.io = ExtentFiles(self.tier.directory)
        self.recovered = self.tier.recovered()
        self.held = {(r.group, r.key): r.record for r in self.recovered}
        self.free = {
            g: sorted(
                set(range(self.tier.capacity(g)))
                - {r.record for r in self.recovered if r.group == g}
            )
            for g in range(len(self.model.groups))
        }
        self.acknowledged: Callable[[str, bytes], None] = lambda what, key: None

    def chain(self, seed: int, n: int) -> tuple[bytes, list[bytes], list[bytes]]:
        """(root, keys, symbols) of a sequence."""
        root = root_key(self.tier.namespace, epoch=self.tier.epoch)
        keys: list[bytes] = []
        symbols = [hashlib.sha256(b"%d/%d" % (seed, i)).digest() * 2 for i in range(n)]
        parent: bytes = root
        for symbol in symbols:
            parent = block_key(parent, symbol)
            keys.append(parent)
        return root, keys, symbols

    def place(self, seed: int, n: int, group: int = 0, start: int = 0) -> Any:
        root, keys, symbols = self.chain(seed, n)
        runs = self.tier.place(
            group,
            root=root,
            parent=keys[start - 1] if start else root,
            depth=start,
            keys=keys[start:],
            symbols=symbols[start:],
            records=self.free[group][: n - start],
            checksums=[None] * (n - start),
        )
        if runs is not None:
            del self.free[group][: n - start]
        return runs

    def write(self, runs: Sequence[Any]) -> list[Any]:
        written: list[Any] = []
        for run in runs:
            buffers = rows(len(run.keys), run.capacity)
            for key, buffer in zip(run.keys, buffers, strict=True):
                buffer[: run.raw] = content(key, run.raw)
            written += self.io.write_run(run, buffers)
        self.io.sync({run.file for run in runs})
        return written

    def wait(self, batch: int) -> CatalogueDone:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for done in self.tier.poll():
                if done.batch == batch:
                    return done
            time.sleep(0.001)
        raise AssertionError("no CatalogueDone within 20 s")

    def save(self, seed: int, n: int, group: int = 0, start: int = 0) -> list[bytes] | None:
        """Store blocks start .. n of a sequence; their keys, or None for no room."""
        runs = self.place(seed, n, group, start)
        if runs is None:
            return None
        done = self.wait(self.tier.commit(runs, self.write(runs)))
        if not done.ok:
            self.free[group] += [one for run in runs for one in run.records]
            return None
        keys: list[bytes] = []
        for run in runs:
            for one, key in zip(run.records, run.keys, strict=True):
                self.held[group, key] = one
                self.acknowledged("saved", key)
                keys.append(key)
        return keys

    def delete(self, keys: Sequence[bytes], group: int = 0) -> CatalogueDone:
        for key in keys:
            self.acknowledged("deleting", key)
        ids = [self.held.pop((group, key)) for key in keys]
        done = self.wait(self.tier.delete(group, ids))
        self.free[group] += ids
        return done

    def read(self) -> tuple[set[bytes], int, int]:
        """Read all: (keys read right, records that failed, records with WRONG bytes)."""
        good: set[bytes] = set()
        failed = wrong = 0
        for group in range(len(self.model.groups)):
            names = {one: key for (g, key), one in self.held.items() if g == group}
            for run in self.tier.read_runs(group, sorted(names)):
                buffers = rows(len(run.records), run.stride)
                if run.codecs[0]:
                    buffers = rows(len(run.records), self.tier._held.tables[group].padded)
                for one, ok, buffer in zip(
                    run.records, self.io.read_run(run, buffers).ok, buffers, strict=True
                ):
                    if not ok:
                        failed += 1
                    elif buffer[: run.raw] != content(names[one], run.raw):
                        wrong += 1
                    else:
                        good.add(names[one])
        return good, failed, wrong

    def close(self) -> None:
        self.io.close()
        self.tier.close()


def serve(path: str) -> None:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvstrata").addHandler(handler)
    world = World(path)
    good, failed, wrong = world.read()
    world.tier.check()
    again = world.save(999, 4)
    world.tier.check()
    more, _, worse = world.read()
    world.close()
    assert "torch" not in sys.modules
    told = {
        "good": sorted(key.hex() for key in good),
        "failed": failed,
        "wrong": wrong + worse,
        "stores": again is not None and set(again) <= more,
        "warnings": heard,
        "epoch": world.tier.epoch,
    }
    print(json.dumps(told))


def _point(name: str, nth: int) -> None:
    """Have this process kill itself at a named step of storing, evicting or closing."""
    from kvstrata.tiers.nvme import catalogue, directory, recovery

    count = 0

    def due() -> bool:
        nonlocal count
        count += 1
        return count == nth

    def die() -> None:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def wrap(owner: Any, attribute: str, torn: bool = False) -> None:
        inner = getattr(owner, attribute)
        after = name.endswith("after")

        def call(*args: Any, **options: Any) -> Any:
            last = due()
            if last and torn:
                fd, parts, offset = args
                half = list(parts)[: max(1, len(parts) // 2)]
                inner(fd, [half[0][:4096], *half[1:]][:1] if len(half) < 2 else half, offset)
                die()
            if last and not after:
                die()
            result = inner(*args, **options)
            if last:
                die()
            return result

        setattr(owner, attribute, call)

    step = name.split(".")[0]
    if step == "payload":
        wrap(os, "pwritev", torn=name.endswith("torn"))
    elif step == "sync":
        wrap(os, "fdatasync")
    elif step == "commit":
        wrap(catalogue.Catalogue, "_commit")
    elif step == "apply":
        wrap(catalogue.Catalogue, "_apply")
    elif step == "grow":
        wrap(os, "posix_fallocate")
    elif step == "rename":
        wrap(os, "rename")
    elif step == "build":
        wrap(catalogue.Catalogue, "build")
    elif step == "mark":
        wrap(recovery, "_remove_mark")
    elif step == "format":
        wrap(directory, "write_format")
    else:
        raise SystemExit(f"no point {name}")


def write(path: str, seed: int, point: str = "", nth: int = 0) -> None:
    """Save and delete for as long as it lives; every fourth round closes and opens again."""
    if point:
        _point(point, nth)
    chance = random.Random(seed)

    def say(what: str, key: bytes) -> None:
        print(what, key.hex(), flush=True)

    number = seed * 100_000
    chains: list[list[bytes]] = []
    for rounds in range(6):
        world = World(path)
        world.acknowledged = say
        for _ in range(chance.randrange(8, 25)):
            number += 1
            saved = world.save(number, chance.randrange(1, 40))
            if saved is not None:
                chains.append(saved)
            if chains and (saved is None or chance.random() < 0.3):
                chance.shuffle(chains)
                # Whole sequences: what has lost its parent would rightly be gone after a restart.
                for keys in chains[: max(1, len(chains) // 3)]:
                    world.delete(keys)
                del chains[: max(1, len(chains) // 3)]
        if rounds == 3:
            print("resetting", flush=True)
            world.tier.reset()
            print("reset", flush=True)
            world.held.clear()
            world.free = {0: list(range(world.tier.capacity(0)))}
            chains = [keys] if (keys := world.save(number + 50_000, 10)) else []
        world.close()
    print("end", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        write(sys.argv[2], int(sys.argv[3]), *sys.argv[4:5], *map(int, sys.argv[5:6]))
