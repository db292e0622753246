"""The directory of an NVMe tier: made, checked and locked before anything in it is believed.

    FORMAT              {"version": 1, "check": ...}; the check tells damage from another version
    LOCK                flock'ed by the Store that has the directory; holds its process id
    EPOCHS              see ``epochs``
    CLEAN               see ``recovery``; there only while no Store is open
    catalogue/          the LMDB environment
    extents/NNNN        the bytes

Directories are 0700, files 0600, all are ours, none is a symbolic link.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time

import xxhash

from kvstrata.core.errors import DirectoryBusyError, FingerprintError, StorageError

VERSION = 1
LOCK_PATIENCE = 1.0
"""Seconds that an opener waits for the lock: ``inspect`` holds it for moments."""

NETWORK = frozenset(
    "9p afs ceph cifs coda fuse.ceph fuse.glusterfs fuse.s3fs fuse.sshfs glusterfs gpfs lustre "
    "ncpfs nfs nfs4 orangefs pvfs2 smb3 smbfs beegfs fuse.rclone fuse.gcsfuse fuse.juicefs".split()
)
_OURS = {"FORMAT", "LOCK", "EPOCHS", "CLEAN", "catalogue", "extents"}

_OPEN: dict[tuple[int, int], int] = {}
"""Directories that this process has open: (device, inode) -> descriptor of the lock.

The one global we allow. LMDB's own locks and flock belong to a process or a descriptor, so a second
opener inside this process is stopped here; and a forked child must let go of the parent's lock.
"""


def _forget_after_fork() -> None:
    for fd in _OPEN.values():
        os.close(fd)
    _OPEN.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class Directory:
    """A directory that is ours and locked, until ``close``.

    Invariant 1: while open, this process holds the flock on ``LOCK`` and the directory's entry in
    the registry.
    """

    def __init__(self, path: str, identity: tuple[int, int], lock: int, damage: list[str]) -> None:
        self.path = path
        self.damage = damage
        """What was found to be missing or damaged and has been replaced, in words."""
        self._identity = identity
        self._lock: int | None = lock

    @classmethod
    def open(
        cls,
        path: str,
        *,
        force: bool = False,
        create: bool = True,
        patience: float = LOCK_PATIENCE,
    ) -> Directory:
        """Make (if its parent exists), check and lock the directory.

        ``patience`` is how many seconds to wait for the lock.

        Raises StorageError where it cannot be used, DirectoryBusyError where another Store has it,
        FingerprintError where it is of another format version (and then nothing is touched).
        """
        try:
            return cls._open(os.path.abspath(path), force, create, patience)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(f"cannot use the NVMe directory {path}: {reason}") from error

    @classmethod
    def _open(cls, path: str, force: bool, create: bool, patience: float) -> Directory:
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            raise StorageError(f"cannot use the NVMe directory {path}: {parent} is no directory")
        kind = filesystem(parent if not os.path.lexists(path) else path)
        if kind in NETWORK and not force:
            raise StorageError(
                f"{path} is on a network file system ({kind}), which may lose what it has "
                "confirmed; use a local disk or set nvme.force"
            )
        if create and not os.path.lexists(path):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
            raise StorageError(f"the NVMe directory {path} is no directory (links are refused)")
        _ours(path, found)
        version = read_format(path)
        fresh = not os.listdir(path)
        if version is None and not fresh:
            foreign = sorted(set(os.listdir(path)) - _OURS - {"FORMAT.new", "EPOCHS.new"})
            if foreign or not create:
                what = f" ({foreign[0]} is not ours)" if foreign else ""
                raise StorageError(f"{path} is not a kvstrata directory{what}; name an empty one")
        identity = (found.st_dev, found.st_ino)
        lock = _take(path, identity, patience)
        try:
            damage: list[str] = []
            if stat.S_IMODE(found.st_mode) != 0o700:
                os.chmod(path, 0o700)
            for name in ("catalogue", "extents"):
                _subdirectory(os.path.join(path, name))
            if version is None:
                write_format(path)
                if not fresh:
                    damage.append("FORMAT was missing or damaged")
            _OPEN[identity] = lock
        except BaseException:
            os.close(lock)
            raise
        return cls(path, identity, lock, damage)

    def close(self) -> None:
        """Let go of the lock. Twice is fine."""
        if self._lock is not None:
            # Absent in a forked child, whose copy of the descriptor is closed already.
            if _OPEN.pop(self._identity, None) is not None:
                os.close(self._lock)
            self._lock = None

    def check(self) -> None:
        """Test the invariant. Raises AssertionError."""
        assert self._lock is None or _OPEN[self._identity] == self._lock, "directory 1"


def filesystem(path: str) -> str:
    """The type of the file system that holds an existing path, "" where /proc does not tell."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                left, _, right = line.partition(" - ")
                point = re.sub(
                    r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), left.split()[4]
                )
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                # Later mounts hide earlier ones at the same point.
                if inside and len(point) >= len(best):
                    best, kind = point, right.split()[0]
    except (OSError, IndexError):
        return ""
    return kind


