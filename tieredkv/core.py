"""One step of the engine, and nothing else: synchronous, deterministic, the only place that orders the phases.

    poll tiers -> schedule -> lay out the batch -> launch -> (take in requests, start spills) -> tokens
               -> commit full blocks -> append tokens -> finish -> outputs

Knows no threads, no HTTP, no text. The runner is a Protocol, so that everything but the numbers is tested without a model.

Invariants: a request gets exactly one output with a finish reason, and none after it; a sequence that is not in the
scheduler owns no block; a step that fails ends its requests with an error, frees their blocks and leaves the core usable,
unless the device is lost: that is raised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tieredkv import hashing
from tieredkv.batch import Batch, SampledToken, build_batch
from tieredkv.blocks import BlockPool
from tieredkv.branches import Branches
from tieredkv.cache import CacheManager, Cleared
from tieredkv.config import Config
from tieredkv.errors import DeviceLostError, InvariantError, RequestError
from tieredkv.events import EventLog
from tieredkv.gate import CostGate
from tieredkv.metrics import EngineMetrics
from tieredkv.pins import Pins
from tieredkv.retention import Retentions
from tieredkv.scheduler import Scheduler
from tieredkv.sequence import ScheduledSequence, Sequence, SequenceStatus
from tieredkv.tier_report import report
from tieredkv.tiers import Tiers
from tieredkv.types import EngineOutput, EngineRequest, FinishReason, TokenSources

logger = logging.getLogger(__name__)

# Blocks of one restore arrive every 0.1 ms. Looking at several at once leaves the interpreter to the threads that load them:
# 3 ms less for 1,024 tokens from disk.
GATHER_S = 0.0005


class Running(Protocol):
    """A batch that is being computed. `result` waits for it: one token per entry of `batch.sampled`, in order."""

    def result(self) -> list[SampledToken]: ...


class Runner(Protocol):
    """What computes batches, one at a time. The device may still be at work when `launch` returns."""

    @property
    def num_blocks(self) -> int: ...

    def launch(self, batch: Batch) -> Running: ...


class EngineCore:
    """The engine without a thread: `add` requests, call `step` until `has_work` is False. Not thread-safe.

    `namespace` is the 32-byte digest that roots every hash chain; `max_model_len` the longest sequence in tokens.
    """

    def __init__(
        self,
        runner: Runner,
        config: Config,
        *,
        namespace: bytes,
        max_model_len: int,
        vocab_size: int,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
        block_nbytes: int = 1,
        make_tiers: Callable[[BlockPool, CostGate, Callable[[], None]], Tiers] | None = None,
        wall_clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.block_size = config.cache.block_size
        self.block_nbytes = block_nbytes
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.metrics = metrics
        self._runner = runner
        self._clock = clock
        self.namespace = namespace
        self.pool = BlockPool(runner.num_blocks)
        if self.pool.num_usable * self.block_size < max_model_len:
            raise InvariantError(f"{self.pool.num_usable} blocks cannot hold one sequence of {max_model_len} tokens")
        # Set from any thread when something that `step` polls has happened; `on_wake` is called then as well.
        self.wakeup = threading.Event()
        self.on_wake: Callable[[], None] = self.wakeup.set
        self.gate = CostGate(config.tiers.restore, self.block_size, block_nbytes)
        self.tiers = make_tiers(self.pool, self.gate, self._wake) if make_tiers is not None else None
        self.events = EventLog()
        self.branches = Branches(self.events)
        self.cache = CacheManager(
            self.pool,
            self.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            tiers=self.tiers,
            clock=clock,
            branches=self.branches,
        )
        self.pins = Pins(
            self.pool,
            self.cache.tiers,
            namespace=namespace,
            block_size=self.block_size,
            block_nbytes=block_nbytes,
            max_model_len=max_model_len,
            budget=config.tiers.pin_budget,
            is_computing=self.cache.is_computing,
            clock_us=wall_clock_us,
            enabled=config.cache.enable_prefix_caching,
        )
        self.retentions = Retentions(
            self.pool,
            self.cache.tiers,
            block_size=self.block_size,
            block_nbytes=block_nbytes,
            budget=config.tiers.retention_budget,
            clock_us=wall_clock_us,
        )
        self.cache.retentions = self.retentions
        self.scheduler = Scheduler(self.cache, config.scheduler, clock)
        self._overlaps = config.scheduler.async_scheduling
        # Called while the device computes a batch; may `add` requests, but nothing else.
        self.meanwhile: Callable[[], None] = lambda: None
        self._sequences: dict[str, Sequence] = {}
        self._outputs: list[EngineOutput] = []
        # Times between tokens that the metrics have not been told: with many sequences that takes a millisecond, which is to
        # be had while the device computes.
        self._gaps_s: list[float] = []
        metrics.watch(lambda: report(self.pool, block_nbytes, self.tiers))
        # Over all requests since the start: where their prompts came from, and what that is estimated to have saved.
        self.token_totals = TokenSources()
        self.saved_s = 0.0
        # Whether the last step had nothing to compute because all requests wait for the tiers.
        self.is_stalled = False

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._outputs)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def check(self, request: EngineRequest) -> None:
        """Raise `RequestError` if this request could never run here. Reads only constants, so any thread may call it."""
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if num_prompt + 1 > self.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens, but the prompt has {num_prompt} "
                "tokens and at least one must be left for the answer.",
                param="prompt",
                code="context_length_exceeded",
            )
        wanted = request.sampling.max_tokens
        if wanted is not None and num_prompt + wanted > self.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens, but {num_prompt + wanted} were "
                f"asked for: {num_prompt} in the prompt and {wanted} in the answer.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= self.vocab_size:
            raise RequestError(f"token ids must be in [0, {self.vocab_size})", param="prompt")
        for name in ("logit_bias", "stop_token_ids"):
            if any(not 0 <= t < self.vocab_size for t in getattr(request.sampling, name)):
                raise RequestError(f"{name}: token ids must be in [0, {self.vocab_size})", param=name)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` as `check` does, and for a request id that is in use."""
        self.check(request)
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        sequence = Sequence(request, hashing.root_hash(self.namespace, request.tenant))
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks now; its last output comes with the next step. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT, [])

    def step(self) -> list[EngineOutput]:
        """Compute one batch; returns what is new for each request, also for those that were aborted since the last step."""
        began_s = self._clock()
        num_preempted = self.scheduler.num_preemptions
        parts: list[ScheduledSequence] = []
        try:
            self.pins.expire()
            self.retentions.expire()
            for sequence in self.cache.poll():
                self.scheduler.resume(sequence)
            parts = self.scheduler.schedule()
            if parts:
                self._report_admissions(parts)
                self._compute(parts)
        except DeviceLostError:
            # Every later step would fail as well, while the engine looked alive.
            raise
        except Exception as error:
            self._fail(parts, error)
        self.is_stalled = not parts
        if not (self._overlaps and self.scheduler.has_work):
            self._report_gaps()
        if parts:
            num_tokens = sum(part.num_new for part in parts)
            seconds = self._clock() - began_s
            self.metrics.step(
                seconds,
                num_tokens,
                self.scheduler.num_preemptions - num_preempted,
            )
            self.gate.measure_step(num_tokens, seconds)
            if self.tiers is not None and not self._overlaps:
                self.tiers.work_ahead()
        self._report_gauges()
        self.events.publish()
        outputs, self._outputs = self._outputs, []
        return outputs

    def work_idle(self, *, save: bool = True) -> bool:
        """With no request to serve, let the tiers get on, and `save` what a restart would lose. True while there is more to
        do or to wait for.
        """
        if self.has_work:
            return False
        self.pins.expire()
        self.retentions.expire()
        if self.tiers is None:
            return False
        self.retentions.tell_disk()
        self.cache.poll()
        busy = (self.tiers.work_idle() if save else self.tiers.busy) or self.pins.busy
        self._report_gauges()
        self.events.publish()
        return busy

    def flush(self, timeout_s: float) -> bool:
        """Save all blocks that no lower tier is certain to keep; False if `timeout_s` seconds were not enough."""
        return self.tiers is None or self.tiers.flush(timeout_s, self.wait)

    def close(self, timeout_s: float) -> bool:
        """Save what would be lost and stop the tiers; False if `timeout_s` seconds were not enough. Nothing runs afterwards."""
        if self.tiers is None:
            return True
        deadline_s = self._clock() + timeout_s
        saved = self.flush(timeout_s)
        return self.tiers.close(max(deadline_s - self._clock(), 1.0)) and saved

    def _wake(self) -> None:
        self.wakeup.set()
        self.on_wake()

    def wait(self, timeout_s: float) -> None:
        """Sleep until something that `step` polls has happened, at most `timeout_s` seconds."""
        if self.wakeup.wait(timeout_s):
            time.sleep(GATHER_S)
        self.wakeup.clear()

    def clear(self) -> Cleared:
        """Forget every cached block that no request uses."""
        cleared = self.cache.clear()
        self.events.publish()
        return cleared

    def check_integrity(self) -> None:
        """Recount blocks, owners and hashes. Raises `InvariantError`."""
        self.cache.check_integrity([*self.scheduler.running, *self.scheduler.restoring])
        queued = list(self.scheduler)
        if len({id(s) for s in queued}) != len(queued) or set(map(id, queued)) != set(
            map(id, self._sequences.values())
        ):
            raise InvariantError("the queues and the table of requests disagree")
        if any(len(s.block_ids) for s in self.scheduler.waiting):
            raise InvariantError("a waiting sequence owns blocks")
        self.pins.check_integrity()
        self.retentions.check_integrity()

    def _compute(self, parts: list[ScheduledSequence]) -> None:
        batch = build_batch(parts, self.block_size)
        running = self._runner.launch(batch)
        if self._overlaps:
            # Touches no sequence of the batch, and only blocks that no sequence owns.
            self.meanwhile()
            if self.tiers is not None:
                self.tiers.work_ahead()
            self._report_gaps()
        tokens = running.result()
        if len(tokens) != len(batch.sampled):
            raise InvariantError(f"{len(tokens)} tokens for {len(batch.sampled)} sequences")
        for part in parts:
            part.sequence.num_computed = part.end
            self.cache.commit(part.sequence)
        now_s = self._clock()
        for part, token in zip(batch.sampled, tokens, strict=True):
            self._append(part.sequence, token, now_s)

    def _append(self, sequence: Sequence, token: SampledToken, now_s: float) -> None:
        request = sequence.request
        sequence.token_ids.append(token.token_id)
        if sequence.first_token_s is None or sequence.last_token_s is None:
            sequence.first_token_s = now_s
            admitted_s = sequence.first_scheduled_s if sequence.first_scheduled_s is not None else now_s
            self.metrics.first_token(now_s - request.arrival_s, now_s - admitted_s, _sources(sequence))
        else:
            self._gaps_s.append(now_s - sequence.last_token_s)
        sequence.last_token_s = now_s
        reason = self._finish_reason(sequence, token.token_id)
        logprobs = None if token.logprob is None else [token.logprob]
        if reason is None:
            self._outputs.append(
                EngineOutput(sequence.request_id, [token.token_id], _sources(sequence), logprobs=logprobs)
            )
        else:
            self._finish(sequence, reason, [token.token_id])
            self._outputs[-1].logprobs = logprobs

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.sampling
        if sequence.num_output_tokens >= sampling.min_tokens:
            if token_id in sequence.request.eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP
            if token_id in sampling.stop_token_ids:
                sequence.stop_reason = token_id
                return FinishReason.STOP
        limit = sampling.max_tokens
        if (limit is not None and sequence.num_output_tokens >= limit) or sequence.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, new_token_ids: list[int], error: str | None = None
    ) -> None:
        done = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.scheduler.remove(sequence, SequenceStatus.FINISHED if done else SequenceStatus.ABORTED)
        del self._sequences[sequence.request_id]
        now_s = self._clock()
        decode_s = now_s - sequence.first_token_s if sequence.first_token_s is not None else 0.0
        self.metrics.finished(reason, sequence.num_output_tokens, now_s - sequence.request.arrival_s, decode_s)
        self._outputs.append(
            EngineOutput(
                sequence.request_id,
                new_token_ids,
                _sources(sequence),
                finish_reason=reason,
                stop_reason=sequence.stop_reason,
                error=error,
            )
        )

    def _fail(self, parts: list[ScheduledSequence], error: Exception) -> None:
        """End the requests of a step that raised. Without parts, scheduling itself failed: end all of them."""
        logger.exception("a step of the engine failed", exc_info=error)
        self.metrics.failed_step()
        victims = [part.sequence for part in parts] or list(self._sequences.values())
        for sequence in victims:
            if not sequence.is_finished:
                self._finish(sequence, FinishReason.ERROR, [], error=f"{type(error).__name__}: {error}")

    def _report_admissions(self, parts: list[ScheduledSequence]) -> None:
        for part in parts:
            sequence = part.sequence
            if sequence.reported_admissions == sequence.num_preemptions:
                sequence.reported_admissions += 1
                if sequence.num_preemptions == 0:
                    sources = _sources(sequence)
                    saved_s = self.gate.prefill_seconds(sources.cached)
                    self.token_totals.add(sources)
                    self.saved_s += saved_s
                    self.metrics.admitted(sources, self._clock() - sequence.request.arrival_s, saved_s)
                else:
                    self.metrics.readmitted(sequence.num_tokens - part.start)

    def _report_gaps(self) -> None:
        gaps_s, self._gaps_s = self._gaps_s, []
        for gap_s in gaps_s:
            self.metrics.next_token(gap_s)

    def _report_gauges(self) -> None:
        used = self.pool.num_usable - self.pool.num_free
        self.metrics.gauges(
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            used / self.pool.num_usable,
        )


def _sources(sequence: Sequence) -> TokenSources:
    """Where the prompt came from; all zero for a request that was never admitted."""
    return sequence.sources if sequence.sources is not None else TokenSources()
