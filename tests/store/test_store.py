"""The Store over memory: what is saved comes back, in every tier, whatever the room."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstrata.core.errors import ClosedError, LayoutError, MisuseError
from kvstrata.prefix_index.prefix import Prefix
from kvstrata.store.answers import Sequence
from kvstrata.testing.models import hybrid_model, tiny_model
from kvstrata.testing.store import MemoryStore, memory_store


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def fill(s: MemoryStore, blocks: np.ndarray, seed: int = 1) -> list[np.ndarray]:
    """Random bytes in the engine's blocks; returns them."""
    rng = np.random.default_rng(seed)
    written = []
    for rows in s.hbm.rows:
        rows[blocks] = rng.integers(0, 256, (len(blocks), rows.shape[1]), np.uint8)
        written.append(rows[blocks].copy())
    return written


def everywhere(s: MemoryStore, blocks: np.ndarray) -> dict[int, np.ndarray]:
    return {group: blocks for group in range(len(s.hbm.rows))}


def save(s: MemoryStore, prefix: Prefix, n: int, seed: int = 1) -> list[np.ndarray]:
    blocks = np.arange(n)
    written = fill(s, blocks, seed)
    done = s.store.wait(s.store.save(prefix, everywhere(s, blocks)))
    assert done is not None and done.tokens == done.requested
    for rows in s.hbm.rows:
        rows[:] = 0xEE
    return written


def load(s: MemoryStore, prefix: Prefix, base: int = 20) -> tuple[int, list[np.ndarray]]:
    hit = s.store.lookup(prefix)
    n = hit.tokens // s.store.model.block_size
    blocks = base + np.arange(n)
    done = s.store.wait(s.store.load(hit, everywhere(s, blocks)))
    assert done is not None
    got = done.tokens // s.store.model.block_size
    return got, [rows[blocks[:got]] for rows in s.hbm.rows]


@pytest.mark.parametrize("dram,nvme", [(16, 0), (16, 64), (2, 64), (1, 64)])
def test_what_was_saved_is_loaded(dram: int, nvme: int) -> None:
    s = memory_store(tiny_model(), dram=dram, nvme=nvme)
    prefix = Prefix.from_tokens(tokens(50))
    written = save(s, prefix, 12)
    n, got = load(s, prefix)
    assert n == 12
    assert np.array_equal(got[0], written[0])
    s.store.check()
    assert s.store.stats().leases == 0
    s.store.close()


def test_hybrid_model_loads_every_group_or_none() -> None:
    s = memory_store(hybrid_model(), dram=4, nvme=64)
    prefix = Prefix.from_tokens(tokens(50))
    written = save(s, prefix, 12)
    n, got = load(s, prefix)
    assert n == 12
    assert np.array_equal(got[0], written[0]) and np.array_equal(got[2], written[2])
    # The window of 6 tokens reads the last two blocks of four, and no others are touched.
    assert np.array_equal(got[1][-2:], written[1][-2:])
    assert (got[1][:-2] == 0xEE).all()
    s.store.check()


def test_match_has_no_side_effect_and_lookup_holds_a_lease() -> None:
    s = memory_store(tiny_model())
    prefix = Prefix.from_tokens(tokens(16))
    save(s, prefix, 4)
    before = s.store.stats()
    for _ in range(3):
        assert s.store.match(prefix).tokens == 16
        assert s.store.match(prefix, max_tokens=15).tokens == 12
    assert s.store.stats() == before
    with s.store.lookup(prefix) as hit:
        assert hit.tokens == 16 and s.store.stats().leases == 4
    assert s.store.stats().leases == 0


def test_a_lease_keeps_its_blocks_while_others_are_evicted() -> None:
    s = memory_store(tiny_model(), dram=6)
    first, second = Prefix.from_tokens(tokens(16, 1)), Prefix.from_tokens(tokens(24, 2))
    written = save(s, first, 4, seed=7)
    hit = s.store.lookup(first)
    fill(s, np.arange(6))
    done = s.store.wait(s.store.save(second, {0: np.arange(6)}))
    assert done is not None and done.tokens == 8 and done.reason == "no_room"
    s.store.wait(s.store.load(hit, {0: np.arange(30, 34)}))
    assert np.array_equal(s.hbm.rows[0][30:34], written[0])
    s.store.check()


