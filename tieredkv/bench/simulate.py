"""What a cache of a given size would do with a workload: hits by capacity and policy, and what tiers below it add.

The policy `lru` runs the product itself: `BlockPool` and `CacheManager`, and with tiers `Tiers`, `HostArena` and a
`DiskStore` in a temporary directory, only without a model: a block's payload is 8 bytes instead of megabytes. The others
are models (`policies`). Requests run one after the other; idle time between them is enough to finish what was started.

Invariant: hits are counted as the product counts them, in whole blocks from the first one on.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tieredkv.bench.policies import POLICIES, next_uses, replay
from tieredkv.bench.traces import TracedRequest, Workload
from tieredkv.blocks import BlockPool
from tieredkv.cache import CacheManager
from tieredkv.disk_tier import ThreadedDisk
from tieredkv.errors import ConfigError, InvariantError
from tieredkv.gate import CostGate
from tieredkv.sequence import Sequence as TokenSequence
from tieredkv.storage.disk import MIN_CAPACITY_NBYTES, DiskStore
from tieredkv.storage.host import MIN_STAGING_SLOTS, HostArena
from tieredkv.storage.memory import PAGE_NBYTES
from tieredkv.storage.record import HEADER_NBYTES
from tieredkv.storage.rows import record_cost
from tieredkv.storage.session import budget_nbytes_for
from tieredkv.storage.workers import StorageWorkers
from tieredkv.tiers import Tiers
from tieredkv.transfer import Copy
from tieredkv.types import EngineRequest, SamplingParams, Tier

UNLIMITED = math.inf
DEFAULT_CAPACITIES = (1_000, 3_000, 6_000, 10_000, 30_000, 50_000, 100_000, UNLIMITED)
DEFAULT_POLICIES = ("lru", *POLICIES)
_PAYLOAD_NBYTES = 8
# Longer than any pause that the tiers make.
_BETWEEN_REQUESTS_S = 60.0
# A store has room for 66 payloads at least, and its size goes in steps of 13.
_LEAST_DISK_BLOCKS = 256
# What passes through between device and disk where there is no host tier.
_STAGING_SLOTS = 64
_NAMESPACE = _ROOT = bytes(32)
_ANSWER = b"\xff" * 32
_SAMPLING = SamplingParams(max_tokens=1)


@dataclass(slots=True)
class Outcome:
    """One policy at one capacity in blocks. `hits` has the hit blocks of each request, by the tier that they lay in."""

    policy: str
    blocks: float
    host_blocks: float = 0
    disk_blocks: float = 0
    hits: dict[Tier, list[int]] = field(default_factory=dict)
    num_spilled: int = 0
    num_stored: int = 0
    num_restored: int = 0
    took_s: float = 0.0

    @property
    def num_hits(self) -> int:
        return sum(map(sum, self.hits.values()))

    def hit_tokens(self, workload: Workload) -> int:
        """Prompt tokens that hits cover; the last token of a prompt is always computed."""
        found = [sum(parts) for parts in zip(*self.hits.values(), strict=True)]
        return sum(
            min(hits * workload.block_size, max(request.num_tokens - 1, 0))
            for hits, request in zip(found, workload.requests, strict=True)
        )


def simulate(
    workload: Workload,
    policies: Sequence[str] = DEFAULT_POLICIES,
    capacities: Sequence[float] = DEFAULT_CAPACITIES,
    *,
    host_blocks: float = 0,
    disk_blocks: float = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Outcome]:
    """Replay `workload` for each policy and capacity (in blocks; `UNLIMITED` for as many as there are).

    With `host_blocks` or `disk_blocks` the product's tiers lie below the device, for `lru` alone. Raises `ConfigError` for
    an unknown policy or a useless capacity.
    """
    for policy in policies:
        if policy != "lru" and policy not in POLICIES:
            raise ConfigError(f"must be some of lru, {', '.join(POLICIES)}, got {policy!r}", key="policy")
    for key, least, values in (("blocks", 1, capacities), ("tiers", 0, (host_blocks, disk_blocks))):
        if any(value < least for value in values):
            raise ConfigError(f"must be at least {least}", key=key)
    for key, least, value in (
        ("host_blocks", MIN_STAGING_SLOTS, host_blocks),
        ("disk_blocks", _LEAST_DISK_BLOCKS, disk_blocks),
    ):
        if 0 < value < least:
            raise ConfigError(f"must be 0 or at least {least}, as the tier simulated is the real one", key=key)
    if (host_blocks or disk_blocks) and any(policy != "lru" for policy in policies):
        raise ConfigError("tiers below the device are simulated for lru alone", key="policy")
    requests = [request.blocks for request in workload.requests]
    uses = next_uses(requests) if any(policy in POLICIES for policy in policies) else []
    outcomes = []
    for capacity in capacities:
        whole = int(min(capacity, max(workload.num_unique, 1)))
        for policy in policies:
            progress(f"{policy}, {'unlimited' if capacity == UNLIMITED else f'{capacity:,.0f}'} blocks")
            began_s = time.perf_counter()
            outcome = Outcome(policy, capacity, host_blocks, disk_blocks)
            if policy != "lru":
                outcome.hits = {Tier.DEVICE: replay(POLICIES[policy](whole), requests, uses)}
            elif host_blocks or disk_blocks:
                _replay_tiers(workload, whole, outcome)
            else:
                _replay_device(workload, whole, outcome)
            outcome.took_s = time.perf_counter() - began_s
            outcomes.append(outcome)
    return outcomes


def _sequence(request: TracedRequest, capacity: int) -> TokenSequence:
    """A sequence with one token a block, and one more that is always computed. A prompt longer than the pool is cut."""
    blocks = request.blocks[: max(capacity - 1, 0)]
    sequence = TokenSequence(EngineRequest("simulated", [0] * (len(blocks) + 1), _SAMPLING), _ROOT)
    # The last one stands for the block that the answer begins: no trace has it.
    sequence.block_hashes = [*blocks, _ANSWER]
    return sequence


def _finish(cache: CacheManager, sequence: TokenSequence) -> None:
    sequence.num_computed = sequence.num_tokens - 1
    cache.commit(sequence)
    cache.release(sequence)


def _replay_device(workload: Workload, capacity: int, outcome: Outcome) -> None:
    # One more than asked for holds what the answer needs, one is the null block.
    cache = CacheManager(BlockPool(capacity + 2), 1)
    hits = outcome.hits[Tier.DEVICE] = []
    for request in workload.requests:
        sequence = _sequence(request, capacity + 1)
        match = cache.match(sequence)
        _admit(cache, sequence, cache.allocate(sequence, match))
        hits.append(match.num_blocks)
        _finish(cache, sequence)


def _admit(cache: CacheManager, sequence: TokenSequence, admitted: bool) -> None:
    if not admitted:
        raise InvariantError(f"a pool of {cache.pool.num_usable} blocks refuses {sequence}")


class InstantCopies:
    """A copy engine whose copies are over at once and move nothing."""

    def __init__(self) -> None:
        self._done: list[Copy] = []

    def launch(self, copy: Copy) -> None:
        self._done.append(copy)

    def poll(self) -> list[Copy]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        pass


def _replay_tiers(workload: Workload, capacity: int, outcome: Outcome) -> None:
    with tempfile.TemporaryDirectory(prefix="tieredkv-simulate-") as folder:
        workers: StorageWorkers | None = None
        if outcome.disk_blocks:
            stored = min(outcome.disk_blocks, workload.num_unique + 1)
            cost = record_cost(HEADER_NBYTES + _PAYLOAD_NBYTES, 4, PAGE_NBYTES)
            capacity_nbytes = MIN_CAPACITY_NBYTES
            while budget_nbytes_for(capacity_nbytes) < stored * cost:
                capacity_nbytes += max(int(stored * cost) - budget_nbytes_for(capacity_nbytes), PAGE_NBYTES)
            store = DiskStore.open(Path(folder) / "store", capacity_nbytes)
            workers = StorageWorkers(store, start=False)
        try:
            _replay_through(workload, capacity, outcome, workers)
        finally:
            if workers is not None:
                workers.close(1.0)


def _replay_through(workload: Workload, capacity: int, outcome: Outcome, workers: StorageWorkers | None) -> None:
    pool = BlockPool(capacity + 2)
    # No more than there are blocks, and where there is a host tier, one that keeps what it gets.
    host_slots = max(int(min(outcome.host_blocks, workload.num_unique + 1)), MIN_STAGING_SLOTS)
    if outcome.host_blocks:
        host = HostArena(_PAYLOAD_NBYTES, host_slots * PAGE_NBYTES)
    else:
        host = HostArena(_PAYLOAD_NBYTES, 0, staging_slots=_STAGING_SLOTS)
    disk = ThreadedDisk(lambda: workers, _NAMESPACE, 60.0) if workers is not None else None
    gate = CostGate("always", 1, _PAYLOAD_NBYTES)
    # Stands still while a request runs: what a disk refused is offered to it again with the next one, on any machine.
    now_s = 0.0
    tiers = Tiers(
        pool,
        InstantCopies(),
        host,
        disk,
        gate,
        clock=lambda: now_s,
        timeout_s=_BETWEEN_REQUESTS_S,
        block_nbytes=_PAYLOAD_NBYTES,
    )
    cache = CacheManager(pool, 1, tiers=tiers, clock=lambda: now_s)

    def turn() -> list[TokenSequence]:
        """Let everything below the device get on."""
        if workers is not None:
            while workers.run_loads():
                pass
            while workers.run_writes():
                pass
        return cache.poll()

    outcome.hits = {tier: [] for tier in Tier}
    for request in workload.requests:
        now_s += _BETWEEN_REQUESTS_S
        sequence = _sequence(request, capacity + 1)
        cache.prepare(sequence)
        while cache.is_looking_up(sequence):
            turn()
        match = cache.match(sequence)
        _admit(cache, sequence, cache.allocate(sequence, match))
        if cache.start_restore(sequence, match):
            while sequence not in turn():
                pass
        sources = sequence.sources
        for tier, count in ((t, getattr(sources, t.value)) for t in Tier):
            outcome.hits[tier].append(count)
        _finish(cache, sequence)
        # What an engine does after each step, for as many steps as it takes; then what it does when idle.
        tiers.work_ahead()
        while tiers.busy:
            turn()
            tiers.work_ahead()
        while tiers.work_idle():
            turn()
    counts = tiers.spiller.counts
    outcome.num_spilled, outcome.num_stored = counts.to_host, counts.to_disk
    outcome.num_restored = tiers.totals.host + tiers.totals.disk
    tiers.close(1.0)
