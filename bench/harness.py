"""What every benchmark shares: a result, arms that alternate, a progress bar, readable text."""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from kvstrata.core.config import parse_size
from kvstrata.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Result:
    """What a command found: `data` for --json, `text` for people, and whether its checks held."""

    data: Mapping[str, object]
    text: str
    ok: bool = True


def alternate(arms: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Runs every arm `repeats` times, alternating, and returns what each arm returned, in order.

    They alternate so that a slow minute of the machine hits all of them, and the order is rotated
    from round to round so that none always runs first. Index i of every list is round i, so arms
    may be compared pair by pair.
    """
    names = list(arms)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            found[name].append(arms[name]())
    return found


class Progress:
    """A bar on stderr for work that lasts, drawn only on a terminal, or when `forced`.

    Use as a context manager; the bar is wiped at the end, so that the result remains alone.
    """

    WIDTH = 24

    def __init__(
        self, total: int, label: str, *, stream: TextIO | None = None, forced: bool = False
    ) -> None:
        self.total = total
        self.label = label
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._shown = forced or self._stream.isatty()
        self._begun = time.monotonic()
        self._drawn = 0.0
        self._length = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._stream.write("\r" + " " * self._length + "\r")
            self._stream.flush()

    def step(self, label: str | None = None, n: int = 1) -> None:
        """`n` more units are done; `label` says what comes next."""
        self.done = min(self.total, self.done + n)
        self.label = self.label if label is None else label
        self._draw()

    def at(self, done: int, total: int) -> None:
        """`done` units of `total` are done: a callback for any thread, as often as it likes."""
        with self._lock:
            self.done, self.total = max(done, self.done), total
            if done == total or time.monotonic() - self._drawn > 0.1:
                self._draw()

    def _draw(self) -> None:
        if not self._shown or not self.total:
            return
        full = self.WIDTH * self.done // self.total
        self._drawn = time.monotonic()
        bar = "#" * full + "." * (self.WIDTH - full)
        line = f"[{bar}] {self.done}/{self.total} {self._drawn - self._begun:4.0f} s  {self.label}"
        self._stream.write("\r" + line.ljust(self._length))
        self._stream.flush()
        self._length = len(line)


def table(rows: Sequence[Sequence[object]], *, header: bool = False) -> str:
    """`rows` as lines of aligned columns; a column of numbers is aligned to the right.

    The first column is always to the left. With `header` the first row is a heading and is
    underlined. A row may be shorter than the others.
    """
    if not rows:
        return ""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = max(len(row) for row in cells)
    cells = [row + [""] * (columns - len(row)) for row in cells]
    widths = [max(len(row[column]) for row in cells) for column in range(columns)]
    body = cells[1:] if header else cells
    right = [column > 0 and all(_numeric(row[column]) for row in body) for column in range(columns)]
    lines = [
        "  ".join(
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, width, to_the_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    if header:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _numeric(cell: str) -> bool:
    """A number, perhaps with a unit behind it; an empty cell goes with any column."""
    return not cell or cell.lstrip("+-").removeprefix(".")[:1].isdigit()


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """0.0123 -> '12.3 ms': three significant digits in us, ms or s; minutes from 120 s on."""
    size = abs(seconds)
    if size >= 120:
        return f"{seconds / 60:.1f} min"
    factor, unit = (1.0, "s") if size >= 1 else (1e3, "ms") if size >= 1e-3 else (1e6, "us")
    digits = 2 if size * factor < 10 else 1 if size * factor < 100 else 0
    return f"{seconds * factor:.{digits}f} {unit}"


def count(text: str) -> int:
    """A whole number of 1 or more on the command line, for `type=` of argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def span(text: str) -> float:
    """A span of time on the command line, for `type=` of argparse: up to a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def size(text: str) -> int:
    """A size on the command line, for `type=` of argparse: bytes, or KiB, MiB, GiB."""
    try:
        return parse_size(int(text) if text.isdecimal() else text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
