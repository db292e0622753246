"""Identity: golden vectors, and that no two different things are called alike."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.keys import BlockKey, block_key, digest, root_key
from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import MLA, FullAttention, SlidingWindow, dtype

NAMESPACE = bytes(range(32))
TOKENS = b"".join(token.to_bytes(4, "little") for token in range(16))
FULL = KVModel(
    b"w" * 32,
    (KVGroup(("layer.0", "layer.1"), FullAttention(16, 8, 128, dtype("bfloat16"))),),
)
FP16, BF16, FP8 = dtype("float16"), dtype("bfloat16"), dtype("float8_e4m3fn")
HYBRID = KVModel(
    b"w" * 32,
    (
        KVGroup(("a",), FullAttention(4, 2, 4, FP16, head_dim_v=8)),
        KVGroup(("b",), SlidingWindow(4, 1, 8, FP8, window=6)),
        KVGroup(("c",), MLA(4, 12, BF16)),
    ),
    tensor_parallel=2,
    scales="per-head",
)

# Written down once, from ``by_hand`` below: whoever changes one orphans every record on every disk,
# and must raise FORMAT_VERSION.
GOLDEN = {
    "empty": "3ecd3f63dcadd0579bfbe923c1e43f077903b245bac93f7d2d48ee7ce696adf4",
    "digest": "1e55f81354b1fddd07897cc59a1ac97603da1f18bb0d0f3e6559665890ef4d87",
    "root": "919762a2024a09055cf03b525c1ab30bf3ca1b3e90357cadbaa47ec0d7729dab",
    "root of all": "11673d7de91c38ccf9270300b94b5b950f64d7b053a742e76c07104f07e0dbbb",
    "block": "8a1b0f95e9d663f7b77bd9f5e20686436724ef90748ee27d14fb273e213f4430",
    "full": "560df4fe3c17180af0ad2a3f35b14251d6b4660570fee44e0d1a003c42e75815",
    "hybrid": "ed88332d57935bd0031717add7cd470a9012bd0632e0e191849668ecacb177ac",
}


def by_hand(*fields: bytes) -> str:
    """The encoding, written out again: each field after its length in 8 little-endian bytes."""
    return hashlib.sha256(
        b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    ).hexdigest()


def n(count: int, width: int = 4) -> bytes:
    return count.to_bytes(width, "little")


def computed() -> dict[str, str]:
    keys = {
        "empty": digest(b"tag", []),
        "digest": digest(b"tag", [b"one", b"", b"three"]),
        "root": root_key(NAMESPACE),
        "root of all": root_key(NAMESPACE, salt=b"tenant", lora=b"adapter", epoch=7, hashed=True),
        "block": block_key(NAMESPACE, TOKENS),
        "full": FULL.namespace(),
        "hybrid": HYBRID.namespace(),
    }
    return {name: key.hex() for name, key in keys.items()}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str) -> None:
    assert computed()[name] == GOLDEN[name]


def test_the_golden_vectors_follow_from_the_encoding_alone() -> None:
    full = [b"full", b"16", b"8", b"128", b"128", b"bfloat16"]
    a = [n(1), b"a", n(6), b"full", b"4", b"2", b"4", b"8", b"float16"]
    b = [n(1), b"b", n(7), b"window", b"6", b"4", b"1", b"8", b"8", b"float8_e4m3fn"]
    c = [n(1), b"c", n(4), b"mla", b"4", b"12", b"bfloat16"]
    model = [b"kvstrata/namespace", n(1), b"w" * 32]
    layout = b"layer-part-token"
    root = [b"kvstrata/root", NAMESPACE]
    assert GOLDEN == {
        "empty": by_hand(b"kvstrata/tag"),
        "digest": by_hand(b"kvstrata/tag", b"one", b"", b"three"),
        "root": by_hand(*root, b"", b"none", b"", n(0, 8), b"tokens"),
        "root of all": by_hand(*root, b"tenant", b"lora", b"adapter", n(7, 8), b"hashes"),
        "block": by_hand(b"kvstrata/block", NAMESPACE, TOKENS),
        "full": by_hand(*model, b"", layout, n(1), n(1), n(2), b"layer.0", b"layer.1", n(6), *full),
        "hybrid": by_hand(*model, b"per-head", layout, n(2), n(3), *a, *b, *c),
    }


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_keys_do_not_depend_on_the_process_or_its_hash_seed(seed: str) -> None:
    code = (
        "from kvstrata.core.keys import *\n"
        "from kvstrata.core.model import *\n"
        "from kvstrata.core.spec import *\n"
        "spec = FullAttention(16, 8, 128, dtype('bfloat16'))\n"
        "model = KVModel(b'w' * 32, (KVGroup(('layer.0', 'layer.1'), spec),))\n"
        "root = root_key(bytes(range(32)), salt=b'tenant', lora=b'adapter', epoch=7, hashed=True)\n"
        "print(model.namespace().hex(), root.hex(), hash('seeded') % 1000)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert out[:2] == [GOLDEN["full"], GOLDEN["root of all"]]


@given(parent=st.binary(min_size=32, max_size=32), symbol=st.binary(max_size=80))
def test_block_key_is_the_digest_of_parent_and_symbol(parent: bytes, symbol: bytes) -> None:
    key: BlockKey = block_key(parent, symbol)
    assert key == digest(b"block", [parent, symbol])
    assert key.hex() == by_hand(b"kvstrata/block", parent, symbol)


@given(data=st.data())
def test_no_two_field_lists_are_encoded_alike(data: st.DataObject) -> None:
    """Both lists cut the same bytes, or hold each other's encoding: what a join would mix up."""
    blob = data.draw(st.binary(max_size=12))

    def cut() -> tuple[bytes, ...]:
        at = sorted(data.draw(st.lists(st.integers(0, len(blob)), max_size=4)))
        return tuple(blob[i:j] for i, j in zip([0, *at], [*at, len(blob)], strict=True))

    one, other = cut(), cut()
    if data.draw(st.booleans()):
        other = (b"".join(len(field).to_bytes(8, "little") + field for field in one)[8:],)
    assert (digest(b"t", one) == digest(b"t", other)) == (one == other)


