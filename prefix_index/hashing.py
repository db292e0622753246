"""The content chain: 32-byte keys of the blocks of a prefix.

The index compares symbols themselves and needs no hash. Keys name blocks where the tree is not: on
disk, in another process, on another host. They cost 0.4 us a block, so they are computed when a
block first goes below DRAM, and once.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.core.errors import MisuseError
from kvstrata.core.keys import BlockKey, block_key
from kvstrata.prefix_index.prefix import Symbols


class KeyChain:
    """The keys of a run of symbols, computed as far as someone has asked.

    Invariants, tested by ``check()``:

    1. ``known`` holds the key of each block from the first on, no more than there are blocks.
    2. Each key is ``block_key`` of the one before it (of ``symbols.root`` for the first) and the
       block's symbol.
    """

    __slots__ = ("known", "symbols")

    def __init__(self, symbols: Symbols, known: Sequence[BlockKey] = ()) -> None:
        """``known``: keys of the first blocks if at hand, as from the chain of a shorter prefix."""
        if len(known) > symbols.num_blocks:
            raise MisuseError(f"{len(known)} known keys for {symbols.num_blocks} blocks")
        self.symbols = symbols
        self.known = list(known)

    def __len__(self) -> int:
        """Blocks, whether their keys are computed yet or not."""
        return self.symbols.num_blocks

    def keys(self, start: int = 0, stop: int | None = None) -> list[BlockKey]:
        """Keys of the blocks ``start`` to ``stop`` (exclusive; default: all).

        Computes those up to ``stop`` that are not known. MisuseError where the range is not within
        the blocks.
        """
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise MisuseError(f"keys {start} to {stop} of {len(self)} blocks")
        known = self.known
        _, width, data = self.symbols
        key = self.parent(len(known)) if len(known) < stop else BlockKey(b"")
        for at in range(len(known) * width, stop * width, width):
            key = block_key(key, data[at : at + width])
            known.append(key)
        return known[start:stop]

    def parent(self, block: int) -> BlockKey:
        """The key before that of ``block``: the root for block 0."""
        return self.keys(block - 1, block)[0] if block else BlockKey(self.symbols.root)

    def check(self) -> None:
        """Assert the class's invariants; for tests."""
        assert len(self.known) <= len(self), "invariant 1: more keys than blocks"
        fresh = KeyChain(self.symbols).keys(0, len(self.known))
        assert fresh == self.known, "invariant 2: a key is not that of its content"


def chain_keys(symbols: Symbols) -> list[BlockKey]:
    """The keys of all blocks of ``symbols``, in order."""
    return KeyChain(symbols).keys()
