"""What the benchmarks share."""

import argparse
import io
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstrata.bench.harness import Progress, alternate, human_bytes, human_seconds, size, table


def test_arms_alternate_and_rotate() -> None:
    order: list[str] = []

    def arm(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = alternate({name: lambda name=name: arm(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


def test_no_arms() -> None:
    assert alternate({}, 3) == {}


def test_a_table_is_aligned() -> None:
    rows = [("arm", "time", "note"), ("recompute", "4.10 s", "x"), ("dram", "151 ms", "longer")]
    assert table(rows, header=True) == (
        "arm          time  note\n"
        "---------  ------  ------\n"
        "recompute  4.10 s  x\n"
        "dram       151 ms  longer"
    )
    assert table([]) == ""
    assert table([("a", 1), ("bb",)]) == "a   1\nbb"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (5 << 40, "5.0 TiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 us"),
        (2.5e-6, "2.50 us"),
        (0.0123, "12.3 ms"),
        (0.151, "151 ms"),
        (4.1, "4.10 s"),
        (119, "119 s"),
        (150, "2.5 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_sizes_on_the_command_line() -> None:
    assert size("4096") == 4096
    assert size("2GiB") == 2 << 30
    with pytest.raises(argparse.ArgumentTypeError, match="10GB"):
        size("10GB")


def test_a_bar_is_drawn_for_people_only() -> None:
    quiet, seen = io.StringIO(), io.StringIO()
    for stream, forced in ((quiet, False), (seen, True)):
        with Progress(2, "first", stream=stream, forced=forced) as bar:
            bar.step("second")
            bar.step()
            bar.step()
    assert quiet.getvalue() == ""
    text = seen.getvalue()
    assert "0/2" in text and "1/2" in text and "2/2" in text and "3/2" not in text
    assert text.endswith("\r") and not text.split("\r")[-2].strip()


def test_a_bar_takes_callbacks_from_threads() -> None:
    seen = io.StringIO()
    with Progress(0, "records", stream=seen, forced=True) as bar:
        assert seen.getvalue() == ""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda done: bar.at(done, 500), range(1, 501)))
    assert bar.done == 500 and "500/500" in seen.getvalue()
    assert seen.getvalue().count("\r") < 20
