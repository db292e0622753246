"""Element types."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.dtypes import DType, dtype
from kvstrata.core.errors import ConfigError

BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "float4_e2m1fn_x2": 4,
    "int4": 4,
}
SHORT = {
    "fp32": "float32",
    "float": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "float4_e2m1fn_x2",
    "nvfp4": "float4_e2m1fn_x2",
}


class Torch:
    """Prints itself as torch's element types do."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


@pytest.mark.parametrize("name", BITS)
def test_a_type_is_known_by_its_name_and_as_torch_prints_it(name: str) -> None:
    assert dtype(name) == dtype(f"torch.{name}") == dtype(Torch(name)) == DType(name, BITS[name])
    assert dtype(name).itemsize == Fraction(BITS[name], 8)


@pytest.mark.parametrize("short", SHORT)
def test_a_short_name_means_the_canonical_type(short: str) -> None:
    assert dtype(short) is not None and dtype(short) == dtype(SHORT[short])
    assert dtype(short).name == SHORT[short]


@given(name=st.sampled_from(sorted(BITS)), elements=st.integers(0, 10**9))
def test_bytes_hold_all_bits_and_less_than_one_byte_more(name: str, elements: int) -> None:
    kind = dtype(name)
    bits = 8 * kind.nbytes(elements) - elements * kind.bits
    assert 0 <= bits < 8
    assert kind.nbytes(2 * elements) == 2 * elements * kind.itemsize


def test_half_bytes_round_up_once_at_the_end() -> None:
    assert [dtype("int4").nbytes(n) for n in range(6)] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("name", ["float64", "", "torch", "torch.", "BFLOAT16", "a\nb", None, 16])
def test_an_unknown_type_is_refused_with_the_known_ones(name: object) -> None:
    with pytest.raises(ConfigError, match="unknown element type") as refused:
        dtype(name)
    assert all(known in str(refused.value) for known in BITS)


def test_the_refusal_is_one_line_whatever_the_name() -> None:
    with pytest.raises(ConfigError) as refused:
        dtype("a\nb")
    assert "\n" not in str(refused.value)