def read_format(path: str) -> int | None:
    """The format version of a directory; None where FORMAT is missing or damaged.

    Raises FingerprintError for a version that is not ours.
    """
    try:
        with open(os.path.join(path, "FORMAT"), "rb") as file:
            tree = json.loads(file.read(4096))
        version = tree["version"]
        damaged = "check" in tree and tree["check"] != _format_check(version)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if damaged or not isinstance(version, int):
        return None
    if version != VERSION:
        raise FingerprintError(
            f"{path} has format version {version} where this kvstrata has {VERSION}; "
            "use another directory, or the kvstrata that wrote it"
        )
    return VERSION


def write_format(path: str) -> None:
    """Write FORMAT of our version. Raises OSError."""
    tree = {"version": VERSION, "check": _format_check(VERSION)}
    replace(os.path.join(path, "FORMAT"), json.dumps(tree).encode() + b"\n")


def _format_check(version: object) -> str:
    return xxhash.xxh3_64_hexdigest(f"kvstrata format {version}".encode())


def replace(path: str, data: bytes) -> None:
    """Put ``data`` in place of a file: durable, and after a crash the old or the new, whole."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path + ".new", flags, 0o600)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(path + ".new", path)
    sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    """Make names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def physical_bytes(path: str) -> int:
    """st_blocks of a directory and everything below it, in bytes; links are not followed."""
    total = os.lstat(path).st_blocks
    for folder, names, files in os.walk(path):
        for name in (*names, *files):
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks
            except FileNotFoundError:
                continue
    return total * 512


def foreign_bytes(path: str) -> int:
    """Bytes (st_blocks) of whatever lies in the directory and is not ours: it counts, untouched."""
    total = 0
    for name in set(os.listdir(path)) - _OURS:
        total += physical_bytes(os.path.join(path, name))
    for folder, pattern in (("catalogue", r"(data|lock)\.mdb"), ("extents", r"\d{4,9}")):
        for name in os.listdir(os.path.join(path, folder)):
            if not re.fullmatch(pattern, name):
                total += os.lstat(os.path.join(path, folder, name)).st_blocks * 512
    return total


def holder(path: str) -> str:
    """The process id that LOCK names, as text."""
    try:
        with open(os.path.join(path, "LOCK"), "rb") as file:
            text = file.read(32).split(b"\n")[0].decode("ascii")
        return str(int(text))
    except (OSError, ValueError):
        return "unknown"


def _take(path: str, identity: tuple[int, int], patience: float) -> int:
    busy = "another Store has the NVMe directory {} (process {}); close it or use another directory"
    if identity in _OPEN:
        raise DirectoryBusyError(busy.format(path, os.getpid()))
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(path, "LOCK"), flags, 0o600)
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DirectoryBusyError(busy.format(path, holder(path))) from None
                time.sleep(0.02)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _subdirectory(path: str) -> None:
    if not os.path.lexists(path):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"{path} is no directory (links are refused); remove it")
    _ours(path, found)
    for name in os.listdir(path):
        inner = os.path.join(path, name)
        entry = os.lstat(inner)
        if not stat.S_ISREG(entry.st_mode):
            raise StorageError(f"{inner} is no plain file (links are refused); remove it")
        _ours(inner, entry)


def _ours(path: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise StorageError(
            f"{path} belongs to user {found.st_uid} and this process is {os.geteuid()}; "
            "use a directory of your own"
        )
