"""Bell: nobody who waits for a ring misses one."""

from __future__ import annotations

import threading
import time

from kvstrata.core.clock import Bell, monotonic


def test_the_clock_never_goes_back() -> None:
    times = [monotonic() for _ in range(100)]
    assert times == sorted(times)


def test_a_ring_after_the_count_was_read_is_never_lost() -> None:
    bell = Bell()
    seen = bell.rings
    bell.ring()
    bell.ring()
    assert bell.wait(seen, 30)
    assert bell.wait(seen, 0)  # a wait does not use the ring up
    assert bell.rings == 2


def test_a_ring_from_before_wakes_nobody() -> None:
    bell = Bell()
    bell.ring()
    assert not bell.wait(bell.rings, 0)
    assert not bell.wait(bell.rings, 0.01)


def test_one_ring_wakes_all_who_wait() -> None:
    bell = Bell()
    seen = bell.rings
    rung: list[bool] = []

    def work() -> None:
        rung.append(bell.wait(seen, None))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # so that they are asleep; right either way
    bell.ring()
    for thread in threads:
        thread.join(10)
    assert rung == [True] * 4


def test_work_handed_over_with_rings_always_arrives() -> None:
    """Two ring after each piece; two wait for all, reading the count before they look."""
    bell = Bell()
    done: list[int] = []
    missed: list[int] = []

    def ring() -> None:
        for i in range(300):
            done.append(i)
            bell.ring()

    def wait() -> None:
        while True:
            seen = bell.rings
            if len(done) == 600:
                return
            if not bell.wait(seen, 30):
                missed.append(seen)
                return

    threads = [threading.Thread(target=job) for job in (wait, wait, ring, ring)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert missed == [] and len(done) == 600 == bell.rings
    assert not any(thread.is_alive() for thread in threads)
