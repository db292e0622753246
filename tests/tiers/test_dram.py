from __future__ import annotations

import threading

import pytest
import torch

from kvstrata.core.config import DramConfig, Size
from kvstrata.core.dtypes import dtype
from kvstrata.core.errors import ConfigError, LayoutError
from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import MLA, FullAttention
from kvstrata.tiers import dram as module
from kvstrata.tiers.base import Addressable, Tier
from kvstrata.tiers.dram import DramTier

MODEL = KVModel(
    b"w" * 32,
    (
        KVGroup(("a", "b"), FullAttention(16, 2, 64, dtype("fp32"))),
        KVGroup(("c",), MLA(16, 36, dtype("bf16"))),
    ),
)
TOGETHER = 8 * 4096 + 4096


def config(slots: int, chunk: int = 1 << 30) -> DramConfig:
    return DramConfig(Size(slots * TOGETHER + 100), Size(chunk))


def test_all_groups_have_the_same_slots() -> None:
    tier = DramTier(config(10), MODEL)
    assert isinstance(tier, Tier) and isinstance(tier, Addressable) and tier.name == "dram"
    assert tier.capacity(0) == tier.capacity(1) == tier.final_capacity(0) == 10
    assert [rows.shape for rows in tier.rows(0)] == [(10, 8 * 4096)]
    assert [rows.shape for rows in tier.rows(1)] == [(10, 4096)]
    tier.check()
    tier.close()
    tier.close()


def test_smaller_than_one_block_is_an_error() -> None:
    with pytest.raises(ConfigError, match="smaller than one block of each KV group"):
        DramTier(DramConfig(Size(TOGETHER - 1)), MODEL)
    DramTier(DramConfig(Size(TOGETHER), Size(1)), MODEL).close()


def test_more_than_can_be_addressed_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot reserve"):
        DramTier(DramConfig(Size(1 << 60)), MODEL)


def test_opens_with_the_first_chunk_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    go, populate = threading.Event(), module._populate

    def slow(address: int, nbytes: int) -> None:
        go.wait()
        populate(address, nbytes)

    monkeypatch.setattr(module, "_populate", slow)
    tier = DramTier(config(100, chunk=30 * TOGETHER), MODEL)
    assert (tier.capacity(0), tier.final_capacity(0)) == (30, 100)
    assert len(tier.rows(0)) == 1
    tier.rows(0)[0].fill_(7)
    with pytest.raises(LayoutError, match="slot 30 of group 0 is outside of 30"):
        tier.row(0, 30)
    go.set()
    assert tier.settle(60)
    assert tier.capacity(0) == 100
    assert [len(rows) for rows in tier.rows(0)] == [30, 30, 30, 10]
    assert (tier.rows(0)[0] == 7).all(), "touching must keep what is there"
    tier.check()
    tier.close()
    assert not tier._grower.is_alive()


def test_close_while_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP", 4096)
    monkeypatch.setattr(module, "REST", 1e9)
    tier = DramTier(config(100, chunk=TOGETHER), MODEL)
    tier.close()
    assert not tier._grower.is_alive()


def test_a_machine_without_memory_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(module, "_populate", refuse)
    tier = DramTier(config(100, chunk=30 * TOGETHER), MODEL)
    assert not tier.settle(60)
    assert tier.capacity(0) == 30
    assert "stays at 30 of 100 slots" in caplog.text
    tier.close()


def test_row_is_the_same_memory_and_aligned() -> None:
    tier = DramTier(config(7, chunk=3 * TOGETHER), MODEL)
    assert tier.settle(60)
    for slot in range(7):
        row = tier.row(1, slot)
        assert len(row) == 4096 and not row.readonly
        row[:4] = bytes([slot, 1, 2, 3])
    every = torch.cat(tier.rows(1))
    assert every[:, 0].tolist() == list(range(7))
    assert not torch.cat(tier.rows(0)).any()
    with pytest.raises(LayoutError):
        tier.row(1, -1)
    tier.close()
