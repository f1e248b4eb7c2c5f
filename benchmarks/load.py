"""Many streams at once, some of them cut off by the client: `run_load`.

Job: keep a number of requests open against one server for a while, hang up on some at random moments, and return what
came of each, so that a test can compare the answers with what they should be. The stream client is `client`. It does not
know what the right answers are, nor how the server was started.

Invariants: loopback only; the number of requests and the time are bounded; what is sent depends on the seed alone.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tieredkv.bench.client import COMPLETIONS, Cut, StreamResult, parse_address, request_stream

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(slots=True)
class LoadRequest:
    """One request of a load run: which of the bodies was sent, and what came of it."""

    body_index: int
    planned_cut: Cut | None
    result: StreamResult


@dataclass(slots=True)
class LoadReport:
    """All requests of a load run, in the order in which they ended, and how long the run took in seconds."""

    requests: list[LoadRequest]
    duration_s: float

    @property
    def completed(self) -> list[LoadRequest]:
        """Those that ended with `[DONE]` and without an error."""
        return [r for r in self.requests if r.result.ok]

    @property
    def cut(self) -> list[LoadRequest]:
        """Those that this client cut off before their end."""
        return [r for r in self.requests if r.result.cut and not r.result.done]

    @property
    def failed(self) -> list[LoadRequest]:
        """Those that neither ended well nor were cut off here: a healthy server has none."""
        return [r for r in self.requests if not r.result.ok and not r.result.cut]

    def summary(self) -> str:
        """One line for people."""
        tokens = sum(r.result.tokens for r in self.completed)
        ttfts = [r.result.ttft_s for r in self.completed if r.result.event_times_s]
        ttft = f", median TTFT {1000 * statistics.median(ttfts):.0f} ms" if ttfts else ""
        return (
            f"{len(self.completed)} completed, {len(self.cut)} cut off, {len(self.failed)} failed "
            f"in {self.duration_s:.1f} s; {tokens / self.duration_s:.0f} tokens/s in the completed ones{ttft}"
        )


def run_load(
    url: str,
    *,
    bodies: Sequence[Mapping[str, Any]],
    streams: int = 64,
    seconds: float = 60.0,
    abort_fraction: float = 1 / 3,
    seed: int = 0,
    path: str = COMPLETIONS,
    timeout_s: float = 120.0,
    max_requests: int = 100_000,
) -> LoadReport:
    """Keep `streams` requests open for `seconds`, each drawn from `bodies`; hang up on `abort_fraction` of them.

    The moments are random: before the first token, or after any number of events below the body's `max_tokens`, half of
    them by reset. After `seconds` no new request starts and those still running may finish. The choices, not their
    timing, depend on `seed` alone. Raises `ValueError` for an address off the loopback interface.
    """
    if parse_address(url).host not in LOOPBACK:
        raise ValueError(f"load goes to this machine only, not to {url!r}")
    return asyncio.run(
        _load(url, bodies, streams, seconds, abort_fraction, random.Random(seed), path, timeout_s, max_requests)
    )


async def _load(
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    streams: int,
    seconds: float,
    abort_fraction: float,
    rng: random.Random,
    path: str,
    timeout_s: float,
    max_requests: int,
) -> LoadReport:
    requests: list[LoadRequest] = []
    started_s = time.perf_counter()
    plan = _plan(bodies, abort_fraction, rng, max_requests)

    async def stream() -> None:
        while time.perf_counter() - started_s < seconds:
            index_and_cut = next(plan, None)
            if index_and_cut is None:
                return
            index, cut = index_and_cut
            result = await request_stream(url, bodies[index], path=path, cut=cut, timeout_s=timeout_s)
            requests.append(LoadRequest(index, cut, result))
            if result.status != 200 and not result.cut:
                await asyncio.sleep(0.05)  # a server that refuses everything must not turn this into a tight loop

    await asyncio.gather(*(stream() for _ in range(streams)))
    return LoadReport(requests, time.perf_counter() - started_s)


def _plan(
    bodies: Sequence[Mapping[str, Any]], abort_fraction: float, rng: random.Random, max_requests: int
) -> Iterator[tuple[int, Cut | None]]:
    for _ in range(max_requests):
        index = rng.randrange(len(bodies))
        yield index, _random_cut(bodies[index], rng) if rng.random() < abort_fraction else None


def _random_cut(body: Mapping[str, Any], rng: random.Random) -> Cut:
    max_tokens = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
    num_events = rng.randrange(max_tokens)
    reset = rng.random() < 0.5
    if num_events == 0:
        return Cut(after_events=1, after_s=rng.uniform(0.0, 0.2), reset=reset)
    return Cut(after_events=num_events, reset=reset)
