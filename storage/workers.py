"""The storage threads: several loaders, two inspectors and one writer, fed by bounded queues, answering through one.

Knows jobs and a `DiskStore`; knows no blocks on a device and no requests. Everything public is for the engine thread.

    engine thread --submit--> loads  --> loader threads --+
                  --submit--> writes --> writer thread  --+--> results --poll--> engine thread
                  --ask-----> asks   --> inspectors    --> futures

Invariants: submitting never waits; a job is answered exactly once, also if its thread dies or the workers close, and what it
points at is not touched afterwards; a dead thread shows in `health` until another one has taken its place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tieredkv.storage.disk import DiskStore
from tieredkv.storage.jobs import AskJob, CallJob, Job, JobQueue, LoadJob, LookupJob, StoreJob, merge_records
from tieredkv.storage.tier import BlockRecord

logger = logging.getLogger(__name__)

MAX_ASKS = 64
NUM_INSPECTORS = 2
"""One for an audit that takes minutes, one for short questions meanwhile."""
MAX_BATCH_NBYTES = 8 << 20
MAINTAIN_EVERY_S = 1.0
SYNC_AFTER_IDLE_S = 3.0
RESTART_AFTER_S = 1.0
STUCK_AFTER_S = 30.0
NO_REASON = "for no known reason"


@dataclass(slots=True, eq=False)
class _Worker:
    """One thread's place: the thread in it now, and what it is doing."""

    name: str
    queue: JobQueue
    thread: threading.Thread | None = None
    current: tuple[Job, ...] = ()
    busy_since_s: float = 0.0
    died: str | None = None
    restart_at_s: float = 0.0

    @property
    def is_dead(self) -> bool:
        """Whether there was a thread that has ended."""
        return self.thread is not None and not self.thread.is_alive()


@dataclass(frozen=True, slots=True)
class QueueDepths:
    """Writes waiting, and bytes of jobs that wait or run."""

    load_nbytes: int
    num_writes: int
    write_nbytes: int


