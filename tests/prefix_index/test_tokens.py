"""What counts as token ids, and what is turned away at the door."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.core.errors import MisuseError
from kvstrata.prefix_index.tokens import token_ids

IDS = [0, 1, 150_000, 2**31 - 1]


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        deque(IDS),
        [np.int64(i) for i in IDS],
        array("q", IDS),
        array("i", IDS),
        memoryview(array("i", IDS)),
        np.array(IDS),
        np.array(IDS, np.int32),
        np.array(IDS, np.uint32),
        np.array(IDS, np.uint64),
        np.array(IDS, ">i8"),
        np.array([IDS]),
        np.repeat(np.array(IDS), 2)[::2],
        torch.tensor(IDS),
        torch.tensor([IDS], dtype=torch.int32),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_form_gives_the_same_ids(tokens: Any) -> None:
    ids = token_ids(tokens)
    assert ids.dtype == np.dtype("<i4")
    assert ids.tolist() == IDS


@pytest.mark.parametrize("tokens", [[], (), np.array([], np.int64), torch.empty(0), range(0)])
def test_no_tokens_are_fine(tokens: Any) -> None:
    assert token_ids(tokens).shape == (0,)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1.0, 2.0], "whole numbers"),
        (np.array([1.5]), "whole numbers"),
        (torch.tensor([1.0]), "whole numbers"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "whole numbers"),
        ([True, False], "booleans"),
        ([1, True], "booleans"),
        (np.array([True]), "whole numbers"),
        (torch.tensor([True]), "whole numbers"),
        ([3, -1], "got -1"),
        (np.array([-5], np.int32), "got -5"),
        ([7, 2**31], "got 2147483648"),
        (np.array([2**63], np.uint64), "got 9223372036854775808"),
        ([2**70], "whole numbers"),
        ("hello", "tokenizer"),
        (b"hello", "tokenizer"),
        (["a"], "whole numbers"),
        ([None], "whole numbers"),
        ([[1, 2], [3, 4]], "one row"),
        ([[1, 2], [3]], "whole numbers"),
        (np.zeros((2, 3), np.int64), "one row"),
        (np.array(5), "one row"),
        ({1, 2}, "set"),
        ({1: 2}, "dict"),
        (5, "int"),
        (None, "NoneType"),
    ],
)
def test_anything_else_is_refused_with_one_line(tokens: Any, says: str) -> None:
    with pytest.raises(MisuseError, match=says) as caught:
        token_ids(tokens)
    assert "\n" not in str(caught.value)


def test_the_ids_are_a_copy() -> None:
    for tokens in (np.array(IDS, np.int32), np.array(IDS)):
        ids = token_ids(tokens)
        tokens[0] = 9
        assert ids[0] == 0
