"""`kvstrata bench ttft`: what a hit saves, and what the first request pays for being stored."""

from __future__ import annotations

import argparse
import gc
import os
import time
from typing import TYPE_CHECKING, Any

from kvstrata.bench.cases.demo import directory
from kvstrata.bench.harness import Progress, Result, alternate, count, human_seconds, table
from kvstrata.bench.models import load_model

if TYPE_CHECKING:
    import torch

    from kvstrata.bench.arms import Shop

_ANSWER = 8
_HITS = 3
"""Rounds of the hits: they are only here for comparison, `kvstrata demo` measures them."""
_BUSY = 0.10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstrata bench ttft`."""
    parser.add_argument("--model", metavar="PATH", help="a Transformers folder (default: SmolLM2)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, metavar="N", help="about so many (default 512)"
    )
    parser.add_argument(
        "--dir", metavar="DIR", help="the NVMe directory (default: a temporary one)"
    )
    parser.add_argument(
        "--pairs", type=count, default=9, metavar="N", help="cold requests of each kind (default 9)"
    )


def run(args: argparse.Namespace) -> Result:
    """Alternate cold requests with and without kvstrata, and compare the fastest of each.

    ``cold_overhead`` is the worse of two: how much later the first token comes, and how much later
    the whole answer has been given and its saving has begun. ``busy`` says that the requests
    without kvstrata differed by more than 10 % among themselves: the machine had other work.
    """
    import torch

    from kvstrata.bench.arms import BLOCK_SIZE, Shop
    from kvstrata.bench.questions import prompts
    from kvstrata.engines.transformers import weights_digest

    pairs = args.pairs
    with directory(args.dir) as place, Progress(2 * pairs + 1, "loading the model") as progress:
        loaded = load_model(args.model)
        asked = prompts(loaded, args.prompt_tokens, _ANSWER, BLOCK_SIZE)
        ids = torch.tensor([asked[0].tokens])
        weights = weights_digest(loaded.model)
        tokens = ids.shape[1] + _ANSWER
        shop = Shop(loaded, place, os.urandom(16), weights, tokens, requests=pairs + 2)
        try:
            cold = _Cold(shop, ids, progress)
            cold.once_each()
            alternate({"without": cold.without, "with": cold.with_kvstrata}, pairs)
            shop.cold(ids, 0)
            other = torch.tensor([asked[1].tokens])
            hits = alternate(
                {
                    "floor": lambda: shop.floor(other, 0).seconds,
                    "dram": lambda: shop.hit("dram", other, 0).seconds,
                    "nvme": lambda: shop.hit("nvme", other, 0).seconds,
                },
                _HITS,
            )
        finally:
            shop.close()
    return _result(loaded.name, ids.shape[1], cold, hits)


class _Cold:
    """Two ways to answer a prompt nobody has seen; each run notes (first token, whole request)."""

    def __init__(self, shop: Shop, ids: torch.Tensor, progress: Progress) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
        self._shop = shop
        self._ids = ids
        self._progress = progress

    def once_each(self) -> None:
        """Warm up: the first run of all pays for the library's own first time."""
        self.without()
        self.with_kvstrata()
        for times in self.times.values():
            times.clear()

    def without(self) -> float:
        """Plain Transformers."""
        from transformers import DynamicCache

        runner = self._shop.runner
        return self._run("without", lambda: (DynamicCache(config=runner.config), None))

    def with_kvstrata(self) -> float:
        """Look up, compute, start saving. A salt of its own makes every request a first one."""
        salt = os.urandom(16)

        def begin() -> tuple[Any, Any]:
            sequence = self._shop.kv.sequence(self._ids, salt=salt, reserve=_ANSWER)
            return sequence.cache, sequence

        return self._run("with", begin)

    def _run(self, name: str, begin: Any) -> float:
        import torch

        # What the request before has left to do in the background would slow this one down.
        self._shop.kv.flush()
        runner = self._shop.runner
        gc.collect()
        gc.disable()
        try:
            with torch.inference_mode():
                begun = time.perf_counter()
                cache, sequence = begin()
                token = runner.step(self._ids, cache)
                first = time.perf_counter() - begun
                tokens = runner.decode(token, cache, _ANSWER - 1)
                if sequence is not None:
                    sequence.save([*self._ids[0].tolist(), *tokens])
                whole = time.perf_counter() - begun
        finally:
            gc.enable()
        if sequence is not None:
            sequence.close()
        self.times[name].append((first, whole))
        self._progress.step("first requests, with and without kvstrata")
        return whole


def _result(name: str, num_tokens: int, cold: _Cold, hits: dict[str, list[float]]) -> Result:
    best = {
        arm: [min(column) for column in zip(*runs, strict=True)] for arm, runs in cold.times.items()
    }
    overheads = [have / want - 1 for have, want in zip(best["with"], best["without"], strict=True)]
    baseline = [whole for _, whole in cold.times["without"]]
    ttft = {"recompute": best["without"][0], "cold": best["with"][0]}
    ttft |= {arm: min(seconds) for arm, seconds in hits.items()}
    data = {
        "model": name,
        "prompt_tokens": num_tokens,
        "ttft_s": ttft,
        "request_s": {"without": best["without"][1], "with": best["with"][1]},
        "cold_overhead": max(overheads),
        "cold_overhead_first_token": overheads[0],
        "cold_overhead_request": overheads[1],
        "busy": max(baseline) > (1 + _BUSY) * min(baseline),
        "pairs": len(baseline),
    }
    titles = {
        "recompute": "first request, plain Transformers",
        "cold": "first request, with kvstrata",
        "dram": "later request, from DRAM",
        "nvme": "later request, from NVMe",
        "floor": "KV in place already (the floor)",
    }
    rows = [[title, human_seconds(ttft[arm])] for arm, title in titles.items()]
    text = [
        f"{name}, {num_tokens} prompt tokens, best of {len(baseline)}",
        "",
        table([["request", "first token"], *rows], header=True),
        "",
        f"Being stored costs a first request {max(overheads):+.1%}.",
    ]
    if data["busy"]:
        text.append("The machine was busy: equal requests differed by more than 10 %.")
    return Result(data, "\n".join(text))
