"""The nodes of the radix tree by number, and the changes to them that move no BlockRef.

Where a block stands is one number per ref, so that cutting an edge in two or putting two together
costs one assignment of numbers, however long the edge.
"""

from __future__ import annotations

import numpy as np

from kvstrata.prefix_index.edges import NO_REFS, Node
from kvstrata.prefix_index.refs import NO_REF, Refs, RefTable, dead_ref

_JOIN_BYTES = 64 * 1024
# Edges below this size are extended in place, or joined with an only child, rather than chained: a
# sequence that grows block by block, or a prompt that outlived its branches, would otherwise become
# a node a block. The copy that this costs is a few microseconds.


class NodeTable:
    """Numbers nodes, finds the node of a ref, and appends, splits and joins edges.

    ``RadixIndex`` states and checks what holds of the tree as a whole.
    """

    __slots__ = ("_free", "_nodes", "_refs")

    def __init__(self, refs: RefTable) -> None:
        self._refs = refs
        self._nodes: list[Node | None] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """Nodes in use."""
        return len(self._nodes) - len(self._free)

    def get(self, number: int) -> Node:
        """The node in use under ``number``."""
        node = self._nodes[number]
        assert node is not None
        return node

    def place(self, ref: int) -> tuple[Node, int]:
        """The node whose edge ``ref`` is on, and where on it. MisuseError where it is not live."""
        table = self._refs
        if not 0 <= ref < table.high or table.node[ref] == NO_REF:
            raise dead_ref()
        node = self.get(int(table.node[ref]))
        last = len(node.refs) - 1
        if node.refs[last] == ref:
            return node, last
        return node, int((node.refs == ref).argmax())

    def append(self, node: Node, data: bytes, pos: int, width: int) -> Refs:
        """Put the new run ``data[pos:]`` (>= 1 block) after the end of ``node``'s edge.

        Returns its refs, as the tree holds them. A child of that first symbol must not exist.
        """
        above = int(node.refs[-1]) if node.number != NO_REF else NO_REF
        count = (len(data) - pos) // width
        if above != NO_REF and not node.kids and len(node.symbols) < _JOIN_BYTES:
            refs = self._refs.take(count, above, node.number)
            node.symbols = b"".join((node.symbols, memoryview(data)[pos:]))
            node.refs = np.concatenate((node.refs, refs))
        else:
            child = self._new(data[pos:], NO_REFS, node)
            refs = child.refs = self._refs.take(count, above, child.number)
            node.kids[child.symbols[:width]] = child
        return refs

    def split(self, node: Node, count: int) -> Node:
        """Cut the edge of ``node`` after ``count`` blocks and return the upper half."""
        # The lower half keeps the node, so that none of its children needs a new parent.
        assert node.parent is not None
        size = count * node.width
        upper = self._new(node.symbols[:size], node.refs[:count].copy(), node.parent)
        upper.kids[node.symbols[size : size + node.width]] = node
        node.parent.kids[node.first] = upper
        node.symbols = node.symbols[size:]
        node.refs = node.refs[count:].copy()
        node.parent = upper
        self._refs.node[upper.refs] = upper.number
        return upper

    def join(self, node: Node) -> None:
        """Put ``node`` and its only child on one edge, if that is so and worth the copy."""
        if self._nodes[node.number] is not node or len(node.kids) != 1:
            return
        (kid,) = node.kids.values()
        if len(node.symbols) + len(kid.symbols) > _JOIN_BYTES:
            return
        assert node.parent is not None
        node.parent.kids[node.first] = kid
        kid.parent = node.parent
        kid.symbols = node.symbols + kid.symbols
        kid.refs = np.concatenate((node.refs, kid.refs))
        self._refs.node[node.refs] = kid.number
        self.drop(node)

    def drop(self, node: Node) -> None:
        """Forget a node that the tree no longer reaches."""
        self._nodes[node.number] = None
        self._free.append(node.number)

    def reset(self) -> None:
        """Forget every node."""
        self._nodes.clear()
        self._free.clear()

    def _new(self, symbols: bytes, refs: Refs, parent: Node) -> Node:
        if self._free:
            number = self._free.pop()
        else:
            number = len(self._nodes)
            self._nodes.append(None)
        node = self._nodes[number] = Node(symbols, refs, parent, number)
        return node
