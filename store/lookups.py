"""What lookups leave behind: counters, last uses, and why the named ones missed."""

from __future__ import annotations

from collections import OrderedDict

from kvstrata.core.clock import Clock
from kvstrata.core.errors import MisuseError
from kvstrata.core.metrics import Metrics
from kvstrata.store.answers import Match, Reason
from kvstrata.store.placement import Placement, Refs
from kvstrata.tiers.records import RecordTier

_REMEMBERED = 1024
"""Named lookups whose reasons are kept."""


class Lookups:
    """Takes note of every lookup. The Store's lock is held around every call."""

    def __init__(
        self, placement: Placement, nvme: RecordTier | None, wall: Clock, metrics: Metrics
    ) -> None:
        self._placement = placement
        self._nvme = nvme
        self._wall = wall
        self._metrics = metrics
        self._named: OrderedDict[str, Match] = OrderedDict()

    def note(
        self, match: Match, asked_tokens: int, path: Refs, hit: Refs, request: str | None
    ) -> None:
        """A lookup of ``asked_tokens`` found ``path`` in the index and may load ``hit`` of it."""
        self._placement.touch(path)
        self._metrics.add("lookup_tokens_total", asked_tokens)
        for tier, tokens in match.by_tier.items():
            self._metrics.add("hit_tokens_total", tokens, tier=tier)
        if self._nvme is not None:
            # So that a restart knows what was used last; the tier writes it lazily. The last block
            # is enough: who takes records in again counts a use of it as one of its whole path.
            for group, records in enumerate(self._placement.records(hit)):
                self._nvme.touch(group, records[-1:].tolist(), self._wall())
        if request is not None:
            self._named[request] = match
            while len(self._named) > _REMEMBERED:
                self._named.popitem(last=False)

    def why(self, request: str) -> tuple[Reason, ...]:
        """The reasons of a named lookup. Raises MisuseError for one that is not remembered."""
        if request not in self._named:
            raise MisuseError(
                f"no lookup named {request!r} among the last {_REMEMBERED} named ones"
            )
        return self._named[request].reasons
