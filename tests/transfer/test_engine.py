from __future__ import annotations

import random
import threading
import time
from collections import Counter

import numpy as np
import pytest

from kvstrata.core.errors import ClosedError, MisuseError
from kvstrata.transfer.device import HostWorker
from kvstrata.transfer.move import Priority

D, P, S = Priority


def test_a_ready_event_is_waited_for(house, event) -> None:
    # The slow writer: what it writes before the event is what must be stored.
    one, ready = house(), event()
    one.engine.submit([one.move("hbm", "dram", [2], [3], ready=ready)])
    assert ready.waited.wait(60)
    assert not one.engine.poll()
    one.randomise()
    want = one.record(2)
    ready.set()
    (done,) = one.wait(1)
    assert done.ok.all() and one.row(3) == want


def test_a_load_waits_for_the_last_reader(house, event) -> None:
    one, ready = house(), event()
    one.do("hbm", "dram", [1], [0])
    before = one.record(2)
    one.engine.submit([one.move("dram", "hbm", [0], [2], ready=ready, gate=1)])
    assert ready.waited.wait(60)
    assert one.record(2) == before and not one.engine.gate(1, 0).is_open(0)
    ready.set()
    one.wait(1)
    assert one.record(2) == one.record(1) and one.engine.gate(1, 0).wait(2, 60)


def test_demand_overtakes_prefetch_overtakes_store(house, event) -> None:
    one, ready = house(threads=1), event()
    first = one.move("dram", "hbm", [0], [0], ready=ready)
    one.engine.submit([first])
    assert ready.waited.wait(60)
    moves = [one.move("dram", "hbm", [0], [1], priority=p) for p in (S, P, D, S, D, P)]
    one.engine.submit(moves)
    assert one.engine.backlog(S) == 2 * one.layout.record_bytes
    ready.set()
    order = [done.id for done in one.wait(7)]
    assert order == [first.id, *(moves[i].id for i in (2, 4, 1, 5, 0, 3))]
    assert not any(map(one.engine.backlog, Priority))


def test_deadline(house, event) -> None:
    now = [100.0]
    one, ready = house(threads=1, clock=lambda: now[0]), event()
    one.engine.submit([one.move("dram", "hbm", [0], [0], ready=ready, deadline=100.0)])
    assert ready.waited.wait(60)
    before = one.record(1)
    late = one.move("dram", "hbm", [0], [1], deadline=101.0, gate=5)
    early = one.move("dram", "hbm", [0], [2], deadline=103.0)
    one.engine.submit([late, early])
    now[0] = 102.0
    ready.set()
    dones = {done.id: done for done in one.wait(3)}
    assert not dones[late.id].ok.any() and dones[late.id].error == "deadline"
    assert dones[early.id].ok.all()
    assert one.record(1) == before
    assert one.engine.gate(5, 0).reason == "deadline"


def test_a_bad_record_never_reaches_pages(house) -> None:
    one = house()
    stored = one.do("hbm", "dram", range(6), range(6), wants_checksums=True)
    want = [one.record(block) for block in range(6)]
    for slot in (1, 4):
        one.dram.row(0, slot)[17] ^= 1
    one.randomise()
    before = [one.record(block) for block in range(6)]
    flags = np.array([True, True, True, False, False, True])
    done = one.do(
        "dram", "hbm", range(6), range(6), checksums=stored.checksums, verify=flags, gate=3
    )
    assert done.ok.tolist() == [True, False, True, True, True, True]
    assert done.error == "checksum"
    assert one.record(1) == before[1], "the damaged record was flagged and must not be copied"
    assert [one.record(i) for i in (0, 2, 3, 5)] == [want[i] for i in (0, 2, 3, 5)]
    gate = one.engine.gate(3, 0)
    assert gate.reason == "checksum" and not gate.wait(0, 0)


@pytest.mark.parametrize(
    ("source", "target", "a", "b", "text"),
    [
        ("hbm", "dram", [16], [0], "block id 16 of group 0 is outside of 16 blocks"),
        ("hbm", "dram", [0], [12], "slot 12 of group 0 is outside of dram's 12"),
        ("dram", "hbm", [-1], [0], "slot -1"),
        ("hbm", "dram", [0, 1], [0], "as many source slots as target slots"),
        ("hbm", "tape", [0], [0], "there is no tier tape; there are hbm, dram"),
    ],
)
def test_an_impossible_move_is_answered(house, source, target, a, b, text) -> None:
    one = house()
    done = one.do(source, target, a, b, gate=1)
    assert not done.ok.any() and text in done.error and "\n" not in done.error
    assert not one.engine.gate(1, 0).wait(0, 0) if source == "dram" else True


