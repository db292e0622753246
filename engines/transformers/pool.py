"""The paged pool of one model, seen as attention sees it: rows of heads, token after token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.core.errors import MisuseError
from kvstrata.core.model import KVModel
from kvstrata.core.spec import FullAttention, SlidingWindow, blocks_for
from kvstrata.tiers.pool import BlockPool, Ids


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's K and V, ``[num_blocks * block_size, heads, dim]`` each.

    Block b owns rows ``b * block_size ... (b + 1) * block_size - 1``.
    """

    group: int
    window: int | None
    keys: Tensor
    values: Tensor


class KVPool:
    """All blocks of all KV groups, and how each layer of the model reads and writes them.

    Invariant 1: a view shares the memory of the registered tensor, it is never a copy.
    Invariant 2: every sequence holds its blocks through ``Pages``, which gives them back once.
    """

    def __init__(
        self, model: KVModel, tensors: Sequence[Sequence[Tensor]], blocks: Sequence[BlockPool]
    ) -> None:
        """``tensors[g]``: one K and one V tensor a layer (``part_per_tensor``); ``blocks[g]``: ids.

        Layers are named ``layers.n`` as by ``kv_model``, n being the place in the cache.
        """
        self.block_size = model.block_size
        self.blocks = tuple(blocks)
        self.reclaim: Callable[[int], bool] = lambda count: False
        """Frees so many blocks if it can when a group is full; True if another try is worth it."""
        views: dict[int, LayerView] = {}
        for index, group in enumerate(model.groups):
            spec = group.spec
            if not isinstance(spec, FullAttention):
                raise MisuseError(f"the Transformers cache holds keys and values, not {spec!r}")
            window = spec.window if isinstance(spec, SlidingWindow) else None
            for place, name in enumerate(group.layers):
                key, value = tensors[index][2 * place : 2 * place + 2]
                value_dim = spec.head_dim if spec.head_dim_v is None else spec.head_dim_v
                views[int(name.rpartition(".")[2])] = LayerView(
                    index,
                    window,
                    _rows(key, spec.dtype.name, spec.num_kv_heads, spec.head_dim),
                    _rows(value, spec.dtype.name, spec.num_kv_heads, value_dim),
                )
        self.layers = tuple(views[index] for index in range(len(views)))

    def touch(self) -> None:
        """Write zeros everywhere; for a pool that holds nothing yet.

        On the host, memory costs a page fault when it is first written to: for the first load of a
        long prefix that was four times the load itself. It belongs to opening, not to a request.
        """
        for view in self.layers:
            if view.keys.device.type == "cpu":
                view.keys.zero_()
                view.values.zero_()

    def pages(self) -> tuple[Pages, ...]:
        """Empty pages for a new sequence, one for each group."""
        return tuple(Pages(self, group) for group in range(len(self.blocks)))


