"""Cache, scheduler and tiers together, with every copy and every answer of the disk under the test's hand.

The properties: tokens never depend on what the tiers do, in which order, or whether they fail; stored bytes belong to
their key; sources add up; nothing is leaked, waits are bounded, and what was computed once is found again.
"""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fakes import VOCAB_SIZE, Collector, expected_tokens, request
from tests.tier_fakes import FakeDisk, TieredCore
from tieredkv.gate import CostGate
from tieredkv.types import FinishReason, Tier


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + i * 31) % VOCAB_SIZE for i in range(length)]


def run(tiered: TieredCore, *requests, max_steps: int = 10_000) -> Collector:
    """Run requests to their end, with copies and disk as fast as they are asked."""
    for each in requests:
        tiered.core.add(each)
    collector = Collector(tiered.core)
    for _ in range(max_steps):
        if not tiered.core.has_work:
            tiered.core.check_integrity()
            tiered.check_tiers()
            return collector
        collector.step()
        while tiered.crank():
            pass
    raise AssertionError("the core does not come to an end")


def churn(tiered: TieredCore, num: int, seed: int = 100) -> None:
    """Push everything else out of the device pool."""
    for i in range(num):
        run(tiered, request(f"churn-{seed}-{i}", prompt(100, seed=seed + i)))


def test_what_the_device_evicts_is_found_in_the_host_tier():
    tiered = TieredCore(num_blocks=20, num_slots=64)
    run(tiered, request("a", prompt(60)))
    tiered.settle()
    churn(tiered, 4)
    result = run(tiered, request("b", prompt(60)))
    assert result.tokens["b"] == expected_tokens(prompt(60), 4)
    assert result.sources["b"].host == 56
    assert result.sources["b"].total == 60


def test_what_host_and_device_evict_is_found_on_disk():
    tiered = TieredCore(num_blocks=20, num_slots=16, disk=FakeDisk())
    run(tiered, request("a", prompt(60)))
    tiered.settle()
    churn(tiered, 6)
    result = run(tiered, request("b", prompt(60)))
    assert result.tokens["b"] == expected_tokens(prompt(60), 4)
    assert result.sources["b"].disk > 0
    assert result.sources["b"].cached == 56


def test_idle_time_saves_everything_and_a_restart_finds_it():
    disk = FakeDisk()
    first = TieredCore(num_blocks=64, num_slots=4, disk=disk)
    turns = run(first, request("a", prompt(60), max_tokens=20))
    first.settle()
    assert first.tiers.spiller.num_unsaved == 0
    second = TieredCore(num_blocks=64, num_slots=4, disk=disk)
    again = run(second, request("b", prompt(60) + turns.tokens["a"], max_tokens=4))
    assert again.sources["b"].disk == 72
    assert again.tokens["b"] == expected_tokens(prompt(60) + turns.tokens["a"], 4)


def test_flush_is_bounded_and_says_what_it_left():
    tiered = TieredCore(disk=FakeDisk(), num_slots=8)
    run(tiered, request("a", prompt(60)))
    tiered.core.wakeup.wait = lambda seconds: setattr(tiered.clock, "now_s", tiered.clock.now_s + seconds)
    assert not tiered.core.flush(1.0)
    tiered.core.wakeup.wait = lambda seconds: tiered.crank()
    assert tiered.core.flush(1.0)
    assert len(tiered.disk.blocks) == 7


def test_a_restart_with_another_namespace_finds_nothing():
    disk = FakeDisk()
    first = TieredCore(disk=disk)
    run(first, request("a", prompt(60)))
    first.settle()
    second = TieredCore(disk=disk, namespace=b"m" * 32)
    assert run(second, request("b", prompt(60))).sources["b"].cached == 0


def test_tenants_share_nothing_below_the_device():
    disk = FakeDisk()
    first = TieredCore(disk=disk)
    run(first, request("a", prompt(60), tenant=b"t" * 32))
    first.settle()
    second = TieredCore(disk=disk)
    assert run(second, request("b", prompt(60), tenant=b"u" * 32)).sources["b"].cached == 0
    assert run(second, request("c", prompt(60), tenant=b"t" * 32)).sources["c"].disk == 56


