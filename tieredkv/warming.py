"""Warming: prompts computed in the background so that later requests find their blocks; jobs with progress.

    start(prompts) --> jobs --round robin, one prompt at a time--> pieces of a prompt --> engine, as ordinary requests

Runs on the asyncio loop. Knows the engine's face and the core's words for lookups and pins; no HTTP, no files, no text.

A prompt is computed in pieces, each the prefix of the next, so a piece finds all before it and computes only its own
tokens. Before each piece the traffic is looked at: nobody there, and a piece is long; requests running, and it is short,
so that they lose little; requests waiting, and it waits as well, though not for ever.

Invariants: at most one request of warming is in the engine at a time; a prompt that fails costs its job that prompt only;
a job ends in exactly one of done, cancelled and failed; what of a prompt lies in the wanted tier already is not computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from tieredkv.core import EngineCore
from tieredkv.errors import CapacityError, RequestError, TieredKVError
from tieredkv.reports import JobReport, PinReport
from tieredkv.residency import ResidencyLook
from tieredkv.types import (
    SHARED_OWNER,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Retention,
    SamplingParams,
    TokenSources,
)
from tieredkv.warm_job import DeferredPrompt, WarmJob, WarmPrompt

logger = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_PIECE_TOKENS = 1024
BUSY_PIECE_TOKENS = 256
"""Tokens computed at once, alone and beside requests of others."""
PATIENCE_S = 2.0
"""Longest wait for others before the next short piece goes in beside them."""
RETAINED_PRIORITY = 70
"""Priority of a prompt with a time to live and no pin."""
MAX_OPEN_JOBS = 64
MAX_FINISHED_JOBS = 100
_LOOK_EVERY_S = 0.02


class OutputStream(Protocol):
    """The outputs of one submitted request."""

    def __aiter__(self) -> AsyncIterator[EngineOutput]: ...

    def abort(self) -> None: ...


class Engine(Protocol):
    """What warming needs of `tieredkv.engine.Engine`."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_unfinished(self) -> int: ...

    def submit(self, request: EngineRequest) -> OutputStream: ...

    def call(self, function: Callable[[EngineCore], T]) -> Future[T]: ...


class _EngineGoneError(TieredKVError):
    """The engine takes no requests any more."""


