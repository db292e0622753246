"""Every command: its words on the command line, one line about it, and the module that does it.

A command's module has `add_arguments(parser)` and `run(args) -> Result`. It is imported when the
command is given and not before, so that `kvstrata --help` and `inspect` start without torch.
"""

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from kvstrata.bench.harness import Result


class CommandModule(Protocol):
    """What a module named in COMMANDS has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> Result: ...


@dataclass(frozen=True, slots=True)
class Command:
    """One command: `words` as typed, `about` for the list of commands, and the module's name."""

    words: tuple[str, ...]
    about: str
    module: str

    @property
    def name(self) -> str:
        return " ".join(self.words)

    def load(self) -> CommandModule:
        return cast(CommandModule, importlib.import_module(self.module))


COMMANDS = (
    Command(
        ("demo",),
        "a real model answers from its stored KV cache, faster and with the same tokens",
        "kvstrata.bench.cases.demo",
    ),
    Command(
        ("bench", "ttft"),
        "time to first token, and what the first request pays for being stored",
        "kvstrata.bench.cases.ttft",
    ),
    Command(
        ("bench", "idle"),
        "the CPU time of an open store that does nothing",
        "kvstrata.bench.cases.idle",
    ),
    Command(("inspect",), "what an NVMe directory holds", "kvstrata.cli.inspect"),
    Command(("verify",), "read and check every record of an NVMe directory", "kvstrata.cli.verify"),
)
