"""Element types of a KV cache, by name: kvstrata moves bytes and never converts them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvstrata.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its canonical name and its width in bits."""

    name: str
    bits: int

    def nbytes(self, elements: int) -> int:
        """Bytes of so many elements, packed; half bytes (fp4, int4) round up once at the end."""
        return -(-elements * self.bits // 8)

    @property
    def itemsize(self) -> Fraction:
        """Bytes of one element; a fraction for the four-bit types."""
        return Fraction(self.bits, 8)


_BITS = {
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
_ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "float4_e2m1fn_x2",
    "nvfp4": "float4_e2m1fn_x2",
}


def dtype(name: object) -> DType:
    """The DType called so; accepts ``torch.bfloat16`` and the usual short names too.

    Raises ConfigError for a name that is not known.
    """
    text = str(name).removeprefix("torch.")
    text = _ALIASES.get(text, text)
    if text not in _BITS:
        known = ", ".join(sorted(_BITS))
        raise ConfigError(f"unknown element type {name!r}; use one of {known}")
    return DType(text, _BITS[text])