def test_salts_and_loras_do_not_share() -> None:
    s = memory_store(tiny_model())
    save(s, Prefix.from_tokens(tokens(16), salt=b"a"), 4)
    assert s.store.match(Prefix.from_tokens(tokens(16), salt=b"a")).tokens == 16
    for other in (
        Prefix.from_tokens(tokens(16)),
        Prefix.from_tokens(tokens(16), salt=b"b"),
        Prefix.from_tokens(tokens(16), lora=b"a"),
    ):
        match = s.store.match(other)
        assert match.tokens == 0
        assert [r.why for r in match.reasons] == ["other_salt"]


def test_reset_is_total_also_for_what_is_in_flight() -> None:
    s = memory_store(tiny_model(), nvme=32, auto=False, held=True)
    prefix = Prefix.from_tokens(tokens(16))
    fill(s, np.arange(4))
    ticket = s.store.save(prefix, {0: np.arange(4)})
    s.store.reset()
    s.executor.run_all()
    done = s.store.wait(ticket)
    assert done is not None and done.tokens == 0 and done.reason == "reset"
    assert s.store.match(prefix).tokens == 0 and s.store.match(prefix).pending == 0
    s.store.check()
    assert s.store.stats().tiers["dram"]["empty"] == 16


def test_a_hit_from_before_a_reset_loads_nothing_and_says_so() -> None:
    s = memory_store(tiny_model())
    prefix = Prefix.from_tokens(tokens(16))
    save(s, prefix, 4)
    hit = s.store.lookup(prefix)
    s.store.reset()
    done = s.store.wait(s.store.load(hit, {0: np.arange(4)}))
    assert done is not None
    assert (done.tokens, done.requested, done.reason) == (0, 16, "reset")
    assert (s.hbm.rows[0] == 0xEE).all()


def test_reset_forgets_a_record_whose_commit_is_under_way() -> None:
    s = memory_store(tiny_model(), nvme=32, held=True)
    prefix = Prefix.from_tokens(tokens(16))
    save(s, prefix, 4)
    s.store.poll()
    s.store.reset()
    assert s.records is not None
    s.records.settle()
    s.store.poll()
    assert s.store.match(prefix).tokens == 0
    s.store.check()
    again = memory_store(tiny_model(), nvme=32, survived=s.records)
    assert again.store.match(prefix).tokens == 0


def test_beyond_the_queue_saves_are_refused_and_loads_are_not() -> None:
    model = tiny_model()
    s = memory_store(model, auto=False, queue=3 * model.groups[0].block_bytes())
    first = s.store.save(Prefix.from_tokens(tokens(16, 1)), {0: np.arange(4)})
    second = s.store.save(Prefix.from_tokens(tokens(4, 2)), {0: [4]})
    done = s.store.wait(second)
    assert done is not None
    assert (done.tokens, done.requested, done.reason, done.freed) == (0, 4, "busy", {0: (4,)})
    s.executor.auto = True
    done = s.store.wait(first)
    assert done is not None and done.tokens == 16
    assert load(s, Prefix.from_tokens(tokens(16, 1)))[0] == 4
    done = s.store.wait(s.store.save(Prefix.from_tokens(tokens(4, 2)), {0: [4]}))
    assert done is not None and done.tokens == 4
    s.store.check()


def test_a_kept_block_that_a_copy_reads_comes_back_after_a_reset() -> None:
    s = memory_store(tiny_model(), cache_hbm=True)
    prefix = Prefix.from_tokens(tokens(16))
    fill(s, np.arange(4))
    assert s.store.keep(prefix, {0: np.arange(4)})[0].tolist() == [0, 1, 2, 3]
    s.executor.auto = False
    ticket = s.store.load(s.store.lookup(prefix), {0: [10, 11, 12, 13]})
    s.store.reset()
    assert s.store.poll().shed == {}
    s.executor.run_all()
    s.store.wait(ticket)
    assert s.store.poll().shed == {0: (0, 1, 2, 3)}
    s.store.check()


