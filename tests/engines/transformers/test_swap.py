"""Preemption: out in the middle of an answer and back in, exact to the token."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstrata.core.config import StoreConfig  # noqa: E402
from kvstrata.core.errors import MisuseError  # noqa: E402
from kvstrata.engines.transformers import KVStrata  # noqa: E402
from kvstrata.engines.transformers.model import cache_keyword  # noqa: E402

BLOCK = 8


def go_on(lab: Any, kv: KVStrata, sequence: Any, ids: Any, n: int) -> Any:
    return lab.greedy(kv.model, ids, n, **{cache_keyword(kv.model): sequence.cache})


def test_two_sequences_in_a_pool_for_one(lab: Any, model: Any, config: StoreConfig) -> None:
    ids = [lab.prompt(50), lab.prompt(51, seed=2)]
    expected = [lab.greedy(model, each, 30) for each in ids]
    with KVStrata(model, config, block_size=BLOCK, pool_tokens=88) as kv:
        open_, text = [], list(ids)
        free = kv.pool.blocks[0].num_free
        for each in ids:
            sequence = kv.sequence(each, reserve=30)
            open_.append(sequence)
            text[len(open_) - 1] = go_on(lab, kv, sequence, each, 3)
            assert sequence.swap_out(text[len(open_) - 1])
            assert kv.pool.blocks[0].num_free == free
        for _ in range(3):
            for index, sequence in enumerate(open_):
                kept = text[index].shape[1] - 1
                assert sequence.swap_in() == kept
                with pytest.raises(MisuseError, match="swap out another sequence"):
                    kv.sequence(ids[1 - index])
                text[index] = go_on(lab, kv, sequence, text[index], 9)
                assert sequence.swap_out(text[index])
        for index, sequence in enumerate(open_):
            assert torch.equal(text[index], expected[index])
            sequence.close()
        kv.flush()
        kv.store.check()
        assert kv.pool.blocks[0].num_free == free


def test_while_it_is_out(lab: Any, tiny: Any, config: StoreConfig) -> None:
    ids = lab.prompt(30)
    with KVStrata(tiny, config, block_size=BLOCK, pool_tokens=128) as kv:
        sequence = kv.sequence(ids)
        with pytest.raises(MisuseError, match="is not swapped out"):
            sequence.swap_in()
        got = go_on(lab, kv, sequence, ids, 12)
        with pytest.raises(MisuseError, match="pass all tokens of the sequence to swap_out"):
            sequence.swap_out()
        assert sequence.swap_out(got)
        with pytest.raises(MisuseError, match="swapped out: call swap_in first"):
            go_on(lab, kv, sequence, got, 1)
        for call in (sequence.swap_out, sequence.save):
            with pytest.raises(MisuseError, match="swapped out: call swap_in first"):
                call(got)
        sequence.close()
        kv.flush()
        kv.store.check()
        assert kv.store.stats().leases == 0


def test_without_room_below_it_stays(lab: Any, tiny: Any) -> None:
    config = StoreConfig.from_dict({"dram": {"capacity": "8KiB", "chunk": "1MiB"}})
    ids = lab.prompt(60)
    with KVStrata(tiny, config, block_size=BLOCK, pool_tokens=128) as kv:
        sequence = kv.sequence(ids)
        got = go_on(lab, kv, sequence, ids, 5)
        assert not sequence.swap_out(got)
        assert torch.equal(go_on(lab, kv, sequence, got, 7), lab.greedy(tiny, ids, 12))
