"""What each hop between the tiers costs on this machine, and from how many tokens on a tier pays.

    device -> host -> device     the engine's own copies, whole blocks
    host -> disk -> host         the engine's own store, by codec, verified on the way back (from the page cache)
    lookup                       the longest stored prefix of a 128k-token chain
    prefill                      the model computes a prompt: what all of this has to beat

Every hop is measured through the code that serves requests. The verdict uses the cost gate's rule: a tier pays for n
tokens if bringing them up takes less time than computing them. Knows no HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tieredkv.errors import StorageError
from tieredkv.storage.autocodec import make_codec
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.tier import BlockRecord, LoadOutcome, StoreOutcome
from tieredkv.transfer import Copy, CopyEngine, ThreadCopyEngine

CODECS = ("raw", "zstd")
LOOKUP_TOKENS = 131_072
_NAMESPACE = hashlib.sha256(b"bench tiers").digest()
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Hop:
    """One way, at one block size: bytes a second over many blocks, and seconds for a single block."""

    name: str
    block_nbytes: int
    nbytes_per_s: float
    latency_s: float


def kv_like(nbytes: int, seed: int) -> Any:
    """uint8 [nbytes]: bf16 values like those of keys and values, normal with a scale per channel."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(-(-nbytes // 128), 64)).astype(np.float32) * np.exp(rng.normal(size=(1, 64)))
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)[:nbytes]


