"""Read a catalogue that may be damaged, in a process that may die of it.

LMDB maps its file: a truncated one kills whoever reads it (SIGBUS), and a page with a wrong pointer
may crash or spin. So a child reads it and sends what it found through a pipe; the parent believes
only what ends with the right count, and judges every item by its own checksum.

    frame: 1 byte name of the sub-database (M or R), key length 4, value length 4, key, value
    end:   1 byte E, number of frames 8
"""

from __future__ import annotations

import json
import logging
import resource
import struct
import subprocess
import sys

import lmdb

META, RECORDS = b"meta", b"records"
TIMEOUT = 300.0
"""Seconds after which a walk is taken to spin: 100,000 records take a quarter of one."""

log = logging.getLogger("kvstrata.nvme")

_FRAME = struct.Struct("<cII")
_END = struct.Struct("<cQ")
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kvstrata.tiers.nvme.walk import main; main(sys.argv[2], sys.argv[3] == 'locked')"
)

Items = list[tuple[bytes, bytes]]


def walk(catalogue: str, *, locked: bool = False) -> tuple[Items, Items] | None:
    """(meta items, record items) of the environment in ``catalogue``, None where it is damaged.

    ``locked`` registers as a reader: needed, and harmless, beside a live Store; else the lock file
    is not looked at. Starts a child (0.1 s) without torch, and never raises for its sake.
    """
    command = [sys.executable or "python3", "-I", "-c", _CHILD, json.dumps(sys.path), catalogue]
    try:
        child = subprocess.run(
            [*command, "locked" if locked else "alone"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.info("reading %s failed: %s", catalogue, error)
        return None
    if child.returncode:
        log.info("reading %s ended with %s: %s", catalogue, child.returncode, child.stderr[-400:])
        return None
    return parse(child.stdout)


def parse(data: bytes) -> tuple[Items, Items] | None:
    """What a child sent, None unless it is complete. Never raises."""
    found: dict[bytes, Items] = {b"M": [], b"R": []}
    at = count = 0
    while at + _END.size <= len(data):
        if data[at : at + 1] == b"E":
            whole = at + _END.size == len(data) and _END.unpack_from(data, at)[1] == count
            return (found[b"M"], found[b"R"]) if whole else None
        name, key_size, value_size = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        if name not in found or at + key_size + value_size > len(data):
            return None
        split = at + key_size
        found[name].append((data[at:split], data[split : split + value_size]))
        at = split + value_size
        count += 1
    return None


def main(catalogue: str, locked: bool) -> None:
    """The child: write all frames of an environment to stdout. Dies of a damaged one, by design."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = sys.stdout.buffer
    env = lmdb.open(catalogue, readonly=True, create=False, lock=locked, max_dbs=4)
    count = 0
    with env.begin() as txn:
        for letter, name in ((b"M", META), (b"R", RECORDS)):
            db = env.open_db(name, txn=txn, create=False)
            before = count
            previous = b""
            for key, value in txn.cursor(db):
                # A damaged tree may hold a loop; keys that do not rise end it.
                if key <= previous:
                    raise ValueError("keys do not rise")
                previous = key
                out.write(_FRAME.pack(letter, len(key), len(value)) + key + value)
                count += 1
            if txn.stat(db)["entries"] != count - before:
                raise ValueError(f"{count - before} entries of {txn.stat(db)['entries']}")
    out.write(_END.pack(b"E", count))
    out.flush()
