"""What the engine thread asks of the storage threads, and the bounded queue that takes it there.

A job is made by the engine thread, run by one storage thread, and answered exactly once. Whoever submitted it keeps what
the job points at (a reservation's view, leases) until the answer is there, however late: that is what makes a slow disk
harmless.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from tieredkv.errors import StorageError
from tieredkv.storage.tier import BlockRecord, LoadOutcome, StoreOutcome

MAX_JOBS = 8192


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """Times are in seconds of the workers' clock. `error` says why a job failed, `tag` is the submitter's own."""

    tag: Any = None
    deadline_s: float = float("inf")
    submitted_s: float = 0.0
    started_s: float = 0.0
    finished_s: float = 0.0
    answered: bool = False
    error: str | None = None

    @property
    def nbytes(self) -> int:
        """What the job counts for in a bounded queue."""
        return 0

    @property
    def run_s(self) -> float:
        """Time from being taken up to being answered."""
        return self.finished_s - self.started_s

    def fail(self, reason: str) -> None:
        """Fill in the answer of a job that was not run, or not to its end."""
        self.error = reason


@dataclass(slots=True, eq=False, kw_only=True)
class LoadJob(Job):
    """Fill `target` with a block. Until the job is answered, `target` belongs to it."""

    hash: bytes
    namespace: bytes
    target: memoryview
    token_ids: bytes | None = None
    outcome: LoadOutcome = LoadOutcome.FAILED

    @property
    def nbytes(self) -> int:
        return self.target.nbytes

    def fail(self, reason: str) -> None:
        self.outcome, self.error = LoadOutcome.FAILED, reason


@dataclass(slots=True, eq=False, kw_only=True)
class LookupJob(Job):
    """How many of `hashes`, from the first on, are on disk; for a caller that must not wait for a disk."""

    hashes: Sequence[bytes]
    num_found: int = 0

    def fail(self, reason: str) -> None:
        self.num_found, self.error = 0, reason


@dataclass(slots=True, eq=False, kw_only=True)
class StoreJob(Job):
    """Store blocks, parents first. Until the job is answered, their bytes do not change."""

    records: Sequence[BlockRecord]
    outcomes: list[StoreOutcome] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(record.payload.nbytes for record in self.records)

    def fail(self, reason: str) -> None:
        self.outcomes, self.error = [StoreOutcome.FAILED] * len(self.records), reason


@dataclass(slots=True, eq=False, kw_only=True)
class CallJob(Job):
    """Anything else that changes the store: `call()` in the writer thread; its value is the `result`, None if it failed."""

    call: Callable[[], Any]
    result: Any = None


@dataclass(slots=True, eq=False, kw_only=True)
class AskJob(Job):
    """Something that is asked of the store and may take long; `future` gets what `call()` returns or raises."""

    call: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.call())
            except Exception as error:
                self.future.set_exception(error)

    def fail(self, reason: str) -> None:
        self.error = reason
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(StorageError(reason))


class JobQueue:
    """First in, first out; bounded in bytes and in jobs. A job's bytes count until `finished`, so also while it runs."""

    def __init__(self, max_nbytes: int, max_jobs: int = MAX_JOBS) -> None:
        self.max_nbytes = max_nbytes
        self.max_jobs = max_jobs
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._nbytes = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        """Jobs that nobody has taken yet."""
        return len(self._jobs)

    def offer(self, job: Job) -> bool:
        """Add a job; False at once if it does not fit. One job always fits into an empty queue. Never waits for a disk."""
        with self._changed:
            if self._closed or len(self._jobs) >= self.max_jobs:
                return False
            if self._nbytes and self._nbytes + job.nbytes > self.max_nbytes:
                return False
            self._nbytes += job.nbytes
            self._jobs.append(job)
            self._changed.notify()
            return True

    def take(self, timeout_s: float) -> Job | None:
        """The next job, None after `timeout_s` without one or when the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed, timeout_s)
            return self._jobs.popleft() if self._jobs else None

    def take_more(self, kind: type[Job], max_nbytes: int) -> list[Job]:
        """Jobs at the head of the queue as long as they are of one kind and add up to at most `max_nbytes`."""
        with self._changed:
            taken: list[Job] = []
            while self._jobs and isinstance(self._jobs[0], kind) and self._jobs[0].nbytes <= max_nbytes:
                max_nbytes -= self._jobs[0].nbytes
                taken.append(self._jobs.popleft())
            return taken

    def finished(self, job: Job) -> None:
        with self._changed:
            self._nbytes -= job.nbytes

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> list[Job]:
        """Take no more jobs; returns those that nobody has taken."""
        with self._changed:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
            return left


def merge_records(jobs: Collection[StoreJob]) -> list[BlockRecord]:
    """The records of several jobs, in order."""
    return [record for job in jobs for record in job.records]
