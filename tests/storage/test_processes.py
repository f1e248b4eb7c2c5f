"""Several processes on one store, some of them killed at the worst moment."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.storage.chains import assert_sound, chain, hashes, load, name, pin
from tieredkv.errors import StorageError
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.environment import StoreUnavailableError
from tieredkv.storage.tier import LoadOutcome, StoreOutcome

CAPACITY = 4 << 20
NBYTES = 20_000
ROOT = Path(__file__).resolve().parents[2]

WRITER = """
import sys
from tests.storage.chains import chain
from tieredkv.storage.disk import DiskStore
store = DiskStore.open(sys.argv[1], int(sys.argv[2]))
print("open", flush=True)
for number in range(int(sys.argv[3]), 1_000_000):
    store.put(chain(number, 8))
    if number % 3 == 0:
        store.touch([chain(number, 8)[-1].hash])
    if number % 7 == 0:
        store.maintain(idle=True)
"""

PINNER = """
import sys
from tests.storage.chains import chain, hashes, pin
from tieredkv.storage.disk import DiskStore
store = DiskStore.open(sys.argv[1], int(sys.argv[2]))
print("open", flush=True)
for number in range(1_000_000):
    store.put(chain((sys.argv[3], number), 8))
    store.pin(pin(number % 3, hashes((sys.argv[3], number), 8)))
    if number % 5 == 0:
        store.unpin(pin(number % 2, ()).id)
    if number % 7 == 0:
        store.maintain(idle=False)
"""

LOCK_HOLDER = """
import sys
from tests.storage.chains import record, name, ROOT
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.medium import Medium
class Stopping(Medium):
    def commit(self, txn):
        print("holding", flush=True)
        sys.stdin.read()
store = DiskStore.open(sys.argv[1], medium=Stopping())
store.put([record(name("half", 0), ROOT, 0)])
"""

READER = """
import sys
from tests.storage.chains import BLOCK_NBYTES, NAMESPACE, name
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.medium import Medium
class Stopping(Medium):
    def read(self, source, target):
        print("reading", flush=True)
        sys.stdin.read()