def saved(**settings) -> TieredCore:
    """A fresh core over a disk that holds the 7 full blocks of `prompt(60)`."""
    disk = FakeDisk()
    first = TieredCore(disk=disk)
    run(first, request("a", prompt(60)))
    first.settle()
    return TieredCore(disk=disk, **settings)


@pytest.mark.parametrize("bad", range(7))
def test_the_usable_prefix_ends_at_the_first_block_that_fails(bad):
    tiered = saved()
    tiered.core.add(request("b", prompt(60)))
    collector = Collector(tiered.core)
    collector.step()
    tiered.disk.complete()
    collector.step()
    loads = list(tiered.disk.pending)
    assert [job[0] for job in loads] == ["load"] * 7
    # Answers come last one first, and one of them is bad.
    for i in reversed(range(7)):
        tiered.disk.complete(i, fail=i == bad)
    for _ in range(50):
        collector.step()
        while tiered.copies.launched:
            tiered.copies.complete()
    assert collector.tokens["b"] == expected_tokens(prompt(60), 4)
    assert collector.sources["b"].disk == bad * 8
    assert collector.sources["b"].total == 60
    tiered.core.check_integrity()
    # The record that failed is not believed again.
    tiered.settle()
    assert len(tiered.disk.blocks) == 7
    tiered.check_tiers()


def test_a_failed_copy_to_the_device_is_computed_instead():
    tiered = saved()
    tiered.core.add(request("b", prompt(60)))
    collector = Collector(tiered.core)
    for _ in range(4):
        collector.step()
        while tiered.disk.pending:
            tiered.disk.complete()
        while tiered.copies.launched:
            tiered.copies.complete(error="injected")
    for _ in range(20):
        collector.step()
    assert collector.tokens["b"] == expected_tokens(prompt(60), 4)
    assert collector.sources["b"].cached == 0
    tiered.core.check_integrity()


def test_a_slow_disk_delays_a_request_no_longer_than_the_deadline():
    tiered = saved()
    tiered.core.add(request("b", prompt(60)))
    collector = Collector(tiered.core)
    collector.step()
    tiered.disk.complete()
    collector.step()
    for _ in range(3):
        tiered.disk.complete()
    collector.step()
    while tiered.copies.launched:
        tiered.copies.complete()
    collector.step()
    assert "b" not in collector.tokens
    tiered.clock.now_s += 6
    for _ in range(10):
        collector.step()
    assert collector.tokens["b"] == expected_tokens(prompt(60), 4)
    assert collector.sources["b"].disk == 24
    # The late answers hurt nobody.
    while tiered.crank():
        tiered.core.work_idle()
    tiered.settle()
    tiered.core.check_integrity()
    tiered.check_tiers()


def test_a_core_that_is_told_not_to_save_starts_nothing_and_ends_what_is_under_way():
    tiered = TieredCore(disk=FakeDisk())
    run(tiered, request("a", prompt(60)))
    assert not tiered.core.work_idle(save=False)
    assert not tiered.crank()
    assert tiered.core.work_idle()
    while tiered.crank():
        tiered.core.work_idle(save=False)
    assert not tiered.core.work_idle(save=False)
    tiered.check_tiers()
    tiered.settle()
    assert len(tiered.disk.blocks) == 7


def test_a_lookup_that_hangs_delays_a_request_no_longer_than_its_deadline():
    tiered = saved()
    tiered.core.add(request("b", prompt(60)))
    collector = Collector(tiered.core)
    collector.step()
    assert tiered.core.is_stalled
    tiered.clock.now_s += 1
    for _ in range(10):
        collector.step()
    assert collector.tokens["b"] == expected_tokens(prompt(60), 4)
    assert collector.sources["b"].cached == 0


def test_others_decode_while_one_restores():
    tiered = saved()
    tiered.core.add(request("other", prompt(10, seed=5), max_tokens=30))
    collector = Collector(tiered.core)
    collector.step()
    tiered.disk.complete()
    collector.step()
    tiered.core.add(request("b", prompt(60)))
    for _ in range(10):
        collector.step()
        if any(job[0] == "lookup" for job in tiered.disk.pending):
            tiered.disk.complete()
    assert len(collector.tokens["other"]) >= 10
    assert "b" not in collector.tokens
    assert tiered.core.scheduler.restoring


