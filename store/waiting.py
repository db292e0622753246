"""Waiting for completions without spinning, by as many threads as like."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstrata.core.clock import Bell, Clock
from kvstrata.core.errors import MisuseError
from kvstrata.store.control import Control
from kvstrata.transfer.move import Completion, Ticket

_GRACE = 0.02
"""Seconds that the attendant leaves to whoever waits for a ticket, who is faster without it."""


class Waiting:
    """Goes round with the Control whenever the bell rings or a deadline comes.

    The Store's lock is held while going round, and never while asleep. What an engine has started
    goes on while it does something else, or nothing: an attendant thread goes round for it. It
    sleeps until something has ended, so an idle store costs nothing.
    """

    def __init__(
        self, control: Control, lock: threading.RLock, bell: Bell, clock: Clock, *, attended: bool
    ) -> None:
        """``attended`` False leaves every step to the caller, for tests and replay."""
        self._control = control
        self._lock = lock
        self._bell = bell
        self._clock = clock
        self._awaited: dict[int, int] = {}
        """Tickets that threads wait for, which a poll must leave to them."""
        self._over = threading.Event()
        self._attendant = threading.Thread(target=self._attend, name="kvstrata-store", daemon=True)
        if attended:
            self._attendant.start()

    def advance(self) -> None:
        """Go round once; whoever else waits is told of what completed. The lock must be held."""
        if self._control.advance():
            self._bell.ring()

    def close(self) -> None:
        """End the attendant and go round a last time."""
        self._over.set()
        self._bell.ring()
        if self._attendant.ident is not None:
            self._attendant.join()
        with self._lock:
            self._control.advance()

    def _attend(self) -> None:
        while not self._over.is_set():
            seen = self._bell.rings
            with self._lock:
                self.advance()
                deadline = self._control.next_deadline()
            left = None if deadline is None else max(0.0, deadline - self._clock())
            self._bell.wait(seen, left)
            self._over.wait(_GRACE)

    def until(self, test: Callable[[], bool], timeout: float | None) -> bool:
        """Go on until ``test`` is true, asleep in between; False if that takes too long."""
        until = None if timeout is None else self._clock() + timeout
        while True:
            seen = self._bell.rings
            with self._lock:
                self.advance()
                if test():
                    return True
                times = [t for t in (until, self._control.next_deadline()) if t is not None]
            now = self._clock()
            if until is not None and now >= until:
                return False
            self._bell.wait(seen, max(0.0, min(times) - now) if times else None)

    def completion(self, ticket: Ticket, timeout: float | None) -> Completion | None:
        """Take out the Completion of a ticket; None if it does not come in time.

        Raises MisuseError for a ticket whose Completion was fetched before.
        """
        found: list[Completion] = []
        with self._lock:
            self._awaited[ticket.id] = self._awaited.get(ticket.id, 0) + 1

        def completed() -> bool:
            done = self._control.results.pop(ticket.id, None)
            if done is not None:
                found.append(done)
            elif ticket.id not in self._control.jobs:
                raise MisuseError(f"the completion of {ticket} was fetched before")
            return done is not None

        try:
            return found[0] if self.until(completed, timeout) else None
        finally:
            with self._lock:
                self._awaited[ticket.id] -= 1
                if not self._awaited[ticket.id]:
                    del self._awaited[ticket.id]

    def take(self) -> list[Completion]:
        """Go round and take out all Completions that nobody waits for. The lock must be held."""
        self.advance()
        results = self._control.results
        ids = [number for number in results if number not in self._awaited]
        return [results.pop(number) for number in ids]
