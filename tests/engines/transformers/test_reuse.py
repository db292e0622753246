"""Cache on = cache off: the same tokens, wherever the prefix came from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstrata.core.config import StoreConfig  # noqa: E402
from kvstrata.core.errors import ClosedError, MisuseError  # noqa: E402
from kvstrata.engines.transformers import KVStrata  # noqa: E402
from kvstrata.engines.transformers.model import cache_keyword  # noqa: E402

BLOCK = 8


def open_kv(model: Any, config: StoreConfig, tokens: int = 512, **more: Any) -> KVStrata:
    return KVStrata(model, config, block_size=BLOCK, pool_tokens=tokens, **more)


def ask(lab: Any, kv: KVStrata, ids: Any, n: int = 12, salt: bytes = b"") -> tuple[Any, int]:
    """The answer, and how many tokens came from the store; stores it all."""
    with kv.sequence(ids, salt=salt, reserve=n) as sequence:
        got = lab.greedy(kv.model, ids, n, **{cache_keyword(kv.model): sequence.cache})
        sequence.save(got)
        return got, sequence.cached


@pytest.mark.parametrize("length", [61, 64, 7, 8, 9])
def test_same_tokens_from_every_tier(
    lab: Any, model: Any, config: StoreConfig, length: int
) -> None:
    ids = lab.prompt(length)
    expected = lab.greedy(model, ids)
    # The last token is always computed, so a prompt of whole blocks gives up its last block.
    whole = (length - 1) // BLOCK * BLOCK
    with open_kv(model, config) as kv:
        assert ask(lab, kv, ids)[1] == 0
        kv.flush()
        for dropped in ([], ["hbm"], ["hbm", "dram"]):
            for tier in dropped:
                kv.store.drop(tier)
            kv.flush()
            got, cached = ask(lab, kv, ids)
            assert torch.equal(got, expected), dropped
            assert cached == whole
        kv.store.check()
    with open_kv(model, config) as kv:
        got, cached = ask(lab, kv, ids)
        assert torch.equal(got, expected)
        assert cached == whole


def test_generate_does_it_all(lab: Any, model: Any, config: StoreConfig) -> None:
    ids = lab.prompt(50)
    settings = {"max_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, **settings)
    with open_kv(model, config) as kv:
        assert torch.equal(kv.generate(ids, **settings), expected)
        rich = kv.generate(ids, return_dict_in_generate=True, **settings)
        assert torch.equal(rich.sequences, expected)
        assert kv.store.stats().metrics


def test_a_pad_token_in_the_prompt_is_a_token(lab: Any, tiny: Any, config: StoreConfig) -> None:
    # Transformers infers a padding mask from pad tokens where it is given none: KV of shifted
    # positions, stored under the same tokens, would be served to requests that mean none of it.
    ids = lab.prompt(48)
    ids[0, :BLOCK] = tiny.config.pad_token_id
    mask = torch.ones_like(ids)
    expected = tiny.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    with open_kv(tiny, config) as kv:
        assert torch.equal(kv.generate(ids, max_new_tokens=12, do_sample=False), expected)
        kv.flush()
        again = kv.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        assert torch.equal(again, expected)
        with pytest.raises(MisuseError, match="padded"):
            kv.generate(ids, attention_mask=torch.zeros_like(ids))
        with pytest.raises(MisuseError, match="must be a tensor"):
            kv.generate(ids[0])


def test_a_second_turn_reuses_what_was_decoded(lab: Any, model: Any, config: StoreConfig) -> None:
    ids = lab.prompt(30)
    with open_kv(model, config) as kv:
        first, _ = ask(lab, kv, ids, 20)
        turn = torch.cat([first, lab.prompt(9, seed=3)], 1)
        got, cached = ask(lab, kv, turn)
        # 49 of the 50 tokens have KV: the last one was never fed.
        assert cached == 48
        assert torch.equal(got, lab.greedy(model, turn))


def test_a_common_beginning_is_shared(lab: Any, tiny: Any, config: StoreConfig) -> None:
    one, two = lab.prompt(60), lab.prompt(60)
    two[0, 45:] = lab.prompt(15, seed=5)
    with open_kv(tiny, config) as kv:
        ask(lab, kv, one)
        got, cached = ask(lab, kv, two)
        assert cached == 40
        assert torch.equal(got, lab.greedy(tiny, two))


def test_salts_share_nothing(lab: Any, tiny: Any, config: StoreConfig) -> None:
    ids = lab.prompt(40)
    with open_kv(tiny, config) as kv:
        ask(lab, kv, ids, salt=b"alice")
        assert ask(lab, kv, ids, salt=b"bob")[1] == 0
        assert ask(lab, kv, ids)[1] == 0
        assert ask(lab, kv, ids, salt=b"alice")[1] == 32


def test_other_weights_share_nothing(lab: Any, tiny: Any, config: StoreConfig) -> None:
    ids = lab.prompt(40)
    with open_kv(tiny, config) as kv:
        ask(lab, kv, ids)
    with torch.no_grad():
        tiny.model.layers[0].self_attn.k_proj.weight[0, 0] += 1.0
    with open_kv(tiny, config) as kv:
        got, cached = ask(lab, kv, ids)
        assert cached == 0
        assert torch.equal(got, lab.greedy(tiny, ids))


def test_a_new_process(lab: Any, tiny: Any, config: StoreConfig, tmp_path: Path) -> None:
    ids = lab.prompt(40)
    with open_kv(tiny, config) as kv:
        got, _ = ask(lab, kv, ids)
    tiny.save_pretrained(tmp_path / "model")
    program = f"""
