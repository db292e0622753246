"""Counters, gauges, and the text that Prometheus reads."""

from __future__ import annotations

import threading

from kvstrata.core.metrics import Metrics


def test_counters_add_and_gauges_are_set() -> None:
    m = Metrics()
    assert m.get("saved") == 0 and m.snapshot() == {}
    m.add("saved")
    m.add("saved", 41)
    m.set("used", 7)
    m.set("used", 5)
    assert m.get("saved") == 42 and m.get("used") == 5


def test_labels_are_part_of_the_name_in_any_order() -> None:
    m = Metrics()
    m.add("moved", 1, source="hbm", target="dram")
    m.add("moved", 2, target="dram", source="hbm")
    m.add("moved", 4, source="dram", target="hbm")
    m.add("moved", 8)
    assert m.get("moved", target="dram", source="hbm") == 3
    assert m.get("moved", source="dram", target="hbm") == 4
    assert m.get("moved") == 8 and m.get("moved", source="hbm") == 0


def test_the_text_has_a_line_for_each_value_in_order() -> None:
    m = Metrics()
    m.add("z_total", 2)
    m.set("hit_rate", 0.25)
    m.add("a_total", 3, source="nvme")
    assert m.text() == (
        'kvstrata_a_total{source="nvme"} 3\nkvstrata_hit_rate 0.25\nkvstrata_z_total 2\n'
    )
    assert Metrics().text() == ""


def test_bytes_are_counted_to_the_last_one_in_the_text_too() -> None:
    m = Metrics()
    m.add("loaded_bytes_total", 1_234_567_890_123)
    m.add("loaded_bytes_total", 4)
    assert m.text() == "kvstrata_loaded_bytes_total 1234567890127\n"


def test_a_label_cannot_end_its_line() -> None:
    m = Metrics()
    m.add("failed_total", error='a "b"\nc\\d')
    assert m.text() == 'kvstrata_failed_total{error="a \\"b\\"\\nc\\\\d"} 1\n'
    assert m.get("failed_total", error='a "b"\nc\\d') == 1


def test_a_snapshot_is_a_copy() -> None:
    m = Metrics()
    m.add("n")
    before = m.snapshot()
    m.add("n")
    before["n"] += 100
    assert m.get("n") == 2 and before["n"] == 101


def test_no_addition_is_lost_between_threads() -> None:
    m = Metrics()
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(30)
        for _ in range(2000):
            m.add("n", 1, tier="dram")
            m.snapshot()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert m.get("n", tier="dram") == 8000
