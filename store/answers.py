"""What the Store says: values without behaviour of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstrata.prefix_index.lease import Lease
from kvstrata.prefix_index.prefix import Prefix, Symbols
from kvstrata.transfer.move import Completion

Blocks = Mapping[int, ArrayLike]
"""For each KV group the engine's block ids, one a block of the prefix, in order. A group whose kind
does not read old blocks (a sliding window) may give -1 for those it no longer holds."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run of blocks cannot be loaded: ``never_stored``, ``not_admitted``, ``evicted``,
    ``other_salt``, ``pending``, ``failed_check`` ..."""

    first_block: int
    blocks: int
    why: str


@dataclass(frozen=True, slots=True)
class Match:
    """What the Store could give a prefix now. No lease, no side effect: ask every step.

    ``tokens`` counts whole blocks from the start that every KV group can resume at. ``by_tier``
    splits them by where they would come from. ``pending`` counts the tokens (``tokens`` included)
    that will be there once copies in flight have completed.
    """

    tokens: int
    by_tier: dict[str, int]
    pending: int
    reasons: tuple[Reason, ...]


@dataclass(slots=True, eq=False)
class Hit:
    """A Match that holds a lease: until ``release`` its blocks stay where they can be loaded from.

    A context manager; releasing twice is fine.
    """

    match: Match
    symbols: Symbols
    blocks: int
    refs: NDArray[np.int32]
    epoch: int
    lease: Lease
    on_release: Callable[[Hit], None]
    resident: dict[int, NDArray[np.int64]]
    """By group, the block of the engine's pool that holds each block already, -1 where none does;
    empty where the Store does not cache in HBM. Share it and pass it to ``load``: nothing is
    copied.
    """

    @property
    def tokens(self) -> int:
        """Tokens that can be loaded."""
        return self.match.tokens

    @property
    def by_tier(self) -> dict[str, int]:
        """Tokens by the tier that they would come from."""
        return self.match.by_tier

    def release(self) -> None:
        """Let the blocks go; a load under way keeps what it needs."""
        self.on_release(self)

    def __enter__(self) -> Hit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class Pin:
    """Holds ``tokens`` of a prefix somewhere in the Store; a context manager, released once."""

    tokens: int
    lock: threading.RLock
    lease: Lease

    def release(self) -> None:
        """Let the blocks be evicted like any other. Twice is fine."""
        with self.lock:
            self.lease.release()

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence as an engine holds it: ``num_tokens`` tokens of KV are in ``blocks``.

    ``prefix`` names at least the whole blocks among them.
    """

    prefix: Prefix
    num_tokens: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Polled:
    """Everything that completed since the last poll; each Ticket appears once in its life.

    ``failed`` repeats those of the others that fell short. ``freed`` lists, by group, the source
    blocks of saves and swap-outs that nothing reads any more; ``shed`` the kept blocks that the
    Store gives back unasked (a reset, an emptied tier).
    """

    loaded: tuple[Completion, ...] = ()
    saved: tuple[Completion, ...] = ()
    prefetched: tuple[Completion, ...] = ()
    swapped_out: tuple[Completion, ...] = ()
    swapped_in: tuple[Completion, ...] = ()
    failed: tuple[Completion, ...] = ()
    freed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    shed: dict[int, tuple[int, ...]] = field(default_factory=dict)


def polled(completions: list[Completion], shed: dict[int, tuple[int, ...]]) -> Polled:
    """Sort completions by kind; ``shed`` are kept blocks that the Store gives back."""

    def of(kind: str) -> tuple[Completion, ...]:
        return tuple(c for c in completions if c.ticket.kind == kind)

    freed: dict[int, tuple[int, ...]] = {}
    for completion in completions:
        for group, ids in completion.freed.items():
            freed[group] = freed.get(group, ()) + ids
    return Polled(
        loaded=of("load"),
        saved=of("save"),
        prefetched=of("prefetch"),
        swapped_out=of("swap_out"),
        swapped_in=of("swap_in"),
        failed=tuple(c for c in completions if c.tokens < c.requested),
        freed=freed,
        shed=shed,
    )


@dataclass(frozen=True, slots=True)
class Stats:
    """The Store in numbers. ``tiers`` maps a tier to its slots by state, all groups together."""

    tiers: dict[str, dict[str, int]]
    blocks_indexed: int
    leases: int
    moves_in_flight: int
    tickets_open: int
    metrics: dict[str, float]
