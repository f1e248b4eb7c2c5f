"""The cap holds at every instant, and a full store goes on taking blocks."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from tests.storage.chains import NAMESPACE, ROOT, assert_sound, chain, hashes, name
from tieredkv.storage.audit import verify_store
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.tier import BlockRecord, StoreOutcome
from tieredkv.storage.workers import StorageWorkers

KIB, MIB = 1 << 10, 1 << 20


def folder_nbytes(store: DiskStore) -> int:
    return sum(path.stat().st_size for path in store.directory.iterdir())


def test_a_burst_of_ten_times_the_capacity_never_exceeds_it(tmp_path):
    capacity = 4 * MIB
    store = DiskStore.open(tmp_path, capacity)
    answered = threading.Event()
    workers = StorageWorkers(store, max_write_nbytes=1 * MIB, on_result=answered.set)
    samples: list[tuple[int, int, bool]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            # Not by way of the store, whose audit keeps the writer out.
            report = verify_store(store._env)
            samples.append((store.usage().used_nbytes, folder_nbytes(store), report.ok))

    sampler = threading.Thread(target=sample)
    sampler.start()
    written = number = 0
    outcomes = set()
    while written < 10 * capacity:
        records = chain(number, 8)
        if workers.put(records) is None:
            answered.wait(10)
            answered.clear()
        else:
            written += sum(r.payload.nbytes for r in records)
            number += 1
        for job in workers.poll():
            outcomes |= set(job.outcomes)
    assert workers.drain(30)
    outcomes |= {o for job in workers.poll() if hasattr(job, "outcomes") for o in job.outcomes}
    done.set()
    sampler.join()
    assert outcomes == {StoreOutcome.STORED}
    assert samples
    for used, files, ok in samples:
        assert used <= capacity
        assert files <= capacity
        assert ok
    assert_sound(store)
    assert workers.close(10)


def churn(store: DiskStore, sizes: list[int], num_turnovers: float, *, per_chain: int = 8) -> int:
    """Write chains until so many times the capacity has gone in; everything must be stored. Returns blocks written."""
    data = memoryview(np.random.default_rng(0).integers(0, 256, max(sizes), dtype=np.uint8))
    rng = random.Random(1)
    capacity = store.usage().capacity_nbytes
    written = number = 0
    while written < num_turnovers * capacity:
        names = hashes(("churn", number), per_chain)
        records = [
            BlockRecord(h, names[d - 1] if d else ROOT, d, NAMESPACE, data[: rng.choice(sizes)])
            for d, h in enumerate(names)
        ]
        assert set(store.put(records)) == {StoreOutcome.STORED}
        assert store.file_nbytes <= capacity
        written += sum(r.payload.nbytes for r in records)
        number += 1
    return number * per_chain


@pytest.mark.parametrize(
    ("capacity", "sizes"),
    [
        (64 * MIB, [360 * KIB]),
        (64 * MIB, [230 * KIB, 260 * KIB, 300 * KIB, 330 * KIB]),
        (96 * MIB, [2 * MIB]),
    ],
    ids=["equal", "varied", "large"],
)
def test_a_full_store_refuses_nothing_for_fragmentation(tmp_path, capacity, sizes):
    store = DiskStore.open(tmp_path, capacity)
    churn(store, sizes, 4)
    assert store.usage().num_refused == 0
    # Evictions that only fragmentation forced would leave the store emptier than it may be.
    assert store.usage().used_nbytes > 0.8 * store._session.budget_nbytes
    assert_sound(store)
    store.close()


@pytest.mark.soak
@pytest.mark.parametrize(
    "sizes", [[360 * KIB], [230 * KIB, 260 * KIB, 300 * KIB, 330 * KIB], [2 * MIB], [20 * KIB, MIB]]
)
def test_ten_turnovers_of_a_full_store(tmp_path, sizes):
    store = DiskStore.open(tmp_path, 256 * MIB)
    churn(store, sizes, 10)
    assert store.usage().num_refused == 0
    assert store.usage().used_nbytes > 0.8 * store._session.budget_nbytes
    assert_sound(store)
    store.close()


def test_opening_takes_no_longer_with_more_in_it(tmp_path):
    store = DiskStore.open(tmp_path, 64 * MIB)
    for number in range(200):
        store.put(chain(number, 20, nbytes=4000))
    store.close()
    started_s = time.perf_counter()
    store = DiskStore.open(tmp_path, 64 * MIB)
    print(f"opening {store.usage().num_blocks} blocks took {(time.perf_counter() - started_s) * 1000:.1f} ms")
    assert name(199, 19) in store
    store.close()
