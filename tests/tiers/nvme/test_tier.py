"""The tier's face: what is stored is served, over restarts, within the quota."""

import time

import pytest

from kvstrata.core.errors import ClosedError, ConfigError, MisuseError
from kvstrata.tiers.base import Keyed, Tier
from kvstrata.tiers.nvme.directory import physical_bytes


def test_is_a_tier(opened):
    tier = opened().tier
    assert isinstance(tier, Tier) and isinstance(tier, Keyed)
    assert tier.name == "nvme" and tier.epoch == 0 and len(tier.namespace) == 32


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_is_stored_is_served_also_after_a_restart(opened, codec):
    one = opened(codec=codec)
    keys = one.save(1, 100) + one.save(2, 3)
    one.tier.check()
    assert one.read() == (set(keys), 0, 0)
    one.close()
    two = opened(codec=codec)
    assert two.read() == (set(keys), 0, 0)
    two.tier.check()
    assert [r.depth for r in two.recovered] == sorted(r.depth for r in two.recovered)
    by_key = {r.key: r for r in two.recovered}
    root, chain, symbols = two.chain(1, 100)
    for depth, key in enumerate(chain):
        found = by_key[key]
        assert (found.root, found.depth, found.symbol) == (root, depth, symbols[depth])
        assert found.parent == (chain[depth - 1] if depth else root)


def test_zstd_takes_less_space(opened, tmp_path):
    plain, packed = opened(tmp_path / "a"), opened(tmp_path / "b", codec="zstd")
    plain.save(1, 60), packed.save(1, 60)
    assert packed.tier.used_bytes < 0.8 * plain.tier.used_bytes


def test_nothing_is_visible_before_its_commit(opened):
    one = opened()
    runs = one.place(1, 10)
    written = one.write(runs)
    assert one.tier.poll() == []
    with pytest.raises(MisuseError):
        one.tier.read_runs(0, runs[0].records)
    done = one.wait(one.tier.commit(runs, written))
    assert done.ok and not done.error
    with pytest.raises(MisuseError):
        one.tier.commit(runs, written)


def test_blocks_that_were_not_written_give_their_space_back(opened):
    one = opened()
    runs = one.place(1, 10)
    written = one.write(runs)
    written[3] = written[9] = None
    assert one.wait(one.tier.commit(runs, written)).ok
    one.tier.check()
    assert one.tier.stats()["records"] == 8
    whole = one.tier.used_bytes
    one.tier.abandon(one.place(2, 50))
    one.tier.check()
    assert one.tier.used_bytes == whole
    runs = one.place(3, 4)
    assert one.wait(one.tier.commit(runs, [None] * 4)).ok
    assert one.tier.used_bytes == whole


def test_place_refuses_ids_that_are_taken(opened):
    one = opened()
    one.save(1, 5)
    for records in ([0], [-1], [one.tier.capacity(0)]):
        with pytest.raises(MisuseError):
            one.tier.place(
                0, root=b"r" * 32, parent=b"r" * 32, depth=0, keys=[b"k" * 32],
                symbols=[b"s"], records=records, checksums=[None],
            )  # fmt: skip


def test_delete_frees_space_once_it_is_durable(opened):
    one = opened()
    one.save(1, 20)
    assert one.tier.used_bytes > 0 and not one.tier.deletes_pending
    batch = one.tier.delete(0, list(one.held.values()))
    assert one.tier.deletes_pending and one.tier.used_bytes > 0
    assert one.wait(batch).ok
    assert one.tier.used_bytes == 0 and not one.tier.deletes_pending
    one.tier.check()
    assert one.wait(one.tier.delete(0, [0, 1])).ok  # nothing there: fine


def test_a_full_tier_says_none_and_keeps_its_quota(opened, tmp_path):
    one = opened()
    number = 0
    saved: dict[int, list[bytes]] = {}
    for _ in range(400):
        number += 1
        keys = one.save(number, 10)
        while keys is None:
            one.delete(saved.pop(min(saved)))
            keys = one.save(number, 10)
        saved[number] = keys
    one.tier.check()
    expected = {key for keys in saved.values() for key in keys}
    assert one.read() == (expected, 0, 0)
    room = one.tier.capacity(0)
    assert len(expected) > 0.9 * room
    one.close()
    assert physical_bytes(str(tmp_path / "nvme")) <= one.config.quota
    assert opened().read() == (expected, 0, 0)


