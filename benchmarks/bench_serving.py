"""Serving speed over HTTP, beside a peer in the same run: `python -m benchmarks.bench_serving` (or `make bench`).

Job: start TieredKV's server and, where it is set up, vLLM's; measure both in alternating rounds; print medians, ranges
and ratios. Only the server that is being measured gets processor time: the others are stopped with SIGSTOP meanwhile. A
third process runs the same engine without a server, which shows what HTTP and scheduling add to a step.

Every figure is taken with streaming requests, greedy, `ignore_eos`, prompts of random words given as token ids:

    ttft_cold_ms   a prompt of 1024 tokens that the server has never seen
    ttft_warm_ms   the same prompt again
    itl_ms         mean time between 64 tokens of one stream after a prompt of 256 tokens
    tokens_per_s   8 streams at once, 256 tokens in, 64 out: output tokens over the time from first byte to last token
    step8_ms       median time between tokens while all 8 of these streams decode
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.figures import BATCH_IN, BATCH_OUT, BATCH_STREAMS, PROMPT_TOKENS, Contender, as_text, collect, save
from benchmarks.servers import MODEL_NAME, Server
from tieredkv.bench.client import LoadError, StreamResult, request_stream
from tieredkv.bench.datasets import WORDS


class Prompts:
    """Fresh random prompts of exact length, as token ids."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        answer = servers.http_post(
            f"{server.url}/tokenize",
            {"model": MODEL_NAME, "prompt": " " + " ".join(WORDS.split()), "add_special_tokens": False},
        )
        self._token_ids = sorted({int(token_id) for token_id in answer["tokens"]})
        self._rng = rng

    def fresh(self, length: int) -> list[int]:
        return self._rng.choices(self._token_ids, k=length)


async def generate(server: Server, prompt: Sequence[int], max_tokens: int) -> StreamResult:
    """One greedy stream of exactly `max_tokens` tokens. Raises `LoadError` or `ServerError` when it is not that."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    result = (await request_stream(server.url, body)).require_ok()
    if result.tokens != max_tokens:
        raise servers.ServerError(f"{server.name} sent {result.tokens} tokens of {max_tokens}")
    return result


async def generate_together(
    server: Server, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[float, list[float]]:
    """All prompts at once: output tokens per second, and the gaps in seconds between tokens while all of them decode."""
    results = await asyncio.gather(*(generate(server, prompt, max_tokens) for prompt in prompts))
    took_s = max(r.last_token_s for r in results) - min(r.started_s for r in results)
    all_from = max(r.started_s + r.event_times_s[0] for r in results)
    all_until = min(r.last_token_s for r in results)
    gaps = []
    for result in results:
        times = [result.started_s + t for t in result.event_times_s]
        inside = [t for t in times if all_from <= t <= all_until]
        gaps += [later - earlier for earlier, later in itertools.pairwise(inside)]
    return len(prompts) * max_tokens / took_s, gaps


async def measure_round(contender: Contender, prompts: Prompts, num_ttfts: int) -> None:
    """One round: `num_ttfts` cold prompts, each sent again, one single stream, one batch of streams."""
    server, samples = contender.server, contender.samples
    for _ in range(num_ttfts):
        prompt = prompts.fresh(PROMPT_TOKENS)
        samples["ttft_cold_ms"].append(1000 * (await generate(server, prompt, 1)).ttft_s)
        again = await generate(server, prompt, 1)
        samples["ttft_warm_ms"].append(1000 * again.ttft_s)
        details = (again.usage or {}).get("prompt_tokens_details") or {}
        contender.cached_tokens = details.get("cached_tokens")
    samples["itl_ms"].append(1000 * (await generate(server, prompts.fresh(BATCH_IN), BATCH_OUT)).itl_s)
    batch = [prompts.fresh(BATCH_IN) for _ in range(BATCH_STREAMS)]
    tokens_per_s, gaps = await generate_together(server, batch, BATCH_OUT)
    samples["tokens_per_s"].append(tokens_per_s)
    samples["step8_ms"].append(1000 * statistics.median(gaps))


async def warm_up(contender: Contender, prompts: Prompts) -> None:
    """Requests of every shape that is measured, not counted: they pay for lazy set-up."""
    for _ in range(2):
        prompt = prompts.fresh(PROMPT_TOKENS)
        await generate(contender.server, prompt, 2)
        await generate(contender.server, prompt, 2)
        batch = [prompts.fresh(BATCH_IN) for _ in range(BATCH_STREAMS)]
        await generate_together(contender.server, batch, 4)


def run_engine_alone(server: Server, prompts: Prompts) -> dict[str, float]:
    """One batch through the engine without a server: its median step and the model's share of it, in milliseconds."""
    batch = [prompts.fresh(BATCH_IN) for _ in range(BATCH_STREAMS)]
    return servers.http_post(f"{server.url}/run", {"prompts": batch, "max_tokens": BATCH_OUT})


