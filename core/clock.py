"""Time as an argument: whoever decides is given a clock, so that replay can bring its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds on a clock that never goes back; only differences mean anything."""

monotonic: Clock = time.monotonic


class Bell:
    """Wakes whoever waits for work to complete; many ring, many wait, nobody spins.

    Invariant 1: a ring after ``rings`` was read is never lost: ``wait(seen)`` then returns at once.
    """

    __slots__ = ("_condition", "rings")

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.rings = 0

    def ring(self) -> None:
        """Wake all who wait. Any thread may call it."""
        with self._condition:
            self.rings += 1
            self._condition.notify_all()

    def wait(self, seen: int, timeout: float | None) -> bool:
        """Wait until rung more than ``seen`` times, ``timeout`` seconds at most; True if rung."""
        with self._condition:
            return self._condition.wait_for(lambda: self.rings != seen, timeout)
