"""A process of its own that answers from a directory another process has filled.

The parent starts it once, so that the model is loaded only once; but for every question it opens
the directory anew, answers, and closes: nothing but what is on disk can help it. One JSON object a
line goes each way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from kvstrata.core.errors import KVStrataError


class Restarted:
    """The parent's end; a context manager that ends the process."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Start the process; ``setup`` goes to ``_serve``. It gets ready while we go on."""
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONSAFEPATH": "1"}
        # The way by which this process found kvstrata, whatever it was.
        source = str(Path(sys.modules["kvstrata"].__path__[0]).parent)
        paths = [source, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstrata.bench.restart"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._send(setup)

    def ready(self) -> dict[str, Any]:
        """Wait until the model is loaded; says how long that took."""
        return self._receive()

    def ask(self, question: int, more: int) -> dict[str, Any]:
        """An ``Answer`` as a dict, and ``open_s``; the directory must be free meanwhile.

        Raises KVStrataError where the process cannot use the directory, or has died.
        """
        self._send({"question": question, "more": more})
        return self._receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cast(IO[str], self._process.stdin).close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        cast(IO[str], self._process.stdout).close()

    def _send(self, message: Mapping[str, Any]) -> None:
        stdin = cast(IO[str], self._process.stdin)
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise KVStrataError(
                "the restarted process has died; its last words are above"
            ) from None

    def _receive(self) -> dict[str, Any]:
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            raise KVStrataError("the restarted process has died; its last words are above")
        answer = cast(dict[str, Any], json.loads(line))
        if "error" in answer:
            raise KVStrataError(f"in the restarted process: {answer['error']}")
        return answer


def main() -> None:
    """The child's end: stdin brings the setup and the questions, stdout takes the answers."""
    # Whatever a library prints goes to stderr, lest it end up between two answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        _serve(json.loads(sys.stdin.readline()), reply)
    except (KVStrataError, OSError) as error:
        reply({"error": " ".join(str(error).split())})


def _serve(setup: dict[str, Any], reply: Any) -> None:
    import time
    from dataclasses import asdict

    begun = time.perf_counter()
    import torch

    from kvstrata.bench.arms import Shop
    from kvstrata.bench.models import load_model

    imported = time.perf_counter()
    shop = Shop(
        load_model(setup["model"]),
        setup["directory"],
        bytes.fromhex(setup["salt"]),
        bytes.fromhex(setup["weights"]),
        setup["tokens"],
    )
    reply({"import_s": imported - begun, "model_s": time.perf_counter() - imported})
    while line := sys.stdin.readline():
        order = json.loads(line)
        answer = shop.restarted(torch.tensor([setup["prompts"][order["question"]]]), order["more"])
        shop.close()
        reply({**asdict(answer), "open_s": shop.open_seconds[-1]})


if __name__ == "__main__":
    main()
