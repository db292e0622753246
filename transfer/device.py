"""Copies between pages and arena rows, on the host and on CUDA. A worker is one thread's.

On the host a worker copies straight between the two places. On CUDA it has a stream and a packed
buffer in device memory: pages are gathered into the buffer by a kernel and leave it by few large
DMA copies, or the other way round. All of it is queued on that one stream, so the buffer cannot be
overwritten while a copy still reads it: order alone forbids it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from kvstrata.kernels import host, paged
from kvstrata.kernels.pages import Pages
from kvstrata.transfer.move import ReadyEvent, Slots
from kvstrata.transfer.plan import by_chunk, runs

STAGING = 64 << 20
"""Bytes of a CUDA worker's packed buffer, or one record if that is more."""

Opened = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Arena:
    """One group's rows in host memory: chunks of uint8 ``[slots, padded record bytes]``."""

    chunks: list[torch.Tensor]
    record_bytes: int

    def cut(self, slots: Slots) -> Iterator[tuple[torch.Tensor, Slots, slice | Slots]]:
        """``(chunk, rows in it, positions)`` for each chunk that the slots lie in."""
        size = self.chunks[0].shape[0]
        for number, positions in by_chunk(slots, size):
            yield self.chunks[number], slots[positions] - number * size, positions

    def sums(self, slots: Slots) -> NDArray[np.uint64]:
        """xxh3-64 of each record's raw bytes; xxhash lets the interpreter go on meanwhile."""
        out = np.zeros(len(slots), np.uint64)
        for chunk, rows, positions in self.cut(slots):
            memory = chunk.numpy()[:, : self.record_bytes]
            out[positions] = [xxhash.xxh3_64_intdigest(memory[row]) for row in rows.tolist()]
        return out


class Worker(Protocol):
    """The copies that one thread does. Each returns when the bytes are where they belong."""

    @property
    def step(self) -> int:
        """Bytes to copy at once where their checksum is taken next: they are still in the cache."""
        ...

    def wait(self, ready: ReadyEvent | None) -> None:
        """Start nothing of what follows before the event."""
        ...

    def save(self, pages: Pages, blocks: Slots, arena: Arena, slots: Slots) -> None:
        """Record ``slots[i]`` of the arena becomes block ``blocks[i]``."""
        ...

    def load(
        self, arena: Arena, slots: Slots, pages: Pages, blocks: Slots, opened: Opened | None
    ) -> None:
        """The mirror of ``save``; with ``opened`` layer by layer, calling it after each."""
        ...

    def duplicate(self, pages: Pages, source: Slots, target: Slots) -> None:
        """Block ``target[i]`` becomes a copy of block ``source[i]``."""
        ...


class HostWorker:
    """Copies in host memory, which hold no interpreter lock while they run."""

    __slots__ = ()

    step = 2 << 20  # about a second-level cache: hashing from there is 3 times as fast

    def wait(self, ready: ReadyEvent | None) -> None:
        if ready is not None:
            ready.synchronize()

    def save(self, pages: Pages, blocks: Slots, arena: Arena, slots: Slots) -> None:
        for chunk, rows, positions in arena.cut(slots):
            paged.gather(pages, blocks[positions], chunk, rows)

    def load(
        self, arena: Arena, slots: Slots, pages: Pages, blocks: Slots, opened: Opened | None
    ) -> None:
        cuts = list(arena.cut(slots))
        for layer in pages.layers if opened is not None else (None,):
            for chunk, rows, positions in cuts:
                paged.scatter(pages, blocks[positions], chunk, rows, layer)
            if opened is not None and layer is not None:
                opened(layer)

    def duplicate(self, pages: Pages, source: Slots, target: Slots) -> None:
        host.duplicate(pages, source, target)


