"""Random paged layouts, poisoned, for whoever holds a kernel against the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvstrata.core.layout import PagedLayout, Segment
from kvstrata.kernels.pages import Pages

POISON = 0xA5


@dataclass
class Case:
    """Pages and records, twice over: one copy for the kernel, an equal one for the reference."""

    pages: Pages
    twin: Pages
    packed: torch.Tensor
    packed_twin: torch.Tensor
    blocks: np.ndarray
    rows: np.ndarray
    layer: int | None


def _unaligned(nbytes: int, shift: int) -> torch.Tensor:
    """``nbytes`` random bytes whose address is ``shift`` past a multiple of 64."""
    memory = torch.randint(0, 256, (nbytes + 128,), dtype=torch.uint8)
    skip = -memory.data_ptr() % 64 + shift
    return memory[skip : skip + nbytes]


def _layout(rng: random.Random, num_blocks: int, unit: int) -> tuple[PagedLayout, list[int]]:
    """Tensors of one or more segments each, in any stride; sizes are multiples of ``unit``."""
    segments: list[Segment] = []
    sizes: list[int] = []
    offset = 0
    alike = rng.random() < 0.5
    width = rng.choice([1, 3, 36, 72, 300, 1300]) * unit
    for layer in range(rng.randint(1, 4)):
        for _ in range(rng.randint(1, 2)):
            count = rng.randint(1, 3)
            widths = [width if alike else rng.randint(1, 90) * unit for _ in range(count)]
            stride = sum(widths) + rng.choice([0, 0, 1, 5]) * unit
            base = rng.choice([0, 2]) * unit
            at = base
            for nbytes in widths:
                segments.append(Segment(len(sizes), layer, at, stride, nbytes, offset))
                offset += nbytes
                at += nbytes
            sizes.append(base + num_blocks * stride)
    return PagedLayout(num_blocks, offset, tuple(segments)), sizes


@pytest.fixture
def random_case() -> Callable[[int], Case]:
    """A case from a seed: layout, alignment, which blocks to which rows, one layer or all."""

    def make(seed: int) -> Case:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        num_blocks, unit = rng.randint(1, 12), rng.choice([1, 2, 4, 8, 16])
        layout, sizes = _layout(rng, num_blocks, unit)
        shift = rng.choice([0, 0, unit, 1])
        tensors = [_unaligned(size, shift) for size in sizes]
        pages, twin = Pages(tensors, layout), Pages([t.clone() for t in tensors], layout)
        tail = rng.choice([0, 1, 7, 16])
        num_rows = num_blocks + rng.randint(0, 3)
        width = layout.record_bytes + tail
        packed = _unaligned(num_rows * width, rng.choice([0, 0, 1, 4])).view(num_rows, width)
        packed.fill_(POISON) if rng.random() < 0.5 else None
        n = rng.randint(0, num_blocks)
        if rng.random() < 0.4:
            first, row = rng.randint(0, num_blocks - n), rng.randint(0, num_rows - n)
            blocks, rows = list(range(first, first + n)), list(range(row, row + n))
        else:
            blocks, rows = rng.sample(range(num_blocks), n), rng.sample(range(num_rows), n)
        layer = rng.choice([None, None, *pages.layers])
        ids = np.array(blocks, np.int64), np.array(rows, np.int64)
        return Case(pages, twin, packed, packed.clone(), *ids, layer)

    return make


@pytest.fixture
def same() -> Callable[[Case], bool]:
    """Whether every byte of both copies is equal, those that nothing should have touched too."""

    def check(case: Case) -> bool:
        pairs = zip(case.pages.tensors, case.twin.tensors, strict=True)
        return torch.equal(case.packed, case.packed_twin) and all(
            torch.equal(a, b) for a, b in pairs
        )

    return check
