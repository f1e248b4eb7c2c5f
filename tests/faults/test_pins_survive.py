"""A pinned prefix of 2,000 tokens against ten times the capacity of each tier, a restart, and a kill.

The store and its threads are real, the model is not.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes import ManualClock, expected_tokens, make_core, request
from tests.tier_fakes import HandCrankedCopies
from tieredkv.core import EngineCore
from tieredkv.disk_tier import ThreadedDisk
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.host import HostArena
from tieredkv.storage.workers import StorageWorkers
from tieredkv.tiers import Tiers
from tieredkv.types import Retention, Tier

ROOT = Path(__file__).resolve().parents[2]
BLOCK, NUM_BLOCKS, NUM_SLOTS, DISK_NBYTES = 16, 300, 270, 2_600_000
PINNED = [(i * 7919) % 1000 for i in range(2000)]
NUM_PINNED = 125


class Machine:
    """A core over an arena and a store in `folder`. Its clock is the test's; the store's threads are real."""

    def __init__(self, folder: Path, now_s: float = 1e6) -> None:
        self.clock = ManualClock()
        self.clock.now_s = now_s
        self.num_requests = 0
        made: dict = {}

        def wall_clock_us() -> int:
            return int(self.clock.now_s * 1e6)

        def make_tiers(pool, gate, wake):
            runner = made["runner"]
            block_nbytes = runner.slots.nbytes // runner.num_blocks
            self.copies = HandCrankedCopies(runner)

            def open_store() -> StorageWorkers:
                store = DiskStore.open(folder, DISK_NBYTES, clock_us=wall_clock_us)
                return StorageWorkers(store, on_result=wake)

            self.host = HostArena(block_nbytes, NUM_SLOTS * 4096)
            self.disk = ThreadedDisk(open_store, b"n" * 32, 60.0, self.clock)
            return Tiers(
                pool,
                self.copies,
                self.host,
                self.disk,
                gate,
                clock=self.clock,
                timeout_s=60.0,
                block_nbytes=block_nbytes,
            )

        self.core: EngineCore
        self.core, self.runner = make_core(
            NUM_BLOCKS,
            BLOCK,
            2300,
            clock=self.clock,
            make_tiers=make_tiers,
            on_runner=lambda runner: made.update(runner=runner),
            restore="always",
            max_num_batched_tokens=4096,
        )
        self.settle()

    def run(self, tokens: list[int], **more: object):
        """Serve a request; returns where its prompt came from."""
        self.num_requests += 1
        made = request(f"r{self.num_requests}", tokens, max_tokens=2)
        for name, value in more.items():
            setattr(made, name, value)
        self.core.add(made)
        got: list[int] = []
        sources = None
        while self.core.has_work:
            for output in self.core.step():
                got += output.new_token_ids
                sources = output.sources
            self.crank()
            if self.core.is_stalled:
                self.core.wait(0.05)
        assert got == expected_tokens(tokens, 2)
        return sources

    def crank(self) -> None:
        while self.copies.launched:
            self.copies.complete()

    def settle(self) -> None:
        """Idle until everything is saved."""
        give_up_s = time.monotonic() + 30
        while self.core.work_idle() or self.core.pins.busy:
            assert time.monotonic() < give_up_s
            self.crank()
            self.core.wait(0.05)

    def churn(self, times: int, seed: int = 0) -> None:
        """Compute `times` as many blocks as the largest tier has room for, all different."""
        most = max(NUM_BLOCKS, NUM_SLOTS, self.disk.num_fit(BLOCK * 16, BLOCK))
        for i in range(times * most // 120 + 1):
            self.run([seed + i, *((i * 31 + j * 7) % 1000 for j in range(120 * BLOCK))])
            self.settle()

    def close(self) -> None:
        self.settle()
        assert self.core.close(10.0)


@pytest.mark.parametrize("tier", list(Tier))
def test_a_pin_outlives_ten_capacities_and_a_restart_and_goes_with_its_time(tmp_path, tier):
    first = Machine(tmp_path)
    first.run(PINNED)
    report = first.core.pins.pin(PINNED, tier=tier, ttl_s=1000.0, name="system")
    assert (report.outcome, report.num_blocks, report.num_present) == ("accepted", NUM_PINNED, NUM_PINNED)
    first.settle()
    first.churn(10)
    sources = first.run([*PINNED, 1])
    assert getattr(sources, tier.value) == 2000
    first.core.check_integrity()
    first.close()

    second = Machine(tmp_path, first.clock.now_s)
    (kept,) = second.core.pins.list()
    assert (kept.id, kept.name, kept.num_missing) == (report.id, "system", 0)
    second.churn(2, seed=100)
    assert second.run([*PINNED, 2]).disk == 2000
    second.churn(2, seed=200)
    assert getattr(second.run([*PINNED, 3]), tier.value) == 2000
    second.clock.now_s += 1000
    second.churn(2, seed=300)
    assert second.core.pins.list() == []
    assert second.run([*PINNED, 4]).computed > 0
    second.core.check_integrity()
    second.close()


def child(folder: str) -> None:
    """Pin, say so, and churn until killed."""
    machine = Machine(Path(folder))
    machine.run(PINNED)
    report = machine.core.pins.pin(PINNED, name="system")
    machine.settle()
    assert machine.core.pins.is_saved(report.id)
    assert machine.core.pins.get(report.id).num_present == NUM_PINNED
    print("pinned", flush=True)
    for seed in range(10_000):
        machine.churn(1, seed=30 * seed % 900)


def test_a_pin_outlives_a_kill(tmp_path):
    command = [sys.executable, "-c", f"from tests.faults.test_pins_survive import child; child({str(tmp_path)!r})"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "pinned\n"
        # In the middle of writing other blocks.
        before = _size(tmp_path)
        give_up_s = time.monotonic() + 60
        while _size(tmp_path) == before and time.monotonic() < give_up_s:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    machine = Machine(tmp_path)
    (report,) = machine.core.pins.list()
    assert (report.name, report.num_present, report.num_blocks) == ("system", NUM_PINNED, NUM_PINNED)
    assert machine.run([*PINNED, 1]).disk == 2000
    machine.churn(3)
    assert machine.core.pins.list()[0].num_present == NUM_PINNED
    store = machine.disk._workers.store
    assert store.verify().ok
    machine.close()


def _size(folder: Path) -> int:
    return sum(path.stat().st_mtime_ns for path in folder.iterdir())


def test_a_retained_prefix_outlives_others_on_disk_and_over_a_restart(tmp_path):
    first = Machine(tmp_path)
    first.run(PINNED, retention=(Retention(2000, 60, 3600.0),))
    first.settle()
    first.churn(4)
    first.close()
    second = Machine(tmp_path, first.clock.now_s)
    second.churn(2, seed=100)
    assert second.run([*PINNED, 1]).disk == 2000
    second.clock.now_s += 3600
    second.churn(3, seed=200)
    assert second.run([*PINNED, 2]).computed > 0
    second.close()


@pytest.mark.soak
@pytest.mark.parametrize("tier", list(Tier))
def test_a_pin_outlives_long_churn(tmp_path, tier):
    machine = Machine(tmp_path)
    machine.run(PINNED)
    machine.core.pins.pin(PINNED, tier=tier)
    for round_ in range(20):
        machine.churn(5, seed=45 * round_)
        assert machine.core.pins.list()[0].num_present == NUM_PINNED
        machine.core.check_integrity()
    machine.close()