class CudaWorker:
    """One stream and one packed buffer on a CUDA device; the arena's rows are pinned.

    Invariant 1: everything that touches the buffer is queued on the one stream.
    """

    step = 1 << 62  # a DMA copy does not go through this CPU's caches

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffer: torch.Tensor | None = None

    def wait(self, ready: ReadyEvent | None) -> None:
        if isinstance(ready, torch.cuda.Event):
            self.stream.wait_event(ready)
        elif ready is not None:
            ready.synchronize()

    def save(self, pages: Pages, blocks: Slots, arena: Arena, slots: Slots) -> None:
        from kvstrata.kernels import cuda

        width = arena.record_bytes
        with self._on_stream():
            for part, packed in self._steps(len(blocks), width):
                at = np.arange(len(part), dtype=np.int64)
                paged.gather(pages, blocks[part.start : part.stop], packed, at)
                for chunk, rows, positions in arena.cut(slots[part.start : part.stop]):
                    for first, row, n in runs(at[positions], rows):
                        source, target = packed[first : first + n], chunk[row : row + n]
                        cuda.copy_columns(target, source, 0, width, self.stream)

    def load(
        self, arena: Arena, slots: Slots, pages: Pages, blocks: Slots, opened: Opened | None
    ) -> None:
        from kvstrata.kernels import cuda

        arrived: list[tuple[int, torch.cuda.Event]] = []
        with self._on_stream():
            for layer in pages.layers if opened is not None else (None,):
                segments = pages.segments(layer)
                start, stop = segments[0].offset, segments[-1].offset + segments[-1].nbytes
                for part, packed in self._steps(len(blocks), arena.record_bytes):
                    at = np.arange(len(part), dtype=np.int64)
                    for chunk, rows, positions in arena.cut(slots[part.start : part.stop]):
                        for row, first, n in runs(rows, at[positions]):
                            source, target = chunk[row : row + n], packed[first : first + n]
                            cuda.copy_columns(target, source, start, stop, self.stream)
                    paged.scatter(pages, blocks[part.start : part.stop], packed, at, layer)
                if layer is not None:
                    arrived.append((layer, self._finished()))
            # All is queued; now tell of each layer as it arrives.
            for number, event in arrived:
                event.synchronize()
                if opened is not None:
                    opened(number)

    def duplicate(self, pages: Pages, source: Slots, target: Slots) -> None:
        with self._on_stream():
            for part, packed in self._steps(len(source), pages.layout.record_bytes):
                at = np.arange(len(part), dtype=np.int64)
                paged.gather(pages, source[part.start : part.stop], packed, at)
                paged.scatter(pages, target[part.start : part.stop], packed, at)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Queue on the stream; everything queued has ended when the block is left, even by an
        error.

        Slots and blocks are given back then, and no copy may still be on its way into them.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            try:
                yield
            finally:
                self._finished().synchronize()

    def _steps(self, n: int, width: int) -> Iterator[tuple[range, torch.Tensor]]:
        """``0 .. n - 1`` in stretches that fit the buffer, and the buffer as so many records."""
        # Rows start on 16 bytes, so that the kernel's widest access is possible.
        stride = -(-width // 16) * 16
        if self._buffer is None or self._buffer.numel() < stride:
            self._buffer = torch.empty(max(STAGING, stride), dtype=torch.uint8, device=self.device)
        size = self._buffer.numel() // stride
        for start in range(0, n, size):
            part = range(start, min(n, start + size))
            yield part, self._buffer[: len(part) * stride].view(len(part), stride)

    def _finished(self) -> torch.cuda.Event:
        """An event behind all that is queued; waiting for it sleeps instead of spinning."""
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event


def make_worker(device: torch.device) -> Worker:
    """A worker for pages on ``device``. Call it on the thread that is going to use it."""
    return CudaWorker(device) if device.type == "cuda" else HostWorker()


def copy_rows(source: Arena, rows: Slots, target: Arena, to: Slots) -> None:
    """Record ``to[i]`` of one arena becomes record ``rows[i]`` of another, in host memory."""
    for chunk, inside, positions in source.cut(rows):
        for other, there, some in target.cut(to[positions]):
            host.copy_rows(other, there, chunk, inside[some])
