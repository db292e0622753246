"""The pool as a tier: what it keeps is shared in place, copied on write, and given up on demand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstrata.core.config import HbmConfig, StoreConfig  # noqa: E402
from kvstrata.engines.transformers import KVStrata  # noqa: E402
from kvstrata.engines.transformers.model import cache_keyword  # noqa: E402

BLOCK = 8


def open_kv(model: Any, config: StoreConfig, tokens: int = 512) -> KVStrata:
    return KVStrata(model, config, block_size=BLOCK, pool_tokens=tokens)


def turn(lab: Any, kv: KVStrata, ids: Any, n: int = 12) -> tuple[Any, list[int]]:
    """Answer, store and close; the answer and the blocks that were used for group 0."""
    with kv.sequence(ids, reserve=n) as sequence:
        got = lab.greedy(kv.model, ids, n, **{cache_keyword(kv.model): sequence.cache})
        sequence.save(got)
        return got, list(sequence.cache.pages[0].ids)


def test_a_second_turn_goes_on_in_the_same_blocks(
    lab: Any, model: Any, config: StoreConfig
) -> None:
    with open_kv(model, config) as kv:
        first, blocks = turn(lab, kv, lab.prompt(30))
        kv.flush()
        assert kv.store.match(_prefix(first)).by_tier.get("hbm") == 40
        longer = torch.cat([first, lab.prompt(9, seed=3)], 1)
        got, again = turn(lab, kv, longer)
        assert again[:5] == blocks[:5] and again == sorted(again)
        assert torch.equal(got, lab.greedy(model, longer))
        kv.store.check()


def test_two_at_once_share_what_was_kept(lab: Any, model: Any, config: StoreConfig) -> None:
    ids = lab.prompt(49)
    expected = lab.greedy(model, ids)
    keyword = cache_keyword(model)
    with open_kv(model, config) as kv:
        turn(lab, kv, ids)
        with kv.sequence(ids) as one, kv.sequence(ids) as two:
            assert one.cached == two.cached == 48
            for sequence in (one, two):
                got = lab.greedy(model, ids, **{keyword: sequence.cache})
                assert torch.equal(got, expected)


def test_crop_copies_what_is_shared(lab: Any, tiny: Any, config: StoreConfig) -> None:
    ids, other = lab.prompt(49), lab.prompt(20, seed=5)
    keyword = cache_keyword(tiny)
    with open_kv(tiny, config) as kv:
        longer, kept = turn(lab, kv, ids)
        with kv.sequence(longer) as sequence:
            assert sequence.cached == 56 and sequence.cache.pages[0].ids[:7] == kept[:7]
            sequence.cache.crop(-35)  # to 21 tokens, in the middle of a block
            joined = torch.cat([ids[:, :21], other], 1)
            got = lab.greedy(tiny, joined, **{keyword: sequence.cache})
            assert torch.equal(got, lab.greedy(tiny, joined))
            assert sequence.cache.pages[0].ids[:2] == kept[:2]
            assert not set(sequence.cache.pages[0].ids[2:6]) & set(kept[2:6])
        for dropped in ([], ["hbm"]):  # neither the kept blocks nor the saved ones were touched
            for tier in dropped:
                kv.store.drop(tier)
            assert torch.equal(turn(lab, kv, ids)[0], lab.greedy(tiny, ids))


def test_kept_blocks_make_room(lab: Any, model: Any, config: StoreConfig) -> None:
    with open_kv(model, config, tokens=128) as kv:
        for seed in range(6):
            ids = lab.prompt(90, seed=seed)
            assert torch.equal(turn(lab, kv, ids)[0], lab.greedy(model, ids))
        # The last ones are still found where they went.
        assert kv.sequence(lab.prompt(90, seed=4)).cached == 88
        kv.store.check()


def test_reset_gives_them_all_back(lab: Any, tiny: Any, config: StoreConfig) -> None:
    ids = lab.prompt(60)
    with open_kv(tiny, config) as kv:
        turn(lab, kv, ids)
        kv.flush()
        kv.store.reset()
        with kv.sequence(ids) as sequence:
            assert sequence.cached == 0
        assert kv.pool.blocks[0].num_free == 64


def test_off_means_off(lab: Any, tiny: Any, config: StoreConfig) -> None:
    ids = lab.prompt(60)
    with open_kv(tiny, dataclasses.replace(config, hbm=HbmConfig(cache=False))) as kv:
        turn(lab, kv, ids)
        kv.flush()
        assert kv.pool.blocks[0].num_free == 64
        assert torch.equal(turn(lab, kv, ids)[0], lab.greedy(tiny, ids))


def _prefix(ids: Any) -> Any:
    from kvstrata.prefix_index.prefix import Prefix

    return Prefix.from_tokens(ids)
