"""Soft retention: what requests ask to keep outlives what they do not, for as long as they said, within a budget; nothing is
promised, and no block is ever lost or kept for it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes import ManualClock, make_core, request
from tests.tier_fakes import FakeDisk, TieredCore
from tests.unit.test_tiers import churn, prompt, run
from tieredkv.bench.simulate import InstantCopies
from tieredkv.blocks import BlockPool
from tieredkv.cache import CacheManager
from tieredkv.gate import CostGate
from tieredkv.retention import Retentions
from tieredkv.sequence import Sequence
from tieredkv.storage.host import HostArena
from tieredkv.storage.tier import NEVER
from tieredkv.tiers import Tiers
from tieredkv.types import DEFAULT_PRIORITY, RETAINED_PRIORITY, EngineRequest, Retention, SamplingParams

TRACE = Path(__file__).parents[1] / "data" / "conversation_trace.jsonl"
HOUR = Retention(64, RETAINED_PRIORITY, 3600)


def asking(name: str, tokens, *retention: Retention) -> EngineRequest:
    made = request(name, tokens)
    made.retention = retention
    return made


def device_blocks(tiered: TieredCore, tokens, num_blocks: int = 8) -> int:
    hashes = tiered.core.pins._chain(tokens, b"")[:num_blocks]
    return sum(tiered.core.pool.find(block_hash) is not None for block_hash in hashes)


def host_blocks(tiered: TieredCore, tokens, num_blocks: int = 8) -> int:
    return sum(block_hash in tiered.host for block_hash in tiered.core.pins._chain(tokens, b"")[:num_blocks])


def test_what_is_retained_outlives_churn_until_its_time_is_up():
    tiered = TieredCore(num_blocks=40, num_slots=40)
    run(tiered, asking("kept", prompt(64), HOUR))
    run(tiered, request("plain", prompt(64, seed=2)))
    tiered.settle()
    churn(tiered, 20)
    tiered.settle()
    assert (device_blocks(tiered, prompt(64)), device_blocks(tiered, prompt(64, seed=2))) == (8, 0)
    assert (host_blocks(tiered, prompt(64)), host_blocks(tiered, prompt(64, seed=2))) == (8, 0)
    tiered.clock.now_s += 3600
    churn(tiered, 20, seed=200)
    tiered.settle()
    assert device_blocks(tiered, prompt(64)) == host_blocks(tiered, prompt(64)) == 0
    assert len(tiered.core.retentions) == 0
    assert not tiered.core.pool.priorities


def test_every_use_renews_whoever_it_is():
    tiered = TieredCore(num_blocks=40, num_slots=0)
    run(tiered, asking("kept", prompt(64), Retention(64, 60, 300)))
    for i in range(5):
        tiered.clock.now_s += 200
        run(tiered, request(f"use-{i}", [*prompt(64), i]))
        churn(tiered, 6, seed=100 + 10 * i)
    assert device_blocks(tiered, prompt(64)) == 8
    tiered.clock.now_s += 300
    churn(tiered, 6, seed=500)
    assert device_blocks(tiered, prompt(64)) == 0


def test_only_what_was_asked_for_is_retained():
    tiered = TieredCore(num_blocks=40, num_slots=0)
    run(tiered, asking("kept", prompt(64), Retention(37, 60, 300)))
    churn(tiered, 10)
    # Four full blocks lie within 37 tokens.
    assert [device_blocks(tiered, prompt(64), n) for n in (4, 8)] == [4, 4]
    tiered.core.check_integrity()


def test_higher_priorities_last_longer_and_low_ones_go_first():
    tiered = TieredCore(num_blocks=40, num_slots=0, retention_budget=1.0)
    for seed, priority in ((1, 90), (2, 60), (3, DEFAULT_PRIORITY), (4, 5)):
        run(tiered, asking(f"p{priority}", prompt(64, seed=seed), Retention(64, priority, 300)))
    alive = []
    for i in range(6):
        run(tiered, asking(f"new-{i}", prompt(56, seed=100 + i), Retention(64, 80, 300)))
        alive.append([device_blocks(tiered, prompt(64, seed=seed)) for seed in (1, 2, 3, 4)])
    assert all(counts == sorted(counts, reverse=True) for counts in alive)
    assert alive[-1] == [8, 0, 0, 0]
    tiered.core.check_integrity()


def test_more_than_the_budget_is_kept_like_anything_else():
    tiered = TieredCore(num_blocks=40, num_slots=0, retention_budget=0.25)
    for seed in range(1, 4):
        run(tiered, asking(f"kept-{seed}", prompt(64, seed=seed), HOUR))
    assert tiered.core.pool.num_retained <= 9
    churn(tiered, 10)
    assert sum(device_blocks(tiered, prompt(64, seed=seed)) for seed in range(1, 4)) == 9
    assert device_blocks(tiered, prompt(64, seed=3)) == 8, "the latest wish is the last to go"
    tiered.core.check_integrity()


def test_without_a_budget_nothing_is_retained():
    tiered = TieredCore(num_blocks=40, num_slots=0, retention_budget=0.0)
    run(tiered, asking("kept", prompt(64), HOUR))
    assert len(tiered.core.retentions) == tiered.core.pool.num_retained == 0
    churn(tiered, 10)
    assert device_blocks(tiered, prompt(64)) == 0


def test_a_pool_full_of_retained_blocks_takes_every_request():
    core, _ = make_core(num_blocks=40, max_model_len=312, retention_budget=1.0)
    for seed in range(1, 10):
        core.add(asking(f"r-{seed}", prompt(200, seed=seed), Retention(1000, 100, 1e6)))
        while core.has_work:
            core.step()
        core.check_integrity()


def test_the_disk_hears_of_priorities_and_times():
    disk = FakeDisk()
    tiered = TieredCore(num_blocks=40, num_slots=40, disk=disk)
    now_us = int(tiered.clock.now_s * 1e6)
    run(tiered, asking("kept", prompt(64), Retention(64, 60, 300)))
    hashes = tiered.core.pins._chain(prompt(64), b"")
    assert disk.rank(hashes[7]) == (60, now_us + 300_000_000)
    assert disk.rank(b"x" * 32) == (DEFAULT_PRIORITY, NEVER)
    tiered.settle()
    while tiered.crank():
        pass
    assert disk.retained == {hashes[7]: (60, now_us + 300_000_000)}
    tiered.clock.now_s += 100
    run(tiered, request("use", [*prompt(64), 1]))
    tiered.settle()
    while tiered.crank():
        pass
    assert disk.retained == {hashes[7]: (60, now_us + 400_000_000)}


def test_wishes_of_several_lengths_and_times_end_one_by_one():
    clock = ManualClock()
    pool = BlockPool(20)
    wishes = Retentions(pool, None, block_size=8, block_nbytes=1, budget=1.0, clock_us=lambda: int(clock.now_s * 1e6))
    hashes = [bytes([i]) * 32 for i in range(8)]
    wishes.want(hashes, [Retention(24, 80, 300), Retention(64, 60, 3600), Retention(64, 50, 100)])
    for passed_s, expected in ((0, [80] * 3 + [60] * 5), (300, [60] * 8), (3300, [DEFAULT_PRIORITY] * 8)):
        clock.now_s += passed_s
        wishes.expire()
        wishes.check_integrity()
        assert [wishes.priority(h) for h in hashes] == expected


class Replay:
    """A trace through pool, arena and cache as they are; one token stands for each of its blocks."""

    def __init__(self, *, num_blocks: int, num_slots: int, retain: bool, ttl_s: float = 600.0) -> None:
        self.now_s = 0.0
        self.retain, self.ttl_s = retain, ttl_s
        clock = lambda: self.now_s  # noqa: E731
        pool = BlockPool(num_blocks)
        self.host = HostArena(1, num_slots * 4096)
        gate = CostGate("always", 1, 1)
        tiers = Tiers(pool, InstantCopies(), self.host, None, gate, clock=clock, block_nbytes=1) if num_slots else None
        self.cache = CacheManager(pool, 1, tiers=tiers, clock=clock)
        self.cache.retentions = Retentions(
            pool, tiers, block_size=1, block_nbytes=1, budget=0.5, clock_us=lambda: int(self.now_s * 1e6)
        )

    def serve(self, at_s: float, ids: list[int], marked: bool) -> int:
        """How many of the blocks were found."""
        self.now_s = at_s
        retention = (Retention(len(ids), RETAINED_PRIORITY, self.ttl_s),) if marked and self.retain else ()
        made = EngineRequest("r", [*ids, 0], SamplingParams(max_tokens=1), retention=retention)
        sequence = Sequence(made, bytes(32))
        self.cache.retentions.expire()
        self.cache.prepare(sequence)
        match = self.cache.match(sequence)
        assert self.cache.allocate(sequence, match)
        if self.cache.start_restore(sequence, match):
            assert self.cache.poll() == [sequence]
        found = sequence.num_computed
        sequence.num_computed = sequence.num_tokens - 1
        self.cache.commit(sequence)
        self.cache.release(sequence)
        if self.cache.tiers is not None:
            self.cache.tiers.work_ahead()
            self.cache.poll()
        return found


def trace() -> list[tuple[float, list[int], bool]]:
    """Second, blocks, and whether the client knows that this conversation goes on: it has at least four turns."""
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    turns: dict[int, int] = {}
    for row in rows:
        if len(row["hash_ids"]) > 1:
            turns[row["hash_ids"][1]] = turns.get(row["hash_ids"][1], 0) + 1
    return [
        (row["timestamp"] / 1000, row["hash_ids"], len(row["hash_ids"]) > 1 and turns[row["hash_ids"][1]] >= 4)
        for row in rows
    ]


def hits(replay: Replay, requests) -> tuple[int, int]:
    """Blocks found by the requests of marked conversations, and by the others."""
    found = [(replay.serve(*each), each[2]) for each in requests]
    replay.cache.check_integrity([])
    replay.cache.retentions.check_integrity()
    replay.host.check_integrity(num_leases=0, num_reservations=0)
    return sum(n for n, marked in found if marked), sum(n for n, marked in found if not marked)


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(100, 0), (200, 0), (60, 100)])
def test_on_a_real_trace_retention_gains_hits_for_whom_it_is_for(num_blocks, num_slots):
    requests = trace()
    plain = hits(Replay(num_blocks=num_blocks, num_slots=num_slots, retain=False), requests)
    kept = hits(Replay(num_blocks=num_blocks, num_slots=num_slots, retain=True), requests)
    # 300 -> 671, 567 -> 882, 367 -> 691 blocks; the others find what all prompts share, as before.
    assert kept[0] > 1.5 * plain[0]
    assert kept[1] == plain[1]


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(200, 0), (60, 100)])
def test_what_was_retained_decays(num_blocks, num_slots):
    requests = trace()
    replay = Replay(num_blocks=num_blocks, num_slots=num_slots, retain=True)
    hits(replay, requests)
    wanted = replay.cache.retentions._wishes.copy()
    assert len(wanted) > 30
    end_s = requests[-1][0] + replay.ttl_s
    others = [([0, *range(10**6 + 100 * i, 10**6 + 100 * i + 10)], False) for i in range(60)]
    hits(replay, [(end_s, *each) for each in others])
    left = [h for h in wanted if replay.cache.pool.find(h) is not None or h in replay.host]
    # The first block is everybody's.
    assert len(left) <= 1
    assert len(replay.cache.retentions) == replay.cache.pool.num_retained == replay.host.num_retained == 0
