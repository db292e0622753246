"""EPOCHS: the epoch of every namespace, outside of the catalogue.

A catalogue can be rebuilt from the passports, and passports of before a reset are still on the
disk. Only this file then tells which of them a reset has buried, so it is written (by rename)
before a reset's transaction, and whoever rebuilds without it must drop everything.

    {"version": 1, "epochs": {"<namespace, hex>": 3}, "check": "<xxh3-128 of the epochs, hex>"}
"""

from __future__ import annotations

import json
import os

import xxhash

from kvstrata.tiers.nvme.directory import replace


def read(directory: str) -> dict[bytes, int] | None:
    """Namespace -> epoch; None where the file is missing or damaged. Never raises."""
    try:
        with open(os.path.join(directory, "EPOCHS"), "rb") as file:
            tree = json.loads(file.read())
        epochs = tree["epochs"]
        if tree["version"] != 1 or tree["check"] != _check(epochs):
            return None
        return {bytes.fromhex(name): int(epoch) for name, epoch in epochs.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write(directory: str, epochs: dict[bytes, int]) -> None:
    """Replace the file, durably. Raises OSError, and then the old one stands."""
    named = {name.hex(): epoch for name, epoch in sorted(epochs.items())}
    tree = {"version": 1, "epochs": named, "check": _check(named)}
    replace(os.path.join(directory, "EPOCHS"), json.dumps(tree).encode() + b"\n")


def keep(directory: str, known: dict[bytes, int]) -> None:
    """Write the file unless it says so already. Raises OSError."""
    if read(directory) != known:
        write(directory, known)


def _check(epochs: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(epochs, sort_keys=True).encode())
