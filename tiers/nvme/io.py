"""Bytes to and from the extent files: one vectored O_DIRECT call a run, checked on the way in.

Nothing here knows the catalogue. A rank opens its own ``ExtentFiles`` and moves what the runs say;
several threads call it at once, and the disk, the hash and the codec all work without the
interpreter lock (xxhash and zstandard release it).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import xxhash
import zstandard

from kvstrata.core.errors import ClosedError, MisuseError
from kvstrata.core.layout import PAGE, padded
from kvstrata.tiers.nvme import passport
from kvstrata.tiers.nvme.scratch import ScratchPool, address
from kvstrata.tiers.run import ReadRun, WriteRun, Written

log = logging.getLogger("kvstrata.nvme")

IOV_MAX = 1024
NONE, ZSTD = 0, 1
ZSTD_LEVEL = 1


class Read(NamedTuple):
    """What became of a read: ``ok[i]`` per block, and the first error in a few words or ""."""

    ok: list[bool]
    error: str


def extent_path(directory: str, file: int) -> str:
    """Where extent ``file`` of an NVMe directory lies."""
    return os.path.join(directory, "extents", f"{file:04d}")


class ExtentFiles:
    """The open extent files of one NVMe directory. Thread-safe; every call blocks until done.

    Invariant 1: at most one descriptor is open for a file, and none after ``close``.
    Invariant 2: a buffer is handed to an O_DIRECT descriptor only where address and length are
    multiples of 4096; others go through scratch.
    """

    def __init__(self, directory: str, direct: bool = True) -> None:
        """``directory`` is the tier's; nothing is opened yet. ``direct=False`` is for tests."""
        self.directory = directory
        self.scratch = ScratchPool()
        self._direct = direct
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._stale: list[int] = []
        self._closed = False
        self._local = threading.local()

    @property
    def direct(self) -> bool:
        """Whether files are (still) opened with O_DIRECT."""
        return self._direct

    def write_run(self, run: WriteRun, buffers: Sequence[memoryview]) -> list[Written]:
        """Write the passport and every block of a run; durable only after ``sync``.

        ``buffers[i]`` is block i: a page-aligned row of ``run.capacity`` bytes goes to the disk as
        it is; any other buffer of at least ``run.raw`` bytes is copied first. Checksums are taken
        where ``run.checksums`` has none. Raises OSError where the disk refuses (the space then
        holds anything, and may be given back), MisuseError for buffers that are too short.
        """
        views = [self._view(buffer, run.raw) for buffer in buffers]
        if len(views) != len(run.keys):
            raise MisuseError(f"{len(views)} buffers for a run of {len(run.keys)} blocks")
        known = run.checksums or (None,) * len(views)
        sums = [
            xxhash.xxh3_64_intdigest(view[: run.raw]) if one is None else one
            for view, one in zip(views, known, strict=True)
        ]
        with ExitStack() as stack:
            written: list[Written] = []
            parts: list[memoryview] = []
            for view, checksum in zip(views, sums, strict=True):
                squeezed = self._compress(view[: run.raw]) if run.codec == ZSTD else None
                if squeezed is not None and padded(len(squeezed)) < run.capacity:
                    part = stack.enter_context(self.scratch.lend(padded(len(squeezed))))
                    part[: len(squeezed)] = squeezed
                    written.append(Written(len(squeezed), ZSTD, checksum))
                elif len(view) < run.capacity or address(view) % PAGE:
                    part = stack.enter_context(self.scratch.lend(run.capacity))
                    part[: run.raw] = view[: run.raw]
                    part[run.raw :] = bytes(run.capacity - run.raw)
                    written.append(Written(run.raw, NONE, checksum))
                else:
                    part = view[: run.capacity]
                    written.append(Written(run.raw, NONE, checksum))
                parts.append(part)
            head = stack.enter_context(self.scratch.lend(run.passport_bytes))
            head[:] = passport.encode(run, written, time.time_ns())
            self._pwritev(run.file, [head, *parts], run.offset)
        return written

    def read_run(self, run: ReadRun, buffers: Sequence[memoryview]) -> Read:
        """Read every block of a run into ``buffers`` and verify it.

        A page-aligned row of ``run.stride`` bytes is filled by the disk itself; shorter or
        unaligned ones (of at least ``run.raw`` bytes) by a copy. ``ok[i]`` is False for a block
        that is short, damaged or unreadable: its buffer then holds anything. Never raises for the
        disk's sake; MisuseError for buffers that are too short.
        """
        views = [self._view(buffer, run.raw) for buffer in buffers]
        n = len(run.stored)
        if len(views) != n:
            raise MisuseError(f"{len(views)} buffers for a run of {n} blocks")
        with ExitStack() as stack:
            parts: list[memoryview] = []
            for view, codec, stored in zip(views, run.codecs, run.stored, strict=True):
                # All but the last lie `stride` apart; what the last one's padding says is nobody's
                # business, but a whole stride keeps every row a whole number of pages.
                last = len(parts) == n - 1
                need = padded(stored) if last else run.stride
                fits = codec == NONE and len(view) >= need and address(view) % PAGE == 0
                parts.append(view[:need] if fits else stack.enter_context(self.scratch.lend(need)))
            try:
                got = self._preadv(run.file, parts, run.offset)
            except OSError as error:
                return Read([False] * n, f"io: {error.strerror or error}")
            ok: list[bool] = []
            problem = ""
            for i, view in enumerate(views):
                whole = got >= i * run.stride + run.stored[i]
                good = whole and self._accept(run, i, parts[i], view)
                if not good and not problem:
                    problem = "checksum" if whole else "short read"
                ok.append(good)
        return Read(ok, problem)

    def sync(self, files: Iterable[int]) -> None:
        """Make what was written to these files durable (fdatasync). Raises OSError."""
        for file in set(files):
            os.fdatasync(self._fd(file))

    def close(self) -> None:
        """Close all descriptors; no call may be in flight. Twice is fine."""
        with self._lock:
            self._closed = True
            fds = [*self._fds.values(), *self._stale]
            self._fds.clear()
            self._stale.clear()
        for fd in fds:
            os.close(fd)

    @staticmethod
    def _view(buffer: memoryview, raw: int) -> memoryview:
        view = memoryview(buffer)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        if len(view) < raw:
            raise MisuseError(f"a buffer of {len(view)} bytes for a block of {raw}")
        return view

    def _accept(self, run: ReadRun, i: int, part: memoryview, view: memoryview) -> bool:
        stored, raw = run.stored[i], run.raw
        if run.codecs[i] == NONE:
            if stored != raw or xxhash.xxh3_64_intdigest(part[:raw]) != run.checksums[i]:
                return False
            # Only bytes that passed are copied out of scratch.
            if address(part) != address(view):
                view[:raw] = part[:raw]
            return True
        if run.codecs[i] != ZSTD:
            return False
        try:
            plain = self._decompressor().decompress(part[:stored], max_output_size=raw)
        except zstandard.ZstdError:
            return False
        if len(plain) != raw or xxhash.xxh3_64_intdigest(plain) != run.checksums[i]:
            return False
        view[:raw] = plain
        return True

    def _compress(self, raw: memoryview) -> bytes:
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            # One a thread: a compressor must not be shared, and making one costs more than a block.
            compressor = self._local.compressor = zstandard.ZstdCompressor(
                level=ZSTD_LEVEL, write_content_size=True
            )
        squeezed: bytes = compressor.compress(raw)
        return squeezed

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        found = getattr(self._local, "decompressor", None)
        if found is None:
            found = self._local.decompressor = zstandard.ZstdDecompressor()
        decompressor: zstandard.ZstdDecompressor = found
        return decompressor

    def _fd(self, file: int) -> int:
        with self._lock:
            if self._closed:
                raise ClosedError("these extent files have been closed")
            fd = self._fds.get(file)
            if fd is None:
                fd = self._fds[file] = self._open(file)
            return fd

    def _open(self, file: int) -> int:
        path = extent_path(self.directory, file)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._give_up_direct()
        return os.open(path, flags)

    def _give_up_direct(self) -> None:
        if self._direct:
            self._direct = False
            log.warning("%s refuses O_DIRECT; going through the page cache", self.directory)

    def _refused(self, file: int, fd: int, error: OSError) -> bool:
        """After an EINVAL: reopen the file without O_DIRECT; False if that is not the cure."""
        with self._lock:
            if error.errno != errno.EINVAL:
                return False
            if self._fds.get(file) != fd:
                return True  # another thread has already changed over
            if not self._direct:
                return False
            self._give_up_direct()
            # Other threads may be inside a call on these: they are closed with the rest.
            self._stale.extend(self._fds.values())
            self._fds.clear()
        return True

    def _pwritev(self, file: int, parts: list[memoryview], offset: int) -> None:
        parts = list(parts)
        while parts:
            fd = self._fd(file)
            try:
                done = os.pwritev(fd, parts[:IOV_MAX], offset)
            except OSError as error:
                if self._refused(file, fd, error):
                    continue
                raise
            if done == 0:
                raise OSError(errno.EIO, "the disk wrote nothing")
            offset += done
            parts = _rest(parts, done)

    def _preadv(self, file: int, parts: list[memoryview], offset: int) -> int:
        parts = list(parts)
        total = 0
        while parts:
            fd = self._fd(file)
            try:
                done = os.preadv(fd, parts[:IOV_MAX], offset + total)
            except OSError as error:
                if self._refused(file, fd, error):
                    continue
                raise
            total += done
            # A read that ends inside a page has met the end of the file; going on from there
            # would be unaligned.
            if done == 0 or total % PAGE:
                break
            parts = _rest(parts, done)
        return total


def _rest(parts: list[memoryview], done: int) -> list[memoryview]:
    index = 0
    while index < len(parts) and done >= len(parts[index]):
        done -= len(parts[index])
        index += 1
    rest = parts[index:]
    if done:
        rest[0] = rest[0][done:]
    return rest
