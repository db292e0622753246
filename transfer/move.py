"""Moves as data: what the Store asks of a transfer engine, and what it hears back.

A run of blocks is ONE Move. All of it is plain data that an engine may serialise and send to its
workers, but for ``ready``, which means something only in the process that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvstrata.tiers.run import ReadRun, WriteRun, Written

Slots = NDArray[np.int64]
"""Slot numbers (or an engine's block ids, which are the slots of HBM), shape ``[n]``."""


class Priority(IntEnum):
    """Who goes first: a load that a request waits for, then prefetch, then stores."""

    DEMAND = 0
    PREFETCH = 1
    STORE = 2


@runtime_checkable
class ReadyEvent(Protocol):
    """A point in a stream after which bytes may be read or overwritten. ``torch.cuda.Event`` is
    one."""

    def query(self) -> bool:
        """Whether the point has been passed; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the point has been passed."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Copy n blocks of one KV group from one tier to another.

    ``source_slots[i]`` goes to ``target_slots[i]``. From or to ``nvme`` the slots of that side are
    record ids and ``runs`` says where they lie: the runs' records, one run after the other, equal
    those slots. ``gate`` numbers the LayerGate that opens layer by layer (0: none). ``checksums``
    are expected xxh3-64 sums of the records, shape ``[n]`` uint64, for those with ``verify[i]``.
    ``wants_checksums`` asks for the sums of the records that were moved (into DRAM).
    ``deadline`` is a time of the engine's clock after which the Move is not started any more.
    """

    id: int
    source: str
    target: str
    group: int
    source_slots: Slots
    target_slots: Slots
    priority: Priority
    runs: tuple[ReadRun | WriteRun, ...] = ()
    ready: ReadyEvent | None = None
    gate: int = 0
    deadline: float | None = None
    checksums: NDArray[np.uint64] | None = None
    verify: NDArray[np.bool_] | None = None
    wants_checksums: bool = False

    def __len__(self) -> int:
        return len(self.source_slots)


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """The one completion of a Move.

    ``ok[i]`` tells whether block i arrived whole; where it is False nothing may be read from the
    target and ``error`` says why in a few words: ``checksum``, ``io: ...``, ``deadline``,
    ``closed``. ``checksums`` answers ``wants_checksums`` (uint64 ``[n]``); ``written`` answers a
    Move to nvme, one entry a block (None where not ok).
    """

    id: int
    ok: NDArray[np.bool_]
    error: str = ""
    checksums: NDArray[np.uint64] | None = None
    written: tuple[Written | None, ...] = ()
    seconds: float = 0.0


class Executor(Protocol):
    """Whoever has Moves carried out: a TransferEngine here, or an engine's workers elsewhere."""

    @property
    def num_ranks(self) -> int:
        """Ranks that each hold a shard; a Done means that all have reported."""
        ...

    def submit(self, moves: Sequence[Move]) -> None:
        """Queue Moves, in order of priority then of submission. Never blocks on a copy."""
        ...

    def poll(self) -> list[Done]:
        """Completions since the last call; exactly one for every Move. Never blocks."""
        ...

    def gate(self, number: int, group: int) -> Any:
        """The LayerGate (``kvstrata.transfer.layers``) of a Move with that gate to that group."""
        ...

    def close(self) -> None:
        """Finish or fail what is in flight, so that every Move has had its Done; then stop."""
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A load, save, prefetch or swap that is under way."""

    id: int
    kind: str
    gate: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """How a Ticket ended: ``tokens`` whole blocks' worth of the ``requested`` ones, leading.

    ``tokens < requested`` is an answer, not an error: the rest is recomputed (load) or was not
    stored (save). ``reason`` says why in a few words, "" where all went well.
    """

    ticket: Ticket
    tokens: int
    requested: int
    reason: str = ""
    freed: dict[int, tuple[int, ...]] = field(default_factory=dict)
