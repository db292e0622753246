"""What only a GPU can show: the kernels on it, streams, events and pinned memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstrata.core.clock import Bell
from kvstrata.core.config import DramConfig, Size
from kvstrata.core.dtypes import dtype
from kvstrata.core.layout import LAYOUTS, PagedLayout
from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import MLA, FullAttention
from kvstrata.kernels import paged, reference
from kvstrata.kernels.pages import Pages
from kvstrata.tiers.dram import DramTier
from kvstrata.tiers.hbm import HbmTier
from kvstrata.transfer.engine import TransferEngine
from kvstrata.transfer.move import Done, Move, Priority

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCKS = 64
SPECS = [FullAttention(16, 4, 64, dtype("bf16")), MLA(16, 576, dtype("bf16"))]


def _tensors(layout: PagedLayout) -> list[torch.Tensor]:
    sizes: dict[int, int] = {}
    for s in layout.segments:
        end = s.base + (layout.num_blocks - 1) * s.stride + s.nbytes
        sizes[s.tensor] = max(sizes.get(s.tensor, 0), end)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda:0") for n in sizes.values()]


@pytest.fixture(params=LAYOUTS)
def layout_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("spec", SPECS)
def test_kernels_equal_the_reference(layout_name: str, spec: FullAttention | MLA) -> None:
    group = KVGroup(tuple("abcde"), spec)
    layout = LAYOUTS[layout_name](group, BLOCKS)
    pages = Pages(_tensors(layout), layout)
    twin = Pages([tensor.clone() for tensor in pages.tensors], layout)
    rng = np.random.default_rng(0)
    for layer in (None, 3):
        blocks, rows = rng.permutation(BLOCKS)[:40], rng.permutation(48)[:40]
        out = torch.full((48, layout.record_bytes + 5), 0xA5, dtype=torch.uint8, device="cuda:0")
        want = out.clone()
        ids = torch.from_numpy(blocks).cuda(), torch.from_numpy(rows).cuda()
        paged.gather(pages, blocks, out, rows, layer)
        reference.gather(twin, ids[0], want, ids[1], layer)
        assert torch.equal(out, want)
        out.copy_(torch.randint(0, 256, out.shape, dtype=torch.uint8))
        paged.scatter(pages, blocks, out, rows, layer)
        reference.scatter(twin, ids[0], out, ids[1], layer)
        assert all(torch.equal(a, b) for a, b in zip(pages.tensors, twin.tensors, strict=True))


class House:
    def __init__(self, name: str) -> None:
        self.group = KVGroup(tuple(f"layer{i}" for i in range(8)), SPECS[0])
        model = KVModel(b"w" * 32, (self.group,))
        self.layout = LAYOUTS[name](self.group, BLOCKS)
        self.hbm = HbmTier("cuda", model)
        self.hbm.register(0, _tensors(self.layout), self.layout)
        config = DramConfig(Size(64 << 20), Size(10 << 20))
        self.dram = DramTier(config, model, "cuda")
        self.bell = Bell()
        tiers = {"hbm": self.hbm, "dram": self.dram}
        self.engine = TransferEngine(tiers, device="cuda:0", bell=self.bell)
        self.number = 0

    def start(
        self, source: str, target: str, a: np.ndarray, b: np.ndarray, **fields: object
    ) -> None:
        self.number += 1
        move = Move(self.number, source, target, 0, a, b, Priority.DEMAND, **fields)  # type: ignore[arg-type]
        self.engine.submit([move])

    def wait(self) -> Done:
        while True:
            seen = self.bell.rings
            for done in self.engine.poll():
                assert done.ok.all(), done.error
                return done
            assert self.bell.wait(seen, 60)

    def close(self) -> None:
        self.engine.close()
        self.dram.check()
        self.dram.close()


def test_round_trip(layout_name: str) -> None:
    house = House(layout_name)
    assert house.dram.settle(60)
    rng = np.random.default_rng(1)
    blocks, slots = rng.permutation(BLOCKS)[:50], rng.permutation(house.dram.capacity(0))[:50]
    want = [view[torch.from_numpy(blocks).cuda()].clone() for view in house.hbm.views(0)]
    house.start("hbm", "dram", blocks, slots, wants_checksums=True)
    sums = house.wait().checksums
    for tensor in house.hbm.flat(0):
        tensor.zero_()
    torch.cuda.synchronize()
    every = np.ones(50, np.bool_)
    house.start("dram", "hbm", slots, blocks, gate=1, checksums=sums, verify=every)
    assert house.engine.gate(1, 0).wait(7, 60)
    house.wait()
    got = [view[torch.from_numpy(blocks).cuda()] for view in house.hbm.views(0)]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    house.close()


def test_a_store_reads_what_a_slow_writer_wrote(layout_name: str) -> None:
    house = House(layout_name)
    blocks = np.arange(8, dtype=np.int64)
    compute = torch.cuda.Stream()
    for value in range(1, 30):
        with torch.cuda.stream(compute):
            torch.cuda._sleep(20_000_000)
            for tensor in house.hbm.flat(0):
                tensor.fill_(value)
            ready = torch.cuda.Event()
            ready.record(compute)
        house.start("hbm", "dram", blocks, blocks, ready=ready)
        house.wait()
        rows = house.dram.rows(0)[0][:8, : house.layout.record_bytes]
        assert (rows == value).all(), f"round {value} stored bytes of an earlier one"
    house.close()