def _best(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return max(min(times), 1e-9)


def measure_copies(block_nbytes: int, total_nbytes: int) -> list[Hop]:
    """Between the block pool and the host arena of a CPU device."""
    count = max(total_nbytes // block_nbytes, 1)
    blocks = np.zeros((count + 1, block_nbytes), np.uint8)
    for i in range(1, count + 1):
        blocks[i] = kv_like(block_nbytes, i % 4)
    slots = [memoryview(bytearray(block_nbytes)) for _ in range(count)]
    engine = ThreadCopyEngine(blocks)
    try:
        hops = []
        for name, to_device in (("device to host", False), ("host to device", True)):
            many = _best(partial(_copy, engine, range(1, count + 1), slots, to_device))
            one = statistics.median(_best(partial(_copy, engine, [1], slots[:1], to_device)) for _ in range(5))
            hops.append(Hop(name, block_nbytes, count * block_nbytes / many, one))
    finally:
        engine.close()
    return hops


def _copy(engine: CopyEngine, block_ids: Sequence[int], views: Sequence[memoryview], to_device: bool) -> None:
    engine.launch(Copy(list(block_ids), list(views), to_device=to_device, tag=None))
    while not (done := engine.poll()):
        time.sleep(0)
    if done[0].error:
        raise StorageError(f"a copy failed: {done[0].error}")


def measure_disk(block_nbytes: int, total_nbytes: int, codec: str, directory: Path | None) -> list[Hop]:
    """Into an empty store in `directory` (a temporary one if None) and back, verified. Raises `StorageError`."""
    count = max(total_nbytes // block_nbytes, 2)
    payloads = [memoryview(kv_like(block_nbytes, seed)) for seed in range(4)]
    records: list[BlockRecord] = []
    parent = _NAMESPACE
    for i in range(count):
        name = hashlib.sha256(f"{i}".encode()).digest()
        records.append(BlockRecord(name, parent, i, _NAMESPACE, payloads[i % 4], bytes(64)))
        parent = name
    slot = memoryview(bytearray(block_nbytes))
    stores, loads, one_store, one_load = [], [], [], []
    for _ in range(_ROUNDS):
        with _temporary_folder(directory) as folder:
            store = DiskStore.open(
                folder / "store", 3 * count * block_nbytes + (64 << 20), codec=make_codec(codec, 2, folder)
            )
            try:
                one_store.append(_timed(partial(_store, store, records[:1])))
                stores.append(_timed(partial(_store, store, records[1:])))
                loads.append(_timed(partial(_load, store, records, slot)))
                one_load.append(_timed(partial(_load, store, records[:1], slot)))
            finally:
                store.close()
    return [
        Hop(f"host to disk, {codec}", block_nbytes, (count - 1) * block_nbytes / min(stores), min(one_store)),
        Hop(f"disk to host, {codec}", block_nbytes, count * block_nbytes / min(loads), min(one_load)),
    ]


def _timed(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return max(time.perf_counter() - began_s, 1e-9)


def _store(store: DiskStore, records: list[BlockRecord]) -> None:
    if any(outcome is not StoreOutcome.STORED for outcome in store.put(records)):
        raise StorageError(store.fault or "the store does not take blocks: is the disk full?")


def _load(store: DiskStore, records: list[BlockRecord], slot: memoryview) -> None:
    for record in records:
        if store.load(record.hash, _NAMESPACE, slot) is not LoadOutcome.LOADED:
            raise StorageError(store.fault or "a block that was just stored cannot be loaded")


def measure_lookup(block_size: int, directory: Path | None) -> float:
    """Seconds to find the longest stored prefix of a chain of `LOOKUP_TOKENS` tokens, half of which is stored."""
    names = [hashlib.sha256(f"{i}".encode()).digest() for i in range(LOOKUP_TOKENS // block_size)]
    half = len(names) // 2
    parents = [_NAMESPACE, *names]
    payload = memoryview(bytes(64))
    with _temporary_folder(directory) as folder:
        store = DiskStore.open(folder / "store", 256 << 20)
        try:
            _store(store, [BlockRecord(names[i], parents[i], i, _NAMESPACE, payload) for i in range(half)])
            if store.longest_prefix(names) != half:
                raise StorageError("a lookup does not find what was just stored")
            return _best(lambda: store.longest_prefix(names))
        finally:
            store.close()


@contextlib.contextmanager
def _temporary_folder(directory: Path | None) -> Iterator[Path]:
    """A folder in `directory`, or where temporary files go, that is gone afterwards. Raises `StorageError`."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="tieredkv-bench-", dir=directory))
    except OSError as error:
        raise StorageError(f"cannot make a folder to measure in: {error}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_prefill(config: Any, num_tokens: int) -> tuple[float, int, int, str]:
    """Load the model of `config` and compute prompts: (tokens per second, KV bytes per token, tokens used, model name).

    The first token of each prompt differs, so nothing is reused.
    """
    from tieredkv.build import build_core, load_runner
    from tieredkv.types import EngineRequest, SamplingParams

    runner = load_runner(config)
    core = build_core(runner, config)
    try:
        num_tokens = max(min(num_tokens, core.max_model_len - 1), 1)
        rng = np.random.default_rng(0)

        def prefill() -> None:
            prompt = rng.integers(0, core.vocab_size, num_tokens).tolist()
            core.add(EngineRequest(f"prefill-{rng.integers(1 << 40)}", prompt, SamplingParams(max_tokens=1)))
            while core.has_work:
                core.step()

        prefill()
        seconds = _best(prefill)
    finally:
        core.close(1.0)
    return num_tokens / seconds, runner.loaded.layout.token_nbytes, num_tokens, runner.loaded.name


def pays_from_tokens(
    token_nbytes: int, block_size: int, hops: Sequence[Hop], prefill_per_s: float, longest: int = LOOKUP_TOKENS
) -> int | None:
    """The fewest tokens, in whole blocks, that take less time to bring through `hops` one after the other than to compute;
    None if there are none up to `longest`.
    """
    for num_blocks in range(1, longest // block_size + 1):
        num_tokens = num_blocks * block_size
        load_s = sum(hop.latency_s + (num_tokens * token_nbytes) / hop.nbytes_per_s for hop in hops)
        if load_s < num_tokens / prefill_per_s:
            return num_tokens
    return None
