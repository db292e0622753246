"""The nodes of the radix tree, and how a sequence of symbols is compared with their edges.

A node owns the edge that leads to it: the edge's symbols as one bytes object and its refs as one
array. Neither is ever changed in place, so an array or bytes taken from an edge stays what it was.
Nothing here recurses: a path may run through many thousand nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstrata.prefix_index.refs import NO_REF, Refs

NO_REFS: Refs = np.empty(0, np.int32)


class Node:
    """An edge and what hangs below it."""

    __slots__ = ("kids", "number", "parent", "refs", "symbols")

    def __init__(self, symbols: bytes, refs: Refs, parent: Node | None, number: int) -> None:
        self.symbols = symbols
        self.refs = refs
        self.parent = parent
        self.number = number
        """The node's place in the index's list of nodes; NO_REF for a root."""
        self.kids: dict[bytes, Node] = {}

    @property
    def width(self) -> int:
        """Bytes a symbol."""
        return len(self.symbols) // len(self.refs)

    @property
    def first(self) -> bytes:
        """The symbol that the parent files this node under."""
        return self.symbols[: self.width]

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` blocks of the edge."""
        self.symbols = self.symbols[: count * self.width]
        # A copy: a slice would keep the longer array alive.
        self.refs = self.refs[:count].copy()


class Root(Node):
    """Where the chains of one root key begin; its edge is empty."""

    __slots__ = ("key", "_width")

    def __init__(self, key: bytes, width: int) -> None:
        super().__init__(b"", NO_REFS, None, NO_REF)
        self.key = key
        self._width = width

    @property
    def width(self) -> int:
        """Bytes a symbol."""
        return self._width


def ancestors(node: Node) -> Iterator[Node]:
    """``node``, its parent, and so on; the root comes last."""
    up: Node | None = node
    while up is not None:
        yield up
        up = up.parent


def root_of(node: Node) -> Root:
    """The root that ``node`` hangs below."""
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node


def joined(parts: list[Refs]) -> Refs:
    """The parts as one new array, which the caller owns."""
    if len(parts) == 1:
        return parts[0].copy()
    return np.concatenate(parts) if parts else NO_REFS.copy()


def common_blocks(edge: bytes, data: bytes, pos: int, width: int, skip: int = 0) -> int:
    """How many leading blocks of ``edge[skip:]`` equal those of ``data[pos:]``."""
    size = min(len(edge) - skip, len(data) - pos)
    word, step = (np.int64, 8) if width % 8 == 0 else (np.int32, 4)
    count = size // step
    differ = np.frombuffer(edge, word, count, skip) != np.frombuffer(data, word, count, pos)
    first = int(differ.argmax()) if count else 0
    if not count or not differ[first]:
        return size // width
    return first * step // width


def descend(
    node: Node, data: bytes, pos: int, width: int, parts: list[Refs]
) -> tuple[Node, int, int]:
    """Follow ``data[pos:]`` down from the end of ``node``'s edge, adding the refs met to ``parts``.

    Returns (the last node entered, the position reached in ``data``, the blocks of that node's edge
    that match). The walk stops at the end of ``data``, where no child fits, or inside an edge.
    """
    add, agrees, size = parts.append, data.startswith, len(data)
    while pos < size:
        kid = node.kids.get(data[pos : pos + width])
        if kid is None:
            break
        edge = kid.symbols
        if not agrees(edge, pos):
            same = common_blocks(edge, data, pos, width)
            add(kid.refs[:same])
            return kid, pos + same * width, same
        add(kid.refs)
        pos += len(edge)
        node = kid
    return node, pos, len(node.refs)
