"""The extent files on the disk: found, made to fit the quota, grown one at a time."""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
import time

from kvstrata.core.layout import PAGE
from kvstrata.tiers.nvme.directory import sync_directory
from kvstrata.tiers.nvme.io import extent_path

log = logging.getLogger("kvstrata.nvme")

MARGIN = 64 << 20
"""Bytes that growth leaves free on the file system: for the catalogue, and for others."""
PATIENCE = 10.0
"""Seconds before a growth that failed is tried again."""


def find(directory: str) -> dict[int, int]:
    """Number -> bytes of the extent files of a directory. Raises OSError."""
    files: dict[int, int] = {}
    folder = os.path.join(directory, "extents")
    for name in os.listdir(folder):
        number = int(name) if re.fullmatch(r"\d{4,9}", name) else -1
        if number >= 0 and name == f"{number:04d}":
            found = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(found.st_mode):
                files[number] = found.st_size
    return files


def fit(directory: str, payload: int) -> dict[int, int]:
    """Make the extents whole pages, not sparse, and together at most ``payload`` bytes.

    Files that are too much are cut or removed, the highest numbers first: what they held is lost.
    Returns number -> bytes. Raises OSError.
    """
    kept: dict[int, int] = {}
    left = payload
    for number, size in sorted(find(directory).items()):
        path = extent_path(directory, number)
        new = min(size, left) // PAGE * PAGE
        if new == 0:
            os.unlink(path)
            continue
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if new != size:
                os.ftruncate(fd, new)
            # A hole is a promise that the disk has not made: it must fail here, not in a write.
            # (Never more than it had before: cutting comes first.)
            if os.fstat(fd).st_blocks * 512 < new:
                os.posix_fallocate(fd, 0, new)
        except OSError as error:
            log.warning("%s is given up: %s", path, error.strerror)
            os.unlink(path)
            continue
        finally:
            os.close(fd)
        kept[number] = new
        left -= new
    sync_directory(os.path.join(directory, "extents"))
    return kept


class Growth:
    """Makes extent files, in the background as long as somebody looks ahead.

    Invariant 1: files made and files given at the start hold at most ``payload`` bytes together.
    Invariant 2: at most one file is being made at a time.

    Called by one thread at a time; only the making itself runs in a thread of its own, which ends
    with it: an idle tier has none.
    """

    def __init__(self, directory: str, extent: int, payload: int, files: dict[int, int]) -> None:
        self._directory = directory
        self._extent = extent
        self._payload = payload
        self._files = dict(files)
        self._thread: threading.Thread | None = None
        self._made: tuple[int, int] | None = None
        self._again = 0.0
        self._warned = False

    def ahead(self) -> None:
        """Begin to make a file unless one is being made; ``take`` will give it."""
        if self._thread is None and self._made is None and self._wanted(1) is not None:
            self._thread = threading.Thread(
                target=self._make, args=(1,), name="kvstrata-extent", daemon=True
            )
            self._thread.start()

    def take(self, need: int, wait: bool) -> tuple[int, int] | None:
        """A new file (number, bytes) or None. With ``wait``, at least ``need`` bytes.

        Without ``wait`` it never blocks. None with ``wait``: quota or disk have no room; a full
        disk is tried again after ``PATIENCE`` seconds.
        """
        if self._thread is not None:
            if self._thread.is_alive() and not wait:
                return None
            self._thread.join()
            self._thread = None
        if self._made is None and wait:
            self._make(need)
        made, self._made = self._made, None
        if made is not None:
            self._files[made[0]] = made[1]
        return made

    def close(self) -> None:
        """Wait for a file that is being made."""
        if self._thread is not None:
            self._thread.join()

    def _wanted(self, need: int) -> tuple[int, int] | None:
        if time.monotonic() < self._again:
            return None
        left = (self._payload - sum(self._files.values())) // PAGE * PAGE
        size = min(max(self._extent, need) // PAGE * PAGE, left)
        if size < max(need, PAGE):
            return None
        number = next(i for i in range(len(self._files) + 1) if i not in self._files)
        return number, size

    def _make(self, need: int) -> None:
        wanted = self._wanted(need)
        if wanted is None:
            return
        number, size = wanted
        path = extent_path(self._directory, number)
        try:
            disk = os.statvfs(self._directory)
            room = (disk.f_bavail * disk.f_frsize - MARGIN) // PAGE * PAGE
            size = min(size, room)
            if size < max(need, PAGE):
                raise OSError(28, "no space left but the margin")
            fd = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            try:
                os.posix_fallocate(fd, 0, size)
                os.fsync(fd)
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(fd)
            sync_directory(os.path.dirname(path))
        except OSError as error:
            self._again = time.monotonic() + PATIENCE
            if not self._warned:
                self._warned = True
                log.warning("%s cannot grow, so less is kept: %s", self._directory, error.strerror)
            return
        self._made = number, size

    def check(self) -> None:
        """Test the invariants. Raises AssertionError naming the one that is broken."""
        made = self._made[1] if self._made else 0
        assert sum(self._files.values()) + made <= self._payload, "growth 1"