def test_the_tag_is_not_a_field() -> None:
    assert digest(b"a", [b"b"]) != digest(b"ab", [])
    assert digest(b"a", [b"b"]) != digest(b"b", [b"a"])
    assert digest(b"root", [NAMESPACE, TOKENS]) != block_key(NAMESPACE, TOKENS)


def test_a_lora_called_like_a_salt_is_still_a_lora() -> None:
    named = [
        root_key(NAMESPACE),
        root_key(NAMESPACE, salt=b"x"),
        root_key(NAMESPACE, lora=b"x"),
        root_key(NAMESPACE, salt=b"x", lora=b"x"),
        root_key(NAMESPACE, salt=b"xx"),
        root_key(NAMESPACE, lora=b"xx"),
        root_key(NAMESPACE, salt=b"lora"),
        root_key(NAMESPACE, salt=b"none"),
        root_key(NAMESPACE, lora=b"none"),
        root_key(NAMESPACE, lora=b""),
        root_key(NAMESPACE, epoch=1),
        root_key(NAMESPACE, hashed=True),
        root_key(NAMESPACE[::-1]),
    ]
    assert len(set(named)) == len(named)


Root = tuple[bytes, bytes | None, int, bool]
ROOTS = st.tuples(
    st.sampled_from([b"", b"a", b"b", b"ab", b"none", b"lora", b"tokens"]),
    st.sampled_from([None, b"", b"a", b"b", b"ab", b"none", b"tokens"]),
    st.sampled_from([0, 1, 256, 2**63]),
    st.booleans(),
)


