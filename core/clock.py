"""Time as an argument: whoever decides is given a clock, so that replay can bring its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds on a clock that never goes back; only differences mean anything."""

monotonic: Clock = time.monotonic


class Bell:
    """Wakes whoever waits for work to complete; many ring, one waits, nobody spins.

    Invariant 1: a ``ring`` after a ``wait`` has returned is never lost; it ends the next ``wait``.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        """End the present or the next ``wait``. Any thread may call it."""
        self._event.set()

    def wait(self, timeout: float) -> bool:
        """Wait until rung, ``timeout`` seconds at most; True if rung. One thread calls it."""
        rung = self._event.wait(timeout)
        self._event.clear()
        return rung
