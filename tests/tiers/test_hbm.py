from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstrata.core.dtypes import dtype
from kvstrata.core.errors import LayoutError, MisuseError
from kvstrata.core.layout import LAYOUTS, PagedLayout, packed, part_per_tensor
from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import MLA, FullAttention, KVSpec
from kvstrata.tiers.base import Tier
from kvstrata.tiers.hbm import HbmTier

SPECS: list[KVSpec] = [
    FullAttention(4, 2, 8, dtype("fp32")),
    FullAttention(4, 2, 8, dtype("bf16"), head_dim_v=4),
    MLA(4, 36, dtype("fp8")),
]


def model(*specs: KVSpec) -> KVModel:
    groups = [
        KVGroup(tuple(f"{number}.{layer}" for layer in range(3)), spec)
        for number, spec in enumerate(specs)
    ]
    return KVModel(b"w" * 32, tuple(groups))


def tensors_for(layout: PagedLayout) -> list[torch.Tensor]:
    sizes: dict[int, int] = {}
    for s in layout.segments:
        end = s.base + (layout.num_blocks - 1) * s.stride + s.nbytes
        sizes[s.tensor] = max(sizes.get(s.tensor, 0), end)
    return [torch.zeros(n, dtype=torch.uint8) for n in sizes.values()]


def test_allocate_zeroes_and_aligns() -> None:
    tier = HbmTier.allocate(model(*SPECS), 5, "cpu")
    assert isinstance(tier, Tier) and tier.name == "hbm" and tier.groups == (0, 1, 2)
    for group in tier.groups:
        assert tier.capacity(group) == 5
        for tensor in tier.tensors(group):
            assert tensor.shape[0] == 5 and not tensor.any()
            assert tensor.data_ptr() % 4096 == 0
    tier.check()
    tier.close()
    with pytest.raises(MisuseError, match="no tensors"):
        tier.capacity(0)


def test_tensors_do_not_overlap() -> None:
    tier = HbmTier.allocate(model(*SPECS), 3, "cpu")
    every = [view for group in tier.groups for view in tier.views(group)]
    for number, view in enumerate(every):
        view.fill_(number + 1)
    assert all((view == number + 1).all() for number, view in enumerate(every))


@pytest.mark.parametrize("name", LAYOUTS)
def test_views_are_the_segments(name: str) -> None:
    group = model(SPECS[0]).groups[0]
    layout = LAYOUTS[name](group, 6)
    tensors = tensors_for(layout)
    for tensor in tensors:
        tensor.copy_(torch.randint(0, 256, tensor.shape))
    tier = HbmTier("cpu", model(SPECS[0]))
    tier.register(0, tensors, layout)
    for segment, view in zip(layout.segments, tier.views(0), strict=True):
        for block in range(6):
            at = segment.base + block * segment.stride
            assert torch.equal(view[block], tensors[segment.tensor][at : at + segment.nbytes])


def test_registers_typed_tensors_in_place() -> None:
    spec = FullAttention(4, 2, 8, dtype("bf16"))
    layout = part_per_tensor(model(spec).groups[0], 6)
    tensors = [torch.zeros(6, 4, 2, 8, dtype=torch.bfloat16) for _ in range(6)]
    tier = HbmTier("cpu", model(spec))
    tier.register(0, tensors, layout)
    tier.views(0)[3][2].fill_(0x3F)
    assert (tensors[3][2] == torch.tensor(0x3F3F, dtype=torch.int16).view(torch.bfloat16)).all()


def test_contradictions_are_one_clear_line() -> None:
    spec = SPECS[0]
    layout = part_per_tensor(model(spec).groups[0], 6)
    good = tensors_for(layout)
    tier = HbmTier("cpu", model(spec))
    bad = [
        (good[:-1], "6 tensors, 5 were registered"),
        ([*good[:-1], torch.zeros(7, dtype=torch.uint8)], "tensor 5 has 7 bytes"),
        ([*good[:-1], torch.zeros(2 * len(good[0]), dtype=torch.uint8)[::2]], "not contiguous"),
        ([*good[:-1], good[-1].to("meta")], "tensor 5 is on meta, not on cpu"),
        ([t.view(torch.float16) for t in good], "float16 where the KVModel has float32"),
    ]
    for tensors, text in bad:
        with pytest.raises(LayoutError, match=text) as caught:
            tier.register(0, tensors, layout)
        assert "\n" not in str(caught.value)
    other = packed(model(SPECS[1]).groups[0], 6)
    with pytest.raises(LayoutError, match="bytes a block where the KVModel has"):
        tier.register(0, tensors_for(other), other)
    with pytest.raises(LayoutError, match="none of number 4"):
        tier.register(4, good, layout)
    tier.register(0, good, layout)
    with pytest.raises(MisuseError, match="already"):
        tier.register(0, good, layout)


@pytest.mark.parametrize("block", [-1, 6])
def test_block_ids_out_of_range(block: int) -> None:
    tier = HbmTier.allocate(model(SPECS[0]), 6, "cpu")
    tier.check_ids(0, np.arange(6))
    with pytest.raises(LayoutError, match=f"block id {block} of group 0 is outside of 6 blocks"):
        tier.check_ids(0, np.array([0, block]))
