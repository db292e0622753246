"""A Transformers cache whose keys and values lie in the paged pool.

Where a sequence's blocks are one run, attention gets views of the pool: nothing is concatenated and
nothing copied but the new tokens, into their place. Where they are not, attention gets a dense
working copy beside the pool, appended to as the sequence grows: correct, and slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvstrata.core.errors import MisuseError
from kvstrata.engines.transformers.pool import KVPool, LayerView, Pages

_ONE = (
    "the kvstrata cache holds one sequence, this call brings {}: "
    "run one kv.sequence() for each, without beams or num_return_sequences"
)


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of one sequence.

    Invariant 1: tokens 0 ... length - 1 lie in the pool, token t in row ``pages.slots(t, t + 1)``.
    Invariant 2: a window bounds what attention is given, never what is kept: the prefix is worth
    storing, and ``crop`` can always go back.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, view: LayerView, pages: Pages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.is_sliding = view.window is not None
        self.length = 0
        self._view = view
        self._pages = pages
        self._copy: _Copy | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy here: the pool was there before the sequence."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write n new tokens ``[1, heads, n, dim]`` and return what attention reads.

        Returns keys and values ``[1, heads, tokens, dim]``: all tokens, or those the window can
        see. They are views of the pool where its blocks are one run, so they are valid until
        the next ``crop``. MisuseError for more than one sequence or a full pool.
        """
        if key_states.shape[0] != 1:
            raise MisuseError(_ONE.format(f"a batch of {key_states.shape[0]}"))
        start, stop = self.length, self.length + key_states.shape[2]
        self._pages.hold(stop)
        # Detached: the pool outlives every graph, a training forward must not grow into it.
        keys = key_states.detach()[0].transpose(0, 1)
        values = value_states.detach()[0].transpose(0, 1)
        begin = start - self._seen(start)
        if (first := self._pages.first) is not None:
            self._copy = None
            at, count = first + begin, stop - begin
            self._view.keys.narrow(0, first + start, stop - start).copy_(keys)
            self._view.values.narrow(0, first + start, stop - start).copy_(values)
            rows = self._view.keys.narrow(0, at, count), self._view.values.narrow(0, at, count)
        else:
            slots = self._pages.slots(start, stop)
            self._view.keys.index_copy_(0, slots, keys)
            self._view.values.index_copy_(0, slots, values)
            rows = self._gathered(start, stop, begin, keys, values)
        self.length = stop
        self.keys, self.values = (part.transpose(0, 1).unsqueeze(0) for part in rows)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens in place."""
        return self.length

    def get_max_length(self) -> int:
        """-1, no maximum: a window bounds what is read, and the pool says when it is full."""
        return -1

    def get_max_cache_shape(self) -> int:
        """What earlier 5.x releases call ``get_max_length``."""
        return self.get_max_length()

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(tokens that ``update`` will return for so many new ones, position of the first)."""
        # The first 5.x releases pass the positions instead of their number.
        new = query_length if isinstance(query_length, int) else len(query_length)
        seen = self._seen(self.length)
        return seen + new, self.length - seen

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; a positive number is the length to keep.

        Blocks stay with the sequence, and the tokens that remain are untouched.
        """
        if tokens_to_remove < 0:
            self.length = max(0, self.length + tokens_to_remove)
        elif tokens_to_remove > 0:
            self.length = min(self.length, tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens; blocks stay with the sequence."""
        self.length = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """MisuseError: one sequence has no beams."""
        raise MisuseError(_ONE.format("beams"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """MisuseError for more than one."""
        if repeats != 1:
            raise MisuseError(_ONE.format(f"{repeats} copies"))

    def batch_select_indices(self, indices: Tensor) -> None:
        """MisuseError: there is nothing to choose from."""
        raise MisuseError(_ONE.format("a choice among several"))

    def offload(self) -> None:
        """Nothing: moving KV between tiers is the Store's."""

    def prefetch(self) -> None:
        """Nothing: moving KV between tiers is the Store's."""

    def _seen(self, past: int) -> int:
        # A query sees itself and window - 1 tokens before it: the mask counts the same way.
        window = self._view.window
        return past if window is None else min(past, window - 1)

    def _gathered(
        self, start: int, stop: int, begin: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        copy = self._copy
        if copy is None or copy.epoch != self._pages.epoch or copy.length < start:
            slots = self._pages.slots(0, start)
            copy = _Copy(self._pages.epoch)
            keys_then, values_then = self._view.keys, self._view.values
            copy.put(0, keys_then.index_select(0, slots), values_then.index_select(0, slots))
            self._copy = copy
        copy.put(start, keys, values)
        return copy.keys[begin:stop], copy.values[begin:stop]


class _Copy:
    """A dense copy of a sequence whose blocks are scattered: ``keys[t]``, ``values[t]``.

    Invariant 1: rows 0 ... length - 1 equal the pool's, while ``epoch`` is that of the pages.
    """

    __slots__ = ("epoch", "keys", "length", "values")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.length = 0
        self.keys = self.values = torch.empty(0)

    def put(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Rows start ... are these now, and nothing follows them; grows by half when full."""
        stop = start + len(keys)
        if stop > len(self.keys) or not start:
            room = stop + stop // 2
            self.keys = _grown(self.keys, keys, start, room)
            self.values = _grown(self.values, values, start, room)
        self.keys[start:stop] = keys
        self.values[start:stop] = values
        self.length = stop


def _grown(old: Tensor, like: Tensor, kept: int, room: int) -> Tensor:
    new = like.new_empty((room, *like.shape[1:]))
    if kept:
        new[:kept] = old[:kept]
    return new


class PagedCache(Cache):
    """The cache of one sequence: pass it to ``generate`` or ``forward`` like any other.

    ``rewriting`` is called with a number of tokens before tokens from there on may be written
    again, so that blocks which others read or share can be replaced.
    """

    def __init__(self, pool: KVPool, rewriting: Callable[[int], None] | None = None) -> None:
        self.pages = pool.pages()
        self.views = pool.layers
        self.first_held = (0,) * len(self.pages)
        """By group, the first block that holds KV: a resumed window never had those before it."""
        self._least = 0
        self._parked = ""
        self._rewriting = rewriting
        self._paged = [PagedLayer(view, self.pages[view.group]) for view in pool.layers]
        super().__init__(layers=list(self._paged))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """``PagedLayer.update`` of one layer. MisuseError while the sequence has no blocks."""
        if self._parked:
            raise MisuseError(f"this cache cannot be used, {self._parked}")
        return self._paged[layer_idx].update(key_states, value_states, *args, **kwargs)

    def resume(self, tokens: int, first_held: tuple[int, ...] | None = None) -> None:
        """The blocks hold so many tokens already; the next forward brings the ones after them.

        ``first_held[g]`` is the first block of group g that does.
        """
        self.first_held = first_held or (0,) * len(self.pages)
        self._least = tokens if any(self.first_held) else 0
        for layer in self._paged:
            layer.length = tokens

    def park(self, reason: str) -> None:
        """Give all blocks back; until ``unpark`` every update is refused with ``reason``."""
        self._parked = reason
        for pages in self.pages:
            pages.release()

    def unpark(self) -> None:
        """Take updates again."""
        self._parked = ""

    def crop(self, *args: int, **kwargs: int) -> None:
        """Forget tokens at the end: a negative number removes so many, a positive one is the rest.

        MisuseError where a window would have to look back before what it was resumed with.
        """
        (count,) = (*args, *kwargs.values())
        length = self.get_seq_length()
        left = max(0, length + count) if count <= 0 else min(length, count)
        if left < self._least:
            raise MisuseError(
                f"cannot go back to {left} tokens: the window was resumed at {self._least}; "
                "open the sequence anew with the shorter prompt"
            )
        self._before_rewriting(left)
        super().crop(count)

    def reset(self) -> None:
        """Forget all tokens; the blocks stay with the sequence."""
        self._before_rewriting(0)
        self.first_held, self._least = (0,) * len(self.pages), 0
        for layer in self._paged:
            layer.reset()

    def _before_rewriting(self, tokens: int) -> None:
        if self._rewriting is not None:
            self._rewriting(tokens)
