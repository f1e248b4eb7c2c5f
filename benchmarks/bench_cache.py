"""What the cache's bookkeeping costs per block, without a model: `python -m benchmarks.bench_cache`.

Times of this thread alone, the lowest of several runs. Goals: far below the time that a block's computation takes, which is
milliseconds on a CPU and tens of microseconds on a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tieredkv.blocks import BlockPool
from tieredkv.branches import Branches
from tieredkv.cache import CacheManager
from tieredkv.events import EventLog
from tieredkv.hashing import extend_chain
from tieredkv.sequence import Sequence
from tieredkv.tier_faces import BlockInfo
from tieredkv.types import EngineRequest, SamplingParams, Tier

NUM_BLOCKS, BLOCK_SIZE, RUNS = 4096, 16, 5


def best_us(run: Callable[[], None], count: int) -> float:
    times = []
    for _ in range(RUNS):
        began_s = time.thread_time()
        run()
        times.append(time.thread_time() - began_s)
    return 1e6 * min(times) / count


def hash_chain() -> None:
    extend_chain([], bytes(32), list(range(NUM_BLOCKS * BLOCK_SIZE)), BLOCK_SIZE, NUM_BLOCKS)


class Requests:
    """Prompts of 64 blocks through `CacheManager`: `fresh` ones evict others, or the same one again and again."""

    def __init__(self, *, fresh: bool) -> None:
        self.cache = CacheManager(BlockPool(NUM_BLOCKS), BLOCK_SIZE)
        self.fresh = fresh
        self.number = 0
        for _ in range(NUM_BLOCKS // 64):
            self.serve()

    def serve(self) -> None:
        self.number += self.fresh
        tokens = [self.number % 1000, self.number // 1000, *range(64 * BLOCK_SIZE - 1)]
        sequence = Sequence(EngineRequest("r", tokens, SamplingParams(max_tokens=1)), bytes(32))
        match = self.cache.match(sequence)
        self.cache.allocate(sequence, match)
        sequence.num_computed = len(tokens)
        self.cache.commit(sequence)
        self.cache.release(sequence)


def tell_events() -> None:
    branches = Branches(EventLog())
    for i in range(NUM_BLOCKS):
        info = BlockInfo(i.to_bytes(32, "big"), bytes(32), 1, (1, 2), bytes(32))
        branches.stored(Tier.DEVICE, info, "computed")
        branches.removed(Tier.DEVICE, info.hash, "evicted")


def main() -> int:
    cold, warm = Requests(fresh=True), Requests(fresh=False)
    for label, run, count in (
        ("hash a block of 16 tokens", hash_chain, NUM_BLOCKS),
        ("a computed block, evicting another: match, allocate, commit, release", cold.serve, 64),
        ("a block found on the device: match, allocate, release", warm.serve, 64),
        ("account and event of a block that comes and goes", tell_events, NUM_BLOCKS),
    ):
        print(f"{label:72}{best_us(run, count):7.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