class Warming:
    """The warming jobs of one engine. Belongs to the loop on which `start` is called; `close` ends it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: dict[str, WarmJob] = {}
        self._turns: deque[WarmJob] = deque()
        self._counter = itertools.count()
        self._worker: asyncio.Task[None] | None = None
        self._closed = False

    def start(
        self,
        prompts: Sequence[WarmPrompt | DeferredPrompt],
        *,
        name: str | None = None,
        kind: str = "warm",
        owner: str = SHARED_OWNER,
    ) -> JobReport:
        """Queue a job, prompts to be pinned first. Tokens of a deferred prompt count once they are known.

        Raises `RequestError` without a prompt, `CapacityError` while too many jobs are open or after `close`.
        """
        if self._closed:
            raise CapacityError("the server is shutting down", status=503, retry_after_s=10)
        if not prompts:
            raise RequestError("there is no prompt to warm", param="prompts")
        if sum(job.is_open for job in self._jobs.values()) >= MAX_OPEN_JOBS:
            raise CapacityError(f"{MAX_OPEN_JOBS} jobs are open already; try again later")
        job = WarmJob(
            id=f"job-{secrets.token_hex(6)}",
            kind=kind,
            name=name,
            owner=owner,
            prompts=deque(sorted(prompts, key=lambda prompt: not prompt.pin)),
            num_prompts=len(prompts),
            num_tokens=sum(len(prompt.token_ids) for prompt in prompts if isinstance(prompt, WarmPrompt)),
            created_s=time.time(),
        )
        self._jobs[job.id] = job
        self._turns.append(job)
        self._forget_old()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())
        return job.report()

    def jobs(self, scope: str | None = None) -> list[JobReport]:
        """All jobs that are known, the newest first; with `scope` those of that owner."""
        return [job.report() for job in reversed(self._jobs.values()) if scope in (None, job.owner)]

    def get(self, job_id: str, scope: str | None = None) -> JobReport:
        """One job. Raises `RequestError` with status 404."""
        return self._find(job_id, scope).report()

    def cancel(self, job_id: str, scope: str | None = None) -> JobReport:
        """End a job; what it has computed stays. Nothing happens to one that is over. Raises `RequestError` (404)."""
        job = self._find(job_id, scope)
        job.end("cancelled")
        return job.report()

    async def close(self) -> None:
        """Cancel all jobs and take no more."""
        self._closed = True
        for job in self._jobs.values():
            job.end("cancelled")
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await worker

    def _find(self, job_id: str, scope: str | None) -> WarmJob:
        job = self._jobs.get(job_id)
        if job is None or scope not in (None, job.owner):
            raise RequestError(f"there is no job {job_id[:64]!r}", param="id", status=404)
        return job

    def _forget_old(self) -> None:
        finished = [job_id for job_id, job in self._jobs.items() if not job.is_open]
        for job_id in finished[: max(len(finished) - MAX_FINISHED_JOBS, 0)]:
            del self._jobs[job_id]

    async def _work(self) -> None:
        """One prompt of each open job in turn, until no job is open."""
        while self._turns:
            job = self._turns.popleft()
            if job.is_open:
                await self._warm_next(job)
            if job.is_open:
                self._turns.append(job)

    async def _warm_next(self, job: WarmJob) -> None:
        job.state = "running"
        item = job.prompts.popleft()
        try:
            prompt = item if isinstance(item, WarmPrompt) else await asyncio.to_thread(item.load)
            if item is not prompt:
                job.num_tokens += len(prompt.token_ids)
            await self._warm(job, prompt)
        except _EngineGoneError as error:
            job.end("failed", str(error))
        except TieredKVError as error:
            job.note_failure(error)
        except Exception as error:
            logger.exception("a prompt could not be warmed")
            job.note_failure(error)
        if job.is_open:
            job.num_prompts_done += 1
            if not job.prompts:
                job.end("failed" if job.num_prompts_failed == job.num_prompts else "done")

    async def _warm(self, job: WarmJob, prompt: WarmPrompt) -> None:
        refusal = await self._pin(prompt) if prompt.pin else None
        most = self._engine.max_model_len
        if len(prompt.token_ids) > most:
            raise RequestError(f"the prompt has {len(prompt.token_ids)} tokens; the longest request has {most}")
        look = await self._call(lambda core: ResidencyLook(core, prompt))
        block_size = look.block_size
        # Behind the longest prompt there must be room for one token of an answer.
        length = block_size * min(len(look.hashes), (most - 1) // block_size)
        known = min(block_size * await self._resident_blocks(look), length)
        retention: tuple[Retention, ...] = ()
        if prompt.ttl_s is not None and not prompt.pin and length:
            # A request is what renews the time to live, also if it has nothing to compute.
            retention = (Retention(length, RETAINED_PRIORITY, prompt.ttl_s),)
            known = min(known, length - block_size)
        job.num_tokens_done += known
        while known < length and job.is_open:
            piece = await self._until_quiet(job, -(-length // block_size))
            end = min(known + max(piece // block_size, 1) * block_size, length)
            if not job.is_open:
                return
            sources = await self._run(job, prompt, end, retention)
            if not job.is_open:
                return
            job.num_tokens_done += end - known
            job.num_tokens_computed += max(sources.computed - 1, 0)
            known = end
        job.num_tokens_done += len(prompt.token_ids) - length
        if refusal is not None:
            raise RequestError(refusal, param="pin")

    async def _run(self, job: WarmJob, prompt: WarmPrompt, end: int, retention: tuple[Retention, ...]) -> TokenSources:
        """Compute the first `end` tokens, a whole number of blocks. Behind them comes one more token, because the last token
        of a request is never taken from the cache.
        """
        token_ids = list(prompt.token_ids[: end + 1])
        if len(token_ids) == end:
            token_ids.append(token_ids[-1])
        if len(token_ids) + 1 > self._engine.max_model_len:
            token_ids = token_ids[:end]
        request = EngineRequest(
            f"{job.id}-{next(self._counter)}",
            token_ids,
            SamplingParams(temperature=0.0, max_tokens=1),
            prompt.tenant,
            owner=prompt.owner,
            prefix_name=prompt.name,
            retention=retention,
        )
        stream = await self._submit(job, request)
        job.on_end = stream.abort
        try:
            sources = TokenSources()
            async for output in stream:
                sources = output.sources
                if output.finish_reason is FinishReason.ERROR:
                    raise TieredKVError(output.error or "the engine failed")
            return sources
        finally:
            job.on_end = None
            stream.abort()

    async def _submit(self, job: WarmJob, request: EngineRequest) -> OutputStream:
        """Hand a request to the engine, as soon as its queue takes one more."""
        while True:
            try:
                return self._engine.submit(request)
            except CapacityError as error:
                if error.status == 503 or not job.is_open:
                    raise _EngineGoneError(str(error)) from error
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _until_quiet(self, job: WarmJob, num_blocks: int) -> int:
        """Wait for a moment to compute without harm to others; returns how many tokens may be computed then."""
        deadline_s = time.monotonic() + PATIENCE_S
        while job.is_open and self._engine.num_unfinished:
            num_waiting, num_free = await self._call(lambda core: (core.num_waiting, core.pool.num_free))
            if (num_waiting == 0 and num_free >= num_blocks) or time.monotonic() >= deadline_s:
                return BUSY_PIECE_TOKENS
            await asyncio.sleep(_LOOK_EVERY_S)
        return IDLE_PIECE_TOKENS

    async def _pin(self, prompt: WarmPrompt) -> str | None:
        """Pin before computing, so that no block can go in between; returns why the pin was refused, if it was."""
        report = await self._call(lambda core: pin(core, prompt))
        return f"the pin was refused: {report.reason}" if report.outcome == "refused" else None

    async def _resident_blocks(self, look: ResidencyLook) -> int:
        """How many leading blocks lie where the prompt wants them, once the disk has answered."""
        try:
            # The engine polls the disk after every call.
            while (found := await self._call(look.num_resident)) is None:
                await asyncio.sleep(_LOOK_EVERY_S / 4)
        finally:
            self._engine.call(look.end)
        return found

    async def _call(self, function: Callable[[EngineCore], T]) -> T:
        try:
            return await asyncio.wrap_future(self._engine.call(function))
        except CapacityError as error:
            raise _EngineGoneError(str(error)) from error


def pin(core: EngineCore, prompt: WarmPrompt) -> PinReport:
    """Pin a prompt in its tier, or in the lowest there is; on the engine thread."""
    return core.pins.pin(
        prompt.token_ids,
        tenant=prompt.tenant,
        owner=prompt.owner,
        tier=prompt.tier,
        ttl_s=prompt.ttl_s,
        name=prompt.name,
    )