def test_ids_are_unique_and_unknown_gates_an_error(house, event) -> None:
    one, ready = house(), event()
    move = one.move("hbm", "dram", [0], [0], ready=ready)
    one.engine.submit([move])
    with pytest.raises(MisuseError, match="ids of their own"):
        one.engine.submit([move])
    with pytest.raises(MisuseError, match="no Move has named gate 9"):
        one.engine.gate(9, 0)
    ready.set()
    one.wait(1)


def test_an_empty_move_is_done_too(house) -> None:
    one = house()
    done = one.do("dram", "hbm", [], [], gate=1)
    assert done.ok.shape == (0,) and not done.error
    assert one.engine.gate(1, 0).is_open(0)


def test_several_moves_may_share_a_gate(house, event) -> None:
    one, ready = house(), event()
    moves = [one.move("dram", "hbm", [0], [0], gate=4)]
    moves.append(one.move("dram", "hbm", [1], [1], gate=4, ready=ready))
    one.engine.submit(moves)
    one.wait(1)
    assert not one.engine.gate(4, 0).is_open(0)
    ready.set()
    one.wait(1)
    assert one.engine.gate(4, 0).is_open(2)
    one.engine.gate(4, 0).check()


def test_close_with_work_in_flight(house, event) -> None:
    one, ready = house(threads=1), event()
    running = one.move("dram", "hbm", [0], [0], ready=ready)
    waiting = [one.move("dram", "hbm", [0], [1], gate=8), one.move("hbm", "dram", [0], [1])]
    one.engine.submit([running, waiting[0]])
    assert ready.waited.wait(60)
    closer = threading.Thread(target=one.engine.close)
    closer.start()
    dones = one.wait(1)
    assert dones[0].id == waiting[0].id and dones[0].error == "closed"
    assert one.engine.gate(8, 0).reason == "closed"
    ready.set()
    closer.join(60)
    dones = one.engine.poll()
    assert [done.id for done in dones] == [running.id] and dones[0].ok.all()
    with pytest.raises(ClosedError):
        one.engine.submit([waiting[1]])
    one.engine.check()


def test_the_bell_rings_and_idle_engines_have_no_threads(house) -> None:
    one = house()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvstrata-o")]
    seen = one.bell.rings
    one.do("hbm", "dram", [0], [0])
    assert one.bell.rings == seen + 1


class Faulty(HostWorker):
    """A worker that dawdles and sometimes breaks, by a seed shared among all of them."""

    __slots__ = ("rng",)

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def wait(self, ready: object) -> None:
        time.sleep(self.rng.random() * 0.002)
        if self.rng.random() < 0.2:
            raise self.rng.choice([OSError(5, "Input/output error"), ValueError("broken")])
        super().wait(ready)


@pytest.mark.parametrize("seed", range(25))
def test_exactly_one_done_whatever_happens(house, monkeypatch, seed: int) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr("kvstrata.transfer.engine.make_worker", lambda device: Faulty(rng))
    cut = rng.choice([1, 3, 100])
    monkeypatch.setattr(
        "kvstrata.transfer.engine.parts",
        lambda n, *rest: [range(i, min(n, i + cut)) for i in range(0, max(n, 1), cut)],
    )
    one = house(threads=rng.randint(1, 3))
    # Every Move has blocks of its own, so what arrived can be held against what was there.
    memory = {slot: one.row(slot) for slot in range(12)}
    moves, expected = [], {}
    blocks, slots = rng.sample(range(16), 12), rng.sample(range(12), 12)
    while slots:
        n = min(len(slots), rng.randint(1, 4))
        mine, there = blocks[:n], slots[:n]
        del blocks[:n], slots[:n]
        gate = rng.choice([0, len(moves) + 1])
        pair = [("hbm", "dram", mine, there), ("dram", "hbm", there, mine)][rng.random() < 0.5]
        move = one.move(*pair, priority=rng.choice(list(Priority)), gate=gate)
        records = [one.record(b) for b in mine], [memory[s] for s in there]
        expected[move.id] = records if move.source == "hbm" else records[::-1]
        moves.append(move)
    for move in moves:
        one.engine.submit([move])
        one.engine.check()
    if rng.random() < 0.3:
        one.engine.close()
        dones = one.engine.poll()
    else:
        dones = one.wait(len(moves))
    assert Counter(done.id for done in dones) == Counter(move.id for move in moves)
    read = {"hbm": one.record, "dram": one.row}
    for done in dones:
        move = next(move for move in moves if move.id == done.id)
        assert bool(done.error) == (not done.ok.all())
        assert done.error in ("", "closed", "io: Input/output error", "ValueError: broken")
        source, target = expected[done.id]
        for i, slot in enumerate(move.target_slots.tolist()):
            now = read[move.target](slot)
            assert now == source[i] if done.ok[i] else now in (source[i], target[i])
        if move.gate and move.target == "hbm":
            gate = one.engine.gate(move.gate, 0)
            gate.check()
            assert gate.is_open(2) == bool(done.ok.all())
    one.engine.close()
    assert not one.engine.poll()