def test_identical_requests_share_one_restore():
    tiered = saved(num_blocks=128)
    for i in range(5):
        tiered.core.add(request(f"r{i}", prompt(60)))
    loaded = []
    collector = Collector(tiered.core)
    for _ in range(100):
        collector.step()
        loaded += [job[1] for job in tiered.disk.pending if job[0] == "load"]
        while tiered.crank():
            pass
    assert len(loaded) == len(set(loaded)) == 7
    assert all(collector.tokens[f"r{i}"] == expected_tokens(prompt(60), 4) for i in range(5))


def test_cancelling_during_a_restore_leaks_nothing():
    for stage in range(4):
        tiered = saved()
        name = f"b{stage}"
        tiered.core.add(request(name, prompt(60)))
        collector = Collector(tiered.core)
        collector.step()
        if stage >= 1:
            tiered.disk.complete()
            collector.step()
        if stage >= 2:
            for _ in range(3):
                tiered.disk.complete()
            collector.step()
        if stage >= 3 and tiered.copies.launched:
            tiered.copies.complete()
        tiered.core.abort(name)
        collector.step()
        assert collector.reasons[name] is FinishReason.ABORT
        tiered.core.check_integrity()
        while tiered.crank():
            tiered.core.work_idle()
        tiered.settle()
        tiered.core.check_integrity()
        tiered.check_tiers()
        assert tiered.core.pool.num_free == tiered.core.pool.num_usable


def test_a_block_in_flight_is_not_reused_although_its_owner_is_gone():
    tiered = TieredCore(num_blocks=20, num_slots=64)
    run(tiered, request("a", prompt(60)))
    churn(tiered, 3)
    tiered.core.add(request("b", prompt(60)))
    collector = Collector(tiered.core)
    collector.step()
    in_flight = {b for copy in tiered.copies.launched if copy.to_device for b in copy.block_ids}
    assert in_flight
    tiered.core.abort("b")
    for i in range(3):
        tiered.core.add(request(f"c{i}", prompt(30, seed=50 + i)))
    for _ in range(12):
        collector.step()
        for sequence in tiered.core.scheduler.running:
            assert not in_flight & set(sequence.block_ids)
    while tiered.crank():
        pass
    collector.run()
    for i in range(3):
        assert collector.tokens[f"c{i}"] == expected_tokens(prompt(30, seed=50 + i), 4)


def test_what_a_waiting_request_matched_is_protected_until_its_turn():
    tiered = saved(max_num_seqs=1)
    tiered.core.add(request("first", prompt(20, seed=7), max_tokens=3))
    tiered.core.add(request("waiting", prompt(60)))
    hashes = tiered.core.scheduler.waiting[1].full_block_hashes(8)
    collector = Collector(tiered.core)
    while tiered.disk.pending:
        tiered.disk.complete()
    collector.step()
    assert tiered.disk.protected == {hashes[6]}
    result = run(tiered)
    assert result.sources["waiting"].disk == 56
    assert tiered.disk.protected == frozenset()
    assert tiered.disk.touched[-1] == hashes[6]
    tiered.core.add(request("gone", prompt(60)))
    tiered.core.abort("gone")
    assert not tiered.tiers._lookups


def test_what_a_waiting_request_matched_on_the_device_goes_last():
    core_settings = {"num_blocks": 33, "max_num_seqs": 1, "num_slots": 4}
    tiered = TieredCore(**core_settings)
    for name, seed in (("wanted", 1), ("unwanted", 2)):
        run(tiered, request(name, prompt(60, seed=seed)))
    tiered.core.add(request("running", prompt(60, seed=3), max_tokens=100))
    tiered.core.add(request("waiting", prompt(60, seed=1)))
    result = run(tiered)
    assert result.sources["waiting"].device == 56


def test_restores_never_starve_a_running_request():
    disk = FakeDisk()
    first = TieredCore(num_blocks=64, disk=disk)
    for i in range(2):
        run(first, request(f"a{i}", prompt(80, seed=i)))
    first.settle()
    tiered = TieredCore(num_blocks=25, disk=disk, max_model_len=100)
    tiered.core.add(request("running", prompt(8, seed=9), max_tokens=80))
    collector = Collector(tiered.core)
    collector.step()
    for i in range(2):
        tiered.core.add(request(f"b{i}", prompt(80, seed=i)))
    for _ in range(90):
        collector.step()
        for i, job in enumerate(list(tiered.disk.pending)):
            if job[0] == "lookup":
                tiered.disk.complete(i)
                break
    assert collector.tokens["running"] == expected_tokens(prompt(8, seed=9), 80)
    assert run(tiered).reasons
    tiered.core.check_integrity()


