"""`kvstrata bench idle`: an open store that nobody asks must not wake the machine."""

from __future__ import annotations

import argparse
import time

from kvstrata.bench.cases.demo import directory
from kvstrata.bench.harness import Progress, Result, span

BAR = 0.05
"""CPU seconds a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstrata bench idle`."""
    parser.add_argument(
        "--seconds", type=span, default=20.0, metavar="S", help="how long to watch (default 20)"
    )
    parser.add_argument(
        "--dir", metavar="DIR", help="the NVMe directory (default: a temporary one)"
    )


def run(args: argparse.Namespace) -> Result:
    """Open a store with all tiers, use it once, then watch the process's CPU time.

    ``ok`` is False above 0.05 CPU seconds a minute. All threads of the process count, user and
    system time both.
    """
    from kvstrata.core.config import StoreConfig
    from kvstrata.core.dtypes import dtype
    from kvstrata.core.model import KVGroup, KVModel
    from kvstrata.core.spec import FullAttention
    from kvstrata.prefix_index.prefix import Prefix
    from kvstrata.store.assemble import open_store
    from kvstrata.tiers.hbm import HbmTier

    spec = FullAttention(16, 2, 64, dtype("float32"))
    model = KVModel(bytes(32), (KVGroup(("layers.0", "layers.1"), spec),))
    with directory(args.dir) as place:
        tree = {"dram": {"capacity": "64MiB"}, "nvme": {"path": place, "quota": "1GiB"}}
        hbm = HbmTier.allocate(model, 8, "cpu")
        with open_store(StoreConfig.from_dict(tree), model, hbm=hbm) as store:
            # Threads that only start with the first work are part of an open store.
            store.wait(store.save(Prefix.from_tokens(range(64)), {0: [0, 1, 2, 3]}))
            store.flush()
            time.sleep(0.5)
            used, seconds = _watch(max(1.0, args.seconds))
    rate = used * 60 / seconds
    data = {"cpu_s_per_60s": rate, "seconds": seconds, "bar": BAR}
    verdict = "within" if rate <= BAR else "ABOVE"
    text = f"An open, idle store uses {rate:.3f} CPU s a minute, {verdict} the {BAR} allowed."
    return Result(data, text, rate <= BAR)


def _watch(seconds: float) -> tuple[float, float]:
    # User and system time of all threads, as os.times() has them, but not in ticks of 10 ms: twenty
    # seconds of the bar are less than two ticks.
    with Progress(1, f"doing nothing for {seconds:.0f} s"):
        before, begun = time.process_time(), time.monotonic()
        time.sleep(seconds)
        after, ended = time.process_time(), time.monotonic()
    return after - before, ended - begun
