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
from kvstrata.tiers.base import Tier
from kvstrata.tiers.ledger import Ints


class Looking:
    """Reads a Placement for one model. The Store's lock is held around every call."""

    def __init__(
        self, model: KVModel, placement: Placement, hbm: Tier, epoch: Callable[[], int]
    ) -> None:
        self._model = model
        self._hbm = hbm
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

    def block_ids(
        self, blocks: Blocks, count: int, num_tokens: int, start: int = 0
    ) -> dict[int, Ints]:
        """The engine's ids of the blocks from ``start`` on, by group as int64 arrays of ``count``.

        They must lie in the pool; -1 stands for a block that a group does not read when it resumes
        at ``num_tokens``. Raises LayoutError in one line.
        """
        if not isinstance(blocks, Mapping):
            raise LayoutError("blocks must map each KV group to its block ids")
        groups = range(len(self._model.groups))
        if set(blocks) != set(groups):
            raise LayoutError(f"blocks must name the groups {list(groups)}, got {list(blocks)}")
        found = {}
        for group in groups:
            ids = _ids(group, blocks[group], self._hbm.capacity(group), count)
            read = self._model.groups[group].spec.blocks_read(num_tokens)
            if (ids[max(0, read.start - start) :] < 0).any():
                raise LayoutError(
                    f"group {group} reads blocks {read.start}...{read.stop - 1}: "
                    "give each of them a block id, not -1"
                )
            found[group] = ids
        return found

    def part(
        self, prefix: Prefix, blocks: Blocks, start: int
    ) -> tuple[Symbols, dict[int, Ints], int]:
        """The head of a prefix that ``blocks`` from ``start`` on reach, its ids, and the start."""
        if not isinstance(start, int) or start < 0:
            raise MisuseError(f"start must be a block number, 0 or more, got {start!r}")
        symbols = self.symbols(prefix)
        listed = blocks.values() if isinstance(blocks, Mapping) else ()
        given = max((len(np.atleast_1d(np.asarray(ids))) for ids in listed), default=0)
        stop = min(symbols.num_blocks, start + given)
        start = min(start, stop)
        head = symbols._replace(data=symbols.data[: stop * symbols.width])
        tokens = stop * self._model.block_size
        return head, self.block_ids(blocks, stop - start, tokens, start), start

    def match(self, symbols: Symbols, path: Refs, limited: Refs) -> Match:
        """The answer for a path from ``path``."""
        placement, size = self._placement, self._model.block_size
        present = placement.present(limited)
        usable = placement.usable(limited, present)
        by_tier = {t: n * size for t, n in placement.by_tier(present, usable).items()}
        pending = usable
        why: tuple[Reason, ...] = ()
        if usable < symbols.num_blocks:
            pending = max(usable, placement.pending(limited))
            whole = usable if len(limited) == len(path) else placement.usable(path)
            why = reasons(placement, symbols, path, whole)
        return Match(usable * size, by_tier, pending * size, why)


def _ids(group: int, block_list: object, most: int, count: int) -> Ints:
    try:
        ids = np.atleast_1d(np.asarray(block_list))
    except ValueError:
        raise LayoutError(f"block ids of group {group} must be one list of numbers") from None
    if len(ids) and ids.dtype.kind not in "iu":
        raise LayoutError(f"block ids of group {group} must be whole numbers")
    if ids.ndim != 1 or len(ids) < count:
        raise LayoutError(f"group {group} has {len(ids)} block ids where {count} blocks are meant")
    ids = ids[:count].astype(np.int64)
    if len(ids) and (ids.min() < -1 or ids.max() >= most):
        raise LayoutError(
            f"block ids of group {group} must lie in 0...{most - 1}, "
            f"got {int(ids.min())}...{int(ids.max())}"
        )
    return ids
