"""What kv_model says of a model, and what the digest of its weights depends on."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstrata.core.errors import MisuseError  # noqa: E402
from kvstrata.core.spec import FullAttention, SlidingWindow, dtype  # noqa: E402
from kvstrata.engines.transformers import kv_model, weights_digest  # noqa: E402

W = bytes(32)


def test_grouped_queries(tiny: Any) -> None:
    (group,) = kv_model(tiny, 16, W).groups
    assert group.layers == ("layers.0", "layers.1")
    assert group.spec == FullAttention(16, 2, 12, dtype("float32"))


def test_heads_wider_than_the_hidden_size_says(lab: Any) -> None:
    (group,) = kv_model(lab.llama(head_dim=20), 8, W).groups
    assert group.spec == FullAttention(8, 2, 20, dtype("float32"))


def test_the_type_is_that_of_the_model(lab: Any) -> None:
    (group,) = kv_model(lab.llama().to(torch.bfloat16), 8, W).groups
    assert group.spec.dtype == dtype("bfloat16")


def test_windows(lab: Any) -> None:
    (group,) = kv_model(lab.mistral(20), 8, W).groups
    assert group.spec == SlidingWindow(8, 2, 12, dtype("float32"), window=20)
    full, sliding = kv_model(lab.hybrid(24), 8, W).groups
    assert full.layers == ("layers.0",) and isinstance(full.spec, FullAttention)
    assert sliding.layers == ("layers.1",) and sliding.spec.window == 24


def test_latents_have_two_widths(lab: Any) -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        **{**lab.SHAPE, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        first_k_dense_replace=2,
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    (group,) = kv_model(model, 8, W).groups
    # Newer releases keep the latent and the rotary part, older ones the expanded keys and values.
    assert group.spec.head_dim != (group.spec.head_dim_v or group.spec.head_dim)


def test_state_space_models_are_refused() -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)
    with pytest.raises(MisuseError, match="not supported: use this model without kvstrata"):
        kv_model(transformers.MambaForCausalLM(config).eval(), 8, W)


def test_digest_is_a_function_of_the_model(lab: Any) -> None:
    assert weights_digest(lab.llama()) == weights_digest(lab.llama())
    labelled = lab.llama()
    labelled.config._name_or_path = "another/name"
    assert weights_digest(labelled) == weights_digest(lab.llama())


@pytest.mark.parametrize("change", ["weight", "type", "rotary", "window", "tied"])
def test_digest_sees(lab: Any, change: str) -> None:
    other = lab.llama()
    if change == "weight":
        with torch.no_grad():
            other.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    elif change == "type":
        other = other.to(torch.bfloat16)
    elif change == "rotary":
        other = lab.llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    elif change == "window":
        assert weights_digest(lab.mistral(20)) != weights_digest(lab.mistral(21))
        return
    else:
        other = lab.llama(tie_word_embeddings=True)
    assert weights_digest(other) != weights_digest(lab.llama())


def test_digest_wants_weights(lab: Any) -> None:
    with torch.device("meta"):
        empty = lab.llama()
    with pytest.raises(MisuseError, match="is not loaded: load the model before"):
        weights_digest(empty)
