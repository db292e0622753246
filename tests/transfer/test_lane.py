from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from kvstrata.transfer.lane import Lane


class Note:
    """A task that writes down what happened to it."""

    def __init__(
        self, number: int, log: list[tuple[str, int]], gate: threading.Event | None = None
    ):
        self.number, self.log, self.gate = number, log, gate

    def run(self, worker: object) -> None:
        if self.gate is not None:
            assert self.gate.wait(60)
        self.log.append(("run", self.number))

    def abandon(self, reason: str) -> None:
        self.log.append((reason, self.number))


def test_priority_then_order_of_submission() -> None:
    log: list[tuple[str, int]] = []
    go = threading.Event()
    lane = Lane("test", 1, object)
    lane.put(0, [Note(0, log, go)])
    for number, priority in [(1, 2), (2, 1), (3, 2), (4, 0), (5, 1)]:
        lane.put(priority, [Note(number, log)])
    last = Note(9, log, done := threading.Event())
    lane.put(3, [last])
    go.set()
    done.set()
    while len(log) < 7:
        threading.Event().wait(0.001)
    lane.close()
    lane.check()
    assert [number for _, number in log] == [0, 4, 2, 5, 1, 3, 9]


def test_close_abandons_what_waits_and_finishes_what_runs() -> None:
    log: list[tuple[str, int]] = []
    go, started = threading.Event(), threading.Event()

    class First(Note):
        def run(self, worker: object) -> None:
            started.set()
            super().run(worker)

    lane = Lane("test", 1, object)
    lane.put(0, [First(0, log, go), Note(1, log)])
    assert started.wait(60)
    closer = threading.Thread(target=lane.close)
    closer.start()
    while ("closed", 1) not in log:
        threading.Event().wait(0.001)
    go.set()
    closer.join(60)
    lane.put(0, [Note(2, log)])
    lane.close()
    assert log == [("closed", 1), ("run", 0), ("closed", 2)]
    lane.check()


def test_threads_start_with_work_and_never_more_than_allowed() -> None:
    lane = Lane("counted", 3, object)
    names = lambda: [t for t in threading.enumerate() if "counted" in t.name]  # noqa: E731
    assert not names()
    lane.put(0, [Note(0, [])])
    assert len(names()) == 1
    lane.put(0, [Note(i, []) for i in range(9)])
    assert len(names()) == 3
    lane.close()
    assert not names()


def test_a_worker_that_cannot_be_made_is_an_answer() -> None:
    log: list[tuple[str, int]] = []

    def broken() -> object:
        raise RuntimeError("no device")

    lane = Lane("test", 1, broken)
    lane.put(0, [Note(0, log), Note(1, log)])
    while len(log) < 2:
        threading.Event().wait(0.001)
    lane.close()
    assert [reason for reason, _ in log] == ["RuntimeError: no device"] * 2


@pytest.mark.parametrize("seed", range(20))
def test_every_task_ends_once_whenever_it_is_closed(seed: int) -> None:
    rng, log = random.Random(seed), []
    lane = Lane("test", rng.randint(1, 3), object)
    threads = [
        threading.Thread(
            target=lambda base=base: [lane.put(i % 3, [Note(base + i, log)]) for i in range(50)]
        )
        for base in (0, 100)
    ]
    for thread in threads:
        thread.start()
    if rng.random() < 0.7:
        lane.close()
    for thread in threads:
        thread.join()
    lane.close()
    lane.check()
    assert set(Counter(number for _, number in log).values()) == {1} and len(log) == 100