def test_a_hit_names_the_blocks_that_need_no_copy() -> None:
    s = memory_store(tiny_model(), cache_hbm=True)
    prefix = Prefix.from_tokens(tokens(16))
    s.store.keep(prefix, {0: [4, 5, 6, 7]})
    assert s.store.keep(prefix, {0: [20, 21, 22, 23]})[0].size == 0
    hit = s.store.lookup(prefix)
    assert hit.by_tier == {"hbm": 16, "dram": 0} and hit.resident[0].tolist() == [4, 5, 6, 7]
    assert s.store.shed(4)[0].size == 0, "leased"
    done = s.store.wait(s.store.load(hit, {0: hit.resident[0]}))
    assert done is not None and done.tokens == 16 and s.executor.submitted == 0
    assert s.store.shed(2)[0].tolist() == [7, 6] or s.store.match(prefix).tokens == 8
    s.store.check()


def test_a_block_dropped_while_another_group_of_it_is_written_leaves_no_record() -> None:
    s = memory_store(hybrid_model(), nvme=64, auto=False, held=True)
    ticket = s.store.save(Prefix.from_tokens(tokens(8)), everywhere(s, np.arange(2)))
    s.executor.run_all()
    s.store.wait(ticket)
    assert [move.target for move in s.executor.pending] == ["nvme"] * 3
    assert s.records is not None
    s.executor.run(0)
    s.store.poll()
    s.records.settle()
    s.store.poll()  # group 0 is readable below, the others are on their way
    s.store.drop("nvme")
    s.executor.run_all()
    for _ in range(3):
        s.store.poll()
        s.records.settle()
    assert s.records.catalogue == {} and s.store.stats().tiers["nvme"]["empty"] == 3 * 64
    s.store.check()


@pytest.mark.parametrize("write", ["through", "demote"])
def test_flush_without_nvme_has_nothing_to_do(write: str) -> None:
    s = memory_store(tiny_model(), write=write)
    save(s, Prefix.from_tokens(tokens(16)), 4)
    assert s.store.flush(0.0)
    s.store.check()


