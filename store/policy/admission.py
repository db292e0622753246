"""Admission policies."""

from __future__ import annotations

from collections.abc import Sequence


class AdmitAll:
    """Write every block."""

    def admit(self, refs: Sequence[int]) -> list[bool]:
        return [True] * len(refs)


ADMISSION = {"all": AdmitAll}
"""Policies by the name that ``policy.admission`` gives them."""
