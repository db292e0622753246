"""`kvstrata demo`: a real model, a real document, and five ways to come by its KV cache."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.bench.harness import (
    Progress,
    Result,
    alternate,
    count,
    human_bytes,
    human_seconds,
    table,
)
from kvstrata.bench.models import LoadedModel, cache_folder, load_model

if TYPE_CHECKING:
    from kvstrata.bench.arms import Answer

ANSWER = 24
"""Greedy tokens of an answer that are compared."""
HITS = ("dram", "nvme", "nvme_after_restart")
_TITLES = {
    "recompute": "computed again",
    "dram": "loaded from DRAM",
    "nvme": "loaded from NVMe, DRAM emptied",
    "nvme_after_restart": "loaded from NVMe, in a new process",
    "floor": "in place already (the floor)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstrata demo`."""
    parser.add_argument("--model", metavar="PATH", help="a Transformers folder (default: SmolLM2)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=2000, metavar="N", help="about so many (default 2000)"
    )
    parser.add_argument(
        "--dir", metavar="DIR", help="the NVMe directory (default: a temporary one in the cache)"
    )
    parser.add_argument(
        "--repeats", type=count, default=5, metavar="N", help="rounds; the best counts (default 5)"
    )


def run(args: argparse.Namespace) -> Result:
    """Ask, measure, compare. ``ok`` is False where a token or a loaded block differs.

    Times are from the call to the first token with model and store open, the best of the rounds.
    """
    repeats = args.repeats
    with directory(args.dir) as place, Progress(3 + repeats, "loading the model") as progress:
        begun = time.perf_counter()
        loaded = load_model(args.model)
        demo = _Demo(loaded, place, args.prompt_tokens, time.perf_counter() - begun)
        try:
            return demo.run(repeats, progress)
        finally:
            demo.close()


@contextmanager
def directory(given: str | None) -> Iterator[str]:
    """``given``, or a temporary folder that is removed at the end.

    In the user's cache, not in /tmp: that is often memory, and this is about a disk.
    """
    if given is not None:
        yield given
        return
    parent: Path | None = cache_folder()
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
    except OSError:
        parent = None
    made = tempfile.mkdtemp(prefix="bench-", dir=parent)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


