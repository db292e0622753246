"""What the benches ask: questions about a document, each a prompt that begins with the document."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from kvstrata.bench.models import LoadedModel
from kvstrata.core.errors import ConfigError

QUESTIONS = (
    "What is the KV cache of a language model, and why is it called the working memory?",
    "Which two phases does a request have, and what limits each of them?",
    "When is loading the keys and values from a drive better than computing them?",
)
_LEAST = 128


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question behind the document: all token ids, and the question for people."""

    question: str
    tokens: list[int]


def document() -> str:
    """The text that ships with kvstrata: an essay about KV caches, about 2,600 tokens."""
    return (resources.files("kvstrata.bench") / "data" / "document.txt").read_text("utf-8")


def prompts(loaded: LoadedModel, num_tokens: int, answer: int, block_size: int) -> list[Prompt]:
    """One prompt a question, each of ``num_tokens`` tokens, rounded down to whole blocks.

    The document is cut, or repeated, so that all prompts are equally long: a question of more than
    one and less than two blocks then leaves two blocks of new tokens, the end of the document among
    them. ``answer`` tokens must fit behind. ConfigError where the model cannot read so many.
    """
    if num_tokens < _LEAST:
        raise ConfigError(f"--prompt-tokens must be {_LEAST} or more, got {num_tokens}")
    most = getattr(loaded.model.config, "max_position_embeddings", None)
    if most is not None and num_tokens + answer > most:
        raise ConfigError(f"--prompt-tokens: {loaded.name} reads {most - answer} tokens at most")
    total = num_tokens // block_size * block_size
    text = loaded.tokens(document())
    text = text * (1 + total // len(text))
    made = []
    for question in QUESTIONS:
        asked = loaded.tokens(f"\n\nQuestion: {question}\nAnswer:")
        if len(asked) >= total:
            raise ConfigError(f"--prompt-tokens must be above {len(asked)}: the questions are long")
        made.append(Prompt(question, text[: total - len(asked)] + asked))
    return made