store = DiskStore.open(sys.argv[1], medium=Stopping())
store.load(name("a", 0), NAMESPACE, memoryview(bytearray(BLOCK_NBYTES)))
"""


@contextlib.contextmanager
def running(code: str, *args: object):
    """A process that has printed its first line."""
    command = [sys.executable, "-c", code, *map(str, args)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_pin_holds_for_other_processes(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)
    # Pinned before it is there, and put while another process fills the store many times over.
    assert store.pin(pin("ours", hashes("a", 8))) == 0
    with running(WRITER, tmp_path, CAPACITY, 0):
        store.put(chain("a", 8))
        give_up_s = time.monotonic() + 30
        younger = None
        while younger is None:
            assert time.monotonic() < give_up_s
            younger = next((n for n in range(2000) if store.longest_prefix(hashes(n, 8))), None)
        # What came at about the same time, or later, has been evicted for others.
        for number in range(younger, younger + 40):
            while store.longest_prefix(hashes(number, 8)):
                assert time.monotonic() < give_up_s
        assert store.longest_prefix(hashes("a", 8)) == 8
    assert_sound(store)
    store.close()


def test_pins_and_counts_agree_after_kills_at_any_moment(tmp_path):
    rng = random.Random(7)
    for turn in range(6):
        with running(PINNER, tmp_path, CAPACITY, turn) as process:
            time.sleep(rng.uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
            process.wait()
        store = DiskStore.open(tmp_path, CAPACITY)
        assert_sound(store)
        for record in store.pins().records:
            assert store.longest_prefix(record.hashes) == store.pins().num_resident[record.id] == 8
        store.close()


def test_two_processes_see_each_others_blocks_at_once(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)
    with running(WRITER, tmp_path, CAPACITY, 0):
        give_up_s = time.monotonic() + 20
        while store.longest_prefix(hashes(3, 8)) < 8:
            assert time.monotonic() < give_up_s
            assert set(store.put(chain("mine", 4))) <= {StoreOutcome.STORED, StoreOutcome.PRESENT}
        assert load(store, name(3, 7), NBYTES) is LoadOutcome.LOADED
    assert_sound(store)
    store.close()


def test_a_writer_killed_with_the_lock_leaves_nothing_and_stops_nobody(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)
    store.put(chain("a", 3))
    with running(LOCK_HOLDER, tmp_path) as process:
        process.kill()
        process.wait()
        assert set(store.put(chain("b", 3))) == {StoreOutcome.STORED}
    assert name("half", 0) not in store
    assert_sound(store)
    store.close()


def test_a_reader_killed_in_the_middle_does_not_keep_pages_for_ever(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)
    store.put(chain("a", 3))
    with running(READER, tmp_path) as process:
        process.kill()
        process.wait()
    # Without forgetting the reader, no page freed since could be used again: the third turnover would not fit.
    for turn in range(4):
        for number in range(20):
            assert set(store.put(chain((turn, number), 8))) == {StoreOutcome.STORED}
    assert_sound(store)
    store.close()


def test_the_capacity_is_the_one_of_who_opened_it_last(tmp_path):
    small = DiskStore.open(tmp_path, CAPACITY)
    code = (
        "import sys; from tieredkv.storage.disk import DiskStore; DiskStore.open(sys.argv[1], int(sys.argv[2])).close()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(4 * CAPACITY)], cwd=ROOT, check=True)
    # The map was made for less: it grows, and what another process has added is found.
    for number in range(60):
        assert set(small.put(chain(number, 8))) == {StoreOutcome.STORED}
    usage = small.usage()
    assert usage.capacity_nbytes == 4 * CAPACITY
    assert CAPACITY < usage.used_nbytes <= 4 * CAPACITY
    assert_sound(small)
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(CAPACITY)], cwd=ROOT, check=True)
    small.maintain(idle=False)
    assert small.usage().used_nbytes <= CAPACITY
    small.close()


def test_a_store_grown_by_another_process_is_followed(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)
    with running(WRITER, tmp_path, 8 * CAPACITY, 0):
        give_up_s = time.monotonic() + 30
        while store.usage().used_nbytes < 3 * CAPACITY:
            store.maintain(idle=False)
            assert time.monotonic() < give_up_s
    assert set(store.put(chain("mine", 4))) == {StoreOutcome.STORED}
    assert load(store, name("mine", 3)) is LoadOutcome.LOADED
    assert store.fault is None
    assert store.verify().ok
    store.close()


def kill_rounds(folder: Path, num_rounds: int, seed: int) -> list[float]:
    """Kill a writer at random moments; audit what it leaves. Returns the times that opening took."""
    rng = random.Random(seed)
    opened_s = []
    for turn in range(num_rounds):
        with running(WRITER, folder, CAPACITY, turn * 1000) as process:
            time.sleep(rng.uniform(0, 0.08))  # the random moment
            process.send_signal(signal.SIGKILL)
            process.wait()
        started_s = time.perf_counter()
        store = DiskStore.open(folder, CAPACITY)
        opened_s.append(time.perf_counter() - started_s)
        assert_sound(store)
        assert store.usage().num_resets == 0
        store.put(chain(("after", turn), 2))
        store.close()
    return opened_s


def test_whatever_a_killed_writer_leaves_is_sound(tmp_path):
    opened_s = kill_rounds(tmp_path, 20, seed=1)
    print(f"opening took {max(opened_s) * 1000:.1f} ms at most")


@pytest.mark.soak
def test_whatever_a_killed_writer_leaves_is_sound_200_times(tmp_path):
    opened_s = kill_rounds(tmp_path, 200, seed=2)
    print(f"opening took {max(opened_s) * 1000:.1f} ms at most")
    assert sorted(opened_s)[len(opened_s) // 2] < 0.05


def _use_in_child(store: DiskStore, answers) -> None:
    answers.put((store.longest_prefix(hashes("a", 3)), [o.value for o in store.put(chain("b", 1))]))
    try:
        with store._env.reading():
            answers.put("read")
    except StoreUnavailableError as error:
        answers.put(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_touch_its_parents_store(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)
    store.put(chain("a", 3))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_use_in_child, args=(store, answers))
    child.start()
    assert answers.get() == (0, ["failed"])
    assert "fork" in answers.get()
    child.join()
    assert set(store.put(chain("c", 2))) == {StoreOutcome.STORED}
    assert_sound(store)
    store.close()


def test_opening_does_not_wait_for_ever_for_another_opener(tmp_path, monkeypatch):
    DiskStore.open(tmp_path, CAPACITY).close()
    monkeypatch.setattr("tieredkv.storage.directory.OPEN_WAIT_S", 0.05)
    import fcntl

    fd = os.open(tmp_path / "tieredkv.lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="another process"):
        DiskStore.open(tmp_path, CAPACITY)
    os.close(fd)
    DiskStore.open(tmp_path, CAPACITY).close()
