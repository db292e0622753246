"""The command line: `kvstrata COMMAND [--json]`."""

from kvstrata.cli.app import main

__all__ = ["main"]
