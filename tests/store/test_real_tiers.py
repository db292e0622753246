"""The Store over its real tiers: threads, files, eviction at 100 % occupancy, bytes compared."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstrata.core.config import StoreConfig
from kvstrata.core.errors import (
    ClosedError,
    ConfigError,
    DirectoryBusyError,
    LayoutError,
    StorageError,
)
from kvstrata.core.layout import LAYOUTS, packed
from kvstrata.core.model import KVGroup, KVModel
from kvstrata.core.spec import FullAttention, dtype
from kvstrata.prefix_index.prefix import Prefix
from kvstrata.store.answers import Sequence
from kvstrata.store.assemble import open_store
from kvstrata.store.store import Store
from kvstrata.testing.models import hybrid_model, tiny_model

torch = pytest.importorskip("torch")

BLOCK = 16
BLOCKS = 64
MIB = 1 << 20


def small(tmp_path: Path, **nvme: object) -> StoreConfig:
    """DRAM of one MiB, a few MiB of NVMe."""
    settings = {"path": str(tmp_path / "kv"), "quota": "8MiB", "extent": "1MiB", **nvme}
    return StoreConfig.from_dict(
        {"dram": {"capacity": "1MiB", "chunk": "1MiB", "verify_one_in": 1}, "nvme": settings}
    )


def opened(config: StoreConfig, model: KVModel) -> tuple[Store, list[np.ndarray]]:
    """A Store and, by group, the bytes of the engine's blocks ``[blocks, record]``."""
    store = open_store(config, model)
    rows = []
    for group, what in enumerate(model.groups):
        tensor = torch.zeros((BLOCKS, what.block_bytes()), dtype=torch.uint8)
        store.register({group: [tensor]}, {group: packed(what, BLOCKS)})
        rows.append(tensor.numpy())
    return store, rows


def bytes_of(tokens: list[int], group: int, block: int, size: int) -> np.ndarray:
    """What a block holds: a function of everything before it, as in a model."""
    seed = repr((tokens[: (block + 1) * BLOCK], group)).encode()
    return np.frombuffer(hashlib.shake_128(seed).digest(size), np.uint8)


def compute(rows: list[np.ndarray], tokens: list[int], ids: list[int]) -> None:
    for group, memory in enumerate(rows):
        for block, place in enumerate(ids):
            memory[place] = bytes_of(tokens, group, block, memory.shape[1])


def prompt(rng: random.Random) -> list[int]:
    """One of a few dozen prompts that share beginnings."""
    tokens: list[int] = []
    for _ in range(rng.randint(1, 6)):
        tokens += [rng.randint(0, 2)] * BLOCK
    return tokens


