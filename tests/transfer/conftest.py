"""A small house of tiers around a transfer engine, and Moves that are checked byte for byte."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.core.clock import Bell
from kvstrata.core.config import DramConfig, Size
from kvstrata.core.dtypes import dtype
from kvstrata.core.layout import LAYOUTS, PagedLayout
from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import FullAttention, KVSpec
from kvstrata.tiers.dram import DramTier
from kvstrata.tiers.hbm import HbmTier
from kvstrata.transfer.engine import TransferEngine
from kvstrata.transfer.move import Done, Move, Priority

SPEC = FullAttention(4, 2, 8, dtype("fp32"))
LAYERS = 3


class House:
    """HBM (16 blocks), DRAM (12 slots in chunks of 5) and an engine over both."""

    def __init__(self, spec: KVSpec = SPEC, layout: str = "part_per_tensor", **engine: Any) -> None:
        group = KVGroup(tuple(f"layer{i}" for i in range(LAYERS)), spec)
        self.model = KVModel(b"w" * 32, (group,))
        self.layout = LAYOUTS[layout](group, 16)
        self.hbm = HbmTier("cpu", self.model)
        self.hbm.register(0, _tensors(self.layout), self.layout)
        row = -(-group.block_bytes() // 4096) * 4096
        # Chunks below the configured least, so that every copy crosses one.
        self.dram = DramTier(DramConfig(Size(12 * row), Size(5 * row)), self.model)
        assert self.dram.settle(60)
        self.bell = Bell()
        self._numbers = itertools.count(1)
        tiers = {"hbm": self.hbm, "dram": self.dram, **engine.pop("tiers", {})}
        self.engine = TransferEngine(tiers, bell=self.bell, **engine)

    def move(self, source: str, target: str, a: Any, b: Any, **fields: Any) -> Move:
        """A Move with a number of its own."""
        ids = np.array(list(a), np.int64), np.array(list(b), np.int64)
        priority = fields.pop("priority", Priority.DEMAND)
        return Move(next(self._numbers), source, target, 0, *ids, priority, **fields)

    def wait(self, n: int) -> list[Done]:
        """The next ``n`` Dones, however long they take (a minute at most)."""
        found: list[Done] = []
        while len(found) < n:
            seen = self.bell.rings
            found += self.engine.poll()
            if len(found) < n:
                assert self.bell.wait(seen, 60), f"{n - len(found)} Dones are missing"
        return found

    def do(self, *args: Any, **fields: Any) -> Done:
        """Submit one Move and wait for its Done."""
        self.engine.submit([self.move(*args, **fields)])
        (done,) = self.wait(1)
        return done

    def record(self, block: int) -> bytes:
        """A block of HBM as the record that it should become."""
        views = self.hbm.views(0)
        return b"".join(view[block].numpy().tobytes() for view in views)

    def row(self, slot: int) -> bytes:
        """The record in a slot of DRAM."""
        return bytes(self.dram.row(0, slot)[: self.layout.record_bytes])

    def randomise(self) -> None:
        """Other bytes everywhere in HBM."""
        for flat in self.hbm.flat(0):
            flat.copy_(torch.randint(0, 256, flat.shape))

    def close(self) -> None:
        self.engine.close()
        self.engine.check()
        self.dram.close()


def _tensors(layout: PagedLayout) -> list[torch.Tensor]:
    sizes: dict[int, int] = {}
    for s in layout.segments:
        end = s.base + (layout.num_blocks - 1) * s.stride + s.nbytes
        sizes[s.tensor] = max(sizes.get(s.tensor, 0), end)
    return [torch.zeros(n, dtype=torch.uint8) for n in sizes.values()]


@pytest.fixture
def house() -> Iterator[Callable[..., House]]:
    """Builds houses and closes them."""
    built: list[House] = []

    def build(*args: Any, **fields: Any) -> House:
        built.append(House(*args, **fields))
        built[-1].randomise()
        return built[-1]

    yield build
    for one in built:
        one.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvstrata-")]


class Event:
    """A ReadyEvent by hand."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.waited = threading.Event()

    def set(self) -> None:
        self._event.set()

    def query(self) -> bool:
        return self._event.is_set()

    def synchronize(self) -> None:
        self.waited.set()
        assert self._event.wait(60)


@pytest.fixture
def event() -> Callable[[], Event]:
    """Makes ready events."""
    return Event
