"""BlockPool and BlockTable against a multiset of references and plain lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.core.errors import LayoutError, MisuseError
from kvstrata.core.spec import blocks_for
from kvstrata.tiers.pool import BlockPool
from kvstrata.tiers.table import BlockTable

BLOCKS, SIZE = 24, 4


class Pool(RuleBasedStateMachine):
    """The oracle: one Counter of references, one list of values a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.loose: Counter[int] = Counter()
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.memory: dict[int, int] = {}
        self.value = 0

    def held(self) -> Counter[int]:
        held = Counter(self.loose)
        for table, _ in self.tables:
            held.update(table.blocks.tolist())
        return held

    @rule(n=st.integers(0, BLOCKS), after=st.none() | st.integers(0, BLOCKS - 1))
    def allocate(self, n: int, after: int | None) -> None:
        held = self.held()
        ids = self.pool.allocate(n, after)
        if n > BLOCKS - len(held):
            assert ids is None
            return
        assert ids is not None and len(set(ids.tolist())) == n
        assert not set(ids.tolist()) & set(held)
        behind = range(after + 1, after + 1 + n) if after is not None else None
        if behind and behind[-1] < BLOCKS and not set(behind) & set(held):
            assert ids.tolist() == list(behind)
        free = [block not in held for block in range(BLOCKS)]
        if n and any(all(free[i : i + n]) for i in range(BLOCKS - n + 1)):
            assert ids.tolist() == list(range(ids[0], ids[0] + n)), "a run was there"
        self.loose.update(ids.tolist())

    @precondition(lambda self: self.loose)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.loose)), max_size=4))
        self.pool.share(ids)
        self.loose.update(ids)

    @precondition(lambda self: self.loose)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.loose.elements())), max_size=4))
        held = self.held()
        if any(count > held[block] for block, count in Counter(ids).items()):
            with pytest.raises(MisuseError):
                self.pool.release(ids)
            return
        if Counter(ids) - self.loose:
            return  # it would take a table's reference away
        freed = self.pool.release(ids)
        held.subtract(ids)
        assert set(freed.tolist()) == {block for block in ids if not held[block]}
        self.loose.subtract(ids)
        self.loose = +self.loose

    @rule(block=st.integers(-3, BLOCKS + 3))
    def misuse(self, block: int) -> None:
        if not 0 <= block < BLOCKS:
            with pytest.raises(LayoutError):
                self.pool.release([block])
        elif block not in self.held():
            with pytest.raises(MisuseError):
                self.pool.release([block])
            with pytest.raises(MisuseError):
                self.pool.share([block])

    @rule()
    def new_table(self) -> None:
        self.tables.append((BlockTable(self.pool, SIZE), []))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), n=st.integers(0, 3 * SIZE))
    def append(self, data: st.DataObject, n: int) -> None:
        table, values = data.draw(st.sampled_from(self.tables))
        need = blocks_for(len(values) + n, SIZE) - blocks_for(len(values), SIZE)
        new = table.append(n)
        assert (new is None) == (need > BLOCKS - len(self.held()) + (0 if new is None else need))
        if new is None:
            return
        for _ in range(n):
            values.append(0)
            if not self.write(table, values, len(values) - 1):
                table.truncate(len(values) - 1)
                values.pop()
                table.truncate(len(values))
                return

    @precondition(lambda self: any(values for _, values in self.tables))
    @rule(data=st.data())
    def rewrite(self, data: st.DataObject) -> None:
        table, values = data.draw(st.sampled_from([pair for pair in self.tables if pair[1]]))
        self.write(table, values, data.draw(st.integers(0, len(values) - 1)))

    def write(self, table: BlockTable, values: list[int], position: int) -> bool:
        shared = self.pool.is_shared(table.slot(position) // SIZE)
        if shared and not self.pool.num_free:
            with pytest.raises(MisuseError):
                table.writable(position)
            return False
        copy = table.writable(position)
        assert (copy is not None) == shared
        if copy is not None:
            for offset in range(SIZE):
                old = self.memory.get(copy[0] * SIZE + offset, 0)
                self.memory[copy[1] * SIZE + offset] = old
        self.value += 1
        values[position] = self.memory[table.slot(position)] = self.value
        return True

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, values = data.draw(st.sampled_from(self.tables))
        self.tables.append((table.fork(), list(values)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        table, values = data.draw(st.sampled_from(self.tables))
        keep = data.draw(st.integers(0, len(values)))
        table.truncate(keep)
        del values[keep:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table, _ = self.tables.pop(index)
        table.release()
        assert not len(table.release())

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        held = self.held()
        assert self.pool.num_free == BLOCKS - len(held)
        assert all(self.pool.references(block) == held[block] for block in range(BLOCKS))
        for table, values in self.tables:
            table.check()
            assert table.num_tokens == len(values)
            slots = table.slots(0, len(values)).tolist()
            assert slots == [table.slot(position) for position in range(len(values))]
            assert [self.memory[slot] for slot in slots] == values


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
