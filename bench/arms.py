"""The ways a prompt's KV can come about, each timed from the call to the first token.

    recompute   plain Transformers: a DynamicCache, the whole prompt
    floor       the uncached tail alone, its KV in place before the clock starts
    dram        lookup, load from DRAM, tail
    nvme        the same with DRAM emptied before

What the clock must not see (making room, warming up, checking bytes, the rest of the answer)
happens before it starts or after it stops.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from kvstrata.bench.models import LoadedModel
from kvstrata.core.config import DramConfig, HbmConfig, NvmeConfig, Size, StoreConfig
from kvstrata.engines.transformers import KVStrata, kv_model
from kvstrata.engines.transformers.model import cache_keyword
from kvstrata.engines.transformers.sequence import PagedSequence
from kvstrata.prefix_index.prefix import Prefix

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """What one arm gave: seconds to the first token, the tokens, and what came from the store.

    ``blocks`` are sha256 digests of the loaded blocks, in order; empty for nothing loaded.
    """

    seconds: float
    tokens: list[int]
    cached: int = 0
    blocks: list[str] = field(default_factory=list)


class Runner:
    """Runs a model token by token, greedily. Mutates nothing but the caches it is given."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.model: Any = loaded.model
        self.config = loaded.model.config.get_text_config(decoder=True)
        self._keyword = cache_keyword(self.model)
        names = inspect.signature(self.model.forward).parameters
        # generate() asks for the last position's logits only, and so do all arms.
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    def step(self, tokens: torch.Tensor, cache: Any) -> int:
        """Push ``tokens`` ``[1, n]`` through the model; the likeliest next one."""
        out = self.model(input_ids=tokens, use_cache=True, **{self._keyword: cache}, **self._last)
        return int(out.logits[0, -1].argmax())

    def timed(self, make: Callable[[], tuple[int, Any]], more: int) -> tuple[float, list[int], Any]:
        """Time ``make``, which returns (first token, its cache), then decode ``more`` tokens."""
        gc.collect()
        gc.disable()
        try:
            with torch.inference_mode():
                begun = time.perf_counter()
                token, cache = make()
                seconds = time.perf_counter() - begun
        finally:
            gc.enable()
        return seconds, self.decode(token, cache, more), cache

    def decode(self, token: int, cache: Any, more: int) -> list[int]:
        """``token`` and ``more`` greedy ones after it."""
        found = [token]
        with torch.inference_mode():
            for _ in range(more):
                found.append(self.step(torch.tensor([found[-1:]]), cache))
        return found

    def recompute(self, prompt: torch.Tensor, more: int) -> Answer:
        """Plain Transformers on the whole prompt ``[1, n]``."""

        def make() -> tuple[int, Any]:
            cache = DynamicCache(config=self.config)
            return self.step(prompt, cache), cache

        seconds, tokens, _ = self.timed(make, more)
        return Answer(seconds, tokens)


