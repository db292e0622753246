"""The kinds of KV, against definitions that count positions one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import ConfigError
from kvstrata.core.spec import MLA, FullAttention, KVSpec, SlidingWindow, blocks_for, dtype

BF16, FP4 = dtype("bfloat16"), dtype("fp4")
SIZES = st.integers(1, 9)
TOKENS = st.integers(0, 120)
WINDOWS = st.integers(1, 40)


def window(block_size: int, length: int) -> SlidingWindow:
    return SlidingWindow(block_size, 2, 4, BF16, window=length)


def holding(positions: range, block_size: int) -> set[int]:
    return {position // block_size for position in positions}


def test_k_and_v_are_two_parts_and_a_latent_is_one() -> None:
    assert FullAttention(16, 8, 128, BF16).parts == (32768, 32768)
    assert FullAttention(16, 8, 192, BF16, head_dim_v=128).parts == (49152, 32768)
    assert window(16, 99).parts == (256, 256)
    assert MLA(64, 576, BF16).parts == (73728,)


def test_four_bit_elements_are_packed_over_the_whole_part() -> None:
    assert FullAttention(1, 1, 3, FP4).parts == (2, 2)
    assert FullAttention(3, 1, 3, FP4).parts == (5, 5)


SPECS: list[KVSpec] = [
    FullAttention(4, 2, 4, BF16),
    FullAttention(4, 2, 4, FP4, head_dim_v=7),
    window(4, 6),
    MLA(4, 12, BF16),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.fields()[0])
def test_a_block_is_its_parts(spec: KVSpec) -> None:
    assert isinstance(spec, KVSpec)
    assert spec.block_bytes() == sum(spec.parts) and min(spec.parts) > 0
    assert all(isinstance(text, str) and text for text in spec.fields())


def test_only_a_latent_is_the_same_on_every_rank() -> None:
    assert [spec.replicated for spec in SPECS] == [False, False, False, True]


def test_no_two_kinds_describe_themselves_alike() -> None:
    assert len({spec.fields() for spec in SPECS}) == len(SPECS)
    assert FullAttention(4, 2, 4, BF16).fields()[0] != window(4, 6).fields()[0]


@given(tokens=TOKENS, block_size=SIZES)
def test_blocks_for_counts_the_partial_last_one(tokens: int, block_size: int) -> None:
    assert blocks_for(tokens, block_size) == len(holding(range(tokens), block_size))


@given(tokens=TOKENS, block_size=SIZES)
def test_full_attention_and_a_latent_read_everything(tokens: int, block_size: int) -> None:
    every = sorted(holding(range(tokens), block_size))
    for spec in (FullAttention(block_size, 2, 4, BF16), MLA(block_size, 12, BF16)):
        assert list(spec.blocks_read(tokens)) == every
        assert spec.max_blocks(tokens) == len(every)


@given(tokens=TOKENS, block_size=SIZES, length=WINDOWS)
def test_a_window_reads_the_blocks_that_hold_its_positions(
    tokens: int, block_size: int, length: int
) -> None:
    """A resume at n computes token n, which reads positions n - window + 1 ... n."""
    stored = range(max(0, tokens - length + 1), tokens)  # position n itself is being computed
    assert list(window(block_size, length).blocks_read(tokens)) == sorted(
        holding(stored, block_size)
    )


def test_a_window_of_one_reads_nothing() -> None:
    assert [len(window(4, 1).blocks_read(n)) for n in range(20)] == [0] * 20


@given(block_size=SIZES, length=WINDOWS)
def test_what_is_read_ends_at_the_resume_and_never_begins_earlier_than_before(
    block_size: int, length: int
) -> None:
    """``usable_prefix`` relies on it."""
    spec = window(block_size, length)
    reads = [spec.blocks_read(blocks * block_size) for blocks in range(30)]
    assert [read.stop for read in reads] == list(range(30))
    assert all(a.start <= b.start for a, b in zip(reads, reads[1:], strict=False))


@given(tokens=TOKENS, block_size=SIZES, length=WINDOWS)
def test_max_blocks_is_the_worst_case_and_at_most_one_more(
    tokens: int, block_size: int, length: int
) -> None:
    spec = window(block_size, length)
    worst = max(len(holding(range(max(0, n - length), n), block_size)) for n in range(tokens + 1))
    assert worst <= spec.max_blocks(tokens) <= worst + 1
    assert all(len(spec.blocks_read(n)) <= spec.max_blocks(tokens) for n in range(tokens + 1))


@pytest.mark.parametrize("bad", [0, -1, 2.0, "4", True, None])
@pytest.mark.parametrize("name", ["block_size", "num_kv_heads", "head_dim", "head_dim_v", "window"])
def test_a_number_that_cannot_be_is_refused_by_name(name: str, bad: object) -> None:
    if name == "head_dim_v" and bad is None:
        return  # the same as K
    numbers: dict[str, object] = {"block_size": 4, "num_kv_heads": 2, "head_dim": 4, "window": 6}
    with pytest.raises(ConfigError, match=f"SlidingWindow|FullAttention.*{name}") as refused:
        SlidingWindow(dtype=BF16, **{**numbers, name: bad})  # type: ignore[arg-type]
    assert name in str(refused.value) and repr(bad) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["block_size", "latent_dim"])
def test_a_latent_of_nothing_is_refused(name: str) -> None:
    numbers = {"block_size": 4, "latent_dim": 12, name: 0}
    with pytest.raises(ConfigError, match=f"MLA: {name} must be a positive whole number, got 0"):
        MLA(dtype=BF16, **numbers)


def test_a_window_must_be_given() -> None:
    with pytest.raises(ConfigError, match="window must be a positive whole number, got 0"):
        SlidingWindow(4, 2, 4, BF16)


@pytest.mark.parametrize("given", ["float32", None, 4])
def test_an_element_type_by_name_says_what_to_use(given: object) -> None:
    for make in (
        lambda: FullAttention(16, 2, 64, given),  # type: ignore[arg-type]
        lambda: SlidingWindow(16, 2, 64, given, window=8),  # type: ignore[arg-type]
        lambda: MLA(16, 576, given),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match="kvstrata.dtype"):
            make()