@pytest.mark.parametrize("write", ["through", "demote"])
def test_threads_never_see_a_wrong_byte(tmp_path: Path, write: str) -> None:
    model = hybrid_model(BLOCK, window=24, layers=64)  # 64 KiB, 64 KiB and 24 KiB a block
    store, rows = opened(small(tmp_path, write=write), model)
    wrong: list[str] = []
    hits = [0] * 4

    def engine(worker: int) -> None:
        rng = random.Random(worker)
        mine = list(range(worker * 16, worker * 16 + 16))
        for _ in range(60):
            tokens = prompt(rng)
            prefix = Prefix.from_tokens(tokens)
            blocks = len(tokens) // BLOCK
            ids = rng.sample(mine, blocks)
            everywhere = {group: ids for group in range(len(rows))}
            hit = store.lookup(prefix)
            n = hit.blocks
            done = store.wait(store.load(hit, {g: ids[:n] for g in everywhere}), 60)
            assert done is not None
            got = done.tokens // BLOCK
            hits[worker] += got
            for group, memory in enumerate(rows):
                for block in model.groups[group].spec.blocks_read(done.tokens):
                    right = bytes_of(tokens, group, block, memory.shape[1])
                    if not np.array_equal(memory[ids[block]], right):
                        wrong.append(f"worker {worker}, group {group}, block {block} of {got}")
            compute(rows, tokens, ids)
            if rng.random() < 0.3:
                swapped = store.swap_out(Sequence(prefix, blocks * BLOCK, everywhere))
                store.wait(swapped.ticket, 60)
                store.discard(swapped)
            else:
                store.wait(store.save(prefix, everywhere), 60)
            if rng.random() < 0.1:
                store.drop(rng.choice(["dram", "nvme"]))
            store.prefetch(prefix)
            store.match(prefix)

    threads = [threading.Thread(target=engine, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert wrong == []
    assert sum(hits) > 50
    assert store.flush(60)
    store.poll()
    stats = store.stats()
    assert (stats.leases, stats.tickets_open, stats.moves_in_flight) == (0, 0, 0)
    store.check()
    store.close()
    physical = sum(f.stat().st_blocks * 512 for f in (tmp_path / "kv").rglob("*"))
    assert physical <= 8 * MIB


def test_a_restart_serves_what_was_flushed_and_no_other_model(tmp_path: Path) -> None:
    model, config = tiny_model(BLOCK, layers=64), small(tmp_path)
    tokens = [token for i in range(5) for token in [i] * BLOCK]
    store, rows = opened(config, model)
    compute(rows, tokens, [3, 1, 4, 15, 9])
    store.wait(store.save(Prefix.from_tokens(tokens), {0: [3, 1, 4, 15, 9]}))
    store.close()
    other, _ = opened(config, tiny_model(BLOCK, layers=64, label=b"other weights"))
    assert other.match(Prefix.from_tokens(tokens)).tokens == 0
    other.close()
    again, rows = opened(config, model)
    hit = again.lookup(Prefix.from_tokens(tokens))
    assert hit.by_tier == {"dram": 0, "nvme": 5 * BLOCK}
    done = again.wait(again.load(hit, {0: [20, 21, 22, 23, 24]}))
    assert done is not None and done.tokens == 5 * BLOCK
    for block in range(5):
        assert np.array_equal(rows[0][20 + block], bytes_of(tokens, 0, block, rows[0].shape[1]))
    again.reset()
    assert again.match(Prefix.from_tokens(tokens)).tokens == 0
    again.close()
    last, _ = opened(config, model)
    assert last.match(Prefix.from_tokens(tokens)).tokens == 0, "a reset outlives the process"
    last.close()


def test_what_was_saved_is_durable_though_nobody_polls(tmp_path: Path) -> None:
    model, config = tiny_model(BLOCK, layers=64), small(tmp_path)
    tokens = [token for i in range(5) for token in [i] * BLOCK]
    store, rows = opened(config, model)
    compute(rows, tokens, list(range(5)))
    store.save(Prefix.from_tokens(tokens), {0: list(range(5))})
    until = time.monotonic() + 60
    while store.stats().tiers["nvme"]["ready"] < 5 and time.monotonic() < until:
        time.sleep(0.01)  # and nothing else: no poll, no wait
    assert store.stats().tiers["nvme"]["ready"] == 5
    store.close()


def test_closing_under_load_gives_the_directory_back(tmp_path: Path) -> None:
    model, config = tiny_model(BLOCK, layers=64), small(tmp_path)
    for round_ in range(5):
        store, rows = opened(config, model)
        going = threading.Event()

        def busy(store: Store, going: threading.Event, seed: int) -> None:
            rng = random.Random(seed)
            try:
                while True:
                    tokens = prompt(rng)
                    store.save(Prefix.from_tokens(tokens), {0: list(range(len(tokens) // BLOCK))})
                    going.set()
            except ClosedError:
                pass

        thread = threading.Thread(target=busy, args=(store, going, round_))
        thread.start()
        assert going.wait(60)
        store.close()
        thread.join(60)
        assert not thread.is_alive()
    left = [t.name for t in threading.enumerate() if t.name.startswith("kvstrata")]
    assert left == [], "threads outlive the store"


def test_layers_of_a_load_from_dram_arrive_through_gates(tmp_path: Path) -> None:
    model = tiny_model(BLOCK, layers=64)
    store, rows = opened(small(tmp_path), model)
    tokens = [token for i in range(5) for token in [i] * BLOCK]
    compute(rows, tokens, list(range(5)))
    prefix = Prefix.from_tokens(tokens)
    store.wait(store.save(prefix, {0: list(range(5))}))
    ticket = store.load(store.lookup(prefix), {0: list(range(10, 15))})
    gate = store.gate(ticket, 0)
    assert gate is not None and all(gate.wait(layer, 60) for layer in range(64))
    store.wait(ticket)
    store.flush()
    store.drop("dram")
    ticket = store.load(store.lookup(prefix), {0: list(range(10, 15))})
    assert store.gate(ticket, 0) is None, "what comes from NVMe is waited for whole"
    store.wait(ticket)
    store.close()


def test_bad_beginnings_are_one_line_and_leave_nothing_open(tmp_path: Path) -> None:
    model = tiny_model(BLOCK, layers=64)
    (tmp_path / "file").write_bytes(b"")
    cases: list[tuple[type[Exception], StoreConfig]] = [
        (StorageError, small(tmp_path, path=str(tmp_path / "file" / "kv"))),
        (StorageError, small(tmp_path, path=str(tmp_path / "no" / "such" / "parent"))),
        (ConfigError, small(tmp_path, quota="64KiB")),
        (ConfigError, StoreConfig.from_dict({"dram": {"capacity": "4KiB"}})),
    ]
    for kind, config in cases:
        with pytest.raises(kind) as caught:
            open_store(config, model)
        assert "\n" not in str(caught.value)
    held, _ = opened(small(tmp_path), model)
    with pytest.raises(DirectoryBusyError) as caught:
        open_store(small(tmp_path), model)
    assert "\n" not in str(caught.value)
    held.close()
    open_store(small(tmp_path), model).close()


@pytest.mark.parametrize("device", ["gpu", "", 1.5, "cuda:0"])
def test_a_device_that_is_not_there_is_one_line(device: object) -> None:
    if device == "cuda:0" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(ConfigError) as caught:
        open_store(None, tiny_model(BLOCK), device)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_tensors_that_contradict_the_model_are_refused(layout: str) -> None:
    model = tiny_model(BLOCK)
    store = open_store(None, model)
    with pytest.raises(LayoutError) as caught:
        store.register({0: [torch.zeros(7, 100)]}, {0: LAYOUTS[layout](model.groups[0], BLOCKS)})
    assert "\n" not in str(caught.value)
    for tensors, how in (
        ({0: [torch.zeros(7, 100)]}, layout),
        ({1: [torch.zeros(7, 100)]}, layout),
        ({0: []}, layout),
        ({0: [torch.zeros(64, 1)]}, "diagonal"),
        ([torch.zeros(64, 1)], layout),
    ):
        with pytest.raises(LayoutError) as caught:
            store.register(tensors, how)
        assert "\n" not in str(caught.value)
    store.close()


def test_a_named_layout_refuses_every_shape_but_its_own() -> None:
    spec = FullAttention(BLOCK, 2, 64, dtype("float32"))
    model = KVModel(b"shapes".ljust(16, b"."), (KVGroup(("0", "1"), spec),))
    wrong = {
        "parts_first": [(2, 64, 16, 2, 32), (2, 64, 8, 2, 64), (64, 2, 16, 2, 64), (64, 16, 2, 64)],
        "blocks_first": [(2, 64, 16, 2, 64), (32, 16, 2, 64)],
        "part_per_tensor": [(2, 64, 16, 2, 64), (16, 64, 2, 64)],
    }
    for layout, shapes in wrong.items():
        count = 4 if layout == "part_per_tensor" else 2
        for shape in shapes:
            store = open_store(None, model)
            with pytest.raises(LayoutError) as caught:
                store.register({0: [torch.zeros(shape) for _ in range(count)]}, layout)
            assert "\n" not in str(caught.value)
            store.close()
    store = open_store(None, model)
    store.register({0: [torch.zeros(2, 64, BLOCK, 2, 64) for _ in range(2)]}, "parts_first")
    store.close()
