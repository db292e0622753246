"""Gather and scatter in plain torch: the oracle that every faster kernel is held against.

Slow on purpose (one indexed assignment a segment) and right on every device.
"""

from __future__ import annotations

import torch

from kvstrata.kernels.pages import Pages


def gather(
    pages: Pages,
    blocks: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    layer: int | None = None,
) -> None:
    """``out[rows[i]]`` becomes the record of ``blocks[i]``; see ``paged.gather``."""
    for segment in pages.segments(layer):
        columns = slice(segment.offset, segment.offset + segment.nbytes)
        out[:, columns][rows] = pages.view(segment)[blocks]


def scatter(
    pages: Pages,
    blocks: torch.Tensor,
    source: torch.Tensor,
    rows: torch.Tensor,
    layer: int | None = None,
) -> None:
    """Block ``blocks[i]`` becomes the record ``source[rows[i]]``; see ``paged.scatter``."""
    for segment in pages.segments(layer):
        columns = slice(segment.offset, segment.offset + segment.nbytes)
        pages.view(segment)[blocks] = source[:, columns][rows]
