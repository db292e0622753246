"""Token ids in whatever form a caller has them, as an int32 array.

Everything that is not plainly a list of token ids is refused here, at the door: a float or a
boolean that crept in would otherwise make keys that never match, or worse, that match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import MisuseError

TokenIds = NDArray[np.int32]
"""One-dimensional, little-endian int32."""

TOKEN_BYTES = 4
_LIMIT = 2**31


def token_ids(tokens: Any) -> TokenIds:
    """``tokens`` as a new array. MisuseError says what is wrong with anything else.

    Takes buffers of whole numbers (numpy, array.array, memoryview), torch tensors on any device
    (recognised by their methods; torch is not imported) and sequences of ints.
    """
    ids = _as_array(tokens)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise MisuseError(f"tokens must be one sequence, got shape {ids.shape}: pass one row")
    if not ids.size:
        return np.empty(0, "<i4")
    if ids.dtype.kind not in "iu":
        raise MisuseError(f"token ids must be whole numbers, got {ids.dtype}: convert them first")
    # One pass: the OR of all ids is negative where one is, and at the limit where one is.
    if not 0 <= np.bitwise_or.reduce(ids) < _LIMIT:
        worst = min(int(ids.min()), 0) or int(ids.max())
        raise MisuseError(
            f"token ids must be at least 0 and below 2**31, got {worst}: "
            "cut padding and placeholders out first"
        )
    return ids.astype("<i4")


def _as_array(tokens: Any) -> NDArray[Any]:
    if isinstance(tokens, np.ndarray):
        return tokens
    if isinstance(tokens, str | bytes | bytearray):
        kind = type(tokens).__name__
        raise MisuseError(f"tokens must be token ids, got {kind}: run the tokenizer first")
    try:
        if hasattr(tokens, "detach"):  # a torch tensor, perhaps on a device
            return np.asarray(tokens.detach().cpu().numpy())
        try:
            return np.asarray(memoryview(tokens))
        except TypeError:
            if not isinstance(tokens, Sequence):  # a set or a dict has no order to speak of
                raise
            return _from_sequence(list(tokens))
    except (TypeError, ValueError, OverflowError) as error:
        kind = type(tokens).__name__
        raise MisuseError(
            f"tokens must be one sequence of whole numbers below 2**31, got {kind} ({error})"
        ) from None


def _from_sequence(items: list[Any]) -> NDArray[Any]:
    # numpy takes True for 1, and [[1, 2]] for a table: look at the types first.
    kinds = set(map(type, items))
    if bool in kinds or np.bool_ in kinds:
        raise MisuseError("token ids must be whole numbers, got booleans: is this a mask?")
    if kinds <= {int}:
        return np.array(items, np.int64)
    return np.array(items) if items else np.empty(0, np.int64)
