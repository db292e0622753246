"""How much of a prefix can be resumed, when a model has several kinds of KV.

Full attention reads every block before the resume point, a sliding window only the last few: so the
leading run that is present says too little for the one and too much for the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import MisuseError
from kvstrata.core.spec import KVSpec


def usable_prefix(present: Sequence[NDArray[np.bool_]], specs: Sequence[KVSpec]) -> int:
    """The largest number of blocks n that EVERY group can resume at.

    ``present[g][i]``: block i is readable for group g; blocks beyond an array's end are not.
    ``specs[g]``: the group's kind; all have one block size. Does not mutate. MisuseError where the
    two do not fit together.

    Relies on what holds for any causal attention: a resume at n reads blocks [start(n), n), and
    start never falls as n grows. So where block i is missing from what n reads, every resume
    between i + 1 and n misses it too, and the search goes on at i. A group is not looked at again
    while it reads no block beyond those it has shown: full attention costs one pass.
    """
    if len(present) != len(specs) or not specs:
        raise MisuseError(f"{len(present)} rows of blocks for {len(specs)} KV groups")
    block_size = specs[0].block_size
    if any(spec.block_size != block_size for spec in specs):
        raise MisuseError("the KV groups differ in block size: give them one")
    count = min(len(row) for row in present)
    shown = [range(0)] * len(specs)
    group, agreed = 0, 0
    # Round robin until every group in turn has agreed to the same count.
    while count and agreed < len(specs):
        read = specs[group].blocks_read(count * block_size)
        start, stop = max(read.start, 0), min(read.stop, count)
        known = shown[group]
        if not (known.start <= start and stop <= known.stop):
            window = present[group][start:stop]
            if not window.all():
                count = start + int(window.argmin())
                agreed = 0
                continue
            shown[group] = range(start, stop)
        agreed += 1
        group = (group + 1) % len(specs)
    return count
