"""Layer gates: attention layer i may start when its own layers have arrived."""

from __future__ import annotations

import threading


class LayerGate:
    """Opens layer by layer while a load is under way; attention waits for the layer it needs.

    A load may be carried out in several parts, by several workers: a layer is open once as many
    parts as have joined have said so.

    Invariants (``check`` tests them by these numbers):

    1. No layer has been opened by more parts than have joined.
    2. A gate that has failed never reports a layer as open again.
    """

    __slots__ = ("_changed", "_count", "_failed", "_parts")

    def __init__(self, num_layers: int, parts: int = 1) -> None:
        self._changed = threading.Condition()
        self._count = [0] * num_layers
        self._parts = parts
        self._failed: str | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the KV group."""
        return len(self._count)

    @property
    def reason(self) -> str:
        """Why the gate failed, "" while it has not."""
        return self._failed or ""

    def join(self, parts: int) -> None:
        """So many more parts must open each layer. Call it before any of them can start."""
        with self._changed:
            self._parts += parts

    def open(self, layer: int) -> None:
        """One part of the load has brought this layer."""
        with self._changed:
            self._count[layer] += 1
            if self._count[layer] >= self._parts:
                self._changed.notify_all()

    def open_all(self) -> None:
        """Every layer is there, whoever brought it; after a failure it changes nothing."""
        with self._changed:
            self._count = [self._parts] * len(self._count)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The load will not be whole: wake everybody, with False. The first reason stays."""
        with self._changed:
            if self._failed is None:
                self._failed = reason
            self._changed.notify_all()

    def is_open(self, layer: int) -> bool:
        """Whether the layer may be read now. Never blocks."""
        return self._failed is None and self._count[layer] >= self._parts > 0

    def wait(self, layer: int, timeout: float | None = None) -> bool:
        """Sleep until the layer may be read: True; False once the load failed or time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None or self.is_open(layer), timeout)
            return self.is_open(layer)

    def check(self) -> None:
        """Raise AssertionError unless the numbered invariants hold."""
        with self._changed:
            assert all(count <= self._parts for count in self._count), "1: opened too often"
            if self._failed is not None:
                assert not any(map(self.is_open, range(len(self._count)))), "2: open after fail"