@pytest.mark.parametrize("write", ["through", "demote"])
def test_flush_writes_all_of_it_however_much_is_queued(
    write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.store.lower._QUEUED", 2)
    monkeypatch.setattr("kvstrata.store.lower._IN_FLIGHT", 1)
    s = memory_store(tiny_model(), dram=32, nvme=64, write=write)
    for seed in range(8):
        save(s, Prefix.from_tokens(tokens(16, seed)), 4, seed)
    assert s.store.flush()
    assert s.store.stats().tiers["nvme"]["ready"] == 32
    s.store.check()


def test_flush_ends_though_nvme_is_smaller_than_dram() -> None:
    s = memory_store(tiny_model(), dram=16, nvme=3, write="demote")
    for seed in range(4):
        save(s, Prefix.from_tokens(tokens(16, seed)), 4, seed)
    assert not s.store.flush()
    assert s.store.stats().tiers["nvme"]["ready"] == 3
    s.store.check()


@pytest.mark.parametrize("nvme", [1, 2, 3])
def test_a_prefix_larger_than_nvme_is_not_written_for_ever(nvme: int) -> None:
    s = memory_store(tiny_model(), dram=4, nvme=nvme)
    for seed in range(3):
        s.store.wait(s.store.save(Prefix.from_tokens(tokens(32, seed)), {0: np.arange(8)}))
    size = s.store.model.groups[0].block_bytes()
    written = s.store.stats().metrics["nvme_written_bytes_total"] / size
    assert 0 < written <= 3 * 2 * 8
    s.store.check()


def test_flush_says_when_the_disk_does_not_take_it_all() -> None:
    s = memory_store(tiny_model(), dram=32, nvme=64, write="demote")
    save(s, Prefix.from_tokens(tokens(16)), 4)
    assert s.records is not None
    s.records.writable = False
    assert not s.store.flush()
    s.records.writable = True
    assert s.store.flush()


def test_swapped_blocks_stay_where_they_are_while_nvme_takes_nothing() -> None:
    s = memory_store(tiny_model(), dram=12, nvme=64, write="demote")
    swapped = s.store.swap_out(Sequence(Prefix.from_tokens(tokens(32)), 32, {0: np.arange(8)}))
    s.store.wait(swapped.ticket)
    assert s.records is not None
    s.records.writable = False
    for seed in range(3, 6):
        s.store.wait(s.store.save(Prefix.from_tokens(tokens(32, seed)), {0: np.arange(8)}))
    done = s.store.wait(s.store.swap_in(swapped, {0: np.arange(8)}))
    assert done is not None and done.tokens == 32
    s.store.check()


def test_a_pin_keeps_a_prefix_until_it_is_released() -> None:
    s = memory_store(tiny_model(), dram=6)
    first = Prefix.from_tokens(tokens(16, 1))
    save(s, first, 4)
    with s.store.pin(first) as pin:
        assert pin.tokens == 16
        for seed in range(2, 6):
            s.store.wait(s.store.save(Prefix.from_tokens(tokens(24, seed)), {0: np.arange(6)}))
        assert s.store.match(first).tokens == 16
    s.store.wait(s.store.save(Prefix.from_tokens(tokens(24, 9)), {0: np.arange(6)}))
    assert s.store.match(first).tokens == 0
    s.store.check()


def test_a_block_that_leaves_every_tier_while_its_copy_is_written_keeps_its_name() -> None:
    s = memory_store(hybrid_model(), nvme=64, auto=False, held=True)
    ticket = s.store.save(Prefix.from_tokens(tokens(8)), everywhere(s, np.arange(2)))
    s.executor.run_all()
    s.store.wait(ticket)
    s.executor.run(0)
    s.store.poll()
    assert s.records is not None
    s.records.settle()
    s.store.poll()
    s.executor.run_all()
    s.store.poll()
    s.store.drop("nvme")
    s.store.drop("dram")
    s.executor.auto = True
    save(s, Prefix.from_tokens(tokens(8, 5)), 2)  # would take over the refs, were they free
    s.records.settle()
    s.store.poll()
    assert s.store.match(Prefix.from_tokens(tokens(8))).tokens == 0
    assert s.store.match(Prefix.from_tokens(tokens(8, 5))).tokens == 8
    s.store.check()


def test_minus_one_stands_only_for_blocks_that_are_not_read() -> None:
    s = memory_store(hybrid_model())
    prefix = Prefix.from_tokens(tokens(16))
    # The window of 6 tokens reads the blocks 2 and 3 of four.
    done = s.store.wait(s.store.save(prefix, {0: range(4), 1: [-1, -1, 2, 3], 2: range(4)}))
    assert done is not None and done.tokens == 16 and s.store.match(prefix).tokens == 16
    for blocks in (
        {0: [0, -1, 2, 3], 1: range(4), 2: range(4)},
        {0: range(4), 1: [0, 1, -1, 3], 2: range(4)},
    ):
        with pytest.raises(LayoutError, match="give each of them a block id"):
            s.store.save(prefix, blocks)
        with s.store.lookup(prefix) as hit, pytest.raises(LayoutError, match="not -1"):
            s.store.load(hit, blocks)
    s.store.check()


def test_a_save_waits_for_another_that_brings_the_same_blocks() -> None:
    s = memory_store(tiny_model(), auto=False)
    prefix = Prefix.from_tokens(tokens(16))
    written = fill(s, np.arange(4))
    s.hbm.rows[0][10:14] = written[0]
    first = s.store.save(prefix, {0: np.arange(4)})
    second = s.store.save(prefix, {0: np.arange(10, 14)})
    assert len(s.executor.pending) == 1
    s.executor.run(0, fail="io: gone")
    assert [c.ticket for c in s.store.poll().saved] == [first]
    s.executor.run_all()
    done = s.store.wait(second)
    assert done is not None and done.tokens == 16
    assert s.store.match(prefix).tokens == 16
    s.store.check()


def test_what_another_store_gave_is_refused() -> None:
    ours, theirs = memory_store(tiny_model()), memory_store(tiny_model())
    prefix = Prefix.from_tokens(tokens(16))
    for s in (ours, theirs):
        save(s, prefix, 4)
    hit = theirs.store.lookup(prefix)
    with pytest.raises(MisuseError, match="another store"):
        ours.store.load(hit, {0: np.arange(4)})
    hit.release()
    swapped = theirs.store.swap_out(Sequence(prefix, 16, {0: np.arange(4)}))
    for call in (lambda: ours.store.swap_in(swapped, {0: np.arange(4)}),):
        with pytest.raises(MisuseError, match="another store"):
            call()
    with pytest.raises(MisuseError, match="another store"):
        ours.store.discard(swapped)
    ours.store.check()
    theirs.store.discard(swapped)
    theirs.store.check()


@pytest.mark.parametrize("error", ["io: Too many open files", "closed"])
def test_an_error_that_is_not_damage_loses_no_record(error: str) -> None:
    s = memory_store(tiny_model(), nvme=64, held=True)
    prefix = Prefix.from_tokens(tokens(16))
    save(s, prefix, 4)
    assert s.records is not None
    s.records.settle()
    s.store.poll()
    s.store.drop("dram")
    s.executor.auto = False
    ticket = s.store.load(s.store.lookup(prefix), {0: np.arange(4)})
    while s.executor.pending:
        s.executor.run(0, fail=error)
        s.store.match(prefix)
    done = s.store.wait(ticket)
    assert done is not None and (done.tokens, done.reason) == (0, "unreadable")
    s.executor.auto = True
    assert load(s, prefix)[0] == 4, "the record is still there"
    s.store.check()


def test_poll_leaves_to_a_waiting_thread_what_it_waits_for(tmp_path: object) -> None:
    s = memory_store(tiny_model(), auto=False)
    ticket = s.store.save(Prefix.from_tokens(tokens(16)), {0: np.arange(4)})
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(s.store.wait(ticket, 60)))
    thread.start()
    while not s.store._waiting._awaited:
        pass
    s.executor.run_all()
    assert s.store.poll().saved == ()
    thread.join(60)
    assert [done.ticket for done in got] == [ticket]  # type: ignore[attr-defined]


