"""One sequence: what the store knew of it is in place, what it adds can be stored, or swapped."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from kvstrata.core.errors import ClosedError, MisuseError
from kvstrata.core.model import KVModel
from kvstrata.core.spec import blocks_for
from kvstrata.engines.transformers.cache import PagedCache
from kvstrata.engines.transformers.loans import Loans
from kvstrata.engines.transformers.pool import KVPool
from kvstrata.prefix_index.prefix import Prefix
from kvstrata.prefix_index.tokens import TokenIds, token_ids
from kvstrata.store.answers import Hit, Sequence
from kvstrata.store.store import Store
from kvstrata.store.swap import Swapped
from kvstrata.transfer.move import ReadyEvent, Ticket


class PagedSequence:
    """A sequence of one request, opened by ``KVStrata.sequence``; a context manager.

    Invariant 1: the cache holds KV of the first ``cache.get_seq_length()`` tokens, of which the
    first ``cached`` came from the store and need not be computed.
    Invariant 2: blocks below ``_stored`` are in the store or on the way into it, unchanged.
    """

    def __init__(
        self,
        model: KVModel,
        store: Store,
        pool: KVPool,
        loans: Loans,
        tokens: Any,
        salt: bytes,
        lora: bytes | str | None,
        reserve: int,
    ) -> None:
        """Look ``tokens`` up and load what is there, never the last token; waits for it."""
        self._tokens = token_ids(tokens)
        self._prefix = Prefix.from_tokens(self._tokens, salt, lora)
        if not len(self._tokens):
            raise MisuseError("a sequence needs at least one token: its KV depends on it")
        self._model, self._store, self._pool, self._loans = model, store, pool, loans
        self._reserve = reserve
        self._swapped: Swapped | None = None
        self._length = 0
        self._closed = False
        self.cache = PagedCache(pool, self._before_rewriting)
        self.cached = 0
        """Tokens that the store had, in whole blocks."""
        loans.reap()
        try:
            self.cached = self._load()
        except BaseException:
            self.close()
            raise
        self.cache.resume(self.cached, self._first_held(self.cached))
        self._stored = self.cached // model.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._tokens)

    def save(self, tokens: Any = None) -> Ticket | None:
        """Store the whole blocks that the store has not got yet; returns while they are copied.

        ``tokens`` are all tokens of the sequence so far, the prompt first, as ``generate`` returns
        them; by default the prompt. Those without KV (the last one that was generated) are not
        stored. None where there is nothing new. MisuseError where they begin with another prompt.
        """
        self._usable()
        known = self._all_tokens(tokens)
        size = self._model.block_size
        start, stop = self._stored, min(len(known), self.cache.get_seq_length()) // size
        if stop <= start:
            return None
        ids = {pages.group: pages.ids[start:stop] for pages in self.cache.pages}
        prefix = self._named(known[: stop * size])
        ticket = self._store.save(prefix, ids, start=start, ready=self._now())
        self._loans.reading(ticket, ids)
        self._loans.keep(prefix, ids, start)
        self._stored = stop
        return ticket

    def swap_out(self, tokens: Any = None) -> bool:
        """Move the sequence out of the pool, its partial last block included, and free its blocks.

        ``tokens`` as in ``save``; they must cover every whole block. Waits for the copy. False, and
        nothing has changed, where the tiers below have no room. Until ``swap_in`` the cache refuses
        to be used.
        """
        self._usable()
        known = self._all_tokens(tokens)
        length, size = self.cache.get_seq_length(), self._model.block_size
        if len(known) < length // size * size:
            raise MisuseError(
                f"{len(known)} tokens are known and {length} have KV: "
                "pass all tokens of the sequence to swap_out"
            )
        count = blocks_for(length, size)
        first = self.cache.first_held
        ids = {
            pages.group: [
                block if place >= first[pages.group] else -1
                for place, block in enumerate(pages.ids[:count])
            ]
            for pages in self.cache.pages
        }
        sequence = Sequence(self._named(known), length, ids)
        swapped = self._store.swap_out(sequence, ready=self._now())
        completion = self._store.wait(swapped.ticket)
        if completion is None or completion.tokens < length:
            self._store.discard(swapped)
            return False
        self._swapped, self._length = swapped, length
        self.cache.park("it is swapped out: call swap_in first")
        return True

    def swap_in(self) -> int:
        """Bring a swapped-out sequence back into blocks of its own; waits. Returns tokens in place.

        Fewer than were swapped out where a tier below has lost some: run the model again from there
        (``generate`` with all tokens does so by itself). MisuseError, and the sequence stays out,
        where the pool has no room.
        """
        if self._swapped is None:
            raise MisuseError("the sequence is not swapped out")
        size = self._model.block_size
        self._hold(self._length)
        count = blocks_for(self._length, size)
        ids = {pages.group: pages.ids[:count] for pages in self.cache.pages}
        ticket = self._store.swap_in(self._swapped, ids, ready=self._now())
        completion = self._store.wait(ticket)
        self._swapped = None
        got = completion.tokens if completion is not None else 0
        self.cache.unpark()
        self.cache.resume(got, self._first_held(got))
        self._stored = min(self._stored, got // size)
        return got

    def close(self) -> None:
        """Give the blocks back; saves under way finish by themselves. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self._swapped is not None:
            with suppress(ClosedError):  # a closed store has forgotten it already
                self._store.discard(self._swapped)
            self._swapped = None
        self.cache.park("its sequence is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _load(self) -> int:
        most = self.num_tokens - 1
        match = self._store.match(self._prefix, max_tokens=most)
        if match.pending > match.tokens:
            # The request before is still being saved: that ends sooner than computing it again.
            self._loans.drain()
        with self._store.lookup(self._prefix, max_tokens=most) as hit:
            if self._follow(hit):
                return self._fill(hit)
        # Not under the lease, which would keep the pool from taking its blocks back.
        self._hold(self.num_tokens)
        with self._store.lookup(self._prefix, max_tokens=most) as hit:
            return self._fill(hit) if hit.tokens else 0

    def _follow(self, hit: Hit) -> bool:
        """Use the blocks that lie in the pool already, where they are one run with room behind."""
        for pages in self.cache.pages:
            ids = hit.resident[pages.group].tolist() if hit.tokens and hit.resident else []
            whole = min(ids, default=-1) >= 0 and ids == list(range(ids[0], ids[0] + len(ids)))
            tokens = self.num_tokens + self._reserve
            if not whole or not (pages.follow(ids, tokens) or pages.follow(ids, self.num_tokens)):
                for taken in self.cache.pages:
                    taken.release()
                return False
        return True

    def _fill(self, hit: Hit) -> int:
        count = hit.tokens // self._model.block_size
        ids = {pages.group: pages.ids[:count] for pages in self.cache.pages}
        completion = self._store.wait(self._store.load(hit, ids, ready=self._now()))
        got = completion.tokens if completion is not None else 0
        for pages in self.cache.pages:
            pages.own(got)
        return got

    def _now(self) -> ReadyEvent | None:
        """After all that was launched so far, which may still read or write the blocks meant."""
        device = self._pool.layers[0].keys.device
        if device.type != "cuda":
            return None
        event: ReadyEvent = torch.cuda.current_stream(device).record_event()
        return event

    def _hold(self, tokens: int) -> None:
        # Headroom keeps a growing sequence in one run; it is a wish, the tokens are a need.
        for pages in self.cache.pages:
            pages.hold(tokens, wish=tokens + self._reserve)

    def _first_held(self, tokens: int) -> tuple[int, ...]:
        return tuple(group.spec.blocks_read(tokens).start for group in self._model.groups)

    def _all_tokens(self, tokens: Any) -> TokenIds:
        known = self._tokens if tokens is None else token_ids(tokens)
        if not np.array_equal(known[: self.num_tokens], self._tokens):
            raise MisuseError(
                "these tokens do not begin with the prompt of the sequence: "
                "pass the prompt and what was generated, together"
            )
        return known

    def _named(self, tokens: TokenIds) -> Prefix:
        return Prefix.from_tokens(tokens, self._prefix.salt, self._prefix.lora)

    def _before_rewriting(self, tokens: int) -> None:
        for pages in self.cache.pages:
            pages.own(tokens)
        self._stored = min(self._stored, tokens // self._model.block_size)

    def _usable(self) -> None:
        if self._closed:
            raise ClosedError("the sequence is closed")
        if self._swapped is not None:
            raise MisuseError("the sequence is swapped out: call swap_in first")