class Pages:
    """The blocks of one sequence in one group, in the order of its tokens.

    Invariant 1: ``first`` is the first row of the run where the ids ascend one by one, else None.
    Invariant 2: ``epoch`` changes whenever blocks that held tokens are replaced, so that whoever
    copied out of them knows that the copy is stale.
    """

    __slots__ = ("_pool", "_slots", "epoch", "first", "group", "ids")

    def __init__(self, pool: KVPool, group: int) -> None:
        self._pool = pool
        self._slots: tuple[int, int, Tensor] | None = None
        self.group = group
        self.ids: list[int] = []
        self.first: int | None = 0
        self.epoch = 0

    def hold(self, tokens: int, wish: int = 0) -> None:
        """Own blocks for so many tokens at least.

        MisuseError, and nothing is taken, where so many are not free. Where new ones are needed,
        take enough for ``wish`` tokens if so many are free. New blocks follow the old ones where
        the pool can give such, which keeps attention copyless.
        """
        size = self._pool.block_size
        missing = blocks_for(tokens, size) - len(self.ids)
        if missing <= 0:
            return
        wanted = blocks_for(wish, size) - len(self.ids)
        found = self._allocate(wanted) if wanted > missing else None
        while found is None:
            found = self._allocate(missing)
            if found is None and not self._pool.reclaim(missing):
                raise MisuseError(
                    f"the KV pool has no room for {tokens} tokens: raise pool_tokens, "
                    "or close or swap out another sequence"
                )
        self.replace([*self.ids, *found.tolist()], moved=False)

    def replace(self, ids: list[int], *, moved: bool = True) -> None:
        """Take these ids over; ``moved`` tells that the tokens have come to other blocks."""
        self.ids = ids
        self._slots = None
        self.epoch += moved
        first = ids[0] if ids else 0
        run = all(block == first + place for place, block in enumerate(ids))
        self.first = first * self._pool.block_size if run else None

    def follow(self, ids: list[int], tokens: int) -> bool:
        """Share ``ids``, a run of somebody else's, and own what ``tokens`` need right behind it.

        False, and nothing has changed, where the blocks behind them are not free. For empty pages.
        """
        blocks = self._pool.blocks[self.group]
        behind = blocks_for(tokens, self._pool.block_size) - len(ids)
        own = blocks.allocate(behind, after=ids[-1])
        if own is None:
            return False
        whole = [*ids, *own.tolist()]
        if whole != list(range(ids[0], ids[0] + len(whole))):
            blocks.release(own)
            return False
        blocks.share(ids)
        self.replace(whole)
        return True

    def own(self, tokens: int) -> None:
        """Before tokens from ``tokens`` on are written: blocks that others hold too are replaced.

        Copy on write: what the first such block holds before ``tokens`` is copied, the rest is
        about to be written. MisuseError, and nothing has changed, where the pool has no room.
        """
        blocks, size = self._pool.blocks[self.group], self._pool.block_size
        first = tokens // size
        shared = [n for n in range(first, len(self.ids)) if blocks.is_shared(self.ids[n])]
        if not shared:
            return
        fresh = Pages(self._pool, self.group)
        fresh.hold(len(shared) * size)
        old = [self.ids[n] for n in shared]
        ids = list(self.ids)
        for n, block in zip(shared, fresh.ids, strict=True):
            ids[n] = block
        if shared[0] == first and tokens % size:
            self._copy(self.ids[first], ids[first])
        self.replace(ids)
        blocks.release(old)

    def _copy(self, source: int, target: int) -> None:
        size = self._pool.block_size
        for view in self._pool.layers:
            if view.group == self.group:
                for part in (view.keys, view.values):
                    part.narrow(0, target * size, size).copy_(part.narrow(0, source * size, size))

    def take(self) -> list[int]:
        """Hand the ids to the caller, who gives them back to the pool; nothing is left here."""
        ids = self.ids
        self.replace([])
        return ids

    def release(self) -> None:
        """Give all blocks back to the pool. Twice is fine."""
        if ids := self.take():
            self._pool.blocks[self.group].release(ids)

    def _allocate(self, n: int) -> Ids | None:
        blocks = self._pool.blocks[self.group]
        return blocks.allocate(n, after=self.ids[-1] if self.ids else None)

    def slots(self, start: int, stop: int) -> Tensor:
        """Rows of the tokens start ... stop - 1 in the pool, int64 ``[stop - start]``."""
        if self._slots is None or self._slots[:2] != (start, stop):
            size = self._pool.block_size
            places = torch.arange(start, stop)
            blocks = torch.tensor(self.ids)[places // size]
            # Every layer of a forward pass asks for the same range.
            slots = (blocks * size + places % size).to(self._pool.layers[0].keys.device)
            self._slots = (start, stop, slots)
        return self._slots[2]


def _rows(tensor: Tensor, kind: str, heads: int, dim: int) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.data_ptr() != tensor.data_ptr():
        raise MisuseError("the pool's tensors must be contiguous")
    return flat.view(getattr(torch, kind)).view(-1, heads, dim)
