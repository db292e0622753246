from __future__ import annotations

import threading

from kvstrata.transfer.layers import LayerGate


def test_opens_layer_by_layer() -> None:
    gate = LayerGate(3)
    assert not gate.is_open(0) and not gate.wait(0, 0)
    gate.open(0)
    assert gate.wait(0, 0) and not gate.wait(1, 0)
    gate.check()


def test_all_parts_must_have_brought_a_layer() -> None:
    gate = LayerGate(1, 0)
    assert not gate.is_open(0)
    gate.join(2)
    gate.open(0)
    assert not gate.is_open(0)
    gate.open(0)
    assert gate.is_open(0)


def test_wakes_whoever_waits() -> None:
    gate, answers = LayerGate(2), []
    threads = [
        threading.Thread(target=lambda layer=layer: answers.append(gate.wait(layer, 60)))
        for layer in (0, 1, 1)
    ]
    for thread in threads:
        thread.start()
    gate.open_all()
    for thread in threads:
        thread.join(60)
    assert answers == [True] * 3


def test_failure_is_for_good() -> None:
    gate = LayerGate(2)
    gate.open(0)
    gate.fail("checksum")
    gate.fail("io")
    gate.open_all()
    assert not gate.wait(0, None) and gate.reason == "checksum"
    gate.check()
