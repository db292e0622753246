"""The CUDA kernels of ``csrc/paged.cu`` through CuPy, on torch's memory and torch's streams.

CuPy compiles the source at first use (NVRTC, cached on disk) and is imported only then: without a
GPU nothing here is ever called.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.kernels.pages import Pages

Ids = NDArray[np.int64]

SLICE = 16384
"""Bytes that one thread block copies; SLICE of paged.cu."""
THREADS = 256
OPTIONS = ("--std=c++17",)


def source() -> str:
    """The text of paged.cu."""
    return resources.files("kvstrata.kernels").joinpath("csrc/paged.cu").read_text("utf-8")


def gather(
    pages: Pages, blocks: Ids, out: torch.Tensor, rows: Ids, layer: int | None = None
) -> None:
    """Queue ``paged.gather`` on the current stream."""
    _launch("kvstrata_gather", pages, blocks, out, rows, layer)


def scatter(
    pages: Pages, blocks: Ids, source: torch.Tensor, rows: Ids, layer: int | None = None
) -> None:
    """Queue ``paged.scatter`` on the current stream."""
    _launch("kvstrata_scatter", pages, blocks, source, rows, layer)


def copy_columns(
    target: torch.Tensor, source: torch.Tensor, first: int, stop: int, stream: torch.cuda.Stream
) -> None:
    """Queue a copy of bytes ``[first, stop)`` of every row: one strided DMA, either way.

    Both are uint8 ``[n, bytes]`` with adjacent bytes; the host side must be pinned. torch's own
    ``copy_`` would pack strided rows through a temporary on the host first.
    """
    import cupy  # type: ignore[import-not-found, unused-ignore]

    cupy.cuda.runtime.memcpy2DAsync(
        target.data_ptr() + first,
        target.stride(0),
        source.data_ptr() + first,
        source.stride(0),
        stop - first,
        source.shape[0],
        cupy.cuda.runtime.memcpyDefault,
        stream.cuda_stream,
    )


def grid(n: int, segments: int, longest: int) -> tuple[int, int, int]:
    """The grid of a launch: records, segments, slices of the longest piece."""
    return n, segments, -(-longest // SLICE)


def _launch(
    name: str, pages: Pages, blocks: Ids, packed: torch.Tensor, rows: Ids, layer: int | None
) -> None:
    if not len(blocks):
        return
    import cupy

    # torch picks the context, CuPy follows: both see the device and stream that are current here.
    stream = torch.cuda.current_stream(pages.device)
    with torch.cuda.device(pages.device), cupy.cuda.Device(pages.device.index or 0):
        segments, longest = _table(pages, layer)
        # Pinned, so that the host need not wait for it. Both copies belong to the current stream:
        # the allocators hand their memory to nothing that could overtake the launch reading them.
        ids = torch.from_numpy(np.stack([blocks, rows])).pin_memory()
        ids = ids.to(pages.device, non_blocking=True)
        kernel = _function(pages, name)
        arguments = (
            segments.data_ptr(),
            ids[0].data_ptr(),
            ids[1].data_ptr(),
            packed.data_ptr(),
            np.int64(packed.stride(0)),
        )
        with _external(stream):
            kernel(grid(len(blocks), len(segments), longest), (THREADS,), arguments)


def _external(stream: torch.cuda.Stream) -> Any:
    """torch's stream as CuPy's current one; the protocol where both know it, else the pointer."""
    import cupy

    if hasattr(stream, "__cuda_stream__") and hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream)


def _function(pages: Pages, name: str) -> Any:
    """The compiled kernel; CuPy keeps the binary on disk, so a second process only loads it."""
    if "module" not in pages.memo:
        import cupy

        pages.memo["module"] = cupy.RawModule(code=source(), options=OPTIONS, backend="nvrtc")
    return pages.memo["module"].get_function(name)


def _table(pages: Pages, layer: int | None) -> tuple[torch.Tensor, int]:
    """The segment table on the device, int64 ``[segments, 4]``, and the longest piece in bytes."""
    key = ("table", layer)
    if key not in pages.memo:
        table = segment_table(pages, layer)
        on_device = torch.from_numpy(table).to(pages.device)
        # Other streams will read it: it must be there before this call returns, and is kept.
        torch.cuda.current_stream(pages.device).synchronize()
        # Another thread may have made one too: its kernels read it, so the first one stays.
        pages.memo.setdefault(key, (on_device, int(table[:, 2].max())))
    found: tuple[torch.Tensor, int] = pages.memo[key]
    return found


def segment_table(pages: Pages, layer: int | None = None) -> Ids:
    """What paged.cu reads: address of block 0, stride, bytes, offset in the record; ``[n, 4]``."""
    rows = [(pages.address(s), s.stride, s.nbytes, s.offset) for s in pages.segments(layer)]
    return np.array(rows, np.int64)
