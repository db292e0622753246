"""Gather and scatter on the host at the speed of memcpy, straight between pages and rows.

Measured on two cores (facts in the design notes): one strided copy in numpy runs like memcpy from
about 4 KiB a row on, releases the interpreter lock, and does not fight with torch for OpenMP
threads. What costs is the number of calls, so two things cut it down. Segments that lie at a
constant step in memory and in the record are one *band*, copied by one call however many they
are; blocks that lie side by side on both sides are one run. Where runs are short and pieces
small, an indexed copy in steps that stay in the second-level cache beats one call a piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.core.layout import Segment
from kvstrata.kernels.pages import Pages

Ids = NDArray[np.int64]

INDEXED_BELOW = 16 << 10
"""Bytes a call: with fewer, an indexed copy is faster than one call a run."""
STEP = 512 << 10
"""Bytes that an indexed copy holds in passing; they stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Band:
    """``count`` pieces of a block, ``nbytes`` each, at constant steps on both sides. In bytes.

    Piece j of block b lies at ``address + b * stride + j * step``; in a record at
    ``offset + j * offset_step``.
    """

    address: int
    stride: int
    step: int
    count: int
    nbytes: int
    offset: int
    offset_step: int

    def of_pages(self, num_blocks: int) -> NDArray[Any]:
        """The pieces as words ``[num_blocks, count, words]``, in the engine's tensors."""
        shape = (num_blocks, self.count, self.nbytes)
        return _memory(self.address, shape, (self.stride, self.step))

    def of_rows(self, rows: torch.Tensor) -> NDArray[Any]:
        """The pieces as words ``[rows, count, words]``, in packed records ``[rows, bytes]``."""
        shape = (rows.shape[0], self.count, self.nbytes)
        address = rows.data_ptr() + self.offset
        return _memory(address, shape, (rows.stride(0), self.offset_step))


def gather(
    pages: Pages, blocks: Ids, out: torch.Tensor, rows: Ids, layer: int | None = None
) -> None:
    """``out[rows[i]]`` becomes the record of ``blocks[i]``; see ``paged.gather``."""
    cuts = breaks(rows, blocks)
    for band, view in bands(pages, layer):
        copy(band.of_rows(out), rows, view, blocks, cuts)


def scatter(
    pages: Pages, blocks: Ids, source: torch.Tensor, rows: Ids, layer: int | None = None
) -> None:
    """Block ``blocks[i]`` becomes the record ``source[rows[i]]``; see ``paged.scatter``."""
    cuts = breaks(blocks, rows)
    for band, view in bands(pages, layer):
        copy(view, blocks, band.of_rows(source), rows, cuts)


def duplicate(pages: Pages, source: Ids, target: Ids) -> None:
    """Block ``target[i]`` becomes a copy of block ``source[i]``; no block may be in both."""
    cuts = breaks(target, source)
    for _, view in bands(pages):
        copy(view, target, view, source, cuts)


def copy_rows(target: torch.Tensor, to: Ids, source: torch.Tensor, rows: Ids) -> None:
    """``target[to[i]] = source[rows[i]]`` for uint8 rows of the same width."""
    width = source.shape[1]
    band = Band(0, 0, width, 1, width, 0, width)
    copy(band.of_rows(target), to, band.of_rows(source), rows, breaks(to, rows))


def breaks(to: Ids, rows: Ids) -> list[int]:
    """Positions at which a new run begins, but for the first: one side does not count up by one."""
    cuts: list[int] = (np.flatnonzero((np.diff(to) != 1) | (np.diff(rows) != 1)) + 1).tolist()
    return cuts


def copy(target: NDArray[Any], to: Ids, source: NDArray[Any], rows: Ids, cuts: list[int]) -> None:
    """``target[to[i]] = source[rows[i]]`` along the first axis; ``to`` must not repeat an id.

    Both have the same shape but for the first axis; ``cuts`` is ``breaks(to, rows)``. Releases the
    interpreter lock while it copies.
    """
    if not len(to):
        return
    if target.itemsize != source.itemsize:
        target, source = target.view(np.uint8), source.view(np.uint8)
    item = math.prod(target.shape[1:]) * target.itemsize
    if item * len(to) < INDEXED_BELOW * (len(cuts) + 1) and cuts:
        step = max(1, STEP // item)
        for i in range(0, len(to), step):
            target[to[i : i + step]] = source[rows[i : i + step]]
        return
    for i, end in zip([0, *cuts], [*cuts, len(to)], strict=True):
        n, t, s = end - i, int(to[i]), int(rows[i])
        target[t : t + n] = source[s : s + n]


def bands(pages: Pages, layer: int | None = None) -> tuple[tuple[Band, NDArray[Any]], ...]:
    """The fewest bands that cover the layer (or all), each with its view of the pages.

    Worked out once for these tensors.
    """
    key = ("bands", layer)
    found: tuple[tuple[Band, NDArray[Any]], ...] | None = pages.memo.get(key)
    if found is None:
        segments = pages.segments(layer)
        # Parts of a layer may differ in width, or lie apart by another step than layers do: then
        # one band a part is fewer than cutting wherever the step changes.
        parts = len(pages.segments(segments[0].layer))
        ways = [
            _bands(pages, [segments[part::period] for part in range(period)])
            for period in (1, parts)
        ]
        blocks = pages.layout.num_blocks
        found = tuple((band, band.of_pages(blocks)) for band in min(ways, key=len))
        pages.memo[key] = found
    return found


def _bands(pages: Pages, series: Sequence[Sequence[Segment]]) -> tuple[Band, ...]:
    """The bands of each series, cut where widths or steps change."""
    made: list[Band] = []
    for segments in series:
        i = 0
        while i < len(segments):
            first, n = segments[i], 1
            step = offset_step = first.nbytes
            while i + n < len(segments):
                last, new = segments[i + n - 1], segments[i + n]
                apart = pages.address(new) - pages.address(last)
                if n == 1:
                    step, offset_step = apart, new.offset - last.offset
                if (new.nbytes, new.stride) != (first.nbytes, first.stride):
                    break
                if (apart, new.offset - last.offset) != (step, offset_step):
                    break
                n += 1
            if n == 1:
                step = offset_step = first.nbytes
            made.append(_joined(pages.address(first), step, offset_step, n, first))
            i += n
    return tuple(made)


def _joined(address: int, step: int, offset_step: int, count: int, first: Segment) -> Band:
    """The band; pieces that touch each other on both sides are one wider piece."""
    nbytes = first.nbytes
    if step == nbytes and offset_step == nbytes:
        count, nbytes = 1, nbytes * count
        step = offset_step = nbytes
    return Band(address, first.stride, step, count, nbytes, first.offset, offset_step)


class _Memory:
    """Memory that numpy is to see; whoever owns it keeps it alive while the view is used."""

    __slots__ = ("__array_interface__",)

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _memory(address: int, shape: tuple[int, int, int], strides: tuple[int, int]) -> NDArray[Any]:
    """Words of the widest type that the address, every stride and the width are multiples of."""
    word = math.gcd(address, *strides, shape[2], 8)
    return np.asarray(
        _Memory(
            {
                "version": 3,
                "data": (address, False),
                "typestr": "|u1" if word == 1 else f"<u{word}",
                "shape": (shape[0], shape[1], shape[2] // word),
                "strides": (*strides, word),
            }
        )
    )
