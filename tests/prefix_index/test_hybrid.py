"""The longest prefix that every KV group can resume at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstrata.core.dtypes import dtype
from kvstrata.core.errors import MisuseError
from kvstrata.core.spec import MLA, FullAttention, KVSpec, SlidingWindow
from kvstrata.prefix_index.hybrid import usable_prefix

BLOCK = 4
BF16 = dtype("bfloat16")
FULL = FullAttention(BLOCK, 1, 8, BF16)


def window(tokens: int) -> SlidingWindow:
    return SlidingWindow(BLOCK, 1, 8, BF16, window=tokens)


@dataclass(frozen=True, slots=True)
class LastBlock(FullAttention):
    """A state that is read where the sequence stopped: one block, however long the prefix."""

    def blocks_read(self, num_tokens: int) -> range:
        return range(num_tokens // self.block_size - 1, num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Chunked(FullAttention):
    """Attention within chunks of three blocks: at a chunk's start nothing is read."""

    def blocks_read(self, num_tokens: int) -> range:
        stop = num_tokens // self.block_size
        return range(stop // 3 * 3, stop)


def brute(present: list[NDArray[np.bool_]], specs: list[KVSpec]) -> int:
    longest = min(map(len, present))
    return max(
        n
        for n in range(longest + 1)
        if n == 0
        or all(
            row[i]
            for row, spec in zip(present, specs, strict=True)
            for i in spec.blocks_read(n * spec.block_size)
        )
    )


SPECS = st.one_of(
    st.just(FULL),
    st.just(MLA(BLOCK, 8, BF16)),
    st.integers(1, 30).map(window),
    st.just(LastBlock(BLOCK, 1, 8, BF16)),
    st.just(Chunked(BLOCK, 1, 8, BF16)),
)
ROWS = st.lists(st.sampled_from([True, True, True, False]), max_size=30)


@settings(max_examples=500)
@given(st.lists(st.tuples(ROWS, SPECS), min_size=1, max_size=4))
def test_as_brute_force_finds_it(groups: list[tuple[list[bool], KVSpec]]) -> None:
    present = [np.array(row, np.bool_) for row, _ in groups]
    specs = [spec for _, spec in groups]
    assert usable_prefix(present, specs) == brute(present, specs)


def test_full_attention_takes_the_leading_run() -> None:
    assert usable_prefix([np.array([1, 1, 0, 1], np.bool_)], [FULL]) == 2


def test_a_window_forgives_a_hole_that_it_no_longer_sees() -> None:
    row = np.array([1, 0, 1, 1, 1], np.bool_)
    assert usable_prefix([row], [window(2 * BLOCK)]) == 5
    assert usable_prefix([row], [window(5 * BLOCK)]) == 1


def test_groups_agree_below_both() -> None:
    full = np.array([1, 1, 1, 1, 0], np.bool_)
    slid = np.array([0, 1, 1, 0, 1], np.bool_)
    # Full attention allows 4, where the window misses block 3; at 3 the window reads 1 and 2.
    assert usable_prefix([full, slid], [FULL, window(2 * BLOCK)]) == 3
    assert usable_prefix([slid, full], [window(2 * BLOCK), FULL]) == 3


def test_a_group_that_agreed_is_asked_again_lower_down() -> None:
    slid = np.array([1, 1, 0, 1, 1], np.bool_)
    full = np.array([1, 1, 1, 1, 0], np.bool_)
    # The window agrees to 5, full attention only to 4, where the window reads block 2 again.
    assert usable_prefix([slid, full], [window(2 * BLOCK), FULL]) == 2


def test_full_attention_is_looked_at_once() -> None:
    looks = 0

    class Counting(np.ndarray):
        def all(self, *args: object, **kwargs: object) -> np.bool_:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return np.bool_(np.asarray(self).all())

    full = np.ones(1000, np.bool_).view(Counting)
    alternating = np.arange(1000) % 2 == 0
    specs: list[KVSpec] = [FULL, window(BLOCK * 3)]
    assert usable_prefix([full, alternating], specs) == brute([full, alternating], specs)
    assert looks == 1


def test_misuse() -> None:
    row = np.ones(2, np.bool_)
    with pytest.raises(MisuseError, match="rows"):
        usable_prefix([row], [FULL, FULL])
    with pytest.raises(MisuseError, match="rows"):
        usable_prefix([], [])
    with pytest.raises(MisuseError, match="block size"):
        usable_prefix([row, row], [FULL, FullAttention(8, 1, 8, BF16)])
