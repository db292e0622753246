"""KVStrata: a Transformers model, its paged pool and a Store, opened together."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kvstrata.core.config import StoreConfig
from kvstrata.core.errors import ClosedError, MisuseError
from kvstrata.core.spec import blocks_for
from kvstrata.engines.transformers.loans import Loans
from kvstrata.engines.transformers.model import cache_keyword, kv_model
from kvstrata.engines.transformers.pool import KVPool
from kvstrata.engines.transformers.sequence import PagedSequence
from kvstrata.store.assemble import open_store
from kvstrata.tiers.hbm import HbmTier
from kvstrata.tiers.pool import BlockPool


class KVStrata:
    """Reuses KV across requests and processes for one model; a context manager.

    Invariant 1: every block of the pool is free, or held by sequences, or lent to the Store.

    Not for several threads at once: a model runs one forward pass at a time.
    """

    def __init__(
        self,
        model: Any,
        config: StoreConfig | str | Path,
        *,
        block_size: int = 16,
        pool_tokens: int = 8192,
        weights: bytes | None = None,
    ) -> None:
        """Open a Store as ``config`` (or the TOML file there) says, and a pool for ``model``.

        ``pool_tokens`` bounds the tokens of all open sequences together; the pool lies on the
        model's device. What is left of it keeps blocks of earlier requests, unless ``hbm.cache`` is
        off. ``weights`` (32 bytes) replaces the digest of the weights, which takes about
        a second a gigabyte to compute. Errors are those of ``open_store``.
        """
        if not isinstance(config, StoreConfig):
            config = StoreConfig.from_toml(config)
        if pool_tokens < 1:
            raise MisuseError(f"pool_tokens must be 1 or more, got {pool_tokens}")
        self.model = model
        self.kv_model = kv_model(model, block_size, weights)
        count = blocks_for(pool_tokens, block_size)
        hbm = HbmTier.allocate(self.kv_model, count, model.device)
        groups = range(len(self.kv_model.groups))
        blocks = [BlockPool(count) for _ in groups]
        self.pool = KVPool(self.kv_model, [hbm.tensors(group) for group in groups], blocks)
        self.pool.touch()
        self.store = open_store(config, self.kv_model, model.device, hbm=hbm, cache_in_hbm=True)
        self._loans = Loans(self.store, blocks, config.hbm.cache)
        self.pool.reclaim = self._loans.reclaim
        self._closed = False

    def sequence(
        self,
        tokens: Any,
        *,
        salt: bytes = b"",
        lora: bytes | str | None = None,
        reserve: int = 256,
    ) -> PagedSequence:
        """Open a sequence for the prompt ``tokens``, with what the store has of it in place.

        ``tokens``: ids ``[n]`` or ``[1, n]``. Only requests with an equal ``salt`` and ``lora``
        share KV. ``reserve`` is how many tokens it will probably grow by: room behind the prompt
        keeps it in one piece, which is faster; it can grow beyond. Waits for the load; what could
        not be loaded is computed by the next forward pass. MisuseError for tokens that are not
        whole numbers, and where the pool has no room.
        """
        if self._closed:
            raise ClosedError("this KVStrata is closed")
        return PagedSequence(
            self.kv_model, self.store, self.pool, self._loans, tokens, salt, lora, reserve
        )

    def generate(self, input_ids: torch.Tensor, *, salt: bytes = b"", **settings: Any) -> Any:
        """``model.generate`` of one sequence ``[1, n]``, its prefix from the store, then stored.

        ``settings`` go to ``generate``; what it returns is returned. Saving runs on when this
        returns. MisuseError for what would give KV that tokens alone do not identify: padding,
        embeddings, images.
        """
        for name, value in settings.items():
            if isinstance(value, torch.Tensor) and name != "attention_mask":
                raise MisuseError(f"{name} changes the KV and tokens do not name it: leave it out")
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2:
            raise MisuseError("input_ids must be a tensor [1, n], one sequence a call")
        # Without a mask Transformers infers one from the pad token, wherever in the prompt it is.
        mask = settings.setdefault("attention_mask", torch.ones_like(input_ids))
        if not isinstance(mask, torch.Tensor) or not bool(mask.bool().all()):
            raise MisuseError("the prompt is padded: pass its own tokens only, one sequence a call")
        with self.sequence(input_ids, salt=salt, reserve=_growth(settings)) as sequence:
            settings[cache_keyword(self.model)] = sequence.cache
            output = self.model.generate(input_ids, **settings)
            sequence.save(output if isinstance(output, torch.Tensor) else output.sequences)
        return output

    def flush(self) -> None:
        """Wait until all that was saved is durable."""
        self._loans.drain()
        self.store.flush()

    def close(self) -> None:
        """Finish the saves under way and close the Store; the pool is gone. Twice is fine."""
        if not self._closed:
            self._closed = True
            try:
                self._loans.drain()
            finally:
                self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _growth(settings: dict[str, Any]) -> int:
    given = settings.get("max_new_tokens")
    return given if isinstance(given, int) else 256