def server_version(server: Server) -> str:
    return str(json.loads(servers.http_get(f"{server.url}/version")[1])["version"])


def model_folder() -> Path:
    """The default model as a Hugging Face folder, which TieredKV's server has made when it started."""
    from tieredkv import checkpoint, gguf

    return checkpoint.resolve(MODEL_NAME, gguf.convert, lambda *_: None).folder


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start everything, measure in alternating rounds, stop everything; the result as JSON-ready data."""
    rng = random.Random(options.seed)
    with contextlib.ExitStack() as stack:

        def start(server: Server) -> Server:
            say(f"starting {server.name} ...")
            stack.enter_context(server)
            say(f"{server.name} is ready after {server.start_s:.0f} s")
            return server

        own = Contender(start(servers.tieredkv_server("--dtype", "bfloat16")))
        contenders = [own]
        prompts = Prompts(own.server, rng)
        asyncio.run(warm_up(own, prompts))
        own.version = server_version(own.server)
        own.server.pause()
        if options.peer == "vllm":
            contenders.append(Contender(start(servers.vllm_server(model_folder()))))
            asyncio.run(warm_up(contenders[-1], prompts))
            contenders[-1].version = server_version(contenders[-1].server)
            contenders[-1].server.pause()
        alone = None
        alone_samples: list[dict[str, float]] = []
        if not options.no_engine_alone:
            command = [sys.executable, "-m", "benchmarks.inprocess", "--port", "{port}"]
            alone = start(Server("engine-alone", command))
            run_engine_alone(alone, prompts)
            alone.pause()
        for number in range(options.rounds):
            order = contenders if number % 2 == 0 else contenders[::-1]
            for contender in order:
                with running(contender.server):
                    # Its first request after a pause finds cold caches: not counted.
                    asyncio.run(generate_twice(contender, prompts))
                    asyncio.run(measure_round(contender, prompts, options.ttfts))
            if alone is not None:
                with running(alone):
                    alone_samples.append(run_engine_alone(alone, prompts))
            say(f"round {number + 1} of {options.rounds} done")
        return collect(contenders, alone_samples)


async def generate_twice(contender: Contender, prompts: Prompts) -> None:
    prompt = prompts.fresh(BATCH_IN)
    await generate(contender.server, prompt, 4)
    await generate(contender.server, prompt, 4)


@contextlib.contextmanager
def running(server: Server) -> Iterator[None]:
    server.resume()
    try:
        yield
    finally:
        server.pause()


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_serving", description="Serving speed over HTTP, beside a peer.")
    parser.add_argument("--peer", choices=("auto", "vllm", "none"), default="auto", help="auto: vllm if it is set up")
    parser.add_argument("--setup-peers", action="store_true", help="install the peer first (some minutes, about 3 GB)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default: 5)")
    parser.add_argument("--ttfts", type=int, default=3, help="cold prompts per round (default: 3)")
    parser.add_argument("--seed", type=int, default=None, help="of the random prompts (default: another one each time)")
    parser.add_argument("--no-engine-alone", action="store_true", help="do not measure what HTTP and scheduling add")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a figure misses what it is to reach")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.ttfts < 1:
        parser.error("--rounds and --ttfts must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    servers.leave_on_sigterm()
    try:
        if options.setup_peers:
            servers.set_up()
        if options.peer == "auto":
            options.peer = "vllm" if servers.is_set_up() else "none"
            if options.peer == "none":
                say("no peer is set up (--setup-peers does it): there will be no ratios")
        elif options.peer == "vllm" and not servers.is_set_up():
            raise servers.ServerError("vllm is not set up here; run again with --setup-peers")
        result = run(options)
    except (LoadError, servers.ServerError) as error:
        say(f"bench_serving: {error}")
        return 2
    print(json.dumps(result, indent=1) if options.json else as_text(result), end="\n" if options.json else "")
    if options.save:
        say(f"written to {save(result)}")
    missed = [r for r in (*result.get("ratios", {}).values(), result.get("added_per_token") or {}) if r]
    return int(options.check and not all(r["reached"] for r in missed))


if __name__ == "__main__":
    sys.exit(main())