@given(one=ROOTS, other=ROOTS)
def test_salt_lora_epoch_and_kind_each_make_another_root(one: Root, other: Root) -> None:
    keys = [root_key(NAMESPACE, salt=s, lora=a, epoch=e, hashed=h) for s, a, e, h in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def spec(**changed: object) -> FullAttention:
    return replace(FullAttention(4, 2, 4, FP16, head_dim_v=8), **changed)  # type: ignore[arg-type]


A, B, C = HYBRID.groups
OTHERS = {
    "weights": replace(HYBRID, weights=b"w" * 31 + b"x"),
    "longer weights": replace(HYBRID, weights=b"w" * 33),
    "tensor_parallel": replace(HYBRID, tensor_parallel=4),
    "scales": replace(HYBRID, scales="per-tensor"),
    "no scales": replace(HYBRID, scales=""),
    "block_layout": replace(HYBRID, block_layout="token-part-layer"),
    "group order": replace(HYBRID, groups=(B, A, C)),
    "a group less": replace(HYBRID, groups=(A, B)),
    "layer name": replace(HYBRID, groups=(replace(A, layers=("a2",)), B, C)),
    "a layer more": replace(HYBRID, groups=(replace(A, layers=("a", "a2")), B, C)),
    "layer order": replace(HYBRID, groups=(replace(A, layers=("a2", "a")), B, C)),
    "joined names": replace(HYBRID, groups=(replace(A, layers=("aa2",)), B, C)),
    "dtype": replace(HYBRID, groups=(replace(A, spec=spec(dtype=BF16)), B, C)),
    "heads": replace(HYBRID, groups=(replace(A, spec=spec(num_kv_heads=1)), B, C)),
    "head_dim": replace(HYBRID, groups=(replace(A, spec=spec(head_dim=8)), B, C)),
    "head_dim_v": replace(HYBRID, groups=(replace(A, spec=spec(head_dim_v=4)), B, C)),
    "dims swapped": replace(HYBRID, groups=(replace(A, spec=spec(head_dim=8, head_dim_v=4)), B, C)),
    "a window on A": replace(
        HYBRID,
        groups=(replace(A, spec=SlidingWindow(4, 2, 4, FP16, head_dim_v=8, window=6)), B, C),
    ),
    "window": replace(
        HYBRID, groups=(A, replace(B, spec=SlidingWindow(4, 1, 8, FP8, window=7)), C)
    ),
    "no window": replace(HYBRID, groups=(A, replace(B, spec=FullAttention(4, 1, 8, FP8)), C)),
    "fp8 kind": replace(
        HYBRID,
        groups=(A, replace(B, spec=SlidingWindow(4, 1, 8, dtype("fp8_e5m2"), window=6)), C),
    ),
    "latent": replace(HYBRID, groups=(A, B, replace(C, spec=MLA(4, 24, BF16)))),
    "latent dtype": replace(HYBRID, groups=(A, B, replace(C, spec=MLA(4, 12, FP16)))),
    "block size": replace(
        HYBRID,
        groups=(
            replace(A, spec=spec(block_size=8)),
            replace(B, spec=SlidingWindow(8, 1, 8, FP8, window=6)),
            replace(C, spec=MLA(8, 12, BF16)),
        ),
    ),
}


@pytest.mark.parametrize("change", OTHERS)
def test_any_one_difference_makes_another_namespace(change: str) -> None:
    assert OTHERS[change].namespace() != HYBRID.namespace()


def test_no_two_of_these_models_share_a_namespace() -> None:
    spaces = {model.namespace() for model in (HYBRID, *OTHERS.values())}
    assert len(spaces) == 1 + len(OTHERS)


def test_how_layers_are_grouped_is_part_of_the_name() -> None:
    kind = FullAttention(4, 2, 4, FP16)
    split = [
        (KVGroup(("a", "b"), kind), KVGroup(("c",), kind)),
        (KVGroup(("a",), kind), KVGroup(("b", "c"), kind)),
        (KVGroup(("a", "b", "c"), kind),),
    ]
    assert len({KVModel(b"w" * 32, groups).namespace() for groups in split}) == 3


def test_what_is_the_same_has_the_same_name() -> None:
    wide = KVGroup(("a",), FullAttention(4, 2, 8, dtype("torch.float16"), head_dim_v=8))
    short = KVGroup(("a",), FullAttention(4, 2, 8, dtype("half")))
    assert KVModel(b"w" * 32, (wide,)).namespace() == KVModel(b"w" * 32, (short,)).namespace()
    again = KVModel(
        b"w" * 32, (replace(A), replace(B), replace(C)), tensor_parallel=2, scales="per-head"
    )
    assert again is not HYBRID and again.namespace() == HYBRID.namespace()