class _Demo:
    def __init__(self, loaded: LoadedModel, place: str, num_tokens: int, model_s: float) -> None:
        import torch

        from kvstrata.bench.arms import BLOCK_SIZE, Shop
        from kvstrata.bench.questions import prompts
        from kvstrata.bench.restart import Restarted
        from kvstrata.engines.transformers import weights_digest

        self.loaded = loaded
        self.prompts = prompts(loaded, num_tokens, ANSWER, BLOCK_SIZE)
        self.length = len(self.prompts[0].tokens)
        self.ids = [torch.tensor([prompt.tokens]) for prompt in self.prompts]
        begun = time.perf_counter()
        weights, salt = weights_digest(loaded.model), os.urandom(16)
        self.open_s = {"model": model_s, "weights_digest": time.perf_counter() - begun}
        tokens = self.length + ANSWER
        self.shop = Shop(loaded, place, salt, weights, tokens)
        setup = {
            "model": str(loaded.path),
            "directory": place,
            "salt": salt.hex(),
            "weights": weights.hex(),
            "tokens": tokens,
            "prompts": [prompt.tokens for prompt in self.prompts],
        }
        self.child = Restarted(setup)
        self.child_opens: list[float] = []

    def close(self) -> None:
        self.shop.close()
        self.child.__exit__(None, None, None)

    def run(self, repeats: int, progress: Progress) -> Result:
        progress.step("first request, without kvstrata")
        # The child loads its model meanwhile, so this is no time to measure: it is the warm-up.
        plain = self.shop.runner.recompute(self.ids[0], ANSWER - 1)
        started = self.child.ready()
        self.open_s["model_after_restart"] = started["import_s"] + started["model_s"]
        progress.step("first request, computed and stored")
        cold = self.shop.cold(self.ids[0], ANSWER - 1)
        progress.step("questions")
        given = [(plain, cold)]
        answers: dict[str, list[Answer]] = {name: [] for name in _TITLES}
        arms = {name: self._arm(name, answers[name], progress) for name in _TITLES}
        seconds = alternate(arms, repeats)
        given += list(zip(*answers.values(), strict=True))
        return self._result(seconds, answers, given, cold)

    def _arm(self, name: str, answers: list[Answer], progress: Progress) -> Any:
        questions = len(self.prompts) - 1

        def arm() -> float:
            asked = 1 + len(answers) % questions
            # A whole answer once for each question; after that the first token is enough. The floor
            # decodes as the DRAM hit does, so its whole answers would only take time.
            more = ANSWER - 1 if len(answers) < questions and name != "floor" else 0
            answer = self._answer(name, asked, more)
            answers.append(answer)
            if name == "floor":
                progress.step()
            return answer.seconds

        return arm

    def _answer(self, name: str, asked: int, more: int) -> Answer:
        ids = self.ids[asked]
        if name == "recompute":
            return self.shop.runner.recompute(ids, more)
        if name == "floor":
            return self.shop.floor(ids, more)
        if name != "nvme_after_restart":
            return self.shop.hit(name, ids, more)
        from kvstrata.bench.arms import Answer

        self.shop.close()
        told = self.child.ask(asked, more)
        self.child_opens.append(told.pop("open_s"))
        return Answer(**told)

    def _result(
        self,
        seconds: dict[str, list[float]],
        answers: dict[str, list[Answer]],
        given: list[Any],
        cold: Answer,
    ) -> Result:
        ttft = {name: min(values) for name, values in seconds.items()}
        cached = {name: min(a.cached for a in answers[name]) for name in HITS}
        identical = all(_agree([answer.tokens for answer in same]) for same in given)
        loaded = [a for name in HITS for a in answers[name]]
        compared = sum(len(a.blocks) for a in loaded)
        differ = sum(
            mine != stored
            for a in loaded
            for mine, stored in zip(a.blocks, cold.blocks, strict=False)
            if mine
        )
        self.open_s["store"] = min(self.shop.open_seconds)
        self.open_s["store_after_restart"] = min(self.child_opens)
        recompute, floor = ttft["recompute"], ttft["floor"]
        per_token = self.shop.bytes_per_token
        data = {
            "model": self.loaded.name,
            "prompt_tokens": self.length,
            "ttft_s": ttft,
            "speedup": {name: recompute / ttft[name] for name in HITS},
            "identical": identical,
            "bytes_per_token": per_token,
            "blocks_equal": not differ,
            "blocks_compared": compared,
            "within": {name: ttft[name] / floor for name in HITS},
            "cached_tokens": cached,
            "first_request_s": cold.seconds,
            "open_s": self.open_s,
            "busy": max(seconds["recompute"]) > 1.1 * recompute,
        }
        return Result(data, self._text(data, ttft, cold), identical and not differ)

    def _text(self, data: dict[str, Any], ttft: dict[str, float], cold: Answer) -> str:
        floor, recompute = ttft["floor"], ttft["recompute"]
        rows: list[list[object]] = [["KV of the document", "first token", "faster", "of the floor"]]
        rows += [
            [
                _TITLES[name],
                human_seconds(ttft[name]),
                f"{recompute / ttft[name]:.1f}x",
                f"{ttft[name] / floor:.2f}x",
            ]
            for name in _TITLES
        ]
        fresh = self.length - data["cached_tokens"]["dram"]
        asked = self.prompts[1].question
        same = "the same" if data["identical"] else "NOT THE SAME"
        equal = "equal" if data["blocks_equal"] else "DO NOT EQUAL"
        lines = [
            f"{data['model']} in float32: a prompt of {self.length} tokens, {fresh} of them new "
            f"with each question, {human_bytes(data['bytes_per_token'])} of KV a token",
            "",
            table(rows, header=True),
            "",
            f'"{asked}"',
            f"The {ANSWER} tokens of every answer are {same} whichever way the KV came, and the "
            f"{data['blocks_compared']} loaded blocks {equal} the stored ones byte for byte.",
            f"Opening took {human_seconds(self.open_s['model'])} for the model and "
            f"{human_seconds(self.open_s['store'])} for the store, which no time above includes.",
        ]
        if min(data["cached_tokens"].values()) == 0:
            lines.append("Something was not stored (see the warnings): those arms computed again.")
        return "\n".join(lines)


def _agree(answers: list[list[int]]) -> bool:
    """Whether all of them begin like the longest: some arms stop after the first token."""
    longest = max(answers, key=len)
    return all(answer == longest[: len(answer)] for answer in answers)