def test_close_waits_for_saves_under_way() -> None:
    s = memory_store(tiny_model(), nvme=64)
    s.executor.auto = False
    prefix = Prefix.from_tokens(tokens(16))
    fill(s, np.arange(4))
    s.store.save(prefix, {0: np.arange(4)})
    s.executor.auto = True
    s.store.close()
    again = memory_store(tiny_model(), nvme=64, survived=s.records)
    assert again.store.match(prefix).tokens == 16


def test_restart_finds_what_nvme_has() -> None:
    s = memory_store(hybrid_model(), nvme=64, dram=4)
    prefix = Prefix.from_tokens(tokens(50))
    written = save(s, prefix, 12)
    s.store.close()
    again = memory_store(hybrid_model(), nvme=64, dram=4, survived=s.records)
    assert again.store.match(prefix).by_tier["nvme"] == 48
    n, got = load(again, prefix)
    assert n == 12 and np.array_equal(got[0], written[0])
    again.store.check()


def test_damage_on_nvme_is_a_shorter_prefix_and_then_a_miss() -> None:
    s = memory_store(tiny_model(), nvme=64, dram=16)
    prefix = Prefix.from_tokens(tokens(50))
    written = save(s, prefix, 12)
    s.store.flush()
    s.store.drop("dram")
    assert s.records is not None
    place = s.records.catalogue[0, 5][0]
    s.records.disk[0, place][3] ^= 1
    n, got = load(s, prefix)
    assert n == 5 and np.array_equal(got[0], written[0][:5])
    match = s.store.match(prefix)
    assert match.tokens == 20
    assert (match.reasons[0].first_block, match.reasons[0].why) == (5, "failed_check")
    assert s.store.stats().metrics['failed_check_blocks_total{tier="nvme"}'] == 1
    save(s, prefix, 12)  # recomputed and stored again: whole
    assert s.store.match(prefix).tokens == 48
    s.store.check()


