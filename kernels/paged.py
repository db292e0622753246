"""Gather and scatter between an engine's paged KV and packed records, on whatever device they are.

    pages:  tensors of an engine, any layout that a PagedLayout can say
    record: layer after layer, part after part, one row of ``out`` each

A kernel takes plain pages and index arrays, never tiers. ``blocks`` and ``rows`` are int64 ``[n]``
and must be in range; ids must not repeat on the side that is written to.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.core.errors import LayoutError
from kvstrata.kernels import host
from kvstrata.kernels.pages import Pages

Ids = NDArray[np.int64]


def gather(
    pages: Pages, blocks: Ids, out: torch.Tensor, rows: Ids, layer: int | None = None
) -> None:
    """``out[rows[i]]`` becomes the record of ``blocks[i]``, or the given layer's part of it.

    ``out`` is uint8 ``[rows, record bytes or more]`` with its bytes adjacent; bytes behind the
    record are left alone. On CUDA it is queued on the current stream, and both must be on the same
    device; on the host it is done on return and holds no interpreter lock meanwhile.
    """
    _fits(pages, out)
    if out.device.type == "cuda":
        from kvstrata.kernels import cuda

        cuda.gather(pages, blocks, out, rows, layer)
    else:
        host.gather(pages, blocks, out, rows, layer)


def scatter(
    pages: Pages, blocks: Ids, source: torch.Tensor, rows: Ids, layer: int | None = None
) -> None:
    """Block ``blocks[i]`` becomes the record ``source[rows[i]]``, or the given layer's part of it.

    The mirror of ``gather``; the same is asked of ``source`` as of its ``out``.
    """
    _fits(pages, source)
    if source.device.type == "cuda":
        from kvstrata.kernels import cuda

        cuda.scatter(pages, blocks, source, rows, layer)
    else:
        host.scatter(pages, blocks, source, rows, layer)


def _fits(pages: Pages, packed: torch.Tensor) -> None:
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.stride(1) != 1:
        raise LayoutError("packed records must be uint8 [rows, bytes] with adjacent bytes")
    if packed.shape[1] < pages.layout.record_bytes:
        raise LayoutError(
            f"rows of {packed.shape[1]} bytes do not hold records of {pages.layout.record_bytes}"
        )
    if packed.device != pages.device:
        raise LayoutError(f"pages are on {pages.device}, packed records on {packed.device}")
