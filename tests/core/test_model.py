"""KVModel and KVGroup: what is refused, and their sums."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import MLA, FullAttention, SlidingWindow, dtype

BF16 = dtype("bfloat16")
FULL = KVGroup(("a", "b"), FullAttention(4, 2, 8, BF16))
LATENT = KVGroup(("c",), MLA(4, 12, BF16))
WEIGHTS = bytes(32)


def test_a_block_of_a_group_holds_all_its_layers() -> None:
    assert FULL.block_bytes() == 2 * 2 * 4 * 2 * 8 * 2
    assert LATENT.block_bytes() == 4 * 12 * 2


def test_the_bytes_of_a_token_are_those_of_all_groups() -> None:
    model = KVModel(WEIGHTS, (FULL, LATENT))
    assert model.block_size == 4
    assert model.bytes_per_token() == 2 * 2 * 2 * 8 * 2 + 12 * 2


def refused(**changed: Any) -> str:
    given: dict[str, Any] = {"weights": WEIGHTS, "groups": (FULL, LATENT), **changed}
    with pytest.raises(ConfigError) as error:
        KVModel(**given)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "label", [b"", b"llama", b"x" * 15, "llama", "meta-llama/Llama-3.1-8B-Instruct"]
)
def test_a_label_is_not_a_digest_of_the_weights(label: object) -> None:
    assert "not a label" in refused(weights=label)


def test_sixteen_bytes_of_digest_are_enough() -> None:
    assert len(KVModel(bytes(16), (FULL,)).namespace()) == 32


def test_a_model_without_groups_is_refused() -> None:
    assert "at least one KV group" in refused(groups=())


def test_groups_of_different_block_size_are_refused_with_the_sizes() -> None:
    other = KVGroup(("d",), SlidingWindow(16, 2, 8, BF16, window=32))
    assert "one block size, got [4, 16]" in refused(groups=(FULL, other))


def test_a_layer_in_two_groups_is_refused() -> None:
    assert "two KV groups" in refused(groups=(FULL, KVGroup(("b",), MLA(4, 12, BF16))))


@pytest.mark.parametrize("ranks", [0, -2, 1.5, True, "2"])
def test_ranks_are_counted_in_whole_numbers(ranks: object) -> None:
    assert f"tensor_parallel must be a whole number, 1 or more, got {ranks!r}" in refused(
        tensor_parallel=ranks
    )


def test_a_group_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        KVGroup((), MLA(4, 12, BF16))


def test_a_layer_twice_in_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        KVGroup(("a", "b", "a"), MLA(4, 12, BF16))