def test_damage_in_dram_is_found_by_the_sampled_check() -> None:
    s = memory_store(tiny_model(), verify_one_in=1)
    prefix = Prefix.from_tokens(tokens(16))
    save(s, prefix, 4)
    s.dram.rows[0][2] ^= 1
    n, _ = load(s, prefix)
    assert n == 2
    assert s.store.match(prefix).tokens == 8
    s.store.check()


def test_demote_writes_only_when_dram_needs_the_room() -> None:
    s = memory_store(tiny_model(), dram=4, nvme=64, write="demote")
    first, second = Prefix.from_tokens(tokens(16, 1)), Prefix.from_tokens(tokens(16, 2))
    a = save(s, first, 4, seed=1)
    assert s.store.stats().tiers["nvme"]["ready"] == 0
    b = save(s, second, 4, seed=2)
    assert s.store.match(first).by_tier == {"dram": 0, "nvme": 16}
    for prefix, written in ((first, a), (second, b), (first, a)):
        n, got = load(s, prefix)
        assert n == 4 and np.array_equal(got[0], written[0])
    s.store.check()


def test_nvme_evicts_the_least_recent_when_full() -> None:
    s = memory_store(tiny_model(), dram=4, nvme=8)
    prefixes = [Prefix.from_tokens(tokens(16, i)) for i in range(5)]
    for i, prefix in enumerate(prefixes):
        save(s, prefix, 4, seed=i)
    assert [s.store.match(p).tokens for p in prefixes] == [0, 0, 0, 16, 16]
    assert s.store.stats().blocks_indexed <= 12
    s.store.check()


def test_prefetch_brings_blocks_up() -> None:
    s = memory_store(tiny_model(), nvme=64)
    prefix = Prefix.from_tokens(tokens(32))
    save(s, prefix, 8)
    s.store.flush()
    s.store.drop("dram")
    assert s.store.match(prefix).by_tier == {"dram": 0, "nvme": 32}
    done = s.store.wait(s.store.prefetch(prefix))
    assert done is not None and done.tokens == 32
    assert s.store.match(prefix).by_tier == {"dram": 32, "nvme": 0}
    assert s.store.stats().leases == 0
    s.store.check()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 30, 32])
