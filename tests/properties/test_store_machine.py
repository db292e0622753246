"""The Store against an oracle, over every order in which copies and commits can end.

A block's bytes are a function of its prefix, its group and the number of resets, as they are of the
tokens and the weights in an engine. So whatever is loaded can be checked byte by byte, and a block
of another prefix, another salt or an older epoch is found at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvstrata.prefix_index.prefix import Prefix
from kvstrata.store.answers import Sequence
from kvstrata.store.swap import Swapped
from kvstrata.testing.models import hybrid_model, tiny_model
from kvstrata.testing.store import memory_store
from kvstrata.transfer.move import Completion, Ticket

SIZE = 4
HBM = 48
paths = st.lists(st.integers(0, 2), min_size=1, max_size=9)
"""A prefix as one small number a block: few enough that paths share, branch and repeat."""
salts = st.sampled_from([b"", b"x"])


def token_ids(path: list[int]) -> list[int]:
    return [number * 10 + i for number in path for i in range(SIZE)]


Blocks = Mapping[int, Iterable[int]]


class StoreMachine(RuleBasedStateMachine):
    hits = Bundle("hits")
    swapped = Bundle("swapped")

    @initialize(
        hybrid=st.booleans(),
        dram=st.integers(1, 8),
        nvme=st.sampled_from([0, 3, 12, 64]),
        write=st.sampled_from(["through", "demote"]),
        auto=st.booleans(),
        cache_hbm=st.booleans(),
    )
    def start(
        self, hybrid: bool, dram: int, nvme: int, write: str, auto: bool, cache_hbm: bool
    ) -> None:
        model = hybrid_model(SIZE) if hybrid else tiny_model(SIZE)
        self.s = memory_store(
            model,
            blocks=HBM,
            dram=dram,
            nvme=nvme,
            write=write,
            auto=auto,
            held=not auto,
            cache_hbm=cache_hbm,
        )
        self.cache_hbm = cache_hbm
        self.references = [np.zeros(HBM, np.int64) for _ in self.s.hbm.rows]
        """By group, how many hold each block, the Store's kept ones included."""
        self.store = self.s.store
        self.resets = 0
        self.open: dict[int, tuple[Ticket, Blocks, int, bytes, list[int], int]] = {}
        """Ticket id -> ticket, its blocks, tokens meant, salt, path, resets when it began."""

    # -- what the engine does --------------------------------------------------------------------

    def bytes_of(self, group: int, path: list[int], salt: bytes, n: int) -> np.ndarray:
        size = self.store.model.groups[group].block_bytes()
        seed = repr((group, path[:n], salt, self.resets)).encode()
        return np.frombuffer(hashlib.shake_128(seed).digest(size), np.uint8)

    def take(self, n: int) -> list[int] | None:
        free = np.flatnonzero(sum(self.references) == 0)[:n].tolist()
        if len(free) < n:
            return None
        self.hold(self.everywhere(free), 1)
        return free

    def hold(self, blocks: Mapping[int, Iterable[int]], count: int) -> None:
        for group, ids in blocks.items():
            for block in ids:
                self.references[group][block] += count
            assert (self.references[group] >= 0).all(), "given back twice"

    def compute(self, path: list[int], salt: bytes, blocks: list[int]) -> None:
        for group, rows in enumerate(self.s.hbm.rows):
            for i, block in enumerate(blocks):
                rows[block] = self.bytes_of(group, path, salt, i + 1)

    def everywhere(self, blocks: list[int]) -> dict[int, list[int]]:
        return {group: blocks for group in range(len(self.s.hbm.rows))}

    def follow(self, ticket: Ticket, blocks: Blocks, n: int, salt: bytes, path: list[int]) -> None:
        self.open[ticket.id] = (ticket, blocks, n, salt, path, self.resets)

    # -- rules -----------------------------------------------------------------------------------

    @rule(path=paths, salt=salts, start=st.integers(0, 3))
    def save(self, path: list[int], salt: bytes, start: int) -> None:
        start = min(start, len(path))
        blocks = self.take(len(path))
        if blocks is None:
            return
        self.compute(path, salt, blocks)
        prefix = Prefix.from_tokens(token_ids(path), salt=salt)
        ticket = self.store.save(prefix, self.everywhere(blocks[start:]), start=start)
        self.hold(self.everywhere(blocks[:start]), -1)
        self.follow(ticket, self.everywhere(blocks[start:]), len(path) * SIZE, salt, path)

    @rule(path=paths, salt=salts)
    def keep(self, path: list[int], salt: bytes) -> None:
        blocks = self.take(len(path)) if self.cache_hbm else None
        if blocks is None:
            return
        self.compute(path, salt, blocks)
        prefix = Prefix.from_tokens(token_ids(path), salt=salt)
        self.hold(self.store.keep(prefix, self.everywhere(blocks)), 1)
        self.hold(self.everywhere(blocks), -1)

    @rule(count=st.integers(0, 5))
    def shed(self, count: int) -> None:
        if self.cache_hbm:
            self.hold(self.store.shed(count), -1)

    @rule(target=hits, path=paths, salt=salts, limit=st.none() | st.integers(0, 30))
    def lookup(self, path: list[int], salt: bytes, limit: int | None) -> object:
        prefix = Prefix.from_tokens(token_ids(path), salt=salt)
        match = self.store.match(prefix, limit)
        hit = self.store.lookup(prefix, limit)
        assert hit.match == match
        assert limit is None or hit.tokens <= limit
        assert sum(hit.by_tier.values()) == hit.tokens
        return hit, path, salt

    @rule(item=consumes(hits))
    def release(self, item: tuple) -> None:
        item[0].release()
        item[0].release()

    @rule(item=consumes(hits), share=st.booleans())
    def load(self, item: tuple, share: bool) -> None:
        hit, path, salt = item
        blocks = self.take(hit.blocks)
        if blocks is None:
            hit.release()
            return
        if share and hit.resident and hit.epoch == self.resets:
            groups = {g: np.where(ids >= 0, ids, blocks) for g, ids in hit.resident.items()}
            self.hold(self.everywhere(blocks), -1)
            self.hold(groups, 1)
        else:
            groups = {g: np.array(ids) for g, ids in self.everywhere(blocks).items()}
        ticket = self.store.load(hit, groups)
        self.follow(ticket, groups, hit.tokens, salt, path)

    @rule(path=paths, salt=salts)
    def prefetch(self, path: list[int], salt: bytes) -> None:
        prefix = Prefix.from_tokens(token_ids(path), salt=salt)
        self.follow(self.store.prefetch(prefix), {}, 0, salt, path)

    @rule(target=swapped, path=paths, salt=salts, partial=st.integers(0, SIZE - 1))
    def swap_out(self, path: list[int], salt: bytes, partial: int) -> object:
        blocks = self.take(len(path))
        if blocks is None:
            return None
        self.compute(path, salt, blocks)
        n = (len(path) - bool(partial)) * SIZE + partial
        sequence = Sequence(
            Prefix.from_tokens(token_ids(path), salt=salt), n, self.everywhere(blocks)
        )
        gone = self.store.swap_out(sequence)
        self.follow(gone.ticket, self.everywhere(blocks), n, salt, path)
        return gone, path, salt

    @rule(item=consumes(swapped), back=st.booleans())
    def swap_in(self, item: tuple[Swapped, list[int], bytes] | None, back: bool) -> None:
        if item is None:
            return
        gone, path, salt = item
        blocks = self.take(-(-gone.num_tokens // SIZE)) if back else None
        if blocks is None:
            self.store.discard(gone)
            return
        ticket = self.store.swap_in(gone, self.everywhere(blocks))
        self.follow(ticket, self.everywhere(blocks), gone.num_tokens, salt, path)

    @rule(data=st.data(), fail=st.booleans())
    def run_one(self, data: st.DataObject, fail: bool) -> None:
        pending = self.s.executor.pending
        if pending:
            index = data.draw(st.integers(0, len(pending) - 1))
            self.s.executor.run(index, fail="io: injected" if fail else "")

    @rule(n=st.integers(1, 3))
    def commit(self, n: int) -> None:
        if self.s.records is not None:
            self.s.records.settle(n)

    @rule(tier=st.sampled_from(["hbm", "dram", "nvme"]))
    def drop(self, tier: str) -> None:
        has = {"hbm": self.cache_hbm, "dram": True, "nvme": self.s.records is not None}
        if has[tier]:
            self.store.drop(tier)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        disk = self.s.records.disk if self.s.records is not None else {}
        if disk:
            disk[data.draw(st.sampled_from(sorted(disk)))][0] ^= 0xFF

    @rule()
    def flush(self) -> None:
        if self.s.executor.auto:
            everything = self.store.flush()
            assert everything or self.s.records is not None

    @rule()
    def reset(self) -> None:
        self.store.reset()
        self.resets += 1

    @rule(seconds=st.integers(1, 40))
    def time_passes(self, seconds: int) -> None:
        self.s.clock.now += seconds

    @rule()
    def poll(self) -> None:
        polled = self.store.poll()
        ended = (
            polled.loaded
            + polled.saved
            + polled.prefetched
            + polled.swapped_in
            + polled.swapped_out
        )
        assert {c.ticket.id for c in polled.failed} <= {c.ticket.id for c in ended}
        self.hold(polled.shed, -1)
        for completion in ended:
            self.ended(completion)

    # -- what must hold --------------------------------------------------------------------------

    def ended(self, done: Completion) -> None:
        ticket, blocks, n, salt, path, began = self.open.pop(done.ticket.id)  # once, or KeyError
        assert ticket.kind == done.ticket.kind
        self.hold(blocks, -1)
        if ticket.kind in ("save", "swap_out"):
            assert {g: set(ids) for g, ids in done.freed.items()} == {
                g: set(ids) for g, ids in blocks.items()
            }
        if ticket.kind not in ("load", "swap_in"):
            return
        assert done.tokens <= n
        if began != self.resets:
            assert done.tokens == 0 or began < self.resets
            return
        assert done.tokens == n or done.reason, "a short load says why"
        for group, rows in enumerate(self.s.hbm.rows):
            for i in self.store.model.groups[group].spec.blocks_read(done.tokens):
                expected = self.bytes_of(group, path, salt, i + 1)
                assert np.array_equal(rows[blocks[group][i]], expected), (ticket, group, i)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "s"):
            self.store.check()
            if self.s.records is not None:
                # Whatever is on record is known to the ledger, or its place would be lost for ever.
                for group, record in self.s.records.catalogue:
                    taken = self.store._placement.nvme.ledgers[group]._state[record]
                    assert taken, f"record {record} of group {group} belongs to nobody"

    def teardown(self) -> None:
        if not hasattr(self, "s"):
            return
        self.s.executor.auto = True
        if self.s.records is not None:
            self.s.records.held = False
        self.s.clock.now += 1000
        for _ in range(3):
            self.poll()
        assert not self.open, f"tickets without an end: {self.open}"
        if self.cache_hbm:
            self.store.drop("hbm")
        self.poll()
        kept = sum(int(r.sum()) for r in self.references)
        assert kept == 0 or self.store.stats().leases, "blocks that nobody gives back"
        assert self.store.stats().moves_in_flight == 0
        self.store.close()


StoreMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    # Shrinking a failure takes minutes; the falsifying steps are printed all the same.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
TestStore = StoreMachine.TestCase
