"""`kvstrata verify DIR`: hold every record against its checksum; `--repair` drops what fails."""

import argparse

from kvstrata.bench.harness import Result, table
from kvstrata.cli.inspect import rows
from kvstrata.tiers.nvme.verify import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="an NVMe directory of kvstrata")
    parser.add_argument(
        "--repair", action="store_true", help="drop corrupt records, free orphaned bytes"
    )


def run(args: argparse.Namespace) -> Result:
    found = verify(args.directory, repair=args.repair)
    fine = found["ok"] == found["records"] and not found["corrupt"]
    return Result(data=found, text=table(rows(found)), ok=bool(args.repair or fine))