def test_a_refusing_disk_is_left_alone_for_a_while_and_used_again_afterwards():
    tiered = TieredCore(disk=FakeDisk(capacity=0), num_slots=32)
    run(tiered, request("a", prompt(60)))
    tiered.settle()
    assert tiered.tiers.spiller.counts.refused_by_disk > 0
    assert not tiered.disk.pending
    tiered.disk.capacity = 100
    tiered.clock.now_s += 60
    tiered.settle()
    assert len(tiered.disk.blocks) == 7
    assert tiered.tiers.spiller.num_unsaved == 0


def test_a_disk_that_is_down_costs_nothing_but_hits():
    tiered = TieredCore(num_blocks=20, disk=FakeDisk(), num_slots=8)
    tiered.disk.accepts = False
    tiered.disk.lookup = lambda hashes, tag: False
    churn(tiered, 5)
    result = run(tiered, request("a", prompt(60)))
    assert result.tokens["a"] == expected_tokens(prompt(60), 4)
    assert tiered.tiers.spiller.counts.dropped_by_host + tiered.tiers.spiller.counts.dropped_by_device > 0


def test_the_prefix_that_survives_pressure_is_a_prefix():
    tiered = TieredCore(num_blocks=30, num_slots=10)
    run(tiered, request("a", prompt(160)))
    churn(tiered, 2)
    hashes = []
    sequence = None
    tiered.core.add(request("b", prompt(160)))
    sequence = tiered.core.scheduler.waiting[0]
    hashes = sequence.full_block_hashes(8)
    near = [tiered.core.pool.find(h) is not None or h in tiered.host for h in hashes]
    assert near == sorted(near, reverse=True)


def test_metrics_tell_what_moved_and_what_was_lost():
    disk = FakeDisk(capacity=12)
    tiered = TieredCore(num_blocks=20, num_slots=8, disk=disk)

    def value(name: str, **labels: str) -> float:
        found = tiered.core.metrics.registry.get_sample_value("tieredkv:" + name, {"model_name": "fake", **labels})
        assert found is not None, name
        return found

    run(tiered, request("a", prompt(60)))
    tiered.settle()
    assert value("spilled_blocks_total", tier="disk") == 7 == value("tier_blocks", tier="disk")
    assert value("unsaved_blocks") == 0
    churn(tiered, 3)
    result = run(tiered, request("b", prompt(60)))
    block_nbytes = 8 * 16
    for tier in ("host", "disk"):
        restored = getattr(result.sources["b"], tier) / 8
        assert value("restored_blocks_total", tier=tier) == restored
        assert value("restored_bytes_total", tier=tier) == restored * block_nbytes
        assert value("prompt_tokens_cached_by_source_total", source=tier) == getattr(result.sources["b"], tier)
    lost = value("dropped_blocks_total", tier="device") + value("dropped_blocks_total", tier="host")
    counts = tiered.tiers.spiller.counts
    assert lost == counts.dropped_by_device + counts.dropped_by_host
    assert value("tier_evictions_total", tier="device") > 0
    assert value("tier_capacity_bytes", tier="device") == 19 * block_nbytes
    assert value("tier_used_bytes", tier="device") <= value("tier_capacity_bytes", tier="device")
    assert value("num_requests_restoring") == 0
    assert value("tier_healthy", tier="disk") == 1
    disk.fault = "injected"
    assert value("tier_healthy", tier="disk") == 0


@pytest.mark.parametrize(
    ("prefill", "host", "disk", "expected"),
    [
        (None, None, None, 6),
        (100.0, 1e9, 1e9, 6),
        (1e9, 10.0, 10.0, 2),
        (100.0, 1e9, 10.0, 4),
        (1e9, 1e9, 1e9, 2),
    ],
)
def test_the_gate_restores_only_what_beats_computing(prefill, host, disk, expected):
    gate = CostGate("auto", block_size=8, block_nbytes=1000)
    sources = [Tier.DEVICE] * 2 + [Tier.HOST] * 2 + [Tier.DISK] * 2
    for rate, value in ((gate.prefill, prefill), (gate.bandwidth[Tier.HOST], host), (gate.bandwidth[Tier.DISK], disk)):
        if value is not None:
            rate.measure(value, 1.0)
    assert gate.worth_restoring(sources) == expected


