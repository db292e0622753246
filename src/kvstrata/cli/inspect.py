"""`kvstrata inspect DIR`: what an NVMe directory holds. Reads along while a Store has it open."""

import argparse
from collections.abc import Mapping

from kvstrata.bench.harness import Result, human_bytes, table
from kvstrata.tiers.nvme.verify import inspect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="an NVMe directory of kvstrata")


def run(args: argparse.Namespace) -> Result:
    found = inspect(args.directory)
    return Result(data=found, text=table(rows(found)))


def rows(found: Mapping[str, object]) -> list[tuple[str, str]]:
    """A finding as two columns; keys that count bytes are shown in units."""
    return [(key.replace("_", " "), _shown(key, value)) for key, value in found.items()]


def _shown(key: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and "bytes" in key:
        return human_bytes(value)
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{name}: {_shown(str(name), item)}" for name, item in value.items())
            or "none"
        )
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(_shown(key, item) for item in value) or "none"
    return str(value)