class StorageWorkers:
    """Threads for one store. `on_result`, if given, is called in a storage thread after each answer, to wake the engine.

    Assign `protect` (hashes that waiting requests have matched, the deepest of each is enough) as often as you like; the
    writer evicts none of them. With `start=False` no thread runs, and a test turns the crank: `run_loads`, `run_writes`.
    """

    def __init__(
        self,
        store: DiskStore,
        *,
        num_loaders: int = 2,
        max_load_nbytes: int = 256 << 20,
        max_write_nbytes: int = 256 << 20,
        on_result: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        start: bool = True,
    ) -> None:
        self.store = store
        self.protect: frozenset[bytes] = frozenset()
        self.num_restarts = 0
        self._clock = clock
        self._on_result = on_result
        self._loads = JobQueue(max_load_nbytes)
        self._writes = JobQueue(max_write_nbytes)
        self._asks = JobQueue(0, MAX_ASKS)
        self._results: deque[Job] = deque()
        self._answered = threading.Condition()
        self._open: dict[Job, None] = {}
        self._closed = False
        self._maintained_s = self._idle_since_s = clock()
        self._workers = [_Worker(f"tieredkv-loader-{i}", self._loads) for i in range(num_loaders)]
        self._workers += [_Worker(f"tieredkv-inspector-{i}", self._asks) for i in range(NUM_INSPECTORS)]
        self._workers.append(_Worker("tieredkv-writer", self._writes))
        if start:
            for worker in self._workers:
                self._start(worker)

    # -- engine thread -------------------------------------------------------------------------------------------------

    def load(
        self,
        block_hash: bytes,
        namespace: bytes,
        target: memoryview,
        *,
        timeout_s: float = float("inf"),
        token_ids: bytes | None = None,
        tag: Any = None,
    ) -> LoadJob | None:
        """Read a block into `target`, which must stay untouched until the answer; None if the queue is full."""
        job = LoadJob(hash=block_hash, namespace=namespace, target=target, token_ids=token_ids, tag=tag)
        return job if self._submit(self._loads, job, timeout_s) else None

    def lookup(self, hashes: Sequence[bytes], *, timeout_s: float = float("inf"), tag: Any = None) -> LookupJob | None:
        """Ask a loader for the longest resident prefix; None if the queue is full."""
        job = LookupJob(hashes=hashes, tag=tag)
        return job if self._submit(self._loads, job, timeout_s) else None

    def put(self, records: Sequence[BlockRecord], *, tag: Any = None) -> StoreJob | None:
        """Write blocks, whose bytes must not change until the answer; None if the queue is full: drop the suffix."""
        job = StoreJob(records=records, tag=tag)
        return job if self._submit(self._writes, job, float("inf")) else None

    def touch(self, hashes: Sequence[bytes]) -> bool:
        """Note uses on disk, when the writer gets round to it."""
        return self.call(lambda: self.store.touch(hashes)) is not None

    def call(self, function: Callable[[], Any], *, tag: Any = None) -> CallJob | None:
        """Run something else on the store in the writer thread, in order with the stores."""
        job = CallJob(call=function, tag=tag)
        return job if self._submit(self._writes, job, float("inf")) else None

    def ask(self, function: Callable[[], Any]) -> Future[Any] | None:
        """Run something on the store that changes nothing and may take long, in a thread of its own; None if too many wait."""
        job = AskJob(call=function)
        return job.future if self._submit(self._asks, job, float("inf")) else None

    def change(self, function: Callable[[], Any]) -> Future[Any] | None:
        """As `call`, in the writer thread and in order with the stores, but with the answer in a future."""
        job = AskJob(call=function)
        return job.future if self._submit(self._writes, job, float("inf")) else None

    def _submit(self, queue: JobQueue, job: Job, timeout_s: float) -> bool:
        job.submitted_s = self._clock()
        job.deadline_s = job.submitted_s + timeout_s
        with self._answered:
            if self._closed or not queue.offer(job):
                return False
            # Nobody waits for the inspector's answers before closing.
            if queue is not self._asks:
                self._open[job] = None
        return True

    def poll(self) -> list[Job]:
        """The jobs answered since the last call. Also sees to dead threads."""
        self._supervise()
        done = []
        while self._results:
            done.append(self._results.popleft())
        return done

    @property
    def num_open(self) -> int:
        """Jobs submitted and not answered."""
        return len(self._open)

    @property
    def depths(self) -> QueueDepths:
        return QueueDepths(self._loads.nbytes, len(self._writes), self._writes.nbytes)

    def health(self) -> list[str]:
        """What is wrong with the threads, for people; empty while all is well. `poll` replaces dead ones. For any thread."""
        now_s, problems = self._clock(), []
        for worker in self._workers:
            if worker.died is not None or (worker.is_dead and not self._closed):
                problems.append(f"{worker.name} died: {worker.died or NO_REASON}")
            elif worker.current and worker.queue is not self._asks and now_s - worker.busy_since_s > STUCK_AFTER_S:
                problems.append(f"{worker.name} has been busy with one job for {now_s - worker.busy_since_s:.0f} s")
        return problems

    def _supervise(self) -> None:
        for worker in self._workers:
            if self._closed or not worker.is_dead:
                continue
            if worker.died is None:
                worker.died = NO_REASON
            self._answer_all(worker, worker.died)
            if self._clock() >= worker.restart_at_s:
                logger.warning("disk tier: %s is started again", worker.name)
                self.num_restarts += 1
                self._start(worker)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job is answered and the store is synced; False if that took too long. Poll afterwards."""
        give_up_at_s = time.monotonic() + timeout_s
        if not self._wait_until_idle(give_up_at_s):
            return False
        sync = self.call(self.store.sync)
        return self._wait_until_idle(give_up_at_s) and sync is not None and bool(sync.result)

    def _wait_until_idle(self, give_up_at_s: float) -> bool:
        with self._answered:
            while self._open:
                left_s = give_up_at_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._answered.wait(min(left_s, 0.1))
                self._supervise()
        return True

    def close(self, timeout_s: float) -> bool:
        """Drain, stop the threads, close the store; False if something had to be left behind.

        Jobs that nobody has taken up are answered as failed. A thread that is stuck in the disk is left to itself and
        keeps what its job points at, so the arena must then not be closed either.
        """
        give_up_at_s = time.monotonic() + timeout_s
        self.store.stopping = True
        drained = self.drain(timeout_s) if any(w.thread for w in self._workers) else not self._open
        self._closed = True
        for queue in (self._loads, self._asks, self._writes):
            for job in queue.close():
                self._answer(queue, job, "the workers are closing")
        stopped = True
        for worker in self._workers:
            if worker.thread is not None:
                worker.thread.join(max(give_up_at_s - time.monotonic(), 0.1))
                stopped &= not worker.thread.is_alive()
        if stopped:
            self.store.close()
        return drained and stopped

    # -- storage threads -----------------------------------------------------------------------------------------------

    def _start(self, worker: _Worker) -> None:
        worker.died = None
        worker.thread = threading.Thread(target=self._live, args=(worker,), name=worker.name, daemon=True)
        worker.thread.start()

    def _live(self, worker: _Worker) -> None:
        try:
            while not worker.queue.closed:
                self._step(worker, MAINTAIN_EVERY_S)
        except BaseException as error:  # whatever it was, the supervisor must learn of it
            worker.restart_at_s = self._clock() + RESTART_AFTER_S
            worker.died = f"{type(error).__name__}: {error}"
            self._answer_all(worker, worker.died)
            if not isinstance(error, Exception):
                return
            logger.exception("disk tier: %s died", worker.name)

    def _step(self, worker: _Worker, timeout_s: float) -> bool:
        """Run the next job, or what goes with it; False if there was none."""
        job = worker.queue.take(timeout_s)
        is_writer = worker.queue is self._writes
        if job is not None:
            jobs: tuple[Job, ...] = (job,)
            if isinstance(job, StoreJob):
                jobs += tuple(worker.queue.take_more(StoreJob, MAX_BATCH_NBYTES - job.nbytes))
            worker.current, worker.busy_since_s = jobs, self._clock()
            for taken in jobs:
                taken.started_s = worker.busy_since_s
            self._run(jobs)
            self._answer_all(worker, None)
            self._idle_since_s = self._clock() if is_writer else self._idle_since_s
        if is_writer:
            self._maintain()
        return job is not None

    def _maintain(self) -> None:
        now_s = self._clock()
        if now_s - self._maintained_s >= MAINTAIN_EVERY_S:
            self._maintained_s = now_s
            self.store.maintain(idle=now_s - self._idle_since_s >= SYNC_AFTER_IDLE_S)
            if self.store.has_changes and self._on_result is not None:
                self._on_result()

    def _run(self, jobs: Sequence[Job]) -> None:
        job = jobs[0]
        if isinstance(job, StoreJob):
            stores = [j for j in jobs if isinstance(j, StoreJob)]
            outcomes = iter(self.store.put(merge_records(stores), protect=self.protect))
            for store in stores:
                store.outcomes = [next(outcomes) for _ in store.records]
        elif job.deadline_s <= self._clock():
            job.fail("its deadline passed before it was taken up")
        elif isinstance(job, LoadJob):
            job.outcome = self.store.load(job.hash, job.namespace, job.target, token_ids=job.token_ids)
        elif isinstance(job, LookupJob):
            job.num_found = self.store.longest_prefix(job.hashes)
        elif isinstance(job, CallJob):
            job.result = job.call()
        elif isinstance(job, AskJob):
            job.run()

    def _answer_all(self, worker: _Worker, failure: str | None) -> None:
        while worker.current:
            job, worker.current = worker.current[0], worker.current[1:]
            self._answer(worker.queue, job, failure)

    def _answer(self, queue: JobQueue, job: Job, failure: str | None) -> None:
        if failure is not None:
            job.fail(failure)
        job.finished_s = self._clock()
        job.answered = True
        queue.finished(job)
        self._results.append(job)
        with self._answered:
            self._open.pop(job, None)
            self._answered.notify_all()
        if self._on_result is not None:
            self._on_result()

    # -- cranked by hand -----------------------------------------------------------------------------------------------

    def run_loads(self, count: int = 1) -> int:
        """Run up to `count` loads and lookups in this thread; returns how many there were. For tests without threads."""
        return sum(self._step(self._workers[0], 0) for _ in range(count))

    def run_asks(self) -> bool:
        """Run the next question in this thread; False if there was none."""
        return self._step(self._workers[-2], 0)

    def run_writes(self) -> bool:
        """Run the next write (or batch of stores) in this thread; False if there was none."""
        return self._step(self._workers[-1], 0)
