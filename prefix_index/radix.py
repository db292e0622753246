"""The prefix index: a path-compressed radix tree over fixed-width symbols.

A symbol is one block's content as bytes (its int32 token ids, or the engine's hash), so to compare
a whole edge is one ``bytes.startswith``, which is memcmp; a child is found by its first symbol in a
dict, however many siblings it has. The tree is pure topology: it names each block by a BlockRef
that no later split, append or join changes, and everything known of a block lives in flat arrays
indexed by that ref. After the radix tree of SGLang's RadixAttention (Zheng et al., arXiv
2312.07104), which keeps the slots in the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvstrata.core.errors import MisuseError
from kvstrata.prefix_index.edges import (
    NO_REFS,
    Node,
    Root,
    ancestors,
    common_blocks,
    descend,
    joined,
    root_of,
)
from kvstrata.prefix_index.lease import LeaseBook
from kvstrata.prefix_index.nodes import NodeTable
from kvstrata.prefix_index.prefix import Symbols
from kvstrata.prefix_index.refs import NO_REF, Refs, RefTable, as_refs

_ROOTS_LOOKED_AT = 256
# Saying why a prefix was missed must not cost more than missing it.


class RadixIndex:
    """Maps sequences of symbols to BlockRefs.

    Invariants, tested by ``check()``:

    1. Each live ref stands on exactly one edge, on the one that ``table.node`` says.
    2. An edge holds at least one block, and its bytes are its number of blocks times the width.
    3. A child is filed under its first symbol, and names its parent; every node is reachable.
    4. ``table.parent`` of a ref is the ref before it on its path, or NO_REF at the head of a root.
    5. A root has a child, and one width, a positive multiple of 4.
    6. Only live refs are leased.
    7. Nothing is marked between two calls.

    Not thread-safe: the Store's lock guards it. Refs returned by ``remove`` are recycled by the
    next ``insert``: clear what is kept of them outside before that.
    """

    def __init__(self) -> None:
        self.leases = LeaseBook()
        self._table = RefTable()
        self._roots: dict[bytes, Root] = {}
        self._nodes = NodeTable(self._table)
        self._marked = np.zeros(0, np.bool_)
        self._fit()

    def __len__(self) -> int:
        """Blocks in the tree."""
        return len(self._table)

    @property
    def capacity(self) -> int:
        """All refs are smaller; never shrinks. Arrays indexed by ref grow to it after an insert."""
        return self._table.capacity

    def match(self, symbols: Symbols) -> Refs:
        """Refs of the leading run of ``symbols`` that is in the tree; it may end inside an edge.

        Never mutates. The caller owns the array. MisuseError where the root has another width.
        """
        root = self._root(symbols)
        if root is None:
            return NO_REFS.copy()
        parts: list[Refs] = []
        descend(root, symbols.data, 0, symbols.width, parts)
        return joined(parts)

    def insert(self, symbols: Symbols) -> Refs:
        """Refs of all of ``symbols``, creating the missing ones. The caller owns the array."""
        return self.extend(NO_REF, symbols)

    def extend(self, parent: int, symbols: Symbols) -> Refs:
        """Like ``insert``, for a run whose first block follows the block ``parent``.

        ``parent`` = NO_REF (-1) is the start of ``symbols.root``. Returns the run's refs alone.
        MisuseError, with nothing changed, where ``parent`` is not live or of another root.
        """
        data, width = symbols.data, symbols.width
        root = self._root(symbols)
        node: Node
        if parent != NO_REF:
            node, offset = self._nodes.place(parent)
            offset += 1
            if root is None or root_of(node) is not root:
                raise MisuseError("extend: the parent block belongs to another root")
        if not data:
            return NO_REFS.copy()
        if parent == NO_REF:
            if root is None:
                root = self._roots[symbols.root] = Root(symbols.root, width)
            node, offset = root, 0
        parts: list[Refs] = []
        pos = 0
        if offset < len(node.refs):
            same = common_blocks(node.symbols, data, 0, width, skip=offset * width)
            parts.append(node.refs[offset : offset + same])
            pos, offset = same * width, offset + same
        if offset == len(node.refs):
            node, pos, offset = descend(node, data, pos, width, parts)
        if pos < len(data):
            if offset < len(node.refs):
                node = self._nodes.split(node, offset)
            parts.append(self._nodes.append(node, data, pos, width))
            self._fit()
        return joined(parts)

    def remove(self, refs: Refs | Sequence[int]) -> Refs:
        """Remove those of ``refs`` that end up without children, tail to head, and return them.

        A block stays if it is leased, or if a block that stays follows it. Nothing outside of
        ``refs`` is removed. Costs O(len(refs)) and the bytes of the edges that it shortens.
        MisuseError, with nothing changed, where a ref is not live.
        """
        refs = as_refs(refs)
        self._table.require_live(refs)
        numbers, counts = np.unique(self._table.node[refs], return_counts=True)
        given = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        self._marked[refs] = True
        parts: list[Refs] = []
        lonely: list[Node] = []
        ready = [node for node in map(self._nodes.get, given) if not node.kids]
        while ready:
            node = ready.pop()
            gone = self._removable(node, given[node.number])
            if not len(gone):
                continue
            parts.append(gone)
            self._table.give(gone)
            if len(gone) < len(node.refs):
                node.truncate(len(node.refs) - len(gone))
                continue
            parent = self._unlink(node)
            if parent.number == NO_REF:
                continue
            if not parent.kids and parent.number in given:
                ready.append(parent)
            elif len(parent.kids) == 1:
                lonely.append(parent)
        self._marked[refs] = False
        for node in lonely:
            self._nodes.join(node)
        return joined(parts)

    def parents(self, refs: Refs) -> Refs:
        """The ref before each of ``refs`` (live), -1 at the head of a root."""
        found: Refs = self._table.parent[refs]
        return found

    def children(self, refs: Refs) -> Refs:
        """How many blocks follow directly on each of ``refs`` (live)."""
        found: Refs = self._table.children[refs]
        return found

    def path(self, ref: int) -> Refs:
        """Refs from the head of the root to ``ref``, both included."""
        node, offset = self._nodes.place(ref)
        parts = [node.refs[: offset + 1]]
        parts += [above.refs for above in islice(ancestors(node), 1, None)]
        return joined(parts[::-1])

    def symbols(self, ref: int) -> Symbols:
        """The symbols from the head of the root to ``ref``, as once inserted."""
        node, offset = self._nodes.place(ref)
        parts = [node.symbols[: (offset + 1) * node.width]]
        parts += [above.symbols for above in islice(ancestors(node), 1, None)]
        root = root_of(node)
        return Symbols(root.key, root.width, b"".join(parts[::-1]))

    def symbol(self, ref: int) -> bytes:
        """The bytes of the block ``ref`` itself."""
        node, offset = self._nodes.place(ref)
        return node.symbols[offset * node.width : (offset + 1) * node.width]

    def root_of(self, ref: int) -> tuple[bytes, int]:
        """The root key that ``ref`` stands under, and its width in bytes a symbol."""
        root = root_of(self._nodes.place(ref)[0])
        return root.key, root.width

    def live(self) -> Refs:
        """Every ref in the tree, ascending. O(capacity)."""
        return self._table.live()

    def known_elsewhere(self, symbols: Symbols) -> bool:
        """Whether another root begins with the same block; looks at a bounded number of roots."""
        first = symbols.data[: symbols.width]
        others = islice(self._roots.items(), _ROOTS_LOOKED_AT)
        return any(key != symbols.root and first in root.kids for key, root in others)

    def width_of(self, root: bytes) -> int | None:
        """Bytes a symbol under ``root``; None while it has no block."""
        found = self._roots.get(root)
        return None if found is None else found.width

    def reset(self) -> None:
        """Forget everything, leases too. No ref of before is live; the capacity stays."""
        self._roots.clear()
        self._nodes.reset()
        self._table.reset()
        self.leases.reset()

    # ---- inside ------------------------------------------------------------------------------

    def _root(self, symbols: Symbols) -> Root | None:
        root = self._roots.get(symbols.root)
        width = symbols.width
        if root is not None and root.width != width:
            raise MisuseError(
                f"this root holds symbols of {root.width} bytes, not {width}: "
                "use another root key for another block size or kind of prefix"
            )
        if width <= 0 or width % 4 or len(symbols.data) % width:
            raise MisuseError(
                f"symbols: {len(symbols.data)} bytes are not whole symbols of {width} bytes "
                "(a positive multiple of 4)"
            )
        return root

    def _removable(self, node: Node, most: int) -> Refs:
        """The marked, unleased tail of a childless node's edge; at most its last ``most`` refs."""
        tail = node.refs[-most:]
        stays = ~self._marked[tail] | self.leases.pinned(tail)
        last = np.flatnonzero(stays)
        return tail[last[-1] + 1 :] if len(last) else tail

    def _unlink(self, node: Node) -> Node:
        """Take an emptied node out of the tree, its root too if that was all; return the parent."""
        parent = node.parent
        assert parent is not None
        del parent.kids[node.first]
        self._nodes.drop(node)
        if isinstance(parent, Root) and not parent.kids:
            del self._roots[parent.key]
        return parent

    def _fit(self) -> None:
        """Grow what is indexed by ref to the table's capacity."""
        if len(self._marked) < self._table.capacity:
            self._marked = np.zeros(self._table.capacity, np.bool_)
            self.leases.grow(self._table.capacity)

    def check(self) -> None:
        """Assert the class's invariants, and those of the refs and leases. Slow; for tests."""
        table = self._table
        table.check()
        self.leases.check()
        seen = np.zeros(table.high, np.int64)
        reached = 0
        for root in self._roots.values():
            assert root.kids, "invariant 5: a root without a block"
            assert root.width > 0 and root.width % 4 == 0, "invariant 5: width"
            todo: list[Node] = [root]
            while todo:
                node = todo.pop()
                todo += node.kids.values()
                for first, kid in node.kids.items():
                    assert kid.symbols[: root.width] == first, "invariant 3: filed wrongly"
                    assert kid.parent is node, "invariant 3: another parent"
                if node is root:
                    continue
                reached += 1
                size = len(node.refs)
                assert size and len(node.symbols) == size * root.width, "invariant 2: edge size"
                assert self._nodes.get(node.number) is node, "invariant 3: node number"
                seen[node.refs] += 1
                assert (table.node[node.refs] == node.number).all(), "invariant 1: on another edge"
                assert node.parent is not None
                above = node.parent.refs[-1:] if node.parent is not root else [NO_REF]
                chain = np.concatenate((above, node.refs[:-1]))
                assert np.array_equal(table.parent[node.refs], chain), "invariant 4: parents"
        assert reached == len(self._nodes), "invariant 3: unreachable node"
        assert (seen == (table.node[: table.high] >= 0)).all(), (
            "invariant 1: not on exactly one edge"
        )
        leased = self.leases.all_pinned()
        assert (leased < table.high).all(), "invariant 6: a lease on a ref never given out"
        assert (table.node[leased] >= 0).all(), "invariant 6: a lease on a dead ref"
        assert not self._marked.any(), "invariant 7: marks left behind"
