"""How fast the disk tier is, beside a raw file of the same bytes on the same disk. Prints ratios; needs no model.

    python -m benchmarks.bench_storage [--directory DIR] [--save]

Store: blocks into an empty store against `write` into an empty file, neither synced. Load: verified blocks into the slots
of an arena of the same total size against `readv` from the page cache into the same slots. Each figure is the best of
three runs that take turns, because both sides share the machine. Knows the storage package only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np

from benchmarks.report import Report
from tieredkv.bench.tiers import kv_like
from tieredkv.storage.autocodec import AutoCodec, make_codec, measure_disk
from tieredkv.storage.codec import decode
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.tier import BlockRecord, LoadOutcome, StoreOutcome

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {"360 KiB": 360 * KIB, "2 MiB": 2 * MIB}
TOTAL_NBYTES = 256 * MIB
CHAIN = 64
NUM_RUNS = 3
NAMESPACE = hashlib.sha256(b"bench").digest()
ROOT = hashlib.sha256(b"root").digest()
TOKENS = bytes(64)


def make_records(nbytes: int, count: int, key: object = "bench") -> list[BlockRecord]:
    """`count` blocks in chains of 64, over 16 different payloads."""
    payloads = [memoryview(kv_like(nbytes, seed)) for seed in range(16)]
    records: list[BlockRecord] = []
    parent = ROOT
    for i in range(count):
        depth = i % CHAIN
        name = hashlib.sha256(f"{key}/{i}".encode()).digest()
        records.append(BlockRecord(name, parent if depth else ROOT, depth, NAMESPACE, payloads[i % 16], TOKENS))
        parent = name
    return records


def timed(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def write_file(path: Path, records: list[BlockRecord]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for record in records:
        os.write(fd, record.payload)
    os.close(fd)


def read_file(path: Path, slots: list[memoryview]) -> None:
    fd = os.open(path, os.O_RDONLY)
    for slot in slots:
        os.readv(fd, [slot])
    os.close(fd)


def put_all(store: DiskStore, records: list[BlockRecord]) -> None:
    for at in range(0, len(records), 32):
        outcomes = store.put(records[at : at + 32])
        if set(outcomes) != {StoreOutcome.STORED}:
            raise RuntimeError(f"not stored: {outcomes}")


def load_all(store: DiskStore, records: list[BlockRecord], slots: list[memoryview]) -> None:
    for record, slot in zip(records, slots, strict=True):
        if store.load(record.hash, NAMESPACE, slot) is not LoadOutcome.LOADED:
            raise RuntimeError("not loaded")


def drop_page_cache() -> bool:
    """Forget clean pages; False without the right to."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")
    except OSError:
        return False
    return True


def bench_throughput(folder: Path, label: str, nbytes: int) -> list[str]:
    records = make_records(nbytes, TOTAL_NBYTES // nbytes)
    total = sum(r.payload.nbytes for r in records)
    arena = np.ones((len(records), nbytes), np.uint8)
    slots = [memoryview(slot) for slot in arena]
    file = folder / "raw"
    best: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, seconds))

    for _ in range(NUM_RUNS):
        file.unlink(missing_ok=True)
        note("file write", timed(lambda: write_file(file, records)))
        shutil.rmtree(folder / "store", ignore_errors=True)
        store = DiskStore.open(folder / "store", 2 * TOTAL_NBYTES)
        note("store", timed(lambda s=store: put_all(s, records)))  # type: ignore[misc]
        for _ in range(NUM_RUNS):
            note("file read", timed(lambda: read_file(file, slots)))
            note("load", timed(lambda s=store: load_all(s, records, slots)))  # type: ignore[misc]
        store.close()
    lines = [
        f"{label:>8}  {name:<12} {total / best[name] / 1e9:6.2f} GB/s   file {total / best[raw] / 1e9:6.2f} GB/s   "
        f"ratio {best[raw] / best[name]:.2f}  (to reach: {goal})"
        for name, raw, goal in (("store", "file write", 0.5), ("load", "file read", 0.6))
    ]
    if drop_page_cache():
        store = DiskStore.open(folder / "store", 2 * TOTAL_NBYTES)
        cold_s = timed(lambda: load_all(store, records, slots))
        store.close()
        drop_page_cache()
        raw_s = timed(lambda: read_file(file, slots))
        lines.append(
            f"{label:>8}  {'load, cold':<12} {total / cold_s / 1e9:6.2f} GB/s   file {total / raw_s / 1e9:6.2f} GB/s   "
            f"ratio {raw_s / cold_s:.2f}"
        )
    shutil.rmtree(folder / "store")
    file.unlink()
    return lines


def bench_lookup(folder: Path) -> list[str]:
    """The longest resident prefix of 128k tokens in blocks of 16, in a store of as many blocks."""
    store = DiskStore.open(folder / "store", GIB)
    payload = memoryview(bytes(64))
    hashes = [hashlib.sha256(f"lookup/{i}".encode()).digest() for i in range(8192)]
    records = [
        BlockRecord(h, hashes[i - 1] if i else ROOT, i, NAMESPACE, payload, TOKENS) for i, h in enumerate(hashes)
    ]
    put_all(store, records[:6000])
    lines = []
    for label, asked in (("all of 6000", hashes[:6000]), ("6000 of 8192", hashes), ("none of 8192", hashes[6000:] * 4)):
        times = sorted(timed(lambda a=asked: store.longest_prefix(a)) for _ in range(200))  # type: ignore[misc]
        lines.append(
            f"  lookup  {label:<14} {times[100] * 1e6:7.1f} us   p99 {times[197] * 1e6:7.1f} us   (to stay under: 500)"
        )
    opened = []
    for _ in range(5):
        store.close()
        started_s = time.perf_counter()
        store = DiskStore.open(folder / "store", GIB)
        opened.append(time.perf_counter() - started_s)
    lines.append(f"  opening a store of {store.usage().num_blocks} blocks: {max(opened) * 1e3:.1f} ms at most")
    store.close()
    shutil.rmtree(folder / "store")
    return lines


