"""The engine thread, and how the asyncio side talks to it.

    asyncio loop                          engine thread
    submit, abort, call  -- inbox -->     EngineCore (blocks, cache, scheduler, model)
    OutputStream  <-- one call_soon_threadsafe per step --

The thread owns everything that computes; it takes no lock, and nobody else touches the core. The loop owns the streams.

Invariants: a stream ends with exactly one output that has a finish reason, whatever happens to the thread; `health`
tells when the thread is dead; nothing is submitted once draining has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from tieredkv.build import Progress, build_core, load_runner
from tieredkv.config import Config, format_size
from tieredkv.core import GATHER_S, EngineCore
from tieredkv.errors import CapacityError, RequestError, TieredKVError
from tieredkv.types import EngineOutput, EngineRequest, FinishReason, SamplingParams, TokenSources

if TYPE_CHECKING:
    from tieredkv.layout import KVLayout
    from tieredkv.model_runner import ModelRunner
    from tieredkv.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
_TIER_POLL_S = 0.02
# Saving begins when nothing was computed for this long: whoever asks next at once, as a chat or a benchmark does, would share
# cores and memory with it.
_REST_S = 0.05
_DELIVERY_S = 0.005


def fan_out(request_id: str, sampling: SamplingParams) -> list[tuple[str, SamplingParams]]:
    """The `n` sequences of a request, as (request id, parameters): one each, with seeds `seed`, `seed + 1`, ..."""
    if sampling.n == 1:
        return [(request_id, sampling)]
    seeds = [None if sampling.seed is None else (sampling.seed + i) % 2**64 for i in range(sampling.n)]
    return [(f"{request_id}-{i}", sampling.replace(n=1, seed=seed)) for i, seed in enumerate(seeds)]


@dataclass(frozen=True, slots=True)
class _Submission:
    """The command that queues a request; the only one that may run while a batch is computed."""

    core: EngineCore
    request: EngineRequest

    def __call__(self) -> None:
        self.core.add(self.request)


def _nothing() -> None:
    """The command that only wakes the engine."""


class OutputStream:
    """The outputs of one request, as an async iterator that ends after the one with a finish reason. Belongs to the loop
    that submitted the request.
    """

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.loop = loop
        self.finished = False
        self._abort = abort
        self._queue: asyncio.Queue[EngineOutput] = asyncio.Queue()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> EngineOutput:
        if self.finished and self._queue.empty():
            raise StopAsyncIteration
        return await self._queue.get()

    def put(self, output: EngineOutput) -> None:
        if not self.finished:
            self.finished = output.finish_reason is not None
            self._queue.put_nowait(output)

    def abort(self) -> None:
        """Tell the engine to stop; the last output still arrives. Harmless when the request has ended."""
        if not self.finished:
            self._abort(self.request_id)


class Engine:
    """A core in a thread of its own. Make it with `Engine.load`, then `start`; `close` ends the thread."""

    def __init__(self, core: EngineCore, runner: ModelRunner, config: Config) -> None:
        loaded = runner.loaded
        self.config = config
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.model_name = core.metrics.model_name
        self.max_model_len = core.max_model_len
        self.vocab_size = loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.num_blocks = runner.num_blocks
        self.layout: KVLayout = loaded.layout
        self.dtype = loaded.layout.dtype
        self.device = str(loaded.device)
        self.metrics = core.metrics
        self._core = core
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Taken from the inbox while a batch was computed, to be run when it has ended.
        self._held: list[Callable[[], None] | None] = []
        self._streams: dict[str, OutputStream] = {}
        self._delivered = threading.Event()
        self._draining = False
        self._dead: str | None = None
        self._is_saving = False
        core.on_wake = self.wake
        core.meanwhile = self._take_submissions
        self._thread = threading.Thread(target=self._run, name="tieredkv-engine", daemon=True)

    @classmethod
    def load(cls, config: Config, progress: Progress | None = None) -> Engine:
        """Load the model and make its engine, not yet started. Raises `ConfigError` or `UnsupportedModelError`."""
        runner = load_runner(config, progress)
        return cls(build_core(runner, config), runner, config)

    def describe_tiers(self) -> list[tuple[str, str]]:
        """The tiers below the device, for people: name and size, or what is wrong with it."""
        tiers = self._core.tiers
        if tiers is None:
            return []
        host = format_size(tiers.host.usage().capacity_nbytes) + ("" if tiers.host.keeps else " (staging only)")
        found = [("host", host)]
        if tiers.disk is not None:
            path, size = self.config.tiers.disk_path, format_size(self.config.tiers.disk_size)
            found.append(("disk", f"down: {tiers.disk.fault}" if tiers.disk.fault else f"{size} in {path}"))
        return found

    def start(self) -> None:
        self._thread.start()

    def check(self, request: EngineRequest) -> None:
        """Raise `RequestError` if this request could never run."""
        self._core.check(request)

    def submit(self, request: EngineRequest) -> OutputStream:
        """Queue a request; to be called from a running asyncio loop.

        Raises `RequestError` for what can never run, `CapacityError` with status 429 when the queue is full and 503 while
        draining or dead.
        """
        if self._dead is not None:
            raise CapacityError(f"the engine has stopped: {self._dead}", status=503, retry_after_s=30)
        if self._draining:
            raise CapacityError("the server is shutting down", status=503, retry_after_s=10)
        self.check(request)
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        limits = self.config.scheduler
        if len(self._streams) >= limits.max_queue_size + limits.max_num_seqs:
            raise CapacityError(f"{limits.max_queue_size} requests are waiting already; try again later")
        if not request.arrival_s:
            request = replace(request, arrival_s=time.monotonic())
        stream = OutputStream(request.request_id, asyncio.get_running_loop(), self.abort)
        self._streams[request.request_id] = stream
        self._inbox.put(_Submission(self._core, request))
        if self._dead is not None:
            # The thread died in between and may have missed this stream when it ended all others.
            self._deliver([self._last_words(request.request_id)])
        return stream

    def abort(self, request_id: str) -> None:
        """End a request, from any thread. Its stream gets a last output with reason ABORT; unknown ids are ignored."""
        self._inbox.put(lambda: self._core.abort(request_id))

    def call(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run `function` on the engine thread between two steps; the future has its result or exception."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._core))
                except Exception as error:
                    future.set_exception(error)

        if self._dead is not None:
            future.set_exception(CapacityError(f"the engine has stopped: {self._dead}", status=503))
        else:
            self._inbox.put(run)
        return future

    def begin_drain(self) -> None:
        """Accept nothing more; what was submitted goes on."""
        self._draining = True

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    async def wait_drained(self, timeout_s: float) -> bool:
        """Wait until every submitted request has ended; False when `timeout_s` seconds were not enough."""
        deadline = time.monotonic() + timeout_s
        while self._streams:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    def abort_all(self) -> None:
        for request_id in list(self._streams):
            self.abort(request_id)

    def wake(self) -> None:
        """End the engine's sleep, from any thread: something that it polls has happened."""
        self._inbox.put(_nothing)

    def health(self) -> str | None:
        """None while all is well, else the reason why not."""
        if self._dead is not None:
            return f"the engine has stopped: {self._dead}"
        if self._thread.ident is None:
            return "the engine has not been started"
        return None if self._thread.is_alive() else "the engine thread has ended"

    def warnings(self) -> list[str]:
        """What does not work as it should while requests are served all the same, for people who may be anybody."""
        disk = self._core.tiers.disk if self._core.tiers is not None else None
        if disk is None:
            return []
        refusal = disk.refusal
        if refusal is None:
            return [] if disk.fault is None else ["the disk tier does not work"]
        since = datetime.datetime.fromtimestamp(refusal.since_us // 1_000_000, datetime.UTC).isoformat()
        return [f"the disk tier has taken no blocks since {since} and refused {refusal.num_blocks:,}"]

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop the thread after its current step. Requests that still run end with an error; what the disk tier does not hold
        yet is saved, and False is returned if `timeout_s` seconds were not enough for that.
        """
        self._draining = True
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()
        return self._core.close(timeout_s)

    def _run(self) -> None:
        rested_from_s = 0.0
        try:
            while self._drain_inbox():
                if self._core.has_work:
                    self._publish(self._core.step())
                    rested_from_s = time.monotonic() + _REST_S
                    # If that was the last one, what it computed waits to be saved: nothing else may ever wake this thread.
                    self._is_saving = True
                else:
                    rested = time.monotonic() >= rested_from_s
                    self._is_saving = self._core.work_idle(save=rested) or not rested
            self._dead = self._dead or "closed"
        except BaseException as error:
            logger.exception("the engine thread died")
            self._dead = f"{type(error).__name__}: {error}"
        finally:
            self._fail_streams()

    def _drain_inbox(self) -> bool:
        """Run what came in; without anything to compute, sleep until something does. False when the engine is to stop."""
        core = self._core
        block = core.is_stalled or not core.has_work
        # While the tiers are at work, `wake` ends the sleep early; the timeout is for their deadlines.
        timeout_s = _TIER_POLL_S if core.has_work or self._is_saving else None
        while True:
            try:
                command = self._held.pop() if self._held else self._inbox.get(block, timeout_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            if block and command is _nothing:
                time.sleep(GATHER_S)
            block = False
            self._obey(command)

    def _obey(self, command: Callable[[], None]) -> None:
        try:
            command()
        except TieredKVError:
            logger.exception("a command to the engine was refused")

    def _take_submissions(self) -> None:
        """While a batch is computed: queue what was submitted, up to the first command of another kind."""
        while not self._held:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            if not isinstance(command, _Submission):
                self._held.append(command)
                return
            self._obey(command)

    def _publish(self, outputs: list[EngineOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[EngineOutput]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append(output)
        for loop, batch in by_loop.items():
            # A loop that has closed took its streams along: nobody listens.
            with contextlib.suppress(RuntimeError):
                self._delivered.clear()
                loop.call_soon_threadsafe(self._deliver, batch)
                # Let the loop send these tokens before the next step takes all cores: on a machine with few of them, a loop
                # that competes with the model's threads costs each of their barriers a time slice. A GPU would idle.
                if self.device == "cpu":
                    self._delivered.wait(_DELIVERY_S)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """On the loop: hand each output to its stream."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if stream.finished:
                    del self._streams[output.request_id]
        if outputs:
            # Behind everything that the outputs have woken.
            asyncio.get_running_loop().call_soon(self._delivered.set)

    def _fail_streams(self) -> None:
        """The thread has ended: answer what came too late, and end every stream with an error."""
        for command in self._held:
            self._inbox.put(command)
        with contextlib.suppress(queue.Empty):
            while (command := self._inbox.get_nowait()) is not None:
                with contextlib.suppress(Exception):
                    command()
        self._publish([self._last_words(request_id) for request_id in list(self._streams)])

    def _last_words(self, request_id: str) -> EngineOutput:
        return EngineOutput(
            request_id,
            [],
            TokenSources(),
            finish_reason=FinishReason.ERROR,
            error=f"the engine has stopped: {self._dead}",
        )
