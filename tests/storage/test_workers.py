"""The storage threads: nothing waits for the disk, nothing is lost, a dead thread is seen and replaced."""

from __future__ import annotations

import threading
import time

import pytest

from tests.storage.chains import BLOCK_NBYTES, NAMESPACE, assert_sound, chain, hashes, name, payload_of
from tests.storage.faulty import FaultyMedium
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.jobs import JobQueue, StoreJob
from tieredkv.storage.tier import LoadOutcome, StoreOutcome
from tieredkv.storage.workers import StorageWorkers

CAPACITY = 4 << 20
LIMIT_S = 20.0


class Bench:
    """A store with its threads, an arena, and the engine thread's side of it."""

    def __init__(self, folder, **more) -> None:
        self.medium = FaultyMedium()
        self.store = DiskStore.open(folder, CAPACITY, medium=self.medium)
        self.woken = threading.Event()
        self.clock = FakeClock()
        self.workers = StorageWorkers(self.store, on_result=self.woken.set, clock=self.clock, **more)
        self.done: list = []

    def put(self, records):
        return self.workers.put(records)

    def load(self, block_hash, **more):
        target = memoryview(bytearray(BLOCK_NBYTES))
        return self.workers.load(block_hash, NAMESPACE, target, **more)

    def wait(self, *jobs):
        """Poll until the jobs are answered; each exactly once."""
        give_up_s = time.monotonic() + LIMIT_S
        while not all(job in self.done for job in jobs):
            assert time.monotonic() < give_up_s, "no answer"
            self.woken.wait(0.05)
            self.woken.clear()
            answered = self.workers.poll()
            assert not set(answered) & set(self.done), "answered twice"
            self.done += answered
        return jobs[0] if len(jobs) == 1 else jobs

    def close(self) -> None:
        self.medium.heal()
        assert self.workers.close(LIMIT_S)
        self.workers.poll()


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_blocks_go_down_and_come_up(bench):
    job = bench.wait(bench.put(chain("a", 5)))
    assert job.outcomes == [StoreOutcome.STORED] * 5
    loads = [bench.load(h) for h in hashes("a", 6)]
    bench.wait(*loads)
    assert [j.outcome for j in loads] == [LoadOutcome.LOADED] * 5 + [LoadOutcome.MISSING]
    assert all(j.target == payload_of(j.hash) for j in loads[:5])
    found = bench.wait(bench.workers.lookup(hashes("a", 9)))
    assert found.num_found == 5
    assert bench.workers.num_open == 0
    assert bench.workers.health() == []


def test_touches_and_calls_keep_their_place_behind_the_stores(bench):
    bench.put(chain("a", 3))
    assert bench.workers.touch([name("a", 2)])
    assert bench.workers.call(lambda: bench.store.remove([name("a", 1)])) is not None
    usage = bench.wait(bench.workers.call(lambda: bench.store.usage().num_blocks))
    assert usage.result == 1


def test_a_slow_disk_blocks_no_submit_and_the_bound_refuses(tmp_path):
    bench = Bench(tmp_path, max_write_nbytes=4 * BLOCK_NBYTES)
    gate = bench.medium.block("commit")
    records = chain("a", 8)
    jobs = [bench.put([r]) for r in records[:4]]
    assert bench.put(records[4:5]) is None
    assert bench.workers.depths.write_nbytes == 4 * BLOCK_NBYTES
    # Reading goes on.
    assert bench.wait(bench.load(name("a", 0))).outcome is LoadOutcome.MISSING
    bench.clock.now_s += 60
    assert "busy" in bench.workers.health()[0]
    gate.set()
    bench.wait(*jobs)
    assert [j.outcomes for j in jobs] == [[StoreOutcome.STORED]] * 4
    assert bench.workers.depths.write_nbytes == 0
    bench.close()


def test_a_read_that_ends_after_its_deadline_is_answered_all_the_same(bench):
    bench.wait(bench.put(chain("a", 2)))
    gate = bench.medium.block("read")
    job = bench.load(name("a", 0), timeout_s=5)
    assert gate.entered.wait(LIMIT_S)
    bench.clock.now_s += 6
    assert not job.answered
    gate.set()
    bench.wait(job)
    assert job.outcome is LoadOutcome.LOADED
    assert job.target == payload_of(name("a", 0))


