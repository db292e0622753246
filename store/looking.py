"""From a prefix to an answer: symbols, path, and what each tier has of it. Mutates nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kvstrata.core.errors import LayoutError, MisuseError
from kvstrata.core.keys import root_key
from kvstrata.core.model import KVModel
from kvstrata.prefix_index.prefix import Prefix, Symbols
from kvstrata.store.answers import Blocks, Match, Reason
from kvstrata.store.placement import Placement, Refs
from kvstrata.store.reasons import reasons
from kvstrata.tiers.ledger import Ints


class Looking:
    """Reads a Placement for one model. The Store's lock is held around every call."""

    def __init__(self, model: KVModel, placement: Placement, epoch: Callable[[], int]) -> None:
        self._model = model
        self._placement = placement
        self._epoch = epoch
        self._namespace = model.namespace()

    def symbols(self, prefix: Prefix) -> Symbols:
        """The prefix's full blocks under the root of this model and epoch. Raises MisuseError."""
        if not isinstance(prefix, Prefix):
            raise MisuseError(
                f"expected a kvstrata.Prefix, got {type(prefix).__name__}: "
                "make one with Prefix.from_tokens(tokens)"
            )
        root = root_key(
            self._namespace,
            salt=prefix.salt,
            lora=prefix.lora,
            epoch=self._epoch(),
            hashed=prefix.hashed,
        )
        return prefix.symbols(root, self._model.block_size)

    def path(self, symbols: Symbols, max_tokens: int | None) -> tuple[Refs, Refs]:
        """What the index has of the symbols, all of it and what ``max_tokens`` leaves of it."""
        path = self._placement.index.match(symbols)
        if max_tokens is None:
            return path, path
        return path, path[: max(0, max_tokens) // self._model.block_size]

    def match(self, symbols: Symbols, path: Refs, limited: Refs) -> Match:
        """The answer for a path from ``path``."""
        placement, size = self._placement, self._model.block_size
        usable = placement.usable(limited)
        by_tier = {t: n * size for t, n in placement.by_tier(limited, usable).items()}
        pending = usable
        why: tuple[Reason, ...] = ()
        if usable < symbols.num_blocks:
            pending = max(usable, placement.pending(limited))
            whole = usable if len(limited) == len(path) else placement.usable(path)
            why = reasons(placement, symbols, path, whole)
        return Match(usable * size, by_tier, pending * size, why)


def block_ids(blocks: Blocks, capacities: list[int], count: int, given: int) -> dict[int, Ints]:
    """The engine's block ids by group as int64 arrays of ``count``.

    ``capacities[g]`` is the number of blocks that group g has in HBM, ``given`` how many ids must
    be there. Raises LayoutError, in one line, for anything that cannot be meant.
    """
    if not isinstance(blocks, Mapping):
        raise LayoutError("blocks must map each KV group to its block ids")
    if set(blocks) != set(range(len(capacities))):
        known = list(range(len(capacities)))
        raise LayoutError(f"blocks must name the groups {known}, got {sorted(blocks)}")
    return {g: _ids(g, blocks[g], most, given)[:count] for g, most in enumerate(capacities)}


def _ids(group: int, block_list: object, most: int, given: int) -> Ints:
    ids = np.atleast_1d(np.asarray(block_list))
    if len(ids) and ids.dtype.kind not in "iu":
        raise LayoutError(f"block ids of group {group} must be whole numbers")
    if ids.ndim != 1 or len(ids) < given:
        raise LayoutError(f"group {group} has {len(ids)} block ids where {given} blocks are meant")
    ids = ids.astype(np.int64)
    if len(ids) and (ids.min() < -1 or ids.max() >= most):
        raise LayoutError(
            f"block ids of group {group} must lie in 0...{most - 1}, "
            f"got {int(ids.min())}...{int(ids.max())}"
        )
    return ids
