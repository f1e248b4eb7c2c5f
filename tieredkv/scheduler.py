"""What the next step computes. Knows the cache, no tensors, no HTTP, no clock but the one it is given.

One step has a budget of tokens. Decodes come first, so that running requests keep their pace; then prompts that are
partly computed; then waiting requests, in order of arrival. A prompt longer than what is left of the budget is computed
in parts. All blocks for the known tokens are claimed at admission, so only a decode can run out of blocks; then the
sequence that was admitted last is preempted: it gives its blocks back, waits at the head of the queue, and resumes
through whatever of them is still resident.

A sequence whose prefix lies in a lower tier is admitted like any other, but waits in `restoring` until its blocks are up,
while everybody else goes on. A restore that holds the last blocks is given up before a running sequence is preempted.

Single flight: a waiting sequence whose next block is being computed or restored by another one is passed over until that
block is committed, the other one is gone, or the time is up.

Invariants: the first waiting sequence is admitted whenever nothing else holds blocks; no sequence is in two queues; the
parts of a step are decodes first and add up to at most the budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from tieredkv.cache import CacheManager
from tieredkv.config import SchedulerConfig
from tieredkv.errors import InvariantError
from tieredkv.sequence import ScheduledSequence, Sequence, SequenceStatus


class Scheduler:
    """Two queues and the rule that moves sequences between them. Used by the engine thread alone."""

    def __init__(self, cache: CacheManager, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._config = config
        self._clock = clock
        self.waiting: deque[Sequence] = deque()
        self.restoring: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.restoring
        yield from self.waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.restoring or self.waiting)

    def add(self, sequence: Sequence) -> None:
        self._cache.prepare(sequence)
        self.waiting.append(sequence)

    def resume(self, sequence: Sequence) -> None:
        """The blocks that a sequence waited for are up, or as many of them as there will be."""
        self.restoring.remove(sequence)
        self._run(sequence)

    def remove(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Take a finished or aborted sequence out and free its blocks."""
        self._queue_of(sequence).remove(sequence)
        self._cache.release(sequence)
        sequence.status = status

    def schedule(self) -> list[ScheduledSequence]:
        """The parts of the next step, decodes first; empty when there is nothing to do."""
        budget = self._config.max_num_batched_tokens
        parts: list[ScheduledSequence] = []
        preempted = False
        # A copy, because preemption shortens `running` from its end while it is walked.
        for sequence in list(self.running):
            if sequence.status is not SequenceStatus.RUNNING or sequence.num_tokens - sequence.num_computed != 1:
                continue
            while not self._cache.grow(sequence, sequence.num_tokens):
                preempted = True
                if self._preempt() is sequence:
                    break
            if sequence.status is SequenceStatus.RUNNING:
                parts.append(ScheduledSequence(sequence, sequence.num_computed, 1))
                budget -= 1
        for sequence in self.running:
            missing = sequence.num_tokens - sequence.num_computed
            if missing > 1 and budget > 0:
                parts.append(ScheduledSequence(sequence, sequence.num_computed, min(missing, budget)))
                budget -= parts[-1].num_new
        if not preempted:
            self._admit(parts, budget)
        # The one-token remainder of a prompt may have come behind longer parts.
        parts.sort(key=lambda part: part.num_new != 1)
        return parts

    def _admit(self, parts: list[ScheduledSequence], budget: int) -> None:
        passed_over: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) + len(self.restoring) < self._config.max_num_seqs:
            sequence = self.waiting.popleft()
            if self._must_wait(sequence) or self._cache.is_looking_up(sequence):
                passed_over.append(sequence)
                continue
            match = self._cache.match(sequence)
            in_progress = self._cache.next_block_in_progress(sequence, match)
            if in_progress is not None and self._may_wait_for(sequence, in_progress):
                passed_over.append(sequence)
                continue
            # A spare block for everyone who runs: admitting into the last one would only cause a preemption.
            holders = len(self.running) + len(self.restoring)
            if not self._cache.allocate(sequence, match, reserve=holders):
                self.waiting.appendleft(sequence)
                if not holders and not self._cache.has_blocks_in_flight:
                    raise InvariantError(f"{sequence} cannot be admitted although nothing else holds blocks")
                break
            sequence.waiting_for = None
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = self._clock()
            if self._cache.start_restore(sequence, match):
                sequence.status = SequenceStatus.RESTORING
                self.restoring.append(sequence)
                continue
            self._run(sequence)
            missing = sequence.num_tokens - sequence.num_computed
            parts.append(ScheduledSequence(sequence, sequence.num_computed, min(missing, budget)))
            budget -= parts[-1].num_new
        self.waiting.extendleft(reversed(passed_over))

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether the block it waits for is still being computed: one dict probe, instead of a match in every step."""
        return (
            sequence.waiting_for is not None
            and self._cache.is_computing(sequence.waiting_for)
            and self._in_time(sequence)
        )

    def _may_wait_for(self, sequence: Sequence, block_hash: bytes) -> bool:
        if sequence.waiting_since_s is None:
            sequence.waiting_since_s = self._clock()
        sequence.waiting_for = block_hash
        return self._in_time(sequence)

    def _in_time(self, sequence: Sequence) -> bool:
        since = sequence.waiting_since_s
        return since is not None and self._clock() - since < self._config.single_flight_timeout

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def _queue_of(self, sequence: Sequence) -> list[Sequence] | deque[Sequence]:
        if sequence.status is SequenceStatus.RUNNING:
            return self.running
        return self.restoring if sequence.status is SequenceStatus.RESTORING else self.waiting

    def _preempt(self) -> Sequence:
        """Take the blocks of the sequence that was admitted last, one that only waits for a restore before one that runs."""
        sequence = self.restoring[-1] if self.restoring else self.running[-1]
        if sequence.status is SequenceStatus.RUNNING:
            sequence.num_preemptions += 1
            self.num_preemptions += 1
        self._queue_of(sequence).remove(sequence)
        self._cache.release(sequence)
        sequence.status = SequenceStatus.WAITING
        self._cache.prepare(sequence)
        self.waiting.appendleft(sequence)
        return sequence
