"""Tiny random models, seeded: they have layers, heads and blocks, and take no time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstrata.core.config import StoreConfig  # noqa: E402

SHAPE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Wide weights: a wrong key or value must show in the tokens.
    "initializer_range": 0.4,
}


def llama(**more: Any) -> Any:
    """A Llama with grouped queries; ``more`` changes its configuration."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**{**SHAPE, **more})
    return transformers.LlamaForCausalLM(config).eval()


def mistral(window: int = 20) -> Any:
    """A Mistral all of whose layers see ``window`` tokens."""
    torch.manual_seed(7)
    config = transformers.MistralConfig(**SHAPE, sliding_window=window)
    return transformers.MistralForCausalLM(config).eval()


def qwen_hybrid(window: int = 20) -> Any:
    """A Qwen2 with one layer that sees everything and one that sees ``window`` tokens."""
    torch.manual_seed(7)
    kinds = ["full_attention", "sliding_attention"]
    config = transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=window, layer_types=kinds
    )
    return transformers.Qwen2ForCausalLM(config).eval()


KINDS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "wide heads": lambda: llama(head_dim=20),
    "window": mistral,
    "hybrid": qwen_hybrid,
}


@pytest.fixture(params=KINDS, ids=lambda name: name.replace(" ", "-"))
def model(request: pytest.FixtureRequest) -> Any:
    """Every kind of tiny model in turn."""
    return KINDS[request.param]()


@pytest.fixture
def tiny() -> Any:
    """The plain Llama, for what does not depend on the kind."""
    return llama()


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    """DRAM and NVMe, small, verified on every load."""
    return StoreConfig.from_dict(
        {
            "dram": {"capacity": "16MiB", "chunk": "16MiB", "verify_one_in": 1},
            "nvme": {"path": str(tmp_path / "kv"), "quota": "64MiB", "extent": "4MiB"},
        }
    )


def prompt(n: int, seed: int = 1) -> Any:
    """n random token ids, int64 ``[1, n]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHAPE["vocab_size"], (1, n), generator=generator)


def greedy(model: Any, ids: Any, n: int = 12, **more: Any) -> Any:
    """``generate`` without chance."""
    return model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, **more)


@pytest.fixture
def lab() -> SimpleNamespace:
    """The helpers above, for tests: a conftest cannot be imported by name."""
    return SimpleNamespace(
        SHAPE=SHAPE, greedy=greedy, llama=llama, mistral=mistral, prompt=prompt, hybrid=qwen_hybrid
    )
