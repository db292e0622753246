"""What kinds of KV there are, and every question whose answer depends on the kind.

A spec describes ONE layer. Nothing outside this file switches on the attention kind: whoever needs
to know asks the spec (how many bytes is a block, which blocks does a resume read, what is the worst
case for admission).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvstrata.core.dtypes import DType, dtype
from kvstrata.core.errors import ConfigError


@runtime_checkable
class KVSpec(Protocol):
    """One layer's kind of KV."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        ...

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of each tensor of one block (K and V are two, a latent is one)."""
        ...

    @property
    def replicated(self) -> bool:
        """True where every tensor-parallel rank holds the same bytes: then one copy is stored."""
        ...

    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        ...

    def blocks_read(self, num_tokens: int) -> range:
        """Indices of the blocks that a sequence resuming at ``num_tokens`` will read."""
        ...

    def max_blocks(self, num_tokens: int) -> int:
        """Worst case of blocks held at once by a sequence of so many tokens, for admission."""
        ...

    def fields(self) -> tuple[str, ...]:
        """Every property that two specs must share to exchange bytes, as text, for identity."""
        ...


def _element(kind: str, given: object) -> None:
    if not isinstance(given, DType):
        raise ConfigError(f'{kind}: dtype must be a DType, as kvstrata.dtype("bfloat16") gives it')


def _positive(kind: str, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{kind}: {name} must be a positive whole number, got {value!r}")


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens, the partial last one counted."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Multi-head or grouped-query attention: K and V of every token are read for ever.

    ``head_dim_v`` is the width of V where it differs from K's (expanded latent attention).
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        _element(type(self).__name__, self.dtype)
        _positive(
            type(self).__name__,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim if self.head_dim_v is None else self.head_dim_v,
        )

    @property
    def parts(self) -> tuple[int, ...]:
        rows = self.block_size * self.num_kv_heads
        value = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return self.dtype.nbytes(rows * self.head_dim), self.dtype.nbytes(rows * value)

    @property
    def replicated(self) -> bool:
        return False

    def block_bytes(self) -> int:
        return sum(self.parts)

    def blocks_read(self, num_tokens: int) -> range:
        return range(blocks_for(num_tokens, self.block_size))

    def max_blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def fields(self) -> tuple[str, ...]:
        value = self.head_dim if self.head_dim_v is None else self.head_dim_v
        numbers = (self.block_size, self.num_kv_heads, self.head_dim, value)
        return ("full", *map(str, numbers), self.dtype.name)


@dataclass(frozen=True, slots=True)
class SlidingWindow(FullAttention):
    """Attention that reads the last ``window`` positions only, the query's own included.

    A resume at n computes token n first, which reads positions n - window + 1 ... n: so the blocks
    that hold positions n - window + 1 ... n - 1 must be there, and none before them.
    """

    window: int = 0

    def __post_init__(self) -> None:
        # Named: a slotted dataclass is a new class, and a bare super() would still name the old.
        FullAttention.__post_init__(self)
        _positive("SlidingWindow", window=self.window)

    def blocks_read(self, num_tokens: int) -> range:
        first = max(0, num_tokens - self.window + 1)
        stop = blocks_for(num_tokens, self.block_size)
        return range(first // self.block_size if first < num_tokens else stop, stop)

    def max_blocks(self, num_tokens: int) -> int:
        # The window may begin in the middle of a block, so it can touch one block more.
        return min(
            blocks_for(num_tokens, self.block_size), blocks_for(self.window, self.block_size) + 1
        )

    def fields(self) -> tuple[str, ...]:
        return ("window", str(self.window), *FullAttention.fields(self)[1:])


@dataclass(frozen=True, slots=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one row a token, all heads
    share it.

    ``latent_dim`` counts the compressed latent and the rotary part together (512 + 64 = 576).
    """

    block_size: int
    latent_dim: int
    dtype: DType

    def __post_init__(self) -> None:
        _element("MLA", self.dtype)
        _positive("MLA", block_size=self.block_size, latent_dim=self.latent_dim)

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.dtype.nbytes(self.block_size * self.latent_dim),)

    @property
    def replicated(self) -> bool:
        return True

    def block_bytes(self) -> int:
        return self.parts[0]

    def blocks_read(self, num_tokens: int) -> range:
        return range(blocks_for(num_tokens, self.block_size))

    def max_blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def fields(self) -> tuple[str, ...]:
        return ("mla", str(self.block_size), str(self.latent_dim), self.dtype.name)


__all__ = ["MLA", "DType", "FullAttention", "KVSpec", "SlidingWindow", "blocks_for", "dtype"]
