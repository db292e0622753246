"""The DRAM tier: one arena of page-aligned records a KV group, pinned where CUDA is.

The arena's address space is reserved at once; memory comes chunk by chunk in the background, so the
tier opens with the first chunk however large it is to become. Registering terabytes in one call
fails, and holds a lock of the driver for minutes: hence chunks, of 64 GiB at most.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from typing import Any

import numpy as np
import torch

from kvstrata.core.config import DramConfig
from kvstrata.core.errors import ConfigError, LayoutError
from kvstrata.core.layout import PAGE, padded
from kvstrata.core.model import KVModel

log = logging.getLogger("kvstrata.dram")

MAX_CHUNK = 64 << 30
STEP = 8 << 20
"""Bytes touched between two rests."""
REST = 9.0
"""Rest after a step, in times of what the step took: a tenth of one CPU until all is touched."""

_MAP_NORESERVE = 0x4000  # Linux; the mmap module has no name for it before 3.13
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_REGISTER_PORTABLE = 1


class DramTier:
    """Slots ``0 .. capacity(group) - 1`` of every group, a record each, in this process's memory.

    A slot is a row of ``padded(record bytes)`` bytes, aligned to 4096. All groups have equally many
    slots. ``capacity`` grows chunk by chunk until it is ``final_capacity``, and never shrinks.

    Invariants (``check`` tests them by these numbers):

    1. ``capacity`` is a whole number of chunks or ``final_capacity``, and never above that.
    2. Every row starts on a page, and no two rows overlap.
    3. On CUDA every usable row is pinned.

    Raises ConfigError where the capacity does not hold one block of each group, or where the
    machine refuses the memory.
    """

    def __init__(
        self, config: DramConfig, model: KVModel, device: torch.device | str = "cpu"
    ) -> None:
        self.device = usable_device(device)
        self._row = [padded(group.block_bytes()) for group in model.groups]
        self.record_bytes = [group.block_bytes() for group in model.groups]
        together = sum(self._row)
        self._final = int(config.capacity) // together
        if self._final < 1:
            raise ConfigError(
                f"dram.capacity = {config.capacity} bytes is smaller than one block of each KV "
                f"group ({together} bytes); raise it"
            )
        self._chunk = min(self._final, max(1, min(int(config.chunk), MAX_CHUNK) // together))
        self._memory = [_reserve(self._final * row) for row in self._row]
        self._arena = [
            torch.from_numpy(np.frombuffer(memory, np.uint8)).view(self._final, row)
            for memory, row in zip(self._memory, self._row, strict=True)
        ]
        self._usable = 0
        self._pinned: list[tuple[int, int]] = []
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._opened = threading.Event()
        self._grower = threading.Thread(target=self._grow, name="kvstrata-dram", daemon=True)
        self._closed = False
        if self.device.type != "cuda":
            # Memory that nobody has touched is usable on the host, only slower the first time.
            self._usable = self._chunk
        self._grower.start()
        if self.device.type == "cuda":
            self._opened.wait()
            if not self._usable:
                self.close()
                raise ConfigError("CUDA refused to pin the first chunk of DRAM; lower dram.chunk")

    @property
    def name(self) -> str:
        """``dram``."""
        return "dram"

    @property
    def chunk_slots(self) -> int:
        """Slots in a chunk; the last may have fewer."""
        return self._chunk

    def capacity(self, group: int) -> int:
        """Slots of the group that may be used now; it grows."""
        return self._usable

    def final_capacity(self, group: int) -> int:
        """Slots of the group once all chunks are there."""
        return self._final

    def rows(self, group: int) -> list[torch.Tensor]:
        """The usable chunks: uint8 ``[slots in the chunk, padded record bytes]``, shared memory.

        Slot s is row ``s % chunk_slots`` of chunk ``s // chunk_slots``. On CUDA a copy must not
        cross chunks, since each was registered by a call of its own.
        """
        usable = self._usable
        arena = self._arena[group]
        return [arena[i : min(i + self._chunk, usable)] for i in range(0, usable, self._chunk)]

    def row(self, group: int, slot: int) -> memoryview:
        """The slot's padded row, writable and aligned: what direct I/O reads into and writes from.

        Raises LayoutError for a slot that is not usable.
        """
        if not 0 <= slot < self._usable:
            raise LayoutError(f"slot {slot} of group {group} is outside of {self._usable} slots")
        width = self._row[group]
        return memoryview(self._memory[group])[slot * width : (slot + 1) * width]

    def settle(self, timeout: float | None = None) -> bool:
        """Take all memory now, without rests; True once ``capacity`` is final. For benchmarks."""
        self._hurry.set()
        self._grower.join(timeout)
        return self._usable == self._final

    def check(self) -> None:
        """Raise AssertionError unless the numbered invariants hold."""
        usable = self._usable
        assert usable <= self._final, "1: more slots than there are"
        assert usable == self._final or usable % self._chunk == 0, "1: half a chunk"
        for arena, row in zip(self._arena, self._row, strict=True):
            assert arena.data_ptr() % PAGE == 0 and row % PAGE == 0, "2: not on a page"
            assert arena.stride() == (row, 1), "2: rows overlap"
        if self.device.type == "cuda" and not self._closed:
            chunks = -(-usable // self._chunk)
            assert len(self._pinned) >= chunks * len(self._row), "3: not pinned"

    def close(self) -> None:
        """Stop growing, unpin and let go; nothing may be in flight. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._grower.join()
        self._usable = 0
        if self._pinned:
            with torch.cuda.device(self.device):
                for address, _ in self._pinned:
                    _cudart().cudaHostUnregister(address)
            self._pinned.clear()
        # The mappings go when the last view of them does; closing one under a view would fail.
        self._arena.clear()
        self._memory.clear()

    def _grow(self) -> None:
        """Touch, pin and open one chunk after the other. Runs on its own thread, and ends.

        A failed CUDA call leaves an error behind that the thread's next CUDA call reports; here it
        dies with the thread.
        """
        try:
            for first in range(0, self._final, self._chunk):
                stop = min(first + self._chunk, self._final)
                for arena in self._arena:
                    if not self._touch(arena[first:stop]):
                        return
                if self.device.type == "cuda":
                    for arena in self._arena:
                        self._pin(arena[first:stop])
                self._usable = max(self._usable, stop)
                self._opened.set()
        except OSError as error:
            log.warning("DRAM stays at %d of %d slots: %s", self._usable, self._final, error)
        finally:
            self._opened.set()

    def _touch(self, rows: torch.Tensor) -> bool:
        """Have the kernel back these rows with memory; False where the tier is closing."""
        address, nbytes = rows.data_ptr(), rows.numel()
        for offset in range(0, nbytes, STEP):
            started = time.monotonic()
            _populate(address + offset, min(STEP, nbytes - offset))
            # The first chunk of a pinned arena is waited for; the others leave the CPU to others.
            hurried = self._hurry.is_set() or (self.device.type == "cuda" and not self._usable)
            rest = 0.0 if hurried else REST * (time.monotonic() - started)
            if self._stop.wait(rest):
                return False
        return True

    def _pin(self, rows: torch.Tensor) -> None:
        address, nbytes = rows.data_ptr(), rows.numel()
        with torch.cuda.device(self.device):
            code = _cudart().cudaHostRegister(address, nbytes, _REGISTER_PORTABLE)
        if int(code) != 0:
            raise OSError(f"cudaHostRegister of {nbytes} bytes failed with code {int(code)}")
        self._pinned.append((address, nbytes))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _reserve(nbytes: int) -> mmap.mmap:
    try:
        # Private: a shared anonymous mapping is a file in shmem, without huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot reserve {nbytes} bytes of memory: {error}") from error
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        log.debug("this kernel has no transparent huge pages")
    return memory


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _populate(address: int, nbytes: int) -> None:
    """Back ``nbytes`` with memory and keep what they hold; ctypes lets the interpreter go on.

    Older kernels do not know the advice; there the first copy into a page pays for it. Writing to
    it here would race with copies into the chunk that is open already.
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code != 22:  # EINVAL: a kernel without the advice
            raise OSError(code, f"no memory behind {nbytes} bytes of the arena")


def usable_device(device: torch.device | str) -> torch.device:
    """The device of that name. Raises ConfigError where torch knows none, or has none here."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"unknown device {device!r}: use 'cpu' or 'cuda:0'") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"torch sees no CUDA here for {device!r}: use device='cpu'")
    return found