class Shop:
    """A runner with a store on a directory, which it opens when needed and can close.

    ``salt`` keeps runs on one directory apart, so that the first request is a cold one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        directory: str,
        salt: bytes,
        weights: bytes,
        tokens: int,
        requests: int = 1,
    ) -> None:
        """``tokens``: the longest sequence; ``requests``: how many such are to be kept.

        ``weights`` is the ``weights_digest`` of the model.
        """
        self.runner = Runner(loaded)
        self.salt = salt
        self.open_seconds: list[float] = []
        self._loaded = loaded
        self._weights = weights
        self._directory = directory
        self._tokens = tokens
        described = kv_model(loaded.model, BLOCK_SIZE, weights)
        self.bytes_per_token = described.bytes_per_token()
        self._room = int(2 * requests * tokens * self.bytes_per_token)
        self._kv: KVStrata | None = None

    @property
    def kv(self) -> KVStrata:
        """The open KVStrata."""
        if self._kv is None:
            begun = time.perf_counter()
            self._kv = KVStrata(
                self._loaded.model,
                _config(self._directory, max(self._room, 64 << 20)),
                block_size=BLOCK_SIZE,
                pool_tokens=2 * self._tokens + 16 * BLOCK_SIZE,
                weights=self._weights,
            )
            # A store goes on taking memory in the background after it has opened. That is opening
            # too, so it is waited for here, and counted.
            self._kv.store.settle()
            self.open_seconds.append(time.perf_counter() - begun)
        return self._kv

    def close(self) -> None:
        """Let the directory go, so that another process can take it. Twice is fine."""
        if self._kv is not None:
            self._kv.close()
            self._kv = None

    def cold(self, prompt: torch.Tensor, more: int) -> Answer:
        """A first request: compute, answer, store; durable when this returns."""
        answer, sequence = self._ask(prompt, more)
        with sequence:
            blocks = block_digests(sequence, prompt.shape[1] // BLOCK_SIZE)
            sequence.save([*prompt[0].tolist(), *answer.tokens])
        self.kv.flush()
        return Answer(answer.seconds, answer.tokens, answer.cached, blocks)

    def floor(self, prompt: torch.Tensor, more: int) -> Answer:
        """The tail alone; its KV was put in place before."""
        self._ready(prompt, "dram")
        sequence = self.kv.sequence(prompt, salt=self.salt)
        with sequence:
            tail = prompt[:, sequence.cached :]

            def make() -> tuple[int, Any]:
                return self.runner.step(tail, sequence.cache), sequence.cache

            seconds, tokens, _ = self.runner.timed(make, more)
            return Answer(seconds, tokens)

    def restarted(self, prompt: torch.Tensor, more: int) -> Answer:
        """What a store just opened gives: DRAM is empty because it is new, nothing was dropped."""
        self.close()
        self._warm(prompt)
        return self._answer(prompt, more)

    def hit(self, tier: str, prompt: torch.Tensor, more: int) -> Answer:
        """Lookup, load out of ``tier``, tail."""
        self._ready(prompt, tier)
        return self._answer(prompt, more)

    def _answer(self, prompt: torch.Tensor, more: int) -> Answer:
        answer, sequence = self._ask(prompt, more)
        with sequence:
            blocks = block_digests(sequence, answer.cached // BLOCK_SIZE)
            return Answer(answer.seconds, answer.tokens, answer.cached, blocks)

    def _ask(self, prompt: torch.Tensor, more: int) -> tuple[Answer, PagedSequence]:
        kv = self.kv
        opened: list[PagedSequence] = []

        def make() -> tuple[int, Any]:
            sequence = kv.sequence(prompt, salt=self.salt, reserve=2 * BLOCK_SIZE)
            opened.append(sequence)
            return self.runner.step(prompt[:, sequence.cached :], sequence.cache), sequence.cache

        seconds, tokens, _ = self.runner.timed(make, more)
        return Answer(seconds, tokens, opened[0].cached), opened[0]

    def _ready(self, prompt: torch.Tensor, tier: str) -> None:
        store = self.kv.store
        self.kv.flush()
        if tier == "nvme":
            store.drop("dram")
        else:
            store.wait(store.prefetch(Prefix.from_tokens(prompt, self.salt)))
        self._warm(prompt)

    def _warm(self, prompt: torch.Tensor) -> None:
        # The arm before has just run the model, or has not: nobody starts with cold weights. And
        # opening is over when the store is open, so that too comes before the clock starts.
        self.kv.store.poll()
        with torch.inference_mode():
            self.runner.step(prompt[:, -2 * BLOCK_SIZE :], DynamicCache(config=self.runner.config))


def block_digests(sequence: PagedSequence, count: int) -> list[str]:
    """sha256 of each of the first ``count`` blocks' bytes in the pool, all layers, K and V.

    Blocks that a window has left behind are not held, and are named "".
    """
    found, cache = [], sequence.cache
    for place in range(count):
        state, held = hashlib.sha256(), False
        for view in cache.views:
            if place < cache.first_held[view.group]:
                continue
            held = True
            start = cache.pages[view.group].ids[place] * BLOCK_SIZE
            for part in (view.keys, view.values):
                rows = part[start : start + BLOCK_SIZE].reshape(-1).view(torch.uint8)
                state.update(rows.cpu().numpy().data)
        found.append(state.hexdigest() if held else "")
    return found


def _config(directory: str, room: int) -> StoreConfig:
    return StoreConfig(
        hbm=HbmConfig(cache=False),  # or nothing would ever be loaded
        dram=DramConfig(capacity=Size(room)),
        nvme=NvmeConfig(path=directory, quota=Size(4 * room), extent=Size(64 << 20)),
    )
