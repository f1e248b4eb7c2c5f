"""Whatever goes wrong below the device, in any place where the disk tier touches LMDB or a file: the output is right, no
request fails, waits are bounded, the fault shows in a metric, service resumes when the fault goes, and nothing leaks.

The model is tiny and computes in fp32 through the real code path; its answers are compared with stock transformers'.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import lmdb
import pytest

from tests.engine.truth import random_prompt, stock_tokens
from tests.models_for_tests import build
from tests.storage.faulty import FaultyMedium
from tieredkv import SamplingParams
from tieredkv.build import build_core, load_runner
from tieredkv.config import Config
from tieredkv.inspection import Fixed, cache_report
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.medium import Medium
from tieredkv.types import EngineRequest, FinishReason

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 4


class Clock:
    """The machine's clock, and a test may jump ahead."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset_s


class Harness:
    """An engine core over real storage threads whose medium fails on demand."""

    def __init__(self, runner, settings: dict, path: str, **changes) -> None:
        self.path = path
        self.clock = Clock()
        self.medium = FaultyMedium()
        self.config = Config.load(settings | changes)
        self.core = build_core(runner, self.config, clock=self.clock, medium=self.medium)
        self.tiers = self.core.tiers
        self._names = map(str, itertools.count())

    def run(self, *prompts: list[int]) -> list:
        """Complete prompts and compare with the truth; returns where their tokens came from."""
        names = [next(self._names) for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            self.core.add(EngineRequest(name, prompt, params, arrival_s=self.clock()))
        tokens, sources = {}, {}
        while self.core.has_work:
            for output in self.core.step():
                assert output.finish_reason in (None, FinishReason.LENGTH), output.error
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                sources[output.request_id] = output.sources
            if self.core.is_stalled:
                self.core.wait(0.005)
        for name, prompt in zip(names, prompts, strict=True):
            assert tokens[name] == stock_tokens(self.path, prompt, NUM_TOKENS)
            assert sources[name].total == len(prompt)
        self.core.check_integrity()
        return [sources[name] for name in names]

    def settle(self, seconds: float = 20.0) -> None:
        """Idle until nothing moves, or for as long as a fault that blocks may last."""
        deadline_s = time.monotonic() + seconds
        while self.core.work_idle() and time.monotonic() < deadline_s:
            self.core.wait(0.005)

    def forget(self) -> None:
        """Empty device and host: only the disk knows."""
        self.core.clear()
        self.tiers.host.clear()
        self.tiers.forget_gone()

    def trouble(self) -> float:
        """What an operator sees of faults, in one number."""
        read = self.core.metrics.registry.get_sample_value
        names = (
            "tier_corrupt_records_total",
            "restore_failures_total",
            "restore_timeouts_total",
            "lookup_timeouts_total",
            "disk_refused_blocks_total",
        )
        total = 0.0
        for name in names:
            labels = {"model_name": self.core.metrics.model_name}
            value = read("tieredkv:" + name, labels)
            if value is None:
                value = read("tieredkv:" + name, labels | {"tier": "disk"})
            assert value is not None, name
            total += value
        healthy = read("tieredkv:tier_healthy", {"model_name": self.core.metrics.model_name, "tier": "disk"})
        return total + (1.0 - healthy)

    def recovered(self) -> None:
        """With the fault gone: blocks are saved and restored again, and a recount agrees."""
        self.clock.offset_s += 60
        prompt = random_prompt(100, seed=next(_seeds))
        for _ in range(200):
            self.run(prompt)
            self.settle()
            self.forget()
            if self.run(prompt)[0].disk == 96:
                break
            self.forget()
            self.clock.offset_s += 60
            time.sleep(0.05)
        else:
            raise AssertionError(f"service does not resume: {self.tiers.disk.fault}")
        self.settle()
        self.core.check_integrity()
        self.tiers.host.check_integrity(num_leases=0, num_reservations=0)
        assert self.core.pool.num_free == self.core.pool.num_usable
        assert self.tiers.disk.refusal is None
        assert self.core.close(10)
        store = DiskStore.open(self.config.tiers.disk_path)
        try:
            assert store.verify().problems == []
        finally:
            store.close()


_seeds = itertools.count(5000)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build("llama", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def runner(model):
    return load_runner(Config.load(settings_for(model)))


def settings_for(model: str) -> dict:
    return {
        "model": model,
        "device": "cpu",
        "dtype": "float32",
        "num_gpu_blocks_override": 40,
        "max_model_len": 256,
        "restore": "always",
        "restore_timeout": 0.5,
        "host_memory": "4MiB",
        "disk_size": "64MiB",
    }


@pytest.fixture
def harness(runner, model, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    made = Harness(runner, settings_for(model), model, disk_path=str(tmp_path / "store"))
    yield made
    made.medium.heal()
    made.core.close(5)


@pytest.fixture
def saved(harness):
    """A harness whose disk holds two prompts that nobody else knows any more."""
    prompts = [random_prompt(100, seed=next(_seeds)) for _ in range(2)]
    harness.run(*prompts)
    harness.settle()
    harness.forget()
    assert harness.trouble() == 0
    return harness, prompts


def flip(source: memoryview, target: memoryview) -> None:
    Medium().read(source, target)
    if target.nbytes:
        target[target.nbytes // 2] ^= 0x10


def shorten(txn, key, db):
    value = txn.get(key, db=db)
    return value[:-100] if value is not None and len(value) > 1000 else value


class Swapper:
    """Hands out the record of another block."""

    def __init__(self) -> None:
        self.last = None

    def __call__(self, txn, key, db):
        value = txn.get(key, db=db)
        if value is None or len(value) < 1000:
            return value
        other, self.last = self.last, bytes(value)
        return memoryview(other) if other is not None else value


READ_FAULTS = {
    "bit flip": ("read", flip),
    "truncation": ("get", shorten),
    "swapped records": ("get", Swapper()),
    "EIO in get": ("get", OSError(errno.EIO, "injected")),
    "EIO in read": ("read", OSError(errno.EIO, "injected")),
    "LMDB error in get": ("get", lmdb.CorruptedError("injected")),
    "EIO in begin": ("begin", OSError(errno.EIO, "injected")),
    "a loader that dies": ("read", SystemExit("injected")),
}


@pytest.mark.parametrize("name", READ_FAULTS)
def test_a_read_that_goes_wrong(name, saved):
    harness, prompts = saved
    operation, fault = READ_FAULTS[name]
    if isinstance(fault, BaseException):
        harness.medium.fail(operation, fault)
    else:
        harness.medium.faults[operation] = fault
    harness.run(*prompts)
    harness.run(random_prompt(80, seed=next(_seeds)))
    assert harness.trouble() > 0
    harness.medium.heal()
    harness.recovered()


WRITE_FAULTS = {
    "full map": ("put", lmdb.MapFullError("injected")),
    "ENOSPC in put": ("put", OSError(errno.ENOSPC, "injected")),
    "ENOSPC in commit": ("commit", lmdb.DiskError("injected: No space left on device")),
    "EIO in commit": ("commit", OSError(errno.EIO, "injected")),
    "read-only medium": ("begin", lmdb.ReadonlyError("injected")),
    "a writer that dies": ("put", SystemExit("injected")),
    "a writer that dies in commit": ("commit", SystemExit("injected")),
}


@pytest.mark.parametrize("name", WRITE_FAULTS)
def test_a_write_that_goes_wrong(name, saved):
    harness, prompts = saved
    harness.medium.fail(*WRITE_FAULTS[name])
    fresh = [random_prompt(90, seed=next(_seeds)) for _ in range(3)]
    harness.run(*fresh)
    harness.settle(1)
    harness.run(*prompts, *fresh)
    assert harness.trouble() > 0
    if name.startswith("ENOSPC"):
        told = cache_report(harness.core, Fixed("model", 0.0, None)).tiers[-1]
        assert "no space" in told.refusal
        assert told.num_refused_blocks > 0
        assert told.refusing_since_s is not None
    harness.medium.heal()
    harness.recovered()


@pytest.mark.parametrize("operation", ["get", "read", "begin"])
def test_a_disk_that_hangs_while_reading(operation, saved):
    harness, prompts = saved
    hanging = harness.medium.block(operation)
    # Both finish although the disk has not answered yet.
    harness.run(*prompts)
    assert not hanging.is_set()
    harness.run(random_prompt(60, seed=next(_seeds)))
    assert harness.trouble() > 0
    harness.medium.heal()
    hanging.set()
    harness.recovered()


@pytest.mark.parametrize("operation", ["put", "commit"])
def test_a_disk_that_hangs_while_writing(operation, saved):
    harness, _ = saved
    hanging = harness.medium.block(operation)
    for _ in range(12):
        harness.run(random_prompt(100, seed=next(_seeds)))
        harness.core.work_idle()
    assert not hanging.is_set()
    assert harness.tiers.spiller.num_unsaved > 0
    harness.medium.heal()
    hanging.set()
    harness.recovered()


def test_the_directory_is_removed(saved):
    harness, prompts = saved
    shutil.rmtree(harness.config.tiers.disk_path)
    harness.run(*prompts)
    harness.run(random_prompt(80, seed=next(_seeds)))
    harness.settle(1)
    assert harness.trouble() > 0
    # A disk that was unmounted is not filled behind its back: service resumes when the directory is there again.
    assert not Path(harness.config.tiers.disk_path).exists()
    Path(harness.config.tiers.disk_path).mkdir()
    harness.recovered()


def test_the_data_file_is_damaged_on_disk(saved):
    harness, prompts = saved
    data = Path(harness.config.tiers.disk_path) / "data.mdb"
    block_nbytes = harness.tiers.block_nbytes
    content = data.read_bytes()
    with open(data, "r+b") as file:
        # Somewhere inside every large record, wherever they lie.
        for at in range(64 * 1024, len(content) - 4096, block_nbytes // 2):
            file.seek(at)
            file.write(bytes([content[at] ^ 0xFF]))
    harness.run(*prompts)
    harness.recovered()


@pytest.mark.parametrize("state", ["other format", "a file in the way", "not a store"])
def test_a_store_that_cannot_be_opened(state, runner, model, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    path = tmp_path / "store"
    if state == "a file in the way":
        path.write_text("no directory")
    elif state == "other format":
        DiskStore.open(path, 64 << 20).close()
        with lmdb.open(str(path), max_dbs=8) as env:
            info = env.open_db(b"info")
            with env.begin(write=True) as txn:
                (key,) = [k for k, v in txn.cursor(db=info) if k == b"format"]
                txn.put(key, (99).to_bytes(4, "little"), db=info)
    else:
        with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
            txn.put(b"somebody", b"else's")
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name == "data.mdb"}
    harness = Harness(runner, settings_for(model), model, disk_path=str(path))
    harness.run(random_prompt(80, seed=1))
    harness.settle(1)
    assert harness.tiers.disk.fault
    assert harness.trouble() > 0
    # What is not ours is not touched.
    assert {p: p.read_bytes() for p in before} == before
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    harness.recovered()


def test_a_host_tier_full_of_leases(saved):
    harness, prompts = saved
    host = harness.tiers.host
    held = []
    while True:
        filler = host.begin(os.urandom(32), os.urandom(32), 0)
        if filler is None:
            break
        held.append(filler.commit())
    assert host.num_free == 0
    assert [s.cached for s in harness.run(*prompts)] == [0, 0]
    for lease in held:
        lease.release()
    harness.recovered()


HOLDER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=8, map_size=64 << 20)
txn = env.begin(write=True)
print("holding", flush=True)
sys.stdin.read()
"""


def test_another_process_holds_the_write_lock_and_is_killed(saved):
    harness, prompts = saved
    command = [sys.executable, "-c", HOLDER, harness.config.tiers.disk_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline().strip() == "holding"
        fresh = [random_prompt(90, seed=next(_seeds)) for _ in range(3)]
        harness.run(*fresh)
        harness.settle(0.5)
        # Reading goes on beside a writer that does not let go.
        harness.forget()
        assert [s.disk for s in harness.run(*prompts)] == [96, 96]
        holder.kill()
    harness.settle()
    harness.recovered()
