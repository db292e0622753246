"""PagedCache alone: whatever the blocks look like, attention sees what DynamicCache shows it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvstrata.core.errors import MisuseError  # noqa: E402
from kvstrata.engines.transformers import KVPool, PagedCache, kv_model  # noqa: E402
from kvstrata.engines.transformers.model import cache_keyword  # noqa: E402
from kvstrata.tiers.hbm import HbmTier  # noqa: E402
from kvstrata.tiers.pool import BlockPool  # noqa: E402

BLOCK = 8


class Scattered(BlockPool):
    """A pool that never gives neighbours."""

    def allocate(self, n: int, after: int | None = None) -> Any:
        ids = super().allocate(n, after)
        return ids if ids is None else ids[::-1]


def pool_of(model: Any, blocks: int = 32, kind: type[BlockPool] = BlockPool) -> KVPool:
    described = kv_model(model, BLOCK)
    groups = range(len(described.groups))
    hbm = HbmTier.allocate(described, blocks, "cpu")
    return KVPool(described, [hbm.tensors(g) for g in groups], [kind(blocks) for _ in groups])


@torch.inference_mode()
def logits(model: Any, ids: Any, cache: Any, chunks: list[int]) -> Any:
    """Logits of all tokens, fed in chunks of these sizes."""
    found = []
    for part in ids.split(chunks, dim=1):
        out = model(input_ids=part, use_cache=True, **{cache_keyword(model): cache})
        found.append(out.logits[0])
    return torch.cat(found)


CHUNKS = {
    "prefill": [61],
    "exact blocks": [64],
    "decode": [40, *[1] * 21],
    "chunked": [7, 9, 1, 30, 14],
}


@pytest.mark.parametrize("kind", [BlockPool, Scattered])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_equal_dynamic_cache(
    lab: Any, model: Any, kind: Any, chunks: Any, attention: str
) -> None:
    model.set_attn_implementation(attention)
    ids = lab.prompt(sum(chunks))
    expected = logits(model, ids, DynamicCache(config=model.config), chunks)
    cache = PagedCache(pool_of(model, kind=kind))
    torch.testing.assert_close(logits(model, ids, cache, chunks), expected, rtol=1e-5, atol=1e-5)
    assert cache.get_seq_length() == sum(chunks)
    scattered = any(pages.first is None for pages in cache.pages)
    assert scattered == (kind is Scattered)


def test_attention_reads_the_pool_itself(lab: Any, tiny: Any) -> None:
    pool = pool_of(tiny)
    cache = PagedCache(pool)
    logits(tiny, lab.prompt(30), cache, [20, 10])
    for layer, view in zip(cache.layers, pool.layers, strict=True):
        for seen, held in ((layer.keys, view.keys), (layer.values, view.values)):
            assert seen.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", [BlockPool, Scattered])
def test_crop_goes_back(lab: Any, model: Any, kind: Any) -> None:
    ids, other = lab.prompt(50), lab.prompt(30, seed=2)
    cache = PagedCache(pool_of(model, kind=kind))
    logits(model, ids, cache, [45, 5])
    cache.crop(-20)
    assert cache.get_seq_length() == 30
    got = logits(model, other, cache, [30])
    joined = torch.cat([ids[:, :30], other], 1)
    expected = logits(model, joined, DynamicCache(config=model.config), [30, 30])[30:]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = logits(model, ids, cache, [50])
    expected = logits(model, ids, DynamicCache(config=model.config), [50])
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


def test_two_sequences_grow_in_turns(lab: Any, tiny: Any) -> None:
    """Each takes blocks where the other would have grown: runs break, answers do not."""
    pool = pool_of(tiny)
    one, two = PagedCache(pool), PagedCache(pool)
    first, second = lab.prompt(60), lab.prompt(60, seed=2)
    got: dict[int, list[Any]] = {0: [], 1: []}
    for at in range(0, 60, 6):
        for index, (cache, ids) in enumerate(((one, first), (two, second))):
            got[index].append(logits(tiny, ids[:, at : at + 6], cache, [6]))
    assert one.pages[0].first is None
    for index, ids in enumerate((first, second)):
        expected = logits(tiny, ids, DynamicCache(config=tiny.config), [6] * 10)
        torch.testing.assert_close(torch.cat(got[index]), expected, rtol=1e-5, atol=1e-5)


def test_generate_takes_it(lab: Any, model: Any) -> None:
    ids = lab.prompt(33)
    cache = PagedCache(pool_of(model))
    got = lab.greedy(model, ids, **{cache_keyword(model): cache})
    assert torch.equal(got, lab.greedy(model, ids))


def test_bfloat16_stays_bfloat16(lab: Any) -> None:
    model = lab.llama().to(torch.bfloat16)
    cache = PagedCache(pool_of(model))
    ids = lab.prompt(40)
    got = logits(model, ids, cache, [30, 10])
    expected = logits(model, ids, DynamicCache(config=model.config), [30, 10])
    assert torch.equal(got, expected)
    assert cache.layers[0].keys.dtype == torch.bfloat16


def test_training_leaves_no_trace_in_the_pool(lab: Any, tiny: Any) -> None:
    pool = pool_of(tiny)
    out = tiny(input_ids=lab.prompt(20), use_cache=True, **{cache_keyword(tiny): PagedCache(pool)})
    assert out.logits.requires_grad
    assert not any(view.keys.requires_grad for view in pool.layers)


def test_one_sequence_only(lab: Any, tiny: Any) -> None:
    cache = PagedCache(pool_of(tiny))
    with pytest.raises(MisuseError, match="holds one sequence, this call brings a batch of 2"):
        logits(tiny, lab.prompt(10).repeat(2, 1), cache, [10])
    for call in (lambda: cache.reorder_cache(torch.tensor([0])), lambda: greedy_beams(lab, tiny)):
        with pytest.raises(MisuseError, match="holds one sequence"):
            call()


def greedy_beams(lab: Any, model: Any) -> Any:
    cache = PagedCache(pool_of(model))
    return lab.greedy(model, lab.prompt(10), num_beams=2, **{cache_keyword(model): cache})


def test_a_full_pool_says_what_to_do(lab: Any, tiny: Any) -> None:
    pool = pool_of(tiny, blocks=4)
    cache = PagedCache(pool)
    logits(tiny, lab.prompt(30), cache, [30])
    with pytest.raises(MisuseError, match="no room for 40 tokens: raise pool_tokens"):
        logits(tiny, lab.prompt(10), cache, [10])
    cache.park("it was closed")
    assert pool.blocks[0].num_free == 4
    with pytest.raises(MisuseError, match="cannot be used, it was closed"):
        logits(tiny, lab.prompt(10), cache, [10])