def test_adjacent_records_are_read_with_one_call(opened):
    one = opened()
    keys = one.save(1, 64)
    ids = [one.held[0, key] for key in keys]
    assert len(one.tier.read_runs(0, ids)) == 1
    assert len(one.tier.read_runs(0, ids[::-1])) == 64
    runs = one.tier.read_runs(0, [*ids[:5], *ids[40:]])
    assert [len(run.records) for run in runs] == [5, 24]


def test_reset_is_total_and_survives(opened):
    one = opened()
    one.save(1, 30)
    in_flight = one.place(2, 5)
    written = one.write(in_flight)
    assert one.tier.reset() == one.tier.epoch == 1
    assert one.tier.stats()["records"] == 0
    done = one.wait(one.tier.commit(in_flight, written))
    assert not done.ok and done.error == "reset"
    one.held.clear()
    one.free = {0: list(range(one.tier.capacity(0)))}
    keys = one.save(1, 30)
    one.close()
    two = opened()
    assert two.tier.epoch == 1 and two.read() == (set(keys), 0, 0)
    two.tier.check()


def test_records_of_another_model_are_misses_and_can_be_reclaimed(opened, world):
    one = opened()
    one.save(1, 200)
    one.close()
    other = opened(kv=world.model(b"x" * 32))
    assert not other.recovered and other.tier.stats()["other_records"] == 200
    keys = other.save(1, 20)
    before = other.tier.used_bytes
    assert other.tier.reclaim(1 << 20) and other.tier.deletes_pending
    deadline = time.monotonic() + 10
    while other.tier.deletes_pending and time.monotonic() < deadline:
        other.tier.poll()
    assert before - other.tier.used_bytes >= 1 << 20
    other.tier.check()
    other.close()
    back = opened()
    good, failed, wrong = back.read()
    assert (failed, wrong) == (0, 0)
    assert len(back.recovered) < 200 and back.tier.stats()["other_records"] == len(keys)


def test_last_use_survives(opened):
    one = opened()
    one.save(1, 3)
    when = time.time() + 1000
    one.tier.touch(0, [1], when)
    one.close()
    used = {r.depth: r.last_use for r in opened().recovered}
    assert used[1] == when and abs(used[0] - time.time()) < 100


def test_groups_have_their_own_ids_and_keys(opened, world):
    kv = world.model(groups=2)
    one = opened(kv=kv)
    keys = one.save(1, 5)
    assert one.save(1, 5, group=1) == keys
    one.close()
    two = opened(kv=kv)
    assert sorted((r.group, r.record) for r in two.recovered) == sorted(
        (g, i) for g in range(2) for i in range(5)
    )


def test_blocks_that_no_prefix_reaches_are_not_kept(opened):
    one = opened()
    keys = one.save(1, 10)
    one.delete([keys[4]])
    one.close()
    two = opened()
    assert [r.depth for r in two.recovered] == [0, 1, 2, 3]


def test_a_smaller_quota_keeps_what_fits(opened, tmp_path):
    one = opened()
    while one.save(one.free[0][0] + 1, 20) is not None:
        pass
    one.close()
    two = opened(quota=8 << 20)
    two.tier.check()
    assert two.recovered and physical_bytes(str(tmp_path / "nvme")) <= 8 << 20
    good, failed, wrong = two.read()
    assert failed == wrong == 0 and len(good) == len(two.recovered)


def test_a_quota_below_one_block_is_one_line(opened):
    for quota in (0, 4096, 200 << 10):
        with pytest.raises(ConfigError) as caught:
            opened(quota=quota)
        assert "\n" not in str(caught.value) and "quota" in str(caught.value)


def test_the_quota_that_the_message_asks_for_is_enough(opened):
    with pytest.raises(ConfigError) as caught:
        opened(quota=1)
    need = int(str(caught.value).split("give it ")[1].split()[0])
    assert opened(quota=need).save(1, 1) is not None


def test_close_twice_and_calls_after(opened):
    one = opened()
    one.close()
    one.close()
    with pytest.raises(ClosedError):
        one.tier.delete(0, [])
    with pytest.raises(ClosedError):
        one.place(1, 1)


def test_an_idle_tier_uses_no_cpu(opened):
    one = opened()
    one.save(1, 5)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.005