def bench_churn(folder: Path, sizes: list[int], label: str, codec: str = "raw") -> list[str]:
    """Ten turnovers of a store that is full from the first on: rate and refusals against the fresh store's rate."""
    capacity = GIB
    store = DiskStore.open(folder / "store", capacity, codec=make_codec(codec, 2, folder))
    payloads = [[memoryview(kv_like(nbytes, seed)) for seed in range(4)] for nbytes in sizes]
    rng = np.random.default_rng(2)
    turnovers: list[float] = []
    number = 0
    for _ in range(11):
        written, spent_s = 0, 0.0
        while written < store.usage().capacity_nbytes * 9 // 10:
            records = []
            for depth in range(32):
                name = hashlib.sha256(f"churn/{number}/{depth}".encode()).digest()
                payload = payloads[int(rng.integers(len(sizes)))][depth % 4]
                parent = records[-1].hash if depth else ROOT
                records.append(BlockRecord(name, parent, depth, NAMESPACE, payload, TOKENS))
            number += 1
            spent_s += timed(lambda r=records: put_all(store, r))  # type: ignore[misc]
            written += sum(r.payload.nbytes for r in records)
        turnovers.append(written / spent_s / 1e9)
    usage = store.usage()
    report = store.verify()
    store.close()
    shutil.rmtree(folder / "store")
    last = sum(turnovers[-3:]) / 3
    return [
        f"   churn  {label:<22} fresh {turnovers[0]:5.2f} GB/s, by turnover "
        + " ".join(f"{rate:.2f}" for rate in turnovers[1:])
        + f"; last three against fresh {last / turnovers[0]:.2f} (to reach: 0.7)",
        f"          refused {usage.num_refused}, evicted {usage.num_evictions}, full to "
        f"{usage.used_nbytes / capacity:.3f} of the capacity, audit {'clean' if report.ok else report.problems[:3]}",
    ]


def bench_codecs(folder: Path) -> list[str]:
    nbytes = 360 * KIB
    payloads = [memoryview(kv_like(nbytes, seed)) for seed in range(8)]
    lines = []
    for name in ("raw", "zstd"):
        codec = make_codec(name, 2, folder)
        out = memoryview(np.empty(codec.max_stored_nbytes(nbytes), np.uint8))
        target = memoryview(np.empty(nbytes, np.uint8))
        stored = [bytes(out[: codec.encode(p, out)[1]]) for p in payloads]
        encode_s = min(timed(lambda c=codec, o=out: [c.encode(p, o) for p in payloads]) for _ in range(5))  # type: ignore[misc]
        line = f"   codec  {name:<5} in {8 * nbytes / encode_s / 1e9:6.2f} GB/s"
        if name == "zstd":
            decode_s = min(timed(lambda s=stored, t=target: [decode(2, memoryview(x), t) for x in s]) for _ in range(5))  # type: ignore[misc]
            line += f"   out {8 * nbytes / decode_s / 1e9:6.2f} GB/s   stored {sum(map(len, stored)) / 8 / nbytes:.2f}"
        lines.append(line)
    rates = measure_disk(folder)
    auto = AutoCodec(2, lambda: rates)
    out = memoryview(np.empty(auto.max_stored_nbytes(nbytes), np.uint8))
    for payload in payloads * 2:
        auto.encode(payload, out)
    choice = auto.choice.name if auto.choice is not None else "undecided"
    lines.append(
        f"   codec  auto  chooses {choice}: the device writes {rates.write / 1e9:.2f} and reads {rates.read / 1e9:.2f} GB/s"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="where to work (default: the temporary folder)")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    options = parser.parse_args()
    report = Report()
    report.say(
        f"{'storage':13} py-lmdb {lmdb.__version__}, LMDB {'.'.join(map(str, lmdb.version()[:3]))}, numpy {np.__version__}\n"
    )
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        parts: list[Callable[[], list[str]]] = [
            *(lambda s=size, n=label: bench_throughput(folder, n, s) for label, size in SIZES.items()),  # type: ignore[misc]
            lambda: bench_lookup(folder),
            lambda: bench_churn(folder, [360 * KIB], "360 KiB"),
            lambda: bench_churn(folder, [2 * MIB], "2 MiB"),
            lambda: bench_churn(folder, [320 * KIB, 360 * KIB, 400 * KIB, 460 * KIB], "320-460 KiB, zstd", "zstd"),
            lambda: bench_churn(folder, [230 * KIB, 260 * KIB, 300 * KIB, 330 * KIB], "230-330 KiB, raw"),
            lambda: bench_codecs(folder),
        ]
        for part in parts:
            for line in part():
                report.say(line)
    if options.save:
        print(f"written to {report.save('storage')}")


if __name__ == "__main__":
    main()