def test_what_waits_beyond_its_deadline_is_not_begun(tmp_path):
    bench = Bench(tmp_path, num_loaders=1)
    bench.wait(bench.put(chain("a", 3)))
    gate = bench.medium.block("read")
    first, late = (bench.load(h, timeout_s=5) for h in hashes("a", 2))
    assert gate.entered.wait(LIMIT_S)
    bench.clock.now_s += 6
    gate.set()
    bench.wait(first, late)
    assert late.outcome is LoadOutcome.FAILED
    assert "deadline" in late.error
    assert bench.medium.hits["read"] == 1
    bench.close()


class Killed(BaseException):
    """Ends a thread as nothing in the program does."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [Killed("by a test"), ValueError("a bug")])
def test_a_dead_thread_fails_its_jobs_shows_and_is_replaced(bench, error):
    bench.wait(bench.put(chain("a", 2)))
    bench.medium.fail("begin", error)
    stores = [bench.put(chain("b", 1)), bench.put(chain("c", 1))]
    load = bench.load(name("a", 0))
    bench.wait(load, stores[0])
    assert load.outcome is LoadOutcome.FAILED
    assert stores[0].outcomes == [StoreOutcome.FAILED]
    assert str(error) in load.error
    assert any("died" in problem for problem in bench.workers.health())
    # While the fault lasts the replacements die too; then all goes on, with nothing lost.
    bench.clock.now_s += 2
    bench.workers.poll()
    bench.medium.heal()
    bench.wait(*stores)
    give_up_s = time.monotonic() + LIMIT_S
    while bench.workers.health():
        assert time.monotonic() < give_up_s
        bench.clock.now_s += 2
        bench.workers.poll()
    assert bench.wait(bench.load(name("a", 1))).outcome is LoadOutcome.LOADED
    assert bench.wait(bench.put(chain("d", 2))).outcomes == [StoreOutcome.STORED] * 2
    assert bench.workers.num_restarts >= 2


def test_an_answer_nobody_listens_to_is_not_lost(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)

    def bad_listener() -> None:
        raise RuntimeError("the engine is gone")

    workers = StorageWorkers(store, num_loaders=1, on_result=bad_listener)
    target = memoryview(bytearray(BLOCK_NBYTES))
    job = workers.load(name("a", 0), NAMESPACE, target)
    assert workers.drain(LIMIT_S)
    assert job in workers.poll()
    workers.close(LIMIT_S)


def test_closing_drains_syncs_and_answers_everything(tmp_path):
    bench = Bench(tmp_path)
    jobs = [bench.put(chain(i, 2)) for i in range(10)]
    assert bench.workers.close(LIMIT_S)
    answered = bench.workers.poll()
    assert set(jobs) <= set(answered)
    assert {o for j in jobs for o in j.outcomes} == {StoreOutcome.STORED}
    assert bench.put([]) is None
    store = DiskStore.open(tmp_path, CAPACITY)
    assert store.usage().num_blocks == 20
    assert_sound(store)
    store.close()


def test_closing_does_not_wait_for_a_stuck_disk(tmp_path):
    bench = Bench(tmp_path)
    gate = bench.medium.block("commit")
    stuck = bench.put(chain("a", 1))
    assert gate.entered.wait(LIMIT_S)
    waiting = bench.put(chain("b", 1))
    started_s = time.monotonic()
    assert not bench.workers.close(0.2)
    assert time.monotonic() - started_s < 5
    bench.done += bench.workers.poll()
    assert waiting.outcomes == [StoreOutcome.FAILED]
    assert not stuck.answered
    gate.set()
    bench.wait(stuck)
    bench.store.close()


def test_cranked_by_hand_nothing_happens_before_the_crank_turns(tmp_path):
    bench = Bench(tmp_path, start=False)
    first, second = bench.put(chain("a", 2)), bench.put(chain("a", 4, start=2))
    load = bench.load(name("a", 3))
    assert bench.workers.run_loads(5) == 1
    assert load.outcome is LoadOutcome.MISSING
    assert bench.workers.run_writes()
    assert not bench.workers.run_writes()
    assert first.outcomes + second.outcomes == [StoreOutcome.STORED] * 4
    bench.close()


def test_a_queue_is_bounded_in_jobs_too():
    queue = JobQueue(100, max_jobs=3)
    jobs = [StoreJob(records=[]) for _ in range(4)]
    assert [queue.offer(job) for job in jobs] == [True, True, True, False]
    assert queue.take(0) is jobs[0]
    assert queue.offer(jobs[3])
    assert queue.close() == jobs[1:]
    assert not queue.offer(jobs[0])