def test_gate_policies():
    sources = [Tier.DEVICE, Tier.HOST, Tier.DEVICE, Tier.DISK]
    assert CostGate("never", 8, 1000).worth_restoring(sources) == 1
    slow = CostGate("always", 8, 1000)
    slow.bandwidth[Tier.HOST].measure(1, 1000.0)
    slow.prefill.measure(1e9, 1.0)
    assert slow.worth_restoring(sources) == 4


class TierMachine(RuleBasedStateMachine):
    """Requests, cancels, clears, restarts of the disk's answers and failures in any order around slow copies."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self.tiered = TieredCore(
            num_blocks=20,
            num_slots=12,
            disk=FakeDisk(capacity=40),
            max_model_len=96,
            max_num_batched_tokens=24,
            max_num_seqs=4,
        )
        self.core = self.tiered.core
        self.collector = Collector(self.core)
        self.prompts: dict[str, list[int]] = {}
        self.count = 0

    @rule(
        shared=st.integers(0, 4), own=st.integers(1, 30), tenant=st.sampled_from([b"", b"", b"x"]), n=st.integers(1, 20)
    )
    def add(self, shared, own, tenant, n):
        name = f"r{self.count}"
        self.count += 1
        self.prompts[name] = prompt(shared * 10, seed=1) + prompt(own, seed=own % 3 + 2)
        self.core.add(request(name, self.prompts[name], max_tokens=n, tenant=tenant))

    @rule()
    def step(self):
        self.tiered.clock.now_s += 0.01
        self.collector.step()

    @rule()
    def idle(self):
        self.core.work_idle()

    @precondition(lambda self: self.tiered.copies.launched)
    @rule(data=st.data(), error=st.sampled_from([None, None, None, "injected"]))
    def copy(self, data, error):
        self.tiered.copies.complete(data.draw(st.integers(0, len(self.tiered.copies.launched) - 1)), error)

    @precondition(lambda self: self.tiered.disk.pending)
    @rule(data=st.data(), fail=st.sampled_from([False, False, False, True]))
    def disk(self, data, fail):
        self.tiered.disk.complete(data.draw(st.integers(0, len(self.tiered.disk.pending) - 1)), fail)

    @precondition(lambda self: self.tiered.disk.blocks)
    @rule(data=st.data())
    def disk_evicts(self, data):
        self.tiered.disk.remove(data.draw(st.sampled_from(sorted(self.tiered.disk.blocks))))

    @rule(up=st.booleans())
    def disk_health(self, up):
        self.tiered.disk.accepts = up

    @precondition(lambda self: self.prompts.keys() - self.collector.reasons.keys())
    @rule(data=st.data())
    def abort(self, data):
        self.core.abort(data.draw(st.sampled_from(sorted(self.prompts.keys() - self.collector.reasons.keys()))))

    @rule()
    def clear(self):
        self.core.clear()

    @rule()
    def wait_long(self):
        self.tiered.clock.now_s += 100

    @precondition(lambda self: self.core.has_work)
    @rule()
    def fail(self):
        self.tiered.runner.fail_next = RuntimeError("injected")

    @invariant()
    def holds(self):
        self.core.check_integrity()
        self.tiered.check_tiers()
        for name, tokens in self.collector.tokens.items():
            assert tokens == expected_tokens(self.prompts[name], len(tokens))
            if tokens:
                assert self.collector.sources[name].total == len(self.prompts[name])

    def teardown(self):
        self.tiered.runner.fail_next = None
        self.tiered.disk.accepts = True
        for _ in range(3000):
            if not self.core.has_work:
                break
            self.tiered.clock.now_s += 0.01
            self.collector.step()
            self.tiered.crank()
        assert not self.core.has_work, "the core does not come to an end"
        self.tiered.settle()
        assert self.collector.reasons.keys() == self.prompts.keys()
        self.core.check_integrity()
        self.tiered.check_tiers()
        assert self.core.pool.num_free == self.core.pool.num_usable
        logging.disable(logging.NOTSET)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
