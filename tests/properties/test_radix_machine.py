"""RadixIndex against a dictionary of prefixes, over any order of calls.

The oracle knows one thing: which paths exist, and the ref of each. Alphabets are tiny, so that
paths meet, split and end inside edges all the time.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.core.errors import MisuseError
from kvstrata.prefix_index import nodes
from kvstrata.prefix_index.lease import Lease
from kvstrata.prefix_index.prefix import Symbols
from kvstrata.prefix_index.radix import RadixIndex

WIDTHS = {b"a" * 32: 4, b"b" * 32: 8, b"c" * 32: 64}
ROOTS = st.sampled_from(sorted(WIDTHS))
TEXTS = st.text("xyz", max_size=8)
Path = tuple[bytes, str]


def symbols(root: bytes, text: str) -> Symbols:
    width = WIDTHS[root]
    # The letter is the last byte: blocks that differ there only must differ.
    return Symbols(root, width, b"".join(bytes(width - 1) + c.encode() for c in text))


def prefixes(root: bytes, text: str, start: int = 0) -> list[Path]:
    return [(root, text[: i + 1]) for i in range(start, len(text))]


class RadixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex()
        self.refs: dict[Path, int] = {}
        self.leases: list[tuple[Lease, list[int]]] = []

    def leased(self) -> set[int]:
        return {ref for _, held in self.leases for ref in held}

    def is_leaf(self, path: Path) -> bool:
        root, text = path
        return not any((root, text + c) in self.refs for c in "xyz")

    def note(self, paths: list[Path], refs: list[int]) -> None:
        assert len(paths) == len(refs)
        before = set(self.refs.values())
        for path, ref in zip(paths, refs, strict=True):
            if path in self.refs:
                assert self.refs[path] == ref, "a ref changed"
            else:
                assert ref not in before, "a live ref was given out again"
                self.refs[path] = ref

    @rule(root=ROOTS, text=TEXTS)
    def insert(self, root: bytes, text: str) -> None:
        refs = self.index.insert(symbols(root, text))
        self.note(prefixes(root, text), refs.tolist())

    @rule(root=ROOTS, text=TEXTS)
    def match(self, root: bytes, text: str) -> None:
        expected = [self.refs[p] for p in prefixes(root, text) if p in self.refs]
        assert self.index.match(symbols(root, text)).tolist() == expected

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), text=TEXTS)
    def extend(self, data: st.DataObject, text: str) -> None:
        root, above = data.draw(st.sampled_from(sorted(self.refs)))
        refs = self.index.extend(self.refs[root, above], symbols(root, text))
        self.note(prefixes(root, above + text, len(above)), refs.tolist())

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.refs))))
        gone = self.index.remove([self.refs[path] for path in chosen]).tolist()
        expected = set()
        leased = self.leased()
        for path in sorted(set(chosen), key=lambda p: -len(p[1])):
            if self.is_leaf(path) and self.refs[path] not in leased:
                expected.add(self.refs.pop(path))
        assert len(gone) == len(expected) and set(gone) == expected
        if gone:
            with pytest.raises(MisuseError):
                self.index.remove(gone[:1])

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        root, text = data.draw(st.sampled_from(sorted(self.refs)))
        refs = self.index.match(symbols(root, text))
        self.leases.append((self.index.leases.lease(refs), refs.tolist()))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(0, 9))
    def release_head(self, data: st.DataObject, count: int) -> None:
        lease, held = data.draw(st.sampled_from(self.leases))
        lease.release_head(count)
        del held[:count]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, held = data.draw(st.sampled_from(self.leases))
        lease.release()
        held.clear()

    @rule(anyway=st.integers(0, 9))
    def reset(self, anyway: int) -> None:
        if anyway:  # seldom, or nothing would grow
            return
        self.index.reset()
        self.refs.clear()
        for _, held in self.leases:
            held.clear()

    @invariant()
    def sound(self) -> None:
        self.index.check()
        for lease, held in self.leases:
            lease.check()
            assert lease.held.tolist() == held
        assert set(self.index.leases.all_pinned().tolist()) == self.leased()

    @invariant()
    def agrees(self) -> None:
        index = self.index
        assert len(index) == len(self.refs)
        for (root, text), ref in self.refs.items():
            above = self.refs[root, text[:-1]] if len(text) > 1 else -1
            below = sum((root, text + c) in self.refs for c in "xyz")
            one = np.array([ref], np.int32)
            assert index.parents(one).tolist() == [above]
            assert index.children(one).tolist() == [below]
            assert index.path(ref).tolist() == [self.refs[p] for p in prefixes(root, text)]
            assert index.symbols(ref) == symbols(root, text)
            assert index.symbol(ref) == symbols(root, text[-1]).data
            assert index.root_of(ref) == (root, WIDTHS[root])
        live = {root for root, _ in self.refs}
        for root, width in WIDTHS.items():
            assert index.width_of(root) == (width if root in live else None)


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class ChainedMachine(RadixMachine):
    """The same with edges that are too long to be joined: every node stays a node."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nodes._JOIN_BYTES
        nodes._JOIN_BYTES = 9

    def teardown(self) -> None:
        nodes._JOIN_BYTES = self.kept


TestChained = ChainedMachine.TestCase
TestChained.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
