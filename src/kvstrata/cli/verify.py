"""`kvstrata verify DIR`: hold every record against its checksum; `--repair` drops what fails."""

import argparse

from kvstrata.bench.harness import Progress, Result, table
from kvstrata.cli.inspect import rows
from kvstrata.tiers.nvme.verify import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="an NVMe directory of kvstrata")
    parser.add_argument("--repair", action="store_true", help="drop corrupt records")


def run(args: argparse.Namespace) -> Result:
    """Fails where something is damaged and was not repaired."""
    with Progress(0, "reading every record") as progress:
        found = verify(args.directory, repair=args.repair, progress=progress.at)
    whole = not found["corrupt"] and not found["damaged"]
    text = table(rows(found))
    if not whole and not args.repair:
        text += "\n\nDamaged records are never loaded; 'kvstrata verify --repair' drops them."
    return Result(data=found, text=text, ok=whole or args.repair)
