"""The disk tier behind its threads, as the cache sees it: jobs out, answers in.

Knows the storage threads' interface and the cache's; decides nothing. Used by the engine thread alone. Invariant: every
block that was handed over is answered exactly once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from tieredkv.errors import StorageError
from tieredkv.gate import Rate
from tieredkv.hashing import pack_tokens
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.jobs import LoadJob, LookupJob, StoreJob
from tieredkv.storage.memory import PAGE_NBYTES
from tieredkv.storage.record import HEADER_NBYTES
from tieredkv.storage.rows import record_cost
from tieredkv.storage.session import budget_nbytes_for
from tieredkv.storage.tier import NEVER, BlockRecord, LoadOutcome, Refusal, StoreOutcome, TierUsage
from tieredkv.storage.workers import StorageWorkers
from tieredkv.tier_faces import BlockInfo, DiskResult, LoadResult, LookupResult, StoreResult
from tieredkv.types import DEFAULT_PRIORITY

# Uses noted on disk: one write for several requests.
_TOUCH_BATCH = 16
# Labels, too, are written in batches, before the blocks that they are about.
_LABEL_BATCH = 64
# Writes that may wait: more would only make a later refusal later.
_MOST_WRITES = 64
_REOPEN_AFTER_S = 5.0

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ThreadedDisk:
    """`DiskTier` over `StorageWorkers`. `namespace` is the digest under which this engine's blocks are stored; a read that has
    not begun `timeout_s` seconds after it was asked for is not begun at all.

    A store that cannot be opened is a tier that is down: it is tried again every few seconds.
    """

    def __init__(
        self,
        open_store: Callable[[], StorageWorkers],
        namespace: bytes,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store = open_store
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._clock = clock
        self._touched: list[bytes] = []
        self.rank: Callable[[bytes], tuple[int, int]] = lambda block_hash: (DEFAULT_PRIORITY, NEVER)
        self._labels: dict[tuple[str, bytes], str] = {}
        self._write_rate = Rate()
        self._workers: StorageWorkers | None = None
        self._open_fault: str | None = None
        self._closed = False
        self._reopen_at_s = 0.0
        self._try_to_open()

    @property
    def accepts(self) -> bool:
        # Also while the store has a fault: only a write that succeeds shows that it is over.
        return self._workers is not None and self._workers.depths.num_writes < _MOST_WRITES

    @property
    def fault(self) -> str | None:
        workers = self._workers
        if workers is None:
            return self._open_fault
        return workers.store.fault or next(iter(workers.health()), None)

    @property
    def refusal(self) -> Refusal | None:
        return None if self._workers is None else self._workers.store.refusal

    @property
    def queued_nbytes(self) -> tuple[int, int]:
        if self._workers is None:
            return 0, 0
        depths = self._workers.depths
        return depths.load_nbytes, depths.write_nbytes

    @property
    def write_nbytes_per_s(self) -> float | None:
        return self._write_rate.per_s

    def usage(self) -> TierUsage:
        return self._workers.store.usage(cached=True) if self._workers is not None else TierUsage(0, 0, 0, 0)

    def num_fit(self, block_nbytes: int, block_size: int) -> int:
        budget_nbytes = budget_nbytes_for(self.usage().capacity_nbytes)
        return max(budget_nbytes, 0) // record_cost(HEADER_NBYTES + block_nbytes, 4 * block_size, PAGE_NBYTES)

    def lookup(self, hashes: Sequence[bytes], tag: Any) -> bool:
        workers = self._workers
        return workers is not None and workers.lookup(hashes, timeout_s=self._timeout_s, tag=tag) is not None

    def load(self, block_hash: bytes, target: memoryview, tag: Any) -> bool:
        workers = self._workers
        if workers is None:
            return False
        return workers.load(block_hash, self._namespace, target, timeout_s=self._timeout_s, tag=tag) is not None

    def store(self, blocks: Sequence[tuple[BlockInfo, memoryview]]) -> bool:
        if self._workers is None:
            return False
        records = [
            BlockRecord(
                hash=info.hash,
                parent=info.parent,
                depth=info.depth,
                namespace=self._namespace,
                payload=view,
                token_ids=pack_tokens(info.token_ids),
                priority=rank[0],
                expires_us=rank[1],
            )
            for info, view in blocks
            for rank in (self.rank(info.hash),)
        ]
        self._flush_labels()
        return self._workers.put(records) is not None

    def touch(self, block_hash: bytes) -> None:
        self._touched.append(block_hash)
        if len(self._touched) >= _TOUCH_BATCH:
            self._flush_touches()

    def label(self, kind: str, block_hash: bytes, text: str) -> None:
        self._labels[kind, block_hash] = text
        if len(self._labels) >= _LABEL_BATCH:
            self._flush_labels()

    def ask(self, function: Callable[[DiskStore], T]) -> Future[T]:
        workers = self._workers
        return self._future(None if workers is None else workers.ask(lambda: function(workers.store)))

    def change(self, function: Callable[[DiskStore], T]) -> Future[T]:
        workers = self._workers
        return self._future(None if workers is None else workers.change(lambda: function(workers.store)))

    def _future(self, accepted: Future[T] | None) -> Future[T]:
        if accepted is not None:
            return accepted
        refused: Future[T] = Future()
        refused.set_exception(StorageError(self._open_fault or "the disk tier takes nothing more now"))
        return refused

    def protect(self, hashes: frozenset[bytes]) -> None:
        if self._workers is not None:
            self._workers.protect = hashes

    def poll(self) -> list[DiskResult]:
        results: list[DiskResult] = []
        if self._workers is None:
            self._try_to_open()
            return results
        for job in self._workers.poll():
            if isinstance(job, LoadJob):
                results.append(LoadResult(job.hash, job.outcome is LoadOutcome.LOADED, job.tag))
            elif isinstance(job, LookupJob):
                results.append(LookupResult(job.tag, job.num_found))
            elif isinstance(job, StoreJob):
                if any(outcome is StoreOutcome.STORED for outcome in job.outcomes):
                    self._write_rate.measure(job.nbytes, job.run_s)
                results += map(StoreResult, (record.hash for record in job.records), job.outcomes)
        results += self._workers.store.take_changes()
        # Those that belong to blocks which are stored already.
        self._flush_labels()
        return results

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, sync and stop; False if that took too long."""
        self._closed = True
        self._flush_touches()
        self._flush_labels()
        return self._workers is None or self._workers.close(timeout_s)

    def _try_to_open(self) -> None:
        if self._closed or self._clock() < self._reopen_at_s:
            return
        try:
            workers = self._open_store()
            workers.store.follow()
            self._workers = workers
            self._open_fault = None
        except (StorageError, OSError) as error:
            if self._open_fault is None:
                logger.warning("the disk tier is down: %s", error)
            self._open_fault = str(error)
            self._reopen_at_s = self._clock() + _REOPEN_AFTER_S

    def _flush_labels(self) -> None:
        workers, labels = self._workers, self._labels
        if labels and workers is not None:
            workers.call(lambda: workers.store.label(labels))
            self._labels = {}

    def _flush_touches(self) -> None:
        if self._touched and self._workers is not None:
            self._workers.touch(self._touched)
            self._touched = []