@pytest.mark.parametrize("model", [tiny_model(), hybrid_model()])
def test_swap_is_token_exact(num_tokens: int, model: object) -> None:
    s = memory_store(model, nvme=64)  # type: ignore[arg-type]
    count = -(-num_tokens // 4)
    blocks = np.arange(count)
    written = fill(s, blocks)
    sequence = Sequence(Prefix.from_tokens(tokens(num_tokens)), num_tokens, everywhere(s, blocks))
    swapped = s.store.swap_out(sequence)
    out = s.store.wait(swapped.ticket)
    assert out is not None and out.tokens == num_tokens
    assert {g: sorted(ids) for g, ids in out.freed.items()} == {
        g: blocks.tolist() for g in range(len(s.hbm.rows))
    }
    for rows in s.hbm.rows:
        rows[:] = 0
    back = 30 + np.arange(count)
    done = s.store.wait(s.store.swap_in(swapped, everywhere(s, back)))
    assert done is not None and done.tokens == num_tokens
    for group, rows in enumerate(s.hbm.rows):
        read = s.store.model.groups[group].spec.blocks_read(num_tokens)
        assert np.array_equal(rows[back][read.start :], written[group][read.start :])
    s.store.check()
    assert s.store.stats().tiers["dram"]["filling"] == 0
    with pytest.raises(MisuseError, match="swapped in or discarded"):
        s.store.swap_in(swapped, everywhere(s, back))


def test_swapped_blocks_may_sink_but_not_vanish() -> None:
    s = memory_store(tiny_model(), dram=9, nvme=16)
    blocks = np.arange(8)
    written = fill(s, blocks)
    swapped = s.store.swap_out(Sequence(Prefix.from_tokens(tokens(30)), 30, {0: blocks}))
    s.store.wait(swapped.ticket)
    for seed in range(10, 20):
        save(s, Prefix.from_tokens(tokens(16, seed)), 4, seed)
    done = s.store.wait(s.store.swap_in(swapped, {0: 40 + blocks}))
    assert done is not None and done.tokens == 30
    assert np.array_equal(s.hbm.rows[0][40:48], written[0])
    s.store.check()


def test_discard_gives_everything_back() -> None:
    s = memory_store(tiny_model())
    swapped = s.store.swap_out(Sequence(Prefix.from_tokens(tokens(6)), 6, {0: [0, 1]}))
    s.store.discard(swapped)
    s.store.wait(swapped.ticket)
    assert s.store.stats().tiers["dram"]["ready"] == 1  # the whole block stays cached
    s.store.check()


def test_deadline_ends_a_load_that_does_not_come() -> None:
    s = memory_store(tiny_model(), nvme=32)
    prefix = Prefix.from_tokens(tokens(16))
    save(s, prefix, 4)
    s.store.flush()
    s.store.drop("dram")
    s.executor.auto = False
    ticket = s.store.load(s.store.lookup(prefix), {0: np.arange(4)}, deadline=5.0)
    s.store.poll()
    s.clock.now = 6.0
    polled = s.store.poll()
    assert [(c.ticket, c.tokens, c.reason) for c in polled.loaded] == [(ticket, 0, "deadline")]
    assert polled.failed == polled.loaded
    s.executor.run_all()
    s.store.poll()
    assert s.store.stats().leases == 0 and s.store.stats().moves_in_flight == 0
    s.store.check()


def test_misuse_is_one_clear_line_and_changes_nothing() -> None:
    s = memory_store(tiny_model())
    prefix = Prefix.from_tokens(tokens(16))
    save(s, prefix, 4)
    hit = s.store.lookup(prefix)
    for blocks in (
        {0: [0, 1]},
        {0: [0, 1, 2, 64]},
        {0: [0, 1, 2, -2]},
        {0: [0.5] * 4},
        {1: [0]},
        [0],
    ):
        with pytest.raises(LayoutError) as caught:
            s.store.load(hit, blocks)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    hit.release()
    with pytest.raises(MisuseError, match="released or loaded before"):
        s.store.load(hit, {0: [0, 1, 2, 3]})
    with pytest.raises(MisuseError, match=r"Prefix.from_tokens"):
        s.store.match([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="no tier"):
        s.store.drop("tape")
    s.store.check()
    s.store.close()
    s.store.close()
    with pytest.raises(ClosedError):
        s.store.match(prefix)


def test_why_tells_each_missed_run() -> None:
    s = memory_store(tiny_model(), dram=4)
    prefix = Prefix.from_tokens(tokens(32))
    save(s, Prefix.from_tokens(tokens(16)), 4)
    s.store.lookup(prefix, request="r1").release()
    assert [(r.first_block, r.blocks, r.why) for r in s.store.why("r1")] == [(4, 4, "never_stored")]
    with pytest.raises(MisuseError):
        s.store.why("r2")


def test_in_flight_is_an_answer() -> None:
    s = memory_store(tiny_model(), auto=False)
    prefix = Prefix.from_tokens(tokens(16))
    ticket = s.store.save(prefix, {0: np.arange(4)})
    match = s.store.match(prefix)
    assert (match.tokens, match.pending) == (0, 16)
    assert match.reasons[0].why == "pending"
    s.executor.run_all()
    s.store.wait(ticket)
    assert s.store.match(prefix).tokens == 16


def test_failed_copy_is_never_published() -> None:
    s = memory_store(tiny_model(), auto=False)
    prefix = Prefix.from_tokens(tokens(16))
    ticket = s.store.save(prefix, {0: np.arange(4)})
    s.executor.run(0, fail="io: gone")
    done = s.store.wait(ticket)
    assert done is not None and (done.tokens, done.reason) == (0, "io: gone")
    assert s.store.match(prefix).tokens == 0
    assert s.store.stats().blocks_indexed == 0
    s.store.check()
