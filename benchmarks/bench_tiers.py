"""What each tier brings: time to first token from every tier side by side, what tiers cost without reuse, and a working set
ten times the block pool. In one process, without HTTP, ratios measured in one run.

    python -m benchmarks.bench_tiers [--tokens 1024] [--rounds 5] [--save]

Run it with nothing else on the machine. Knows the offline API only; results go to stdout as a table, and with `--save` to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report
from tieredkv import SamplingParams
from tieredkv.runtime import maybe_reexec, num_cores

if TYPE_CHECKING:
    from tieredkv import LLM

VOCAB = 49_000
TARGETS = {
    "host / device": 1.3,
    "disk / device": 1.6,
    "restart / device": 2.0,
    "host / cold": 1 / 6,
    "disk / cold": 1 / 6,
    "restart / cold": 1 / 6,
}


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, VOCAB) for _ in range(num_tokens)]


def first_token_s(llm: LLM, prompt: list[int]) -> tuple[float, Any]:
    """Seconds from the call to the first token, and where the prompt's tokens came from."""
    started_s = time.perf_counter()
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    return time.perf_counter() - started_s, output.sources


def settle(llm: LLM) -> None:
    while llm.core.work_idle():
        llm.core.wait(0.01)


def forget_device(llm: LLM) -> None:
    llm.core.clear()


def forget_host(llm: LLM) -> None:
    forget_device(llm)
    tiers = llm.core.tiers
    assert tiers is not None
    tiers.host.clear()
    tiers.forget_gone()


def load(args: argparse.Namespace, store: str, **settings: Any) -> LLM:
    # Loads torch, so not before the process has had its chance to start again with a better allocator.
    from tieredkv import LLM

    chosen = {
        "dtype": args.dtype,
        "disk_path": store,
        "disk_size": "4GiB",
        "host_memory": "2GiB",
        "max_model_len": 8192,
    }
    return LLM(args.model, **(chosen | settings))


def measure_ttft(args: argparse.Namespace, store: str) -> dict[str, list[float]]:
    """TTFT of one prompt per round: cold, then from device, host, disk; and from disk after a restart."""
    times: dict[str, list[float]] = {name: [] for name in ("cold", "device", "host", "disk", "restart")}
    prompts = [prompt_of(args.tokens, seed) for seed in range(args.rounds)]
    with load(args, store, restore="always") as llm:
        first_token_s(llm, prompt_of(args.tokens, 10_000))
        for prompt in prompts:
            cold_s, _ = first_token_s(llm, prompt)
            device_s, sources = first_token_s(llm, prompt)
            assert sources.device == sources.cached > 0
            settle(llm)
            forget_device(llm)
            host_s, sources = first_token_s(llm, prompt)
            assert sources.host == sources.cached > 0, sources
            forget_host(llm)
            disk_s, sources = first_token_s(llm, prompt)
            assert sources.disk == sources.cached > 0, sources
            for name, seconds in (("cold", cold_s), ("device", device_s), ("host", host_s), ("disk", disk_s)):
                times[name].append(seconds)
    with load(args, store, restore="always") as llm:
        for prompt in prompts:
            restart_s, sources = first_token_s(llm, prompt)
            assert sources.disk == sources.cached > 0, sources
            times["restart"].append(restart_s)
    return times


def measure_no_reuse(args: argparse.Namespace, store: str) -> dict[str, list[float]]:
    """Output tokens per second of prompts that share nothing: with all tiers and a pool that must spill, without a cache."""
    rates: dict[str, list[float]] = {"tiers": [], "off": []}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    small = {"num_gpu_blocks_override": 400, "max_num_seqs": 8, "max_model_len": 2048}
    with (
        load(args, store, **small) as tiered,
        load(args, store, **small, enable_prefix_caching=False) as plain,
    ):
        for round_number in range(args.rounds + 1):
            for name, llm in (("tiers", tiered), ("off", plain)):
                prompts = [prompt_of(512, 100_000 + round_number * 100 + i) for i in range(12)]
                started_s = time.perf_counter()
                llm.generate(prompts, params)
                if round_number:
                    rates[name].append(len(prompts) * 16 / (time.perf_counter() - started_s))
                settle(llm)
    return rates


def measure_working_set(args: argparse.Namespace, store: str) -> dict[str, Any]:
    """Documents in turn, ten times what the pool holds: TTFT p50 of the second round with tiers and with the device alone."""
    documents = [prompt_of(1024, 200_000 + i) for i in range(20)]
    blocks = len(documents) * 64 // 10 + 8
    found: dict[str, Any] = {}
    for name, settings in (("tiers", {}), ("device alone", {"host_memory": "0", "disk_path": None})):
        chosen = {"num_gpu_blocks_override": blocks, "max_model_len": 2048, **settings}
        with load(args, store, **chosen) as llm:
            for document in documents:
                first_token_s(llm, document)
                settle(llm)
            second = [first_token_s(llm, document) for document in documents]
        found[name] = {
            "p50_s": statistics.median(seconds for seconds, _ in second),
            "hit_rate": sum(s.cached for _, s in second) / sum(s.total for _, s in second),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prompt whose TTFT is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    args = parser.parse_args()
    maybe_reexec(sys.argv)
    report = Report()
    say = report.say
    with tempfile.TemporaryDirectory(prefix="tieredkv-bench-") as folder:
        ttft = measure_ttft(args, f"{folder}/ttft")
        no_reuse = measure_no_reuse(args, f"{folder}/no-reuse")
        working_set = measure_working_set(args, f"{folder}/working-set")
    median = {name: statistics.median(values) for name, values in ttft.items()}
    say(
        f"{args.model} {args.dtype}, {num_cores()} cores, prompt of {args.tokens} tokens, medians of {args.rounds} rounds"
    )
    for name, seconds in median.items():
        low, high = min(ttft[name]) * 1e3, max(ttft[name]) * 1e3
        say(f"  TTFT {name:<8} {seconds * 1e3:8.1f} ms   ({low:.1f} to {high:.1f})")
    for name, most in TARGETS.items():
        above, below = name.split(" / ")
        ratio = median[above] / median[below]
        say(f"  {name:<18} {ratio:6.2f}   target <= {most:.2f}   {'met' if ratio <= most else 'MISSED'}")
    kept = statistics.median(no_reuse["tiers"]) / statistics.median(no_reuse["off"])
    say(f"  no reuse: tiers / off {kept:6.3f}   target >= 0.98   {'met' if kept >= 0.98 else 'MISSED'}")
    gain = working_set["device alone"]["p50_s"] / working_set["tiers"]["p50_s"]
    rate = working_set["tiers"]["hit_rate"]
    say(f"  ten times the pool: TTFT p50 {gain:.1f} times lower (target >= 4), hit rate {rate:.1%} (target > 95%)")
    if args.save:
        document = {"ttft_s": ttft, "no_reuse_tokens_per_s": no_reuse, "working_set": working_set}
        path = report.save("tiers")
        path.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
