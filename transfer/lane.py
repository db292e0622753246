"""A lane: worker threads of one direction, fed in order of priority, then of submission."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T_contra = TypeVar("T_contra", contravariant=True)
W = TypeVar("W")


class Task(Protocol[T_contra]):
    """Work for one worker. Neither call raises: what goes wrong is told to the Move's job."""

    def run(self, worker: T_contra) -> None:
        """Do it; the worker's own things (a stream, scratch) are the argument."""
        ...

    def abandon(self, reason: str) -> None:
        """It will not be done."""
        ...


class Lane(Generic[W]):
    """A priority queue and the threads that empty it.

    Threads start with the first task and sleep on a condition: an idle lane costs nothing.

    Invariants (``check`` tests them by these numbers):

    1. Every task is run or abandoned exactly once.
    2. No more than ``threads`` tasks run at once; a waiting task of a lower number never starts
       before one of a higher.
    """

    def __init__(self, name: str, threads: int, make: Callable[[], W]) -> None:
        self._name = name
        self._size = threads
        self._make = make
        self._wake = threading.Condition()
        self._heap: list[tuple[int, int, Task[W]]] = []
        self._number = 0
        self._ended = 0
        self._running: list[int] = []
        self._threads: list[threading.Thread] = []
        self._closed = False

    def put(self, priority: int, tasks: Sequence[Task[W]]) -> None:
        """Queue tasks, lower numbers first; after ``close`` they are abandoned at once."""
        with self._wake:
            closed = self._closed
            for task in tasks:
                if not closed:
                    heapq.heappush(self._heap, (priority, self._number, task))
                self._number += 1
            if not closed:
                while len(self._threads) < min(self._size, self._number):
                    name = f"kvstrata-{self._name}-{len(self._threads)}"
                    thread = threading.Thread(target=self._work, name=name, daemon=True)
                    self._threads.append(thread)
                    thread.start()
                self._wake.notify(len(tasks))
        if closed:
            self._abandon(tasks)

    def close(self) -> None:
        """Abandon what waits, wait for what runs, end the threads. Twice is fine."""
        with self._wake:
            self._closed = True
            waiting = [task for _, _, task in sorted(self._heap, key=lambda entry: entry[:2])]
            self._heap.clear()
            self._wake.notify_all()
        self._abandon(waiting)
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Raise AssertionError unless the numbered invariants hold."""
        with self._wake:
            known = self._ended + len(self._running) + len(self._heap)
            assert known == self._number, "1: a task got lost or ran twice"
            assert len(self._running) <= self._size, "2: more tasks run than there are threads"

    def _abandon(self, tasks: Sequence[Task[W]]) -> None:
        for task in tasks:
            task.abandon("closed")
        with self._wake:
            self._ended += len(tasks)

    def _work(self) -> None:
        worker: W | None = None
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._heap or self._closed)
                if self._closed:
                    return  # close() has taken what was waiting
                priority, _, task = heapq.heappop(self._heap)
                self._running.append(priority)
            try:
                # Made on its own thread, so that streams and scratch belong to it.
                worker = worker if worker is not None else self._make()
            except Exception as error:
                task.abandon(f"{type(error).__name__}: {error}")
            else:
                task.run(worker)
            with self._wake:
                self._running.remove(priority)
                self._ended += 1
            # A finished task must not keep its Move's arrays alive while the thread sleeps.
            del task