import torch
from transformers import AutoModelForCausalLM
from kvstrata.core.config import StoreConfig
from kvstrata.engines.transformers import KVStrata
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}).eval()
tree = {{"nvme": {{"path": {config.nvme.path!r}, "quota": "64MiB"}}}}
ids = torch.tensor({ids.tolist()})
with KVStrata(model, StoreConfig.from_dict(tree), block_size={BLOCK}, pool_tokens=256) as kv:
    with kv.sequence(ids) as sequence:
        print(sequence.cached)
    out = kv.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    print(out[0].tolist())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["32", str(got[0].tolist())]


def test_the_loaded_bytes_are_what_decides(lab: Any, model: Any, config: StoreConfig) -> None:
    """Negative control: with zeros instead of what was loaded the answer must change."""
    ids = lab.prompt(60)
    expected = lab.greedy(model, ids)
    with open_kv(model, config) as kv:
        ask(lab, kv, ids)
        with kv.sequence(ids) as sequence:
            for view in sequence.cache.views:
                rows = sequence.cache.pages[view.group].slots(0, sequence.cached)
                view.keys[rows] = 0
                view.values[rows] = 0
            got = lab.greedy(model, ids, **{cache_keyword(model): sequence.cache})
        assert not torch.equal(got, expected)


def test_damaged_records_are_computed_again(
    lab: Any, model: Any, config: StoreConfig, caplog: pytest.LogCaptureFixture
) -> None:
    ids = lab.prompt(60)
    expected = lab.greedy(model, ids)
    with open_kv(model, config) as kv:
        ask(lab, kv, ids)
    largest = max(Path(config.nvme.path).rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    extents = [p for p in largest.parent.iterdir() if p.suffix == largest.suffix]
    for extent in extents:
        data = bytearray(extent.read_bytes())
        for at in range(0, len(data), 1024):
            data[at] ^= 0x55
        extent.write_bytes(data)
    with open_kv(model, config) as kv:
        got, cached = ask(lab, kv, ids)
        assert torch.equal(got, expected)
        assert cached == 0
        got, cached = ask(lab, kv, ids)
        assert torch.equal(got, expected)
        assert cached == 56


def test_crop_leaves_what_is_saved_alone(lab: Any, tiny: Any, config: StoreConfig) -> None:
    """What is being saved may not be written over, and what was cropped is saved anew."""
    keyword = cache_keyword(tiny)
    ids, other = lab.prompt(64), lab.prompt(24, seed=9)
    with open_kv(tiny, config) as kv, kv.sequence(ids) as sequence:
        tiny(input_ids=ids, use_cache=True, **{keyword: sequence.cache})
        sequence.save()
        sequence.cache.crop(-24)
        tiny(input_ids=other, use_cache=True, **{keyword: sequence.cache})
        with pytest.raises(MisuseError, match="begin with the prompt"):
            sequence.save(torch.cat([ids[:, :40], other], 1))
        for asked in (ids, torch.cat([ids[:, :40], other], 1)):
            got, _ = ask(lab, kv, asked)
            assert torch.equal(got, lab.greedy(tiny, asked))


def test_bad_calls(lab: Any, tiny: Any, config: StoreConfig) -> None:
    ids = lab.prompt(20)
    kv = open_kv(tiny, config)
    cases: list[tuple[Any, str]] = [
        (lambda: kv.sequence([1.5, 2.5]), "whole numbers"),
        (lambda: kv.sequence([]), "at least one token"),
        (lambda: kv.sequence(ids.repeat(2, 1)), "one sequence"),
        (lambda: kv.sequence(ids, salt="text"), "salt must be bytes"),
        (lambda: kv.sequence(lab.prompt(510).repeat(1, 2)), "raise pool_tokens"),
        (lambda: kv.generate(ids, attention_mask=torch.zeros_like(ids)), "padded"),
        (lambda: kv.generate(ids, inputs_embeds=torch.zeros(1, 20, 48)), "inputs_embeds"),
        (lambda: kv.generate(ids, num_beams=2, max_new_tokens=4), "one sequence"),
    ]
    free = kv.pool.blocks[0].num_free
    for call, message in cases:
        with pytest.raises(MisuseError, match=message):
            call()
        kv.store.check()
        assert kv.pool.blocks[0].num_free == free, message
    kv.close()
    kv.close()
    with pytest.raises(ClosedError):
        kv.sequence(ids)
    with pytest.raises(MisuseError, match="pool_tokens must be 1 or more"):
        open_kv(tiny, config, tokens=0)


def test_blocks_come_back(lab: Any, tiny: Any, config: StoreConfig) -> None:
    with open_kv(tiny, config, tokens=256) as kv:
        for seed in range(12):  # more than the pool holds: saves under way must give theirs back
            got, _ = ask(lab, kv, lab.prompt(100, seed=seed))
            assert got.shape[1] == 112
        kv.store.drop("hbm")
        kv.flush()
        kv.store.drop("hbm")
        kv.flush()
        assert kv.pool.blocks[0].num_free == 32
        kv.store.check()
