"""Counters and gauges that answer questions, without a client library.

Names follow Prometheus (``kvstrata_loaded_bytes_total{source="nvme"}``), so an engine's endpoint
can print ``text()`` as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping


class Metrics:
    """A set of named numbers. Any thread may add; reading gives a consistent copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        key = _key(name, labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[_key(name, labels)] = value

    def get(self, name: str, **labels: str) -> float:
        """The present value, 0 for one never touched."""
        with self._lock:
            return self._values.get(_key(name, labels), 0)

    def snapshot(self) -> dict[str, float]:
        """A copy of all values."""
        with self._lock:
            return dict(self._values)

    def text(self) -> str:
        """All values in Prometheus' text form."""
        # 16 digits: bytes are counted exactly up to 2 ** 53.
        return "".join(f"kvstrata_{k} {v:.16g}\n" for k, v in sorted(self.snapshot().items()))


def _key(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return name
    inner = ",".join(f'{k}="{v.translate(_ESCAPES)}"' for k, v in sorted(labels.items()))
    return f"{name}{{{inner}}}"


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
"""What Prometheus wants escaped in a label's value."""
