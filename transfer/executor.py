"""The Executor of one process: the Store's Moves go straight to a TransferEngine."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.transfer.engine import TransferEngine
from kvstrata.transfer.layers import LayerGate
from kvstrata.transfer.move import Done, Move


class LocalExecutor:
    """One rank, here. Owns the engine: closing it closes the engine."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine

    @property
    def num_ranks(self) -> int:
        """One."""
        return 1

    def submit(self, moves: Sequence[Move]) -> None:
        """See ``TransferEngine.submit``."""
        self.engine.submit(moves)

    def poll(self) -> list[Done]:
        """See ``TransferEngine.poll``."""
        return self.engine.poll()

    def gate(self, id: int, group: int) -> LayerGate:
        """The gate that a submitted Move named, for this group; see ``TransferEngine.gate``."""
        return self.engine.gate(id, group)

    def close(self) -> None:
        """See ``TransferEngine.close``."""
        self.engine.close()
