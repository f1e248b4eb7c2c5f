"""Load on an OpenAI-style server, and what came of it: `run` sends sessions, `summarize` turns the results into figures.

    arrivals    all at once, or at random times (Poisson) at `request_rate` a second, or at the trace's times
    limit       at most `max_concurrency` requests at once; who arrives later waits before it is sent
    passes      the same requests `repeat` times in one run, so that the second pass shows what a cache brings

Knows the streaming client and datasets; nothing of how the server works. Times count from before a request's connection is
opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tieredkv.bench.answer import SOURCES
from tieredkv.bench.client import CHAT, COMPLETIONS, StreamResult, request_stream
from tieredkv.bench.datasets import Session

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how to ask it. `backend` is openai (completions) or openai-chat."""

    url: str
    model: str
    backend: str = "openai"
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0

    def body(self, history: Sequence[tuple[str, str]], prompt: str, output_len: int) -> dict[str, Any]:
        """The request for `prompt` after `history` (pairs of question and answer)."""
        body: dict[str, Any] = {"model": self.model, "temperature": self.temperature}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.backend == "openai-chat":
            messages = [
                message
                for question, answer in history
                for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
            ]
            return body | {
                "messages": [*messages, {"role": "user", "content": prompt}],
                "max_completion_tokens": output_len,
            }
        return body | {"prompt": "".join(q + a + "\n" for q, a in history) + prompt, "max_tokens": output_len}

    @property
    def path(self) -> str:
        return CHAT if self.backend == "openai-chat" else COMPLETIONS


@dataclass(frozen=True, slots=True)
class Pace:
    """How requests arrive. `request_rate` per second; infinite sends all at once."""

    request_rate: float = math.inf
    max_concurrency: int | None = None
    seed: int = 0


@dataclass(slots=True)
class Served:
    """One request: which pass it belongs to, when it was sent (seconds since the run began), what it brought."""

    pass_index: int
    sent_s: float
    result: StreamResult

    @property
    def end_s(self) -> float:
        """Seconds to the last token."""
        return self.result.event_times_s[-1]

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first one; None for answers of one token."""
        return self.result.itl_s if self.result.tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        times = self.result.event_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def num_prompt_tokens(self) -> int:
        return int((self.result.usage or {}).get("prompt_tokens") or 0)

    @property
    def cached_tokens(self) -> int:
        details = (self.result.usage or {}).get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    @property
    def tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens by where they came from. A server that tells no more than cached or not: device or computed."""
        found = (self.result.usage or {}).get("tieredkv") or {}
        if all(found.get(f"{source}_tokens") is not None for source in SOURCES):
            return {source: int(found[f"{source}_tokens"]) for source in SOURCES}
        cached = self.cached_tokens
        return {"device": cached, "host": 0, "disk": 0, "computed": max(self.num_prompt_tokens - cached, 0)}

    @property
    def source(self) -> str:
        """The slowest tier that the prompt's cached part came from; `computed` where nothing was cached."""
        tokens = self.tokens_by_source
        return next((source for source in ("disk", "host", "device") if tokens[source]), "computed")


@dataclass(slots=True)
class Run:
    """All requests of a run, and how long each pass took in seconds."""

    served: list[Served] = field(default_factory=list)
    pass_s: list[float] = field(default_factory=list)


async def run(
    target: Target,
    sessions: Sequence[Session],
    pace: Pace,
    *,
    repeat: int = 1,
    progress: Callable[[int], None] = lambda pass_index: None,
) -> Run:
    """Send all sessions, `repeat` times one after the other. `progress(pass_index)` is called after each request."""
    found = Run()
    began_s = time.perf_counter()
    for index in range(repeat):
        pass_began_s = time.perf_counter()
        limit = asyncio.Semaphore(pace.max_concurrency) if pace.max_concurrency else contextlib.nullcontext()
        arrivals = _arrivals(sessions, pace)
        async with asyncio.TaskGroup() as group:
            for session, at_s in zip(sessions, arrivals, strict=True):
                group.create_task(_serve(target, session, pass_began_s + at_s, limit, found, index, began_s, progress))
        found.pass_s.append(time.perf_counter() - pass_began_s)
    return found


def _arrivals(sessions: Sequence[Session], pace: Pace) -> Iterable[float]:
    rng, now_s = random.Random(pace.seed), 0.0
    times = []
    for session in sessions:
        own = session.turns[0].at_s
        times.append(now_s if own is None else own)
        if pace.request_rate < math.inf:
            now_s += rng.expovariate(pace.request_rate)
    return times


async def _serve(
    target: Target,
    session: Session,
    arrival_s: float,
    limit: contextlib.AbstractAsyncContextManager[Any],
    found: Run,
    pass_index: int,
    began_s: float,
    progress: Callable[[int], None],
) -> None:
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else None
    await asyncio.sleep(max(arrival_s - time.perf_counter(), 0))
    history: list[tuple[str, str]] = []
    for turn in session.turns:
        body = target.body(history, turn.prompt, turn.output_len)
        async with limit:
            result = await request_stream(
                target.url, body, path=target.path, timeout_s=target.timeout_s, headers=headers
            )
        found.served.append(Served(pass_index, result.started_s - began_s, result))
        progress(pass_index)
        if not result.ok or not result.event_times_s:
            return
        if session.grows:
            history.append((turn.prompt, result.text))


def summarize(found: Run) -> list[dict[str, Any]]:
    """The figures of each pass, ready for JSON; times in milliseconds."""
    return [_summarize_pass(found, index) for index in range(len(found.pass_s))]


def _summarize_pass(found: Run, index: int) -> dict[str, Any]:
    mine = [s for s in found.served if s.pass_index == index]
    good = [s for s in mine if s.result.ok and s.result.event_times_s]
    duration_s = found.pass_s[index]
    num_prompt = sum(s.num_prompt_tokens for s in good)
    num_output = sum(s.result.tokens for s in good)
    by_source = {source: sum(s.tokens_by_source[source] for s in good) for source in SOURCES}
    return {
        "pass": index + 1,
        "duration_s": duration_s,
        "completed": len(good),
        "failed": len(mine) - len(good),
        "errors": sorted({(s.result.error or "empty answer")[:200] for s in mine if s not in good})[:5],
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "requests_per_s": len(good) / duration_s,
        "output_tokens_per_s": num_output / duration_s,
        "total_tokens_per_s": (num_prompt + num_output) / duration_s,
        "cached_tokens": sum(s.cached_tokens for s in good),
        "hit_rate": sum(s.cached_tokens for s in good) / num_prompt if num_prompt else 0.0,
        "tokens_by_source": by_source,
        "ttft_ms": _spread(s.result.ttft_s for s in good),
        "tpot_ms": _spread(s.tpot_s for s in good if s.tpot_s is not None),
        "itl_ms": _spread(gap for s in good for gap in s.gaps_s),
        "e2e_ms": _spread(s.end_s for s in good),
        "ttft_ms_by_source": {
            source: _spread(s.result.ttft_s for s in good if s.source == source)
            for source in SOURCES
            if any(s.source == source for s in good)
        },
    }


def _spread(seconds: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank) in milliseconds; empty without values."""
    values = sorted(1000 * value for value in seconds)
    if not values:
        return {}
    ranks = {f"p{p}": values[max(math.ceil(len(values) * p / 100) - 1, 0)] for p in PERCENTILES}
    return {"mean": statistics.fmean(values), **ranks}
