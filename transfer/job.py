"""One Move under way: what its parts report, and its one end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvstrata.core.clock import Clock
from kvstrata.tiers.run import Written
from kvstrata.transfer.layers import LayerGate
from kvstrata.transfer.move import Done, Move


class Job:
    """Collects what ``parts`` parts of a Move report; the last one to end makes the Done.

    Invariants:

    1. ``done`` is called exactly once, by whoever ends the last part, with no lock held.
    2. ``ok[i]`` is True only where a part has said so.
    3. A gate is opened by this job only layer by layer, and fails before the Done where any block
       did not arrive.

    ``last`` runs before the Done where some block is ok (a sync, say); if it raises, none is.
    """

    __slots__ = (
        "_clock", "_done", "_error", "_last", "_left", "_lock", "_started",
        "gate", "move", "ok", "sums", "written",
    )  # fmt: skip

    def __init__(
        self,
        move: Move,
        parts: int,
        clock: Clock,
        done: Callable[[Done], None],
        gate: LayerGate | None = None,
        last: Callable[[], None] | None = None,
    ) -> None:
        self.move = move
        self.gate = gate
        self.ok = np.zeros(len(move), np.bool_)
        self.sums = np.zeros(len(move), np.uint64) if move.wants_checksums else None
        self.written: list[Written | None] = []
        self._clock = clock
        self._done = done
        self._last = last
        self._left = parts
        self._error = ""
        self._started: float | None = None
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """A part is about to start; False where the Move's deadline had passed before any did."""
        with self._lock:
            now = self._clock()
            if self._started is None:
                if self.move.deadline is not None and now > self.move.deadline:
                    return False
                self._started = now
            return True

    def fail(self, error: str) -> None:
        """Something did not arrive, for this reason (the first one is told). Fails the gate."""
        with self._lock:
            self._error = self._error or error
        if self.gate is not None:
            self.gate.fail(error)

    def end(self) -> None:
        """A part has ended, well or not."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        # Nobody else touches the job from here on.
        if self._last is not None and self.ok.any():
            try:
                self._last()
            except Exception as error:
                self.ok[:] = False
                self.fail(describe(error))
        if self.gate is not None and not self.ok.all():
            self.gate.fail(self._error)
        seconds = 0.0 if self._started is None else self._clock() - self._started
        written: Sequence[Written | None] = [
            one if ok else None for one, ok in zip(self.written, self.ok.tolist(), strict=False)
        ]
        self._done(Done(self.move.id, self.ok, self._error, self.sums, tuple(written), seconds))


def describe(error: BaseException) -> str:
    """An exception in a few words, ``io: ...`` where the device or disk refused."""
    if isinstance(error, OSError):
        return f"io: {error.strerror or error}"
    return f"{type(error).__name__}: {error}"
